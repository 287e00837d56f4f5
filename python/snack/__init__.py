"""SNACK: truly sparse neural networks. A zero weight is neither stored nor multiplied, in training and in inference.

    model = snack.sparsify(model, sparsity=0.9)          # nn.Linear -> snack.nn.SparseLinear
    optimizer = torch.optim.AdamW(model.parameters())    # any stock optimiser, built afterwards
    dst = snack.SET(model, optimizer, every=100)         # or snack.RigL, snack.Static, snack.DST
    ...
    optimizer.step(); dst.step()                         # connections move while the model trains

Names are imported when first used, so that `snack doctor` can still speak where the compiled operators do not load.
"""

from __future__ import annotations

import importlib
from importlib import metadata as _metadata
from typing import TYPE_CHECKING

from .errors import SnackError

if TYPE_CHECKING:
    from . import bench, data, dst, formats, nn, ops
    from .dst import DST, SET, RigL, Static
    from .formats import Pattern
    from .nn import SparseLinear, densify, load, param_groups, save, sparsify, summary

_MODULES = ("bench", "data", "dst", "formats", "nn", "ops")
_HOME = {
    **dict.fromkeys(("DST", "SET", "RigL", "Static"), "dst"),
    "Pattern": "formats",
    **dict.fromkeys(("SparseLinear", "densify", "load", "param_groups", "save", "sparsify", "summary"), "nn"),
}

__all__ = [
    "DST", "SET", "Pattern", "RigL", "SnackError", "SparseLinear", "Static", "bench", "data", "densify", "dst", "formats", "load",
    "nn", "ops", "param_groups", "save", "sparsify", "summary",
]

try:
    __version__ = _metadata.version("snack-sparse")
except _metadata.PackageNotFoundError:  # a source tree on the path, not an installed package
    __version__ = "unknown"


def __getattr__(name: str):
    if name in _MODULES:
        return importlib.import_module(f".{name}", __name__)
    if name in _HOME:
        value = getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'snack' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
