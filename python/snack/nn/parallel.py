"""Sparse layers on several processes: the same topology everywhere, and nothing of it sent at every step.

DistributedDataParallel sends parameters and buffers of rank 0 to all when it is built, and buffers again before every forward pass. The
packed index of a layer changes at updates alone, and there on all ranks alike, so it is kept out of this; instead the topologies are
compared when the model is wrapped, and where they differ (ranks with seeds of their own) those of rank 0 are taken, as its values are.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel

from ..errors import SnackError, require
from ..formats.pattern import signed64
from . import reducer
from .linear import SparseLinear
from .sharded import is_sharded
from .state import note_change

_CHUNK = 2**22  # entries hashed at a time: bounds the memory
_FACTORS = (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)  # of SplitMix64


def _mixed_sum(words: Tensor, begin: int) -> Tensor:
    """Sum over i of mix64(words[i] + (begin + i + 1) * factor), modulo 2**64: the order of the words matters, that of the sum does not."""

    def shifted(z: Tensor, bits: int) -> Tensor:  # without the sign
        return (z >> bits) & ((1 << (64 - bits)) - 1)

    number = torch.arange(begin + 1, begin + 1 + words.numel(), device=words.device)
    z = words + number * signed64(_FACTORS[0])
    z = (z ^ shifted(z, 30)) * signed64(_FACTORS[1])
    z = (z ^ shifted(z, 27)) * signed64(_FACTORS[2])
    return (z ^ shifted(z, 31)).sum()


def hash_of(tensors: Iterable[Tensor]) -> Tensor:
    """One int64 number (a tensor without dimensions) of integer or floating tensors of one device: equal bits, equal hash."""
    total: Tensor | None = None
    for position, tensor in enumerate(tensors):
        words = tensor.detach().contiguous().view(-1)
        if words.is_floating_point():
            words = words.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[words.itemsize])
        for begin in range(0, max(1, words.numel()), _CHUNK):
            part = _mixed_sum(words[begin : begin + _CHUNK].long(), begin + (position << 40))
            total = part if total is None else total * 31 + part
    return torch.zeros((), dtype=torch.int64) if total is None else total


def topology_hash(layer: SparseLinear) -> int:
    """A number of 64 bits that layers of one shape share when their connections are the same. O(nnz), bounded memory; a card is waited for."""
    return int(hash_of((layer.index, layer.tile_ptr)))


def all_objects(entry: object, group: dist.ProcessGroup) -> list:
    """What every rank of the group gave, in rank order. Plain small data, pickled by torch.distributed."""
    found: list = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, entry, group=group)
    return found


def first_difference(reports: list[dict[str, object]]) -> tuple[int, str] | None:
    """(rank, key) of the first key, in the order of rank 0, in which a rank differs from rank 0."""
    keys = list(dict.fromkeys(key for report in reports for key in report))
    for key in keys:
        for rank, report in enumerate(reports):
            if report.get(key) != reports[0].get(key):
                return rank, key
    return None


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside DistributedDataParallel and torch.compile, whose layers have the names that files know."""
    while isinstance(model, DistributedDataParallel) or hasattr(model, "_orig_mod"):
        model = model.module if isinstance(model, DistributedDataParallel) else model._orig_mod
    return model


def sparse_layers(model: nn.Module) -> dict[str, SparseLinear]:
    """Layers that have memory, by name."""
    return {name: m for name, m in model.named_modules() if isinstance(m, SparseLinear) and not m.index.is_meta}


def check_topology(model: nn.Module, group: dist.ProcessGroup | None = None) -> None:
    """Compare the topologies of all ranks: 8 bytes a layer are exchanged. Every rank of the group (default: all) must call it.

    Raises: SnackError on every rank, naming the first layer that differs.
    """
    require(dist.is_available() and dist.is_initialized(), "check_topology: there is no process group; call torch.distributed.init_process_group.")
    group = group or dist.group.WORLD
    reports = all_objects({name: (layer.nnz, topology_hash(layer)) for name, layer in sparse_layers(model).items()}, group)
    difference = first_difference(reports)
    if difference is not None:
        rank, name = difference
        raise SnackError(
            f"check_topology: rank {rank} has other connections in layer '{name}' than rank 0; build the model from one seed, or load one "
            "file, on every rank."
        )


def group_of(layers: Iterable[SparseLinear]) -> dist.ProcessGroup | None:
    """The processes that train these layers together: those of the DistributedDataParallel around them, or of their shards (fully_shard).

    None where there are none, or one. Raises: SnackError where layers belong to different ones.
    """
    groups: list[dist.ProcessGroup] = []
    for layer in layers:
        values = layer._parameters.get("values")
        wrapper = reducer.wrapper_of(layer)
        if is_sharded(values):
            group = values.device_mesh.get_group(0)
        else:
            group = None if wrapper is None else wrapper.process_group
        if group is not None and all(group is not known for known in groups):
            groups.append(group)
    require(len(groups) <= 1, "the sparse layers belong to several process groups; train each of them with a stepper of its own.")
    return groups[0] if groups and dist.get_world_size(groups[0]) > 1 else None


def bytes_of(tensor: Tensor) -> Tensor:
    """The tensor's memory as uint8: what every backend can send, whatever the dtype."""
    return tensor.contiguous().view(-1).view(torch.uint8)


@torch.no_grad()
def _take_topology(layer: SparseLinear, group: dist.ProcessGroup) -> None:
    """That of rank 0, in place."""
    source = dist.get_global_rank(group, 0)
    for tensor in (layer.index, layer.tile_ptr):
        dist.broadcast(bytes_of(tensor), source, group=group)  # both are contiguous: their own memory is written
    note_change(layer)


def _adopt(wrapper: nn.Module, name: str, model: nn.Module | None) -> None:
    """Called where any module gets a child: a DistributedDataParallel gets its model, before it sends anything."""
    if not isinstance(wrapper, DistributedDataParallel) or name != "module" or model is None:
        return
    for path, layer in model.named_modules(remove_duplicate=False):
        if isinstance(layer, SparseLinear):
            prefix = f"{path}." if path else ""
            wrapper.parameters_to_ignore |= {f"{prefix}index", f"{prefix}tile_ptr"}
            reducer.remember(layer, wrapper)
    layers, group = sparse_layers(model), wrapper.process_group
    if not layers or dist.get_world_size(group) == 1:
        return
    reports = all_objects({name: (layer.nnz, topology_hash(layer)) for name, layer in layers.items()}, group)
    difference = first_difference([{name: nnz for name, (nnz, _) in report.items()} for report in reports])
    if difference is not None:
        rank, name = difference
        counts = [report.get(name, (0,))[0] for report in (reports[0], reports[rank])]
        raise SnackError(
            f"DistributedDataParallel: layer '{name}' has {counts[0]:,} connections on rank 0 and {counts[1]:,} on rank {rank}; build the "
            "model with one sparsity, or load one file, on every rank."
        )
    for name, layer in layers.items():
        if len({report[name] for report in reports}) > 1:
            _take_topology(layer, group)


if dist.is_available():
    register_module_module_registration_hook(_adopt)
