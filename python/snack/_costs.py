"""The user's own cost tables (`snack bench tune`): found and given to the CUDA library at import, before any plan is made.

$SNACK_COSTS names a file (empty: none is read); else every costs-*.txt in the cache folder. A table serves the cards that it was measured
on, and only the kernels of this version; whatever is wrong with one, the built-in table serves, and `snack doctor` says why.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch

Capability = tuple[int, ...]  # as torch.ops.snack.cuda_capability gives it

_texts: dict[Capability, tuple[Path, str]] = {}
_problems: list[str] = []


def folder() -> Path:
    """Where `snack bench tune` puts tables."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "snack"


def path_for(card: str) -> Path:
    """The table of a card; `card`: its name in results."""
    return Path(os.environ.get("SNACK_COSTS") or folder() / f"costs-{card}.txt")


def load() -> None:
    """Once, at import."""
    named = os.environ.get("SNACK_COSTS")
    for path in sorted(folder().glob("costs-*.txt")) if named is None else [Path(named)] if named else []:
        try:
            text = path.read_text(encoding="utf-8")
            _texts[tuple(torch.ops.snack.cuda_use_costs(text))] = (path, text)
        except (OSError, UnicodeError) as error:
            _problems.append(f"{path} cannot be read ({error})")
        except RuntimeError as error:
            _problems.append(f"{path} is not used: {str(error).splitlines()[0].removeprefix('cost table: ').rstrip('.')}")


def text_of(capability: Capability) -> str:
    """The table that serves such a card; empty: the built-in one."""
    return _texts[tuple(capability)][1] if tuple(capability) in _texts else ""


def is_own() -> bool:
    """Whether any table but the built-in one was loaded."""
    return bool(_texts)


def source_of(capability: Capability) -> str:
    """Where the numbers for such a card come from, for people."""
    found = _texts.get(tuple(capability))
    return f"measured on this card ({found[0]})" if found else "the built-in table (`snack bench tune` measures this card)"


def status() -> str:
    """For `snack doctor`."""
    used = [str(path) for path, _ in _texts.values()]
    return "; ".join([f"from {', '.join(used)}" if used else "the built-in table", *_problems])
