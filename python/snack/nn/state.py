"""State of a SparseLinear: carried through edits, written to and read from state dicts. Every change is all or nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..errors import SnackError
from ..formats import SLOT_ORDER, Pattern, from_coo, from_dense
from ..ops.deferred import DeferredGradient, is_pending
from ..ops.edits import exchange_
from .optimizer_state import check_state_policy, fill_of, forget_vectors, per_slot
from .reducer import note_resize
from .sharded import is_sharded, put, refuse, whole

if TYPE_CHECKING:
    from .linear import SparseLinear
    from .slot_map import SlotMap

__all__ = ["KEYS", "TOPOLOGY_KEYS", "Parsed", "carry", "check_state_policy", "exchange", "load", "note_change", "parse", "prepared", "save"]

_MOST_CARRIED = 16  # tensors that exchange_ takes


def note_change(layer: SparseLinear) -> None:
    """Let a backward pass that was prepared on the old topology fail like any other one whose tensors were overwritten."""
    torch.autograd.graph.increment_version(layer.index)


def _replace_values(layer: SparseLinear, values: Tensor) -> None:
    """Give the Parameter memory of another length. Its gradient goes.

    As long as an older loss lives, so does the node that adds gradients to the Parameter, and it knows the old length. PyTorch drops that
    node when the dtype changes; so the Parameter passes through another dtype, empty.
    """
    parameter = layer.values
    parameter.grad = None
    parameter.data = values.new_empty(0, dtype=torch.float32 if values.dtype == torch.float64 else torch.float64)
    parameter.data = values
    note_resize(layer)


def carry(
    layer: SparseLinear,
    pattern: Pattern,
    slot_map: SlotMap,
    fill: float | Tensor,
    optimizer: torch.optim.Optimizer | None,
    policy: object = "zero",
) -> None:
    """Give `layer` the edited pattern and move values, gradient and optimiser state along `slot_map`.

    All new tensors are made before anything is written, so running out of memory leaves the layer as it was. Nothing here
    makes the host wait for a card, and at constant nnz every tensor keeps its address. A deferred gradient that a step has used
    is forgotten.
    """
    refuse(layer, "rewire")
    states = per_slot(layer, optimizer)
    pattern = pattern.to(layer.index.device)
    values = slot_map.apply(layer.values.data, fill)
    is_used = is_pending(layer.values.grad) and layer.values.grad.operands.used
    grad = None if layer.values.grad is None or is_used else slot_map.apply(layer.values.grad)
    moved = [slot_map.apply(slot.tensor, fill_of(policy, slot.key, slot.tensor)) for slot in states]

    if layer.index.shape == pattern.index.shape and layer.index.dtype == pattern.index.dtype:
        layer.index.copy_(pattern.index)
        layer.tile_ptr.copy_(pattern.tile_ptr)
        layer.values.copy_(values)
        if grad is not None:
            layer.values.grad.copy_(grad)
        elif is_used:
            layer.values.grad = None
        for slot, new in zip(states, moved):
            slot.tensor.copy_(new)
        return
    note_change(layer)
    layer.index, layer.tile_ptr = pattern.index, pattern.tile_ptr
    _replace_values(layer, values)
    layer.values.grad = grad
    for slot, new in zip(states, moved):
        if slot.place is not None:
            container, key = slot.place
            container[key] = new
    if optimizer is not None:
        forget_vectors(optimizer)


def exchange(
    layer: SparseLinear, rules: dict[str, object], fill: float, optimizer: torch.optim.Optimizer | None, policy: object = "zero"
) -> Tensor | None:
    """`ops.exchange_` of the layer's pattern with everything that belongs to its connections; None where some of it is not contiguous.

    rules: drop, fraction, k, grow, key, dy, x, as there. fill: value of grown connections.
    """
    refuse(layer, "exchange")
    states = per_slot(layer, optimizer)
    gradient = layer.values.grad
    if is_pending(gradient) and gradient.operands.used:
        gradient = layer.values.grad = None
    if type(gradient) is DeferredGradient:
        gradient = gradient.operands.gradient(gradient)
    carried = [layer.values.data, *([] if gradient is None else [gradient]), *(slot.tensor for slot in states)]
    if len(carried) > _MOST_CARRIED or not all(tensor.is_contiguous() for tensor in carried):
        return None
    fills = torch.zeros(len(carried), device=layer.values.device)
    fills[0].fill_(fill)
    for place, slot in zip(fills[len(carried) - len(states) :], states):
        start = fill_of(policy, slot.key, slot.tensor)
        place.copy_(start) if isinstance(start, Tensor) else place.fill_(start)
    moved = exchange_(layer.pattern, carried, fills, **rules)
    # Changed behind autograd's back: a backward pass that was prepared before has to notice.
    torch.autograd.graph.increment_version([layer.index, layer.tile_ptr, *carried])
    return moved


# ---- state dicts: values, rows, cols (int32), shape, slot_order, bias ----

TOPOLOGY_KEYS = ("rows", "cols", "shape", "slot_order")
KEYS = ("values", "bias", "weight", *TOPOLOGY_KEYS)


def save(layer: SparseLinear, destination: dict, prefix: str) -> None:
    """Add the topology to a state dict that has values and bias already."""
    rows, cols = layer.pattern.coordinates()
    destination[prefix + "rows"], destination[prefix + "cols"] = rows, cols
    destination[prefix + "shape"] = torch.tensor([layer.out_features, layer.in_features], device="cpu")
    destination[prefix + "slot_order"] = torch.tensor(SLOT_ORDER, device="cpu")


@dataclass
class Parsed:
    """What a state dict holds for one layer, checked. pattern and values are None where it has the bias alone or nothing."""

    pattern: Pattern | None
    values: Tensor | None
    bias: Tensor | None


def _label(prefix: str) -> str:
    return f"SparseLinear '{prefix.rstrip('.')}'" if prefix else "SparseLinear"


def _small_integers(entry: Tensor, name: str, key: str) -> list[int]:
    """A short integer tensor as a list; a file may hold anything under this key."""
    if entry.dtype.is_floating_point or entry.dtype.is_complex or entry.dtype == torch.bool or entry.numel() > 2:
        raise SnackError(
            f"{name}: the file's {key} is {str(entry.dtype).removeprefix('torch.')} of shape {tuple(entry.shape)}, expected integers."
        )
    return entry.flatten().tolist()


def _read_topology(layer: SparseLinear, entries: dict[str, Tensor], name: str) -> tuple[Pattern, Tensor]:
    """(pattern, values in slot order) of a state dict; SnackError when it lies."""
    shape = (layer.out_features, layer.in_features)
    if "weight" in entries:
        weight = entries["weight"]
        if tuple(weight.shape) != shape:
            raise SnackError(f"{name}: the file's dense weight has shape {tuple(weight.shape)}, the layer is {shape}.")
        return from_dense(weight.detach())
    missing = [key for key in ("values", *TOPOLOGY_KEYS) if key not in entries]
    if missing:
        raise SnackError(
            f"{name}: the state dict lacks {', '.join(missing)}; a sparse layer needs values, rows, cols, shape and slot_order."
        )
    order = _small_integers(entries["slot_order"], name, "slot_order")
    if order != [SLOT_ORDER]:
        raise SnackError(
            f"{name}: the file has slot order {order}, this version knows {SLOT_ORDER}; load it with the version that wrote it."
        )
    given = _small_integers(entries["shape"], name, "shape")
    if given != list(shape):
        raise SnackError(f"{name}: the file's layer has shape {tuple(given)}, this layer is {shape}.")
    return from_coo(entries["rows"], entries["cols"], entries["values"].detach(), shape)


def parse(layer: SparseLinear, state_dict: dict, prefix: str) -> Parsed:
    """Read and check the layer's entries of a state dict without touching the layer. Raises: SnackError when they lie."""
    name = _label(prefix)
    entries = {key: whole(state_dict[prefix + key]) for key in KEYS if prefix + key in state_dict}
    for key, entry in entries.items():
        if not isinstance(entry, Tensor) or entry.is_meta:
            raise SnackError(f"{name}: the state dict's {key} is not a tensor with numbers (a {type(entry).__name__}).")
    bias = entries.get("bias")
    if bias is not None and layer.bias is not None and bias.shape != layer.bias.shape:
        raise SnackError(f"{name}: the file's bias has shape {tuple(bias.shape)}, the layer needs {tuple(layer.bias.shape)}.")
    if bias is not None and not bias.is_floating_point():
        raise SnackError(f"{name}: the file's bias is {str(bias.dtype).removeprefix('torch.')}, expected a floating dtype.")
    if not entries.keys() - {"bias"}:
        return Parsed(None, None, bias)
    if "values" in entries and "weight" in entries:
        raise SnackError(f"{name}: the file holds both a dense weight and sparse values; remove one of them.")
    try:
        return Parsed(*_read_topology(layer, entries, name), bias)
    except SnackError as error:
        text = str(error)
        text = text.replace(" or pass sum_duplicates=True to add the values", "").replace("from_coo: ", "")
        raise SnackError(text if text.startswith(name) else f"{name}: the file's topology is not valid: {text}") from None


_prepared: dict[str, Parsed] = {}


@contextmanager
def prepared(layers: dict[str, Parsed]) -> Iterator[None]:
    """Inside, `load` of these prefixes uses what was parsed before instead of parsing again."""
    _prepared.update(layers)
    try:
        yield
    finally:
        _prepared.clear()


def load(
    layer: SparseLinear, state_dict: dict, prefix: str, local_metadata: dict, missing_keys: list, unexpected_keys: list, error_msgs: list
) -> None:
    """`Module._load_from_state_dict` of a SparseLinear: takes another sparsity, or a dense `weight`.

    A lying topology leaves the layer as it was. Missing and unknown keys are PyTorch's to judge, after all layers are loaded;
    `snack.load` checks the whole model first.
    """
    try:
        parsed = _prepared.get(prefix) or parse(layer, state_dict, prefix)
    except SnackError as error:
        error_msgs.append(str(error))
        return
    assign = local_metadata.get("assign_to_params_buffers", False)
    problem = _problem_of_shards(layer, parsed, assign, prefix)
    if problem:
        error_msgs.append(problem)
        return
    if parsed.pattern is None:
        missing_keys.extend(prefix + key for key in ("values", *TOPOLOGY_KEYS))
    else:
        _put(layer, parsed.pattern, parsed.values, assign)
    if layer.bias is None:
        if parsed.bias is not None:
            unexpected_keys.append(prefix + "bias")
    elif parsed.bias is None:
        missing_keys.append(prefix + "bias")
    else:
        _put_bias(layer, parsed.bias, assign)


def _problem_of_shards(layer: SparseLinear, parsed: Parsed, assign: bool, prefix: str) -> str:
    """Why this cannot be loaded into sharded values; empty where it can, or where they are not sharded."""
    if not is_sharded(layer.values):
        return ""
    name, count = _label(prefix), layer.nnz if parsed.values is None else parsed.values.numel()
    if assign or layer.values.is_meta:
        return f"{name}: its values are sharded, and a topology cannot be assigned; give it memory (to_empty), and load without assign=True."
    if count != layer.nnz:
        return f"{name}: its values are sharded, so their number stays {layer.nnz:,}, and the file has {count:,}; load before fully_shard."
    return ""


@torch.no_grad()
def _put(layer: SparseLinear, pattern: Pattern, values: Tensor, assign: bool) -> None:
    device = values.device if assign or layer.values.is_meta else layer.values.device
    dtype = values.dtype if assign else layer.values.dtype
    pattern, values = pattern.to(device), values.to(device, dtype)
    fits = layer.index.shape == pattern.index.shape and layer.index.dtype == pattern.index.dtype
    if fits and not layer.index.is_meta and not assign:
        layer.index.copy_(pattern.index)
        layer.tile_ptr.copy_(pattern.tile_ptr)
        put(layer.values, values)
        return
    note_change(layer)
    layer._buffers.update(index=pattern.index, tile_ptr=pattern.tile_ptr)  # a layer without memory takes a topology here alone
    if layer.values.is_meta or assign:
        layer.values = torch.nn.Parameter(values, requires_grad=layer.values.requires_grad)
    else:
        _replace_values(layer, values)


@torch.no_grad()
def _put_bias(layer: SparseLinear, bias: Tensor, assign: bool) -> None:
    if layer.bias.is_meta or assign:
        dtype = bias.dtype if assign else layer.bias.dtype
        layer.bias = torch.nn.Parameter(bias.detach().to(dtype, copy=True), requires_grad=layer.bias.requires_grad)
    else:
        put(layer.bias, bias.to(layer.bias.device))
