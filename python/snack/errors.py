"""The one exception of the library: what was given, what was expected, what to do."""

from __future__ import annotations


class SnackError(ValueError):
    """Bad input, told in one sentence. The command line prints it and exits with status 2."""


def require(condition: bool, message: str) -> None:
    """Raise SnackError with `message` unless `condition` holds."""
    if not condition:
        raise SnackError(message)
