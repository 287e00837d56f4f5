"""What an optimiser keeps for every connection of a layer, whichever optimiser it is: found by shape, and how it begins for grown ones.

A state tensor with one entry a connection follows its connection. Numbers and tensors of one entry (step counters) stay. LBFGS keeps
vectors over all parameters at once: there the layer's part moves, and where the number of connections changes it starts anew.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..errors import SnackError, require

if TYPE_CHECKING:
    from .linear import SparseLinear

_POLICIES = ("zero", "mean")
_warned: set[tuple[str, str]] = set()


@dataclass(frozen=True)
class PerSlot:
    """A tensor (nnz,) of an optimiser. `place`: (dictionary, key) that holds it, None where it is a part of a longer one."""

    key: str
    tensor: Tensor
    place: tuple[dict, str] | None


def check_state_policy(policy: object) -> object:
    """The policy itself. Raises: SnackError unless it is "zero", "mean", a function, or a dictionary of these by state key."""
    is_known = callable(policy) or (isinstance(policy, str) and policy in _POLICIES)
    if isinstance(policy, Mapping) and all(isinstance(key, str) for key in policy):
        for part in policy.values():
            require(not isinstance(part, Mapping), f"state={policy!r} must name 'zero', 'mean' or a function for every key.")
            check_state_policy(part)
        is_known = True
    choices = "'zero', 'mean', a function (key, tensor) -> number, or a dictionary of these by state key"
    require(is_known, f"state={policy!r} is unknown; choose {choices}.")
    return policy


def fill_of(policy: object, key: str, tensor: Tensor) -> float | Tensor:
    """What grown connections get in this state: a number, or a tensor of one entry on its device (so nobody waits for a card)."""
    if isinstance(policy, Mapping):
        policy = policy.get(key, "zero")
    if policy == "zero" and key == "step_size":  # Rprop's length of a step, which 0 would make the shortest there is
        policy = "mean"
    if policy == "zero" or not tensor.numel():
        return 0.0
    if policy == "mean":
        # Sums of many 16-bit numbers are made in a wider dtype.
        return tensor.mean(dtype=torch.promote_types(tensor.dtype, torch.float32)).to(tensor.dtype) if tensor.is_floating_point() else 0.0
    fill = policy(key, tensor)
    is_number = (isinstance(fill, (int, float)) and not isinstance(fill, bool)) or (isinstance(fill, Tensor) and fill.numel() == 1)
    require(is_number, f"rewire: the state function returned a {type(fill).__name__} for {key!r}, expected one number.")
    return fill.reshape(()).to(tensor) if isinstance(fill, Tensor) else float(fill)


def check_fills(layer: SparseLinear, optimizer: torch.optim.Optimizer, policy: object) -> None:
    """Hear what a function in `policy` has to say about the layer's states, before anything is changed. Raises: SnackError; what it raises."""
    if callable(policy) or isinstance(policy, Mapping):
        for slot in per_slot(layer, optimizer):
            fill_of(policy, slot.key, slot.tensor)


def per_slot(layer: SparseLinear, optimizer: torch.optim.Optimizer | None) -> list[PerSlot]:
    """Everything the optimiser keeps a connection. Warns, once, of a state whose connections cannot be told."""
    if optimizer is None:
        return []
    known = {id(p) for group in optimizer.param_groups for p in group["params"]}
    if id(layer.values) not in known:
        raise SnackError(
            "rewire: the optimiser does not hold this layer's values; it was built before the layer was made sparse. "
            "Build the optimiser from model.parameters() after snack.sparsify."
        )
    if isinstance(optimizer, torch.optim.LBFGS):
        return list(_parts_of_lbfgs(layer, optimizer))
    state = optimizer.state.get(layer.values, {})
    found = [PerSlot(key, t, (state, key)) for key, t in state.items() if isinstance(t, Tensor) and t.shape == layer.values.shape]
    ours = {slot.key for slot in found}
    for key, entry in state.items():
        if key not in ours and isinstance(entry, (Tensor, list, tuple, dict)) and not (isinstance(entry, Tensor) and entry.numel() <= 1):
            _warn_of(optimizer, key, entry)
    return found


def _warn_of(optimizer: torch.optim.Optimizer, key: str, entry: object) -> None:
    what = type(optimizer).__name__, key
    if what in _warned:
        return
    _warned.add(what)
    form = f"a tensor of shape {tuple(entry.shape)}" if isinstance(entry, Tensor) else f"a {type(entry).__name__}"
    warnings.warn(
        f"rewire: {what[0]} keeps {key!r}, {form}, which is not one entry a connection; it stays as it is, whatever connections it belonged to.",
        stacklevel=5,
    )


# ---- LBFGS: vectors over all parameters ----


def _vectors_of(state: dict) -> Iterator[tuple[str, Tensor]]:
    for key in ("d", "prev_flat_grad"):
        if isinstance(state.get(key), Tensor):
            yield key, state[key]
    for key in ("old_dirs", "old_stps"):
        for vector in state.get(key) or ():
            yield key, vector


def _parts_of_lbfgs(layer: SparseLinear, optimizer: torch.optim.LBFGS) -> Iterator[PerSlot]:
    parameters = optimizer.param_groups[0]["params"]
    state = optimizer.state.get(parameters[0], {})
    begin = 0
    for parameter in parameters:
        if parameter is layer.values:
            break
        begin += parameter.numel()
    for key, vector in _vectors_of(state):
        yield PerSlot(key, vector[begin : begin + layer.nnz], None)


def forget_vectors(optimizer: torch.optim.Optimizer) -> None:
    """LBFGS begins anew: its vectors are longer or shorter than the parameters now."""
    if isinstance(optimizer, torch.optim.LBFGS):
        state = optimizer.state.get(optimizer.param_groups[0]["params"][0], {})
        for key in ("d", "prev_flat_grad", "old_dirs", "old_stps", "ro", "al", "H_diag", "prev_loss", "t"):
            state.pop(key, None)
        state["n_iter"], optimizer._numel_cache = 0, None
