"""The exceptions of the library: what was given, what was expected, what to do."""

from __future__ import annotations

import torch


class SnackError(ValueError):
    """Bad input, told in one sentence. The command line prints it and exits with status 2."""


class SnackMemoryError(SnackError, torch.OutOfMemoryError):
    """Memory ran out, told in one sentence; whatever was to be changed is as it was. Also PyTorch's own OutOfMemoryError."""


def require(condition: bool, message: str) -> None:
    """Raise SnackError with `message` unless `condition` holds."""
    if not condition:
        raise SnackError(message)
