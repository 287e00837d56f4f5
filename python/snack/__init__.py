"""SNACK: truly sparse neural networks. A zero weight is neither stored nor multiplied, in training and in inference.

    model = snack.sparsify(model, sparsity=0.9)          # nn.Linear -> snack.nn.SparseLinear
    optimizer = torch.optim.AdamW(model.parameters())    # any stock optimiser, built afterwards
    dst = snack.SET(model, optimizer, every=100)         # or snack.RigL, snack.Static, snack.DST
    ...
    optimizer.step(); dst.step()                         # connections move while the model trains
"""

from __future__ import annotations

from importlib import metadata as _metadata

from . import bench, plot
from .errors import SnackError

__all__ = [
    "DST", "GMP", "ITOP", "MEST", "SET", "SNFS", "Pattern", "RigL", "SRigL", "SnackError", "SparseLinear", "Static", "bench", "densify",
    "formats", "integrations", "io", "load", "load_training", "nn", "ops", "optim", "param_groups", "plot", "prune", "save", "save_training",
    "sparsify", "summary",
]

try:
    __version__ = _metadata.version("snack-sparse")
except _metadata.PackageNotFoundError:  # a source tree on the path, not an installed package
    __version__ = "unknown"

try:
    from . import formats, integrations, io, nn, ops, optim, prune
    from .dst import DST, GMP, ITOP, MEST, SET, SNFS, RigL, SRigL, Static, load_training, save_training
    from .formats import Pattern
    from .nn import SparseLinear, densify, load, param_groups, save, sparsify, summary
except ImportError as error:
    # Without the compiled operators every name explains why, and `snack doctor` can still speak.
    _problem = str(error)

    def __getattr__(name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        raise ImportError(_problem)
