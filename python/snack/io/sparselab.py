"""Layers of the package SparseLab (0.2), whose state_dict has no topology: they are taken from a live model."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..errors import require
from ..nn import SparseLinear, fast_path, stale
from ..nn.convert import find_places, replace, take_hooks


def _coo(layer: nn.Module) -> tuple[Tensor, Tensor, Tensor]:
    """(rows, cols, values) of its padded rows; what stands in the padding is no connection."""
    csr = layer._csr
    start, length, cols = (torch.as_tensor(list(a), dtype=torch.int64) for a in (csr.row_start, csr.row_nnz, csr.col_indices))
    rows = torch.repeat_interleave(torch.arange(len(length)), length)
    first = torch.repeat_interleave(start - (length.cumsum(0) - length), length)
    slots = first + torch.arange(len(rows))
    return rows, cols[slots], layer._values.detach()[slots]


def import_sparselab(model: nn.Module) -> nn.Module:
    """Replace every sparselab.SparseLinear of `model` by a SparseLinear with the same connections, in place, and return the model.

    Explicit zeros stay connections; the bias Parameter itself is taken over. Build the optimiser afterwards. A file alone cannot
    be imported: SparseLab's state_dict holds the values without their positions.

    Raises: SnackError when there is no such layer; the model is then unchanged.
    """
    require(isinstance(model, nn.Module), f"import_sparselab: expected an nn.Module, got {type(model).__name__}.")
    pending = []
    for theirs, name, places in find_places(model, _is_theirs):
        ours = SparseLinear.from_coo(*_coo(theirs), (theirs.out_features, theirs.in_features))
        ours.register_parameter("bias", theirs.bias)
        ours.values.requires_grad_(theirs._values.requires_grad)
        pending.append((theirs, ours.train(theirs.training), name, places))
    require(len(pending) > 0, f"import_sparselab: {type(model).__name__} holds no sparselab.SparseLinear.")
    for theirs, ours, _, places in pending:
        take_hooks(theirs, ours)
        model = replace(model, places, ours)
    stale.mark_replaced([(theirs._values, name) for theirs, _, name, _ in pending], "snack.io.import_sparselab")
    fast_path.update(model)
    return model


def _is_theirs(module: nn.Module | None) -> bool:
    return type(module).__module__.split(".")[0] == "sparselab" and hasattr(module, "_csr")
