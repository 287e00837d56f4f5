"""Lottery tickets: the connections that pruning has found, with the values they had early in training.

Frankle & Carbin 2019 (ICLR) rewind to the initial values, Frankle et al. 2020 (ICML) to those after some hundred steps.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from ..errors import SnackError, require
from ..formats import Pattern
from ..nn import SparseLinear, state
from ..nn.persistence import load_tensors


def snapshot(model: nn.Module) -> dict[str, Tensor]:
    """A copy of every parameter and buffer, on its device: the state_dict, which torch.save or safetensors can keep in a file.

    Take it before `sparsify` (dense weights), or of a sparse model (its connections then).
    """
    require(isinstance(model, nn.Module), f"prune.snapshot: expected an nn.Module, got {type(model).__name__}.")
    kept = {}
    for name, entry in model.state_dict().items():
        require(isinstance(entry, Tensor), f"prune.snapshot: '{name}' is a {type(entry).__name__}, expected a tensor.")
        kept[name] = entry.detach().clone()
    return kept


def rewind(model: nn.Module, snapshot: Mapping[str, Tensor]) -> nn.Module:
    """Give every connection of `model` its value in the snapshot, and all other parameters and buffers theirs; in place.

    The topology stays, and every tensor keeps its address. A connection that a dense snapshot has as 0 becomes 0 and exists.
    Gradients and the optimiser's state belong to the values before: call zero_grad, and build a new optimiser (or clear its state)
    where training is to start again from the snapshot; learning rate schedules are the caller's too.

    Everything is checked before anything is changed. Raises: SnackError when a connection, or an entry, is not in the snapshot,
        or has another shape there (`sparsify(how="random")` rescales values, the snapshot does not).
    """
    require(isinstance(model, nn.Module), f"prune.rewind: expected an nn.Module, got {type(model).__name__}.")
    require(isinstance(snapshot, Mapping), f"prune.rewind: the snapshot is a {type(snapshot).__name__}, expected what prune.snapshot gave.")
    tensors = dict(snapshot)
    for name, layer in model.named_modules(remove_duplicate=False):
        if not isinstance(layer, SparseLinear):
            continue
        prefix = f"{name}." if name else ""
        values = _values_of(layer, tensors, prefix, name or "(model)")
        for key in ("weight", "values", *state.TOPOLOGY_KEYS):
            tensors.pop(prefix + key, None)
        tensors[prefix + "values"] = values
        state.save(layer, tensors, prefix)
    return load_tensors(model, tensors, "prune.rewind: the snapshot")


def _values_of(layer: SparseLinear, snapshot: Mapping[str, Tensor], prefix: str, title: str) -> Tensor:
    """The snapshot's value of every connection of `layer`, in slot order."""
    pattern, weight = layer.pattern, snapshot.get(prefix + "weight")
    rows, cols = (c.long() for c in pattern.coordinates())
    if weight is not None:
        shape = tuple(weight.shape)
        require(shape == pattern.shape, f"prune.rewind: layer '{title}' has shape {shape} in the snapshot and {pattern.shape} in the model.")
        return weight.detach()[rows.to(weight.device), cols.to(weight.device)]
    names = [prefix + key for key in ("values", *state.TOPOLOGY_KEYS)]
    try:
        found = state.parse(layer, {name: snapshot[name] for name in names if name in snapshot}, prefix)
    except SnackError as error:
        raise SnackError(f"prune.rewind: {error}") from None
    require(found.pattern is not None, f"prune.rewind: layer '{title}' is not in the snapshot; take it of the same model.")
    slots, is_there = _find(found.pattern, rows, cols)
    missing = int((~is_there).sum())
    require(
        missing == 0,
        f"prune.rewind: {missing} of the {layer.nnz} connections of layer '{title}' did not exist when the snapshot was taken, so they "
        "have no value to go back to; take the snapshot before connections move, or of the dense model.",
    )
    return found.values.to(layer.values.device)[slots]


def _find(pattern: Pattern, rows: Tensor, cols: Tensor) -> tuple[Tensor, Tensor]:
    """(slot in `pattern`, whether it is there) of every position; O(n log n), whatever the shape."""
    theirs = [c.long().to(rows.device) for c in pattern.coordinates()]
    keys, order = torch.sort(theirs[0] * pattern.shape[1] + theirs[1])
    wanted = rows * pattern.shape[1] + cols
    if keys.numel() == 0:
        return torch.zeros_like(wanted), torch.zeros_like(wanted, dtype=torch.bool)
    at = torch.searchsorted(keys, wanted).clamp(max=keys.numel() - 1)
    return order[at], keys[at] == wanted
