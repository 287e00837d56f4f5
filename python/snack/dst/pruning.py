"""Gradual magnitude pruning: connections are dropped and none grown, until a sparsity is reached."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..errors import SnackError, require
from ..formats.pattern import check_sparsity
from ..nn import SparseLinear
from ..nn.distribution import share
from . import options, rules
from .schedules import Constant, cubic
from .stepper import DST


def _grow_nothing(layer: SparseLinear, k: int, drop: Tensor, context: rules.Context) -> tuple[Tensor, Tensor]:
    raise SnackError("gradual pruning grows nothing.")  # never asked: it shares out no connections


_OF_GROWTH = ("grow", "drop_fraction", "grow_init", "candidates", "redistribute", "state")


class GMP(DST):
    """Gradual magnitude pruning (Zhu and Gupta 2017): the smallest |value| are dropped until every layer is `sparsity` sparse at t_end.

    The sparsity of a layer follows a cubic from what it is before the first update to `sparsity`, every `every` steps from `start` to t_end,
    t_end itself included. A layer that is sparser than the cubic says is left alone until it has caught up. Start from a network with many
    connections: snack.sparsify(model, sparsity=0.0) keeps all. What is dropped is gone: values, optimiser state and index shrink with every
    update, so captured graphs must be built anew (`on_resize`).

    Args:
        sparsity: at the end, in [0, 1). t_end is needed. scope="global" compares all layers as one: then `sparsity` is that of all
            together. Others: see `DST`; drop_fraction, grow, redistribute and what belongs to growing have no meaning here.

    A loaded state brings the sparsity and t_end that it was saved with.
    """

    default_drop = "magnitude"
    option_names = ("sparsity", *(name for name in DST.option_names if name not in _OF_GROWTH))

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, *, sparsity: float = 0.9, t_end: float | None = None, **more: object):
        who = type(self).__name__
        for name in (*_OF_GROWTH, "zeta", "alpha"):
            require(name not in more, f"{who}: {name} has no meaning, as nothing grows and the sparsity says how much is dropped; leave it out.")
        require(t_end is not None, f"{who}: t_end is missing, the optimiser step at which the sparsity is reached.")
        require(more.get("scope", "layer") != "row", f"{who}: scope='row' has no meaning without growth; choose 'layer' or 'global'.")
        self.sparsity = check_sparsity(sparsity, who)
        self._initial: dict[str, int] = {}  # connections of the layers before the first update
        self._saved: dict[str, int] | None = None  # and when the state was saved that was loaded last, until the next update
        super().__init__(model, optimizer, t_end=t_end, drop_fraction=Constant(1.0), **more)
        require(self.t_end > self.start, f"{who}: t_end={t_end!r} must lie after start={self.start}.")
        require(
            self.t_end // self.every * self.every >= max(self.start, 1),
            f"{who}: no step from start={self.start} to t_end={self.t_end} is a multiple of every={self.every}.",
        )
        self._say_what_storing_costs()
        self._say_what_is_sparse_enough()

    def _resolve_grow(self, rule: object, candidates: object, who: str) -> rules.Grow:
        return _grow_nothing

    def is_update(self, step: int) -> bool:
        """Whether optimiser step number `step` is followed by an update; the last one is the last multiple of `every` up to t_end."""
        return step > 0 and step % self.every == 0 and self.start <= step <= self.t_end

    def state_dict(self) -> dict[str, object]:
        """As `DST.state_dict`, and where the pruning began, is and ends."""
        now, initial = {name: layer.nnz for name, layer in self._layers().items()}, self._begun_with()
        return super().state_dict() | {"sparsity": self.sparsity, "initial": {name: initial[name] for name in now}, "connections": now}

    def _read_state(self, state: object) -> dict[str, object]:
        read, who = super()._read_state(state), type(self).__name__
        require(read["t_end"] is not None, f"{who}: the state has no t_end, which gradual pruning needs; it is damaged.")
        initial = self._read_counts(state.get("initial"), "initial")
        saved = self._read_counts(state["connections"], "connections") if "connections" in state else None
        return read | {"sparsity": check_sparsity(state.get("sparsity"), who), "_initial": initial, "_saved": saved}

    def _read_counts(self, counts: object, what: str) -> dict[str, int]:
        """Numbers of connections by layer, as a state has them."""
        who, layers = type(self).__name__, self._layers()
        require(
            isinstance(counts, dict) and counts.keys() == layers.keys(),
            f"{who}: the state is of another model: its layers are {', '.join(map(str, counts or ()))}, expected {', '.join(layers)}.",
        )
        for name, count in counts.items():
            options.check_whole(who, f"{what} of layer '{name}'", count, 0)
            require(
                count <= _positions(layers[name]),
                f"{who}: the state is of another model: layer '{name}' had {count:,} connections, and it has {_positions(layers[name]):,} "
                "positions.",
            )
        return dict(counts)

    def _begun_with(self) -> dict[str, int]:
        """Connections of every layer before the first update. Until then the model may still be loaded or pruned otherwise."""
        if not self.updates:
            self._initial.clear()
        for name, layer in self._layers().items():
            self._initial.setdefault(name, layer.nnz)
        return self._initial

    def _choose(self, step: int, fraction: float, pairs: dict[str, list]) -> list:
        self._check_model()
        return super()._choose(step, fraction, pairs)

    def _check_model(self) -> None:
        """A cubic that is continued in another network would drop all at once what that one has too many of."""
        for name, layer in self._layers().items() if self._saved else ():
            then = self._saved.get(name, layer.nnz)
            require(
                layer.nnz == then,
                f"{type(self).__name__}: layer '{name}' has {layer.nnz:,} connections and had {then:,} when the stepper's state was saved, so the "
                "model is not the one that belongs to it; load the model's state of the same checkpoint, too, or begin with a new stepper.",
            )
        self._saved = None

    def _fraction(self, step: int) -> float:
        """The sparsity aimed at, of all layers together."""
        initial, layers = self._begun_with(), self._layers()
        return self._target(sum(initial[name] for name in layers), sum(map(_positions, layers.values())), step)

    def _target(self, initial: int, positions: int, step: int) -> float:
        last = self.t_end // self.every * self.every
        return cubic(1.0 - initial / positions if positions else 0.0, self.sparsity, step, self.start, max(last, self.start + 1))

    def _drops(self, name: str, layer: SparseLinear, step: int, fraction: float) -> int:
        if self._scope == "global":  # only the sum counts: which layers lose them is decided by comparing all
            layers = list(self._layers().values())
            surplus = sum(other.nnz for other in layers) - _connections(sum(map(_positions, layers)), fraction)
            return share(max(0, surplus), [other.nnz for other in layers])[next(i for i, other in enumerate(layers) if other is layer)]
        positions = _positions(layer)
        return max(0, layer.nnz - _connections(positions, self._target(self._initial[name], positions, step)))

    def _can_change(self, layer: SparseLinear) -> bool:
        return layer.nnz > 0  # a full one, too

    def _takes_part(self, layer: SparseLinear, k: int) -> bool:
        return layer.nnz > 0 if self._scope == "global" else k > 0

    def _share(self, jobs: list) -> None:
        for job in jobs:
            job.grows = 0

    def _say_what_storing_costs(self) -> None:
        dense = [(name, layer) for name, layer in self._layers().items() if layer.density > 0.5]
        if not dense:
            return
        stored = sum(layer.values.nbytes + layer.pattern.nbytes for _, layer in dense)
        full = sum(_positions(layer) * layer.values.itemsize for _, layer in dense)
        names = ", ".join(repr(name) for name, _ in dense[:3]) + (", ..." if len(dense) > 3 else "")
        self._notices.say(
            "cost",
            f"{names} begin more than half full. Until they are sparse, their weights take {stored / 2**20:,.1f} MiB with the index, against "
            f"{full / 2**20:,.1f} MiB as dense matrices, and products are slower than dense ones.",
            stacklevel=3,
        )

    def _say_what_is_sparse_enough(self) -> None:
        """Layers in which nothing will be dropped, or all of them: then the pruning does nothing."""
        layers = [(repr(name), layer.nnz, _positions(layer)) for name, layer in self._layers().items()]
        if self._scope == "global":
            layers = [("all layers together", sum(nnz for _, nnz, _ in layers), sum(positions for *_, positions in layers))]
        surplus = [nnz - _connections(positions, self.sparsity) for _, nnz, positions in layers]
        is_idle = all(more <= 0 for more in surplus)
        found = [layer for layer, more in zip(layers, surplus) if is_idle or more < 0]
        if not found:
            return
        names = ", ".join(f"{name} ({1 - nnz / max(1, positions):.4g})" for name, nnz, positions in found[:3]) + (", ..." if len(found) > 3 else "")
        if is_idle:
            text = f"the sparsity is {self.sparsity:.4g} or more already, of {names}, so nothing will be dropped at all; "
            text += "give a higher sparsity, or begin with more connections."
        else:
            text = f"the sparsity is above {self.sparsity:.4g} already, of {names}, so nothing will be dropped there; give a higher sparsity."
        self._notices.say("sparse enough", text, stacklevel=3)


def _positions(layer: SparseLinear) -> int:
    return layer.out_features * layer.in_features


def _connections(positions: int, sparsity: float) -> int:
    """How many there are at a sparsity."""
    return round((1.0 - sparsity) * positions)

