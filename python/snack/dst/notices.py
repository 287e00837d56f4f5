"""Warnings of one stepper."""

from __future__ import annotations

import warnings


class Notices:
    """Says each thing once, as a UserWarning that begins with the method's name."""

    def __init__(self, who: str):
        self.who = who
        self._said: set[str] = set()

    def say(self, about: str, text: str, stacklevel: int) -> None:
        """Warn with `text`, unless something was said about the same before. stacklevel: as of `warnings.warn`, from the caller."""
        if about not in self._said:
            self._said.add(about)
            warnings.warn(f"{self.who}: {text}", stacklevel=stacklevel + 1)
