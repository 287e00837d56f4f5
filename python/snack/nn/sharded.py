"""Layers whose values are sharded over several processes (torch.distributed.fsdp.fully_shard): every rank holds a part of them.

Forward and backward passes get the values gathered by PyTorch. A topology needs all of them, too: for the time of an update every rank
gathers values, gradient and optimiser state, makes the same edit, and keeps its own part. The packed index is whole on every rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ..errors import SnackError, require

if TYPE_CHECKING:
    from .linear import SparseLinear


def is_sharded(tensor: object) -> bool:
    """Whether it is a DTensor. (Asking by type would import much that nobody else needs.)"""
    return hasattr(tensor, "full_tensor")


def whole(tensor: Tensor) -> Tensor:
    """All of it, as a plain tensor; where it is sharded, every rank must call this."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor


@torch.no_grad()
def put(target: Tensor, source: Tensor) -> None:
    """Copy all of `source`, which every rank has, into `target`, of which a rank may hold its part alone. Nothing is sent."""
    if is_sharded(target):
        from torch.distributed.tensor import distribute_tensor

        part = distribute_tensor(source, target.device_mesh, target.placements, src_data_rank=None)
        target.to_local().copy_(part.to_local())
    else:
        target.copy_(source)


def refuse(layer: SparseLinear, what: str) -> None:
    """SnackError where the values are sharded."""
    require(
        not is_sharded(layer._parameters.get("values")),
        f"{what}: the layer's values are sharded by fully_shard, so this rank has a part of them alone; let a stepper such as snack.RigL "
        "change the connections, or do it inside snack.nn.gathered(layers, optimizer).",
    )


class _Gathered:
    """One layer with its gradient and optimiser state as plain tensors."""

    def __init__(self, layer: SparseLinear, optimizer: torch.optim.Optimizer | None):
        self.layer, self.optimizer, self.sharded = layer, optimizer, layer.values
        self.full = nn.Parameter(whole(self.sharded.detach()).contiguous(), requires_grad=self.sharded.requires_grad)
        if self.sharded.grad is not None:
            self.full.grad = whole(self.sharded.grad)
        self.state = {} if optimizer is None else optimizer.state.get(self.sharded, {})
        self.full_state = {key: whole(entry) if isinstance(entry, Tensor) else entry for key, entry in self.state.items()}

    def take_the_place(self) -> None:
        self.layer._parameters["values"] = self.full
        if self.optimizer is not None:
            _replace(self.optimizer, self.sharded, self.full)
            self.optimizer.state[self.full] = self.full_state

    def give_back(self) -> None:
        """What has changed, into this rank's part."""
        self.layer._parameters["values"] = self.sharded
        if self.optimizer is not None:
            _replace(self.optimizer, self.full, self.sharded)
            self.optimizer.state.pop(self.full, None)
        put(self.sharded, self.full.detach())
        if self.sharded.grad is not None and self.full.grad is not None:
            put(self.sharded.grad, self.full.grad)
        for key, entry in self.state.items():
            if is_sharded(entry):
                put(entry, self.full_state[key])


def _replace(optimizer: torch.optim.Optimizer, old: Tensor, new: Tensor) -> None:
    for group in optimizer.param_groups:
        group["params"] = [new if parameter is old else parameter for parameter in group["params"]]


@contextmanager
def gathered(layers: Iterable[SparseLinear], optimizer: torch.optim.Optimizer | None = None) -> Iterator[None]:
    """Inside, sharded layers hold all of their values, gradients and optimiser states, on every rank; afterwards each rank keeps its part.

    Every rank must enter it and make the same edits; `rewire` works as ever, at a constant number of connections. Layers that are not
    sharded are left as they are. Memory: that of the gathered tensors of all `layers`.
    Raises: SnackError where a layer is sharded along something else than one dimension of processes, or was resized inside.
    """
    found = [layer for layer in layers if is_sharded(layer._parameters.get("values"))]
    for layer in found:
        require(
            layer.values.device_mesh.ndim == 1,
            f"the values are sharded over a mesh of {layer.values.device_mesh.ndim} dimensions, and topologies can change on meshes of one: "
            "call fully_shard with a one-dimensional mesh.",
        )
    parts = [_Gathered(layer, optimizer) for layer in found]
    for part in parts:
        part.take_the_place()
    sizes = [part.full.numel() for part in parts]
    try:
        yield
    finally:
        resized = [part for part, size in zip(parts, sizes) if part.full.numel() != size]
        for part in parts:
            if part not in resized:
                part.give_back()
        if resized:
            raise SnackError("the number of connections of a sharded layer changed, and fully_shard keeps the old one; the layer is unusable now.")
