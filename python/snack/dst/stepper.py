"""The stepper: every so many optimiser steps, drop some connections of every sparse layer and grow as many.

An update runs in two halves. First every layer's edit is worked out by the rules and, where a rule is the user's, checked;
then the edits are applied, each by `SparseLinear.rewire`. So an error of a rule or a check leaves all layers as they were. Running out
of memory while the edits are applied leaves every layer whole, edited or not; the record in `history` says which moved.
"""

from __future__ import annotations

import time
import warnings
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from .. import ops
from ..errors import SnackError
from ..nn import SparseLinear
from . import options, rules
from .capture import Recorder
from .schedules import Constant, check_fraction


@dataclass(frozen=True)
class Update:
    """Record of one topology update.

    Attributes:
        step: optimiser steps taken when it happened. number: of the update, from 0. fraction: as scheduled.
        layers: connections replaced in every trained sparse layer, by name; 0 where nothing could or had to move.
        seconds: wall time.
    """

    step: int
    number: int
    fraction: float
    layers: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def dropped(self) -> int:
        """Connections dropped in all layers."""
        return sum(self.layers.values())

    @property
    def grown(self) -> int:
        """Connections grown in all layers: always as many."""
        return self.dropped


@dataclass(frozen=True)
class _Edit:
    layer: SparseLinear
    drop: Tensor
    grow: tuple[Tensor, Tensor]
    values: Tensor | float


class DST:
    """Dynamic sparse training of all `SparseLinear` layers of a model: a drop rule, a grow rule, a schedule.

        dst = DST(model, optimizer, drop="magnitude", grow="uniform", drop_fraction=0.3, every=100, t_end=7500)
        for x, y in loader:
            optimizer.zero_grad(); loss(model(x), y).backward(); optimizer.step(); dst.step()

    Call `step()` once an iteration, after `optimizer.step()`; where `zero_grad` stands does not matter. The schedule counts
    the steps the optimiser really takes, so one that `GradScaler` skips neither advances it nor edits anything. An update
    follows optimiser step t when t is a multiple of `every` and start <= t < t_end. Then k = floor(drop_fraction * nnz)
    connections of every layer move, at most as many as it has empty positions; a layer that is empty, full or frozen is
    left alone. nnz never changes. Optimiser state and `.grad` stay with their connection and begin at 0 for grown ones.
    A replayed CUDA graph runs no Python, so its steps are not counted: call `layer.rewire` between replays instead.

    Args:
        model: has SparseLinear layers, at any depth. optimizer: any torch.optim.Optimizer over their values.
        drop: "magnitude" (smallest |value|), "signed" (SET: of each sign) or a function, see `snack.dst.rules`.
        grow: "uniform", "gradient" (largest |dY^T X|, see `GradientGrowth`) or a function.
        drop_fraction: part of a layer's connections to replace, in [0, 1], or a schedule, see `snack.dst.schedules`.
        every, start, t_end: optimiser steps; t_end=None never ends.
        seed: of the random streams, one a layer and update: `snack.ops.random_key(seed, update, layer number)`.
        grow_init: value of grown connections: a number, or a function (layer, rows, cols, context) -> tensor (k,).
        candidates: of grow="gradient".
        Names used in papers are understood too: zeta and alpha for drop_fraction, delta_t for every.

    Attributes:
        steps: optimiser steps seen. updates: updates made. history: list of `Update`.

    Raises: SnackError: no sparse layers, an optimiser that does not hold their values, options out of range or unknown.
    """

    default_drop: object = None
    default_grow: object = None
    default_schedule: type = Constant
    moves = True

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        drop: object = None,
        grow: object = None,
        drop_fraction: object = 0.3,
        every: int = 100,
        start: int = 0,
        t_end: float | None = None,
        seed: int = 0,
        grow_init: object = 0.0,
        candidates: int | str | None = None,
        **aliases: object,
    ):
        who = type(self).__name__
        drop_fraction, every = options.resolve_aliases(who, aliases, drop_fraction=drop_fraction, every=every)
        if self.moves:
            self._drop = rules.resolve_drop(self.default_drop if drop is None else drop, who)
            self._grow = rules.resolve_grow(self.default_grow if grow is None else grow, candidates, who)
        self.every, self.start, self.t_end = options.check_times(who, every, start, t_end)
        self.schedule = drop_fraction if callable(drop_fraction) else self.default_schedule(check_fraction(drop_fraction, who))
        options.check_schedule(who, self.schedule, self.t_end)
        self.seed = options.check_seed(who, seed)
        self._grow_init = options.check_grow_init(who, grow_init)
        self.model, self.optimizer = model, optimizer
        options.check_model(who, model, optimizer)
        options.check_optimizer(who, optimizer, self._trained())
        if self.moves:
            options.check_layers(who, self._trained())

        self.steps = 0
        self.updates = 0
        self.history: list[Update] = []
        self._due: tuple[int, dict[SparseLinear, Recorder]] | None = None  # step with an update, and what it recorded
        self._armed: dict[SparseLinear, Recorder] = {}  # layers recording for the coming step
        self._warned: set[str] = set()
        self._watch_optimizer()
        self._arm()

    # ---- what a training loop calls ----

    def step(self) -> Update | None:
        """Make the update that the last optimiser step made due. Returns its record, or None when none was due."""
        if self._due is None:
            return None
        (step, recorders), self._due = self._due, None
        begin = time.perf_counter()
        fraction = check_fraction(self.schedule(step, self.t_end), f"{type(self).__name__} schedule")
        options.check_optimizer(type(self).__name__, self.optimizer, self._trained())
        with torch.no_grad():
            edits = {name: self._plan(name, number, layer, step, fraction, recorders) for name, number, layer in self._trained()}
            moved = dict.fromkeys(edits, 0)
            try:
                for name, edit in edits.items():
                    if edit is not None:
                        edit.layer.rewire(edit.drop, edit.grow, edit.values, self.optimizer)
                        moved[name] = edit.drop.numel()
            finally:
                record = Update(step, self.updates, fraction, moved, time.perf_counter() - begin)
                self.updates += 1
                self.history.append(record)
        return record

    def is_update(self, step: int) -> bool:
        """Whether optimiser step number `step` (1, 2, ...) is followed by an update."""
        return self.moves and step > 0 and step % self.every == 0 and step >= self.start and (self.t_end is None or step < self.t_end)

    @property
    def armed(self) -> bool:
        """Whether the coming step is recorded for growth by gradient. `torch.compile` would not see that: run such a step eagerly."""
        return bool(self._armed)

    def state_dict(self) -> dict[str, object]:
        """Counters, seed and schedule, as plain numbers and strings. Topology and values are in the model's own state dict."""
        is_known = type(self.schedule) in options.SCHEDULES.values()
        return {
            "version": options.STATE_VERSION,
            "method": type(self).__name__,
            "steps": self.steps,
            "updates": self.updates,
            "seed": self.seed,
            "every": self.every,
            "start": self.start,
            "t_end": self.t_end,
            "schedule": type(self.schedule).__name__ if is_known else None,
            "drop_fraction": self.schedule.fraction if is_known else None,
        }

    def load_state_dict(self, state: dict[str, object]) -> None:
        """Continue where `state` was taken; its schedule replaces this one's, unless it was a function of yours.

        Raises: SnackError when it is not the state of the same method; nothing is changed then.
        """
        for name, value in options.read_state(type(self).__name__, state, self.schedule).items():
            setattr(self, name, value)
        self._due = None
        self._arm()

    # ---- the schedule ----

    def _watch_optimizer(self) -> None:
        me = weakref.ref(self)

        def after_step(optimizer, args, kwargs) -> None:
            stepper = me()
            if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():  # recorded, not made: what it is called on is replayed later
                return
            if stepper is not None and not _was_skipped(optimizer):
                stepper._count()

        handle = self.optimizer.register_step_post_hook(after_step)
        # A stepper that nobody holds any more leaves nothing behind.
        weakref.finalize(self, handle.remove)
        weakref.finalize(self, _disarm, self._armed)

    def _count(self) -> None:
        self.steps += 1
        if self.is_update(self.steps):
            self._due = (self.steps, dict(self._armed))
        self._arm()

    def _arm(self) -> None:
        """Put recorders on the layers if the coming step is one whose update reads gradients; take off the old ones."""
        _disarm(self._armed)
        if self.is_update(self.steps + 1) and self._wants_gradient():
            self._armed.update((layer, Recorder(layer)) for _, _, layer in self._trained() if _empty(layer) and layer.nnz)

    def _trained(self) -> Iterator[tuple[str, int, SparseLinear]]:
        """(name, number, layer) of the layers whose values are trained. Looked up anew, as models get wrapped and changed."""
        sparse = ((name, module) for name, module in self.model.named_modules() if isinstance(module, SparseLinear))
        return ((name, number, layer) for number, (name, layer) in enumerate(sparse) if layer.values.requires_grad)

    # ---- one layer's edit ----

    def _plan(self, name: str, number: int, layer: SparseLinear, step: int, fraction: float, recorders: dict) -> _Edit | None:
        """What to change in a layer; None for nothing."""
        empty = _empty(layer)
        k = min(int(fraction * layer.nnz), empty)
        if k == 0:
            return None
        try:
            x = dy = None
            if self._wants_gradient():
                recorder = recorders.get(layer)
                operands = None if recorder is None else recorder.operands()
                if operands is None:
                    self._announce_unused(name)
                    return None
                x, dy = operands
            key = ops.random_key(self.seed, self.updates, number)
            context = rules.Context(name, number, step, self.updates, fraction, empty, key, self.optimizer, x, dy)
            return self._apply_rules(layer, k, context)
        except SnackError as error:
            raise SnackError(f"{type(self).__name__}: layer '{name}': {error}") from error

    def _apply_rules(self, layer: SparseLinear, k: int, context: rules.Context) -> _Edit | None:
        device = layer.values.device
        drop = options.check_slots(self._drop(layer, k, context), k, device)
        if drop.numel() == 0:
            return None
        rows, cols = options.check_positions(self._grow(layer, drop.numel(), drop, context), drop.numel(), device)
        if not (rules.is_built_in(self._drop) and rules.is_built_in(self._grow)):
            ops.rewire(layer.pattern, drop, rows, cols)  # pure: only to hear its complaints before anything is changed
        values = self._grow_init
        if callable(values):
            values = options.check_grown_values(values(layer, rows, cols, context), layer.values, drop.numel())
        return _Edit(layer, drop, (rows, cols), values)

    def _wants_gradient(self) -> bool:
        return rules.wants_gradient(self._drop) or rules.wants_gradient(self._grow)

    def _announce_unused(self, name: str) -> None:
        if name in self._warned:
            return
        self._warned.add(name)
        warnings.warn(
            f"{type(self).__name__}: layer '{name}' took no part in the step before an update, so there is no gradient to grow by and "
            "it keeps its connections. If the model is compiled, run that step eagerly: "
            "with torch.compiler.set_stance('force_eager' if dst.armed else 'default').",
            stacklevel=5,
        )


def _empty(layer: SparseLinear) -> int:
    """Positions without a connection."""
    return layer.out_features * layer.in_features - layer.nnz


def _disarm(armed: dict[SparseLinear, Recorder]) -> None:
    for recorder in armed.values():
        recorder.remove()
    armed.clear()


def _was_skipped(optimizer: torch.optim.Optimizer) -> bool:
    """Fused optimisers take GradScaler's verdict themselves: `step` runs, but changes nothing when a gradient was infinite."""
    found_inf = getattr(optimizer, "found_inf", None)
    return found_inf is not None and bool(found_inf)
