"""Gradual magnitude pruning: connections are dropped and none grown, until a sparsity is reached."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor, nn

from ..errors import SnackError, require
from ..formats.pattern import check_sparsity
from ..nn import SparseLinear
from ..nn.distribution import share
from . import rules
from .schedules import Constant, cubic
from .stepper import DST


def _grow_nothing(layer: SparseLinear, k: int, drop: Tensor, context: rules.Context) -> tuple[Tensor, Tensor]:
    raise SnackError("gradual pruning grows nothing.")  # never asked: it shares out no connections


class GMP(DST):
    """Gradual magnitude pruning (Zhu and Gupta 2017): the smallest |value| are dropped until every layer is `sparsity` sparse at t_end.

    The sparsity of a layer follows a cubic from what it is now to `sparsity`, every `every` steps from `start` to t_end, t_end itself
    included. Start from a network with many connections: snack.sparsify(model, sparsity=0.0) keeps all. What is dropped is gone: values, optimiser
    state and index shrink with every update, so captured graphs and DistributedDataParallel must be built anew (`on_resize`).

    Args:
        sparsity: at the end, in [0, 1). t_end is needed. scope="global" compares all layers as one: then `sparsity` is that of all
            together. Others: see `DST`; drop_fraction, grow, redistribute and what belongs to growing have no meaning here.
    """

    default_drop = "magnitude"

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, *, sparsity: float = 0.9, t_end: float | None = None, **more: object):
        who = type(self).__name__
        for name in ("grow", "drop_fraction", "zeta", "alpha", "grow_init", "candidates", "redistribute"):
            require(name not in more, f"{who}: {name} has no meaning, as nothing grows and the sparsity says how much is dropped; leave it out.")
        require(t_end is not None, f"{who}: t_end is missing, the optimiser step at which the sparsity is reached.")
        require(more.get("scope", "layer") != "row", f"{who}: scope='row' has no meaning without growth; choose 'layer' or 'global'.")
        self.sparsity = check_sparsity(sparsity, who)
        self._initial: dict[str, int] = {}
        super().__init__(model, optimizer, t_end=t_end, drop_fraction=Constant(1.0), **more)
        require(self.t_end > self.start, f"{who}: t_end={t_end!r} must lie after start={self.start}.")
        require(
            self.t_end // self.every * self.every >= max(self.start, 1),
            f"{who}: no step from start={self.start} to t_end={self.t_end} is a multiple of every={self.every}.",
        )
        self._initial = {name: layer.nnz for name, _, layer in self._trained()}
        self._say_what_storing_costs()

    def _resolve_grow(self, rule: object, candidates: object, who: str) -> rules.Grow:
        return _grow_nothing

    def is_update(self, step: int) -> bool:
        """Whether optimiser step number `step` is followed by an update; the last one is the last multiple of `every` up to t_end."""
        return step > 0 and step % self.every == 0 and self.start <= step <= self.t_end

    def state_dict(self) -> dict[str, object]:
        """As `DST.state_dict`, and where the pruning began and ends."""
        return super().state_dict() | {"sparsity": self.sparsity, "initial": dict(self._initial)}

    def _read_state(self, state: object) -> dict[str, object]:
        read = super()._read_state(state)
        initial = state.get("initial")
        names = {name for name, _, _ in self._trained()}
        require(
            isinstance(initial, dict) and initial.keys() == names,
            f"{type(self).__name__}: the state is of another model: its layers are {', '.join(map(str, initial or ()))}.",
        )
        return read | {"sparsity": check_sparsity(state.get("sparsity"), type(self).__name__), "_initial": {n: int(v) for n, v in initial.items()}}

    def _fraction(self, step: int) -> float:
        """The sparsity aimed at, of all layers together."""
        positions = sum(_positions(layer) for _, _, layer in self._trained())
        return self._target(sum(self._initial.values()), positions, step)

    def _target(self, initial: int, positions: int, step: int) -> float:
        last = self.t_end // self.every * self.every
        return cubic(1.0 - initial / positions if positions else 0.0, self.sparsity, step, self.start, max(last, self.start + 1))

    def _drops(self, name: str, layer: SparseLinear, step: int, fraction: float) -> int:
        if self._scope == "global":  # only the sum counts: which layers lose them is decided by comparing all
            layers = [other for _, _, other in self._trained()]
            surplus = sum(other.nnz for other in layers) - round((1.0 - fraction) * sum(map(_positions, layers)))
            return share(max(0, surplus), [other.nnz for other in layers])[next(i for i, other in enumerate(layers) if other is layer)]
        positions = _positions(layer)
        wanted = round((1.0 - self._target(self._initial.get(name, layer.nnz), positions, step)) * positions)
        return max(0, layer.nnz - wanted)

    def _can_change(self, layer: SparseLinear) -> bool:
        return layer.nnz > 0  # a full one, too

    def _takes_part(self, layer: SparseLinear, k: int) -> bool:
        return layer.nnz > 0 if self._scope == "global" else k > 0

    def _share(self, jobs: list) -> None:
        for job in jobs:
            job.grows = 0

    def _say_what_storing_costs(self) -> None:
        dense = [(name, layer) for name, _, layer in self._trained() if layer.density > 0.5]
        if not dense:
            return
        stored = sum(layer.values.nbytes + layer.pattern.nbytes for _, layer in dense)
        full = sum(_positions(layer) * layer.values.itemsize for _, layer in dense)
        names = ", ".join(repr(name) for name, _ in dense[:3]) + (", ..." if len(dense) > 3 else "")
        warnings.warn(
            f"GMP: {names} begin more than half full. Until they are sparse, their weights take {stored / 2**20:,.1f} MiB with the index, against "
            f"{full / 2**20:,.1f} MiB as dense matrices, and products are slower than dense ones.",
            stacklevel=4,
        )


def _positions(layer: SparseLinear) -> int:
    return layer.out_features * layer.in_features

