"""The stepper: every so many optimiser steps, drop some connections of every sparse layer and grow as many.

An update runs in two halves. First every layer's edit is worked out by the rules and, where a rule is the user's, checked;
then the edits are applied, each by `SparseLinear.rewire`. So an error of a rule or a check leaves all layers as they were. Running out
of memory while the edits are applied leaves every layer whole, edited or not; the record in `history` says which moved.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from .. import ops
from ..errors import SnackError, require
from ..nn import SparseLinear, gathered
from ..nn.optimizer_state import check_fills
from ..nn.parallel import group_of, unwrapped
from ..nn.sharded import is_sharded
from . import options, rules, schedules
from .answers import naming
from .capture import Recorder, Recording, alike, is_capturing
from .followers import Follower
from .history import Update, settle
from .notices import Notices
from .processes import Pair, Team, describe_jobs
from .schedules import Constant, check_fraction
from .scope import Exchange, Job, choose_drops, exchange_rules, place_growth, share_growth
from .statistics import Tracker

_IDLE_CALLS = 100  # of step() without one of the optimiser's: more than a GradScaler skips while it looks for its scale


class DST:
    """Dynamic sparse training of all `SparseLinear` layers of a model: a drop rule, a grow rule, a schedule, a scope.

        dst = DST(model, optimizer, drop="magnitude", grow="uniform", drop_fraction=0.3, every=100, t_end=7500)
        for x, y in loader:
            optimizer.zero_grad(); loss(model(x), y).backward(); optimizer.step(); dst.step()

    Call `step()` once an iteration, after `optimizer.step()`; where `zero_grad` stands does not matter, unless a rule reads
    `values.grad`. The schedule counts the steps the optimiser really takes, so one that `GradScaler` skips neither advances it nor edits
    anything. An update follows optimiser step t when t is a multiple of `every` and start <= t < t_end. Then
    k = floor(drop_fraction * nnz) connections of every layer move, at most as many as it has empty positions; a layer that is empty, full
    or frozen is left alone. Without redistribution the nnz of a layer never changes; with it a full layer takes part like every other.
    Optimiser state and `.grad` stay with their connection.
    A replayed CUDA graph runs no Python, so its steps are not counted: tell the stepper with `count_step()` after each replay.

    Args:
        model: has SparseLinear layers, at any depth. optimizer: any torch.optim.Optimizer over their values.
        drop: "magnitude" (smallest |value|), "signed" (SET: of each sign), "sensitivity" (MEST) or a function, see `snack.dst.rules`.
        grow: "uniform", "gradient" (largest |dY^T X|, see `GradientGrowth`), "momentum" (`MomentumGrowth`) or a function.
        drop_fraction: part of a layer's connections to replace, in [0, 1], or a schedule, see `snack.dst.schedules`. Default 0.3.
        every, start, t_end: optimiser steps; every is 100 unless the method says otherwise; t_end=None never ends.
        seed: of the random streams, one a layer and update: `snack.ops.random_key(seed, update, layer number)`.
        grow_init: value of grown connections: a number, or a function (layer, rows, cols, context) -> tensor (k,).
        candidates: of grow="gradient" and "momentum".
        scope: "layer", "row" (every row keeps its number of connections) or "global" (all layers are compared as one), see `snack.dst.scope`.
        redistribute: how what was dropped is shared out among layers: None (each grows what it lost), "connections" (in proportion to the
            connections left; the default with scope="global"), "momentum", "gradient", or a function (Job) -> weight.
        state: what optimiser state a grown connection starts with: "zero", "mean" (of the layer's), a function (key, tensor) -> number, or
            {state's key: one of these}, zero for the others. With Adam and state "zero" the first step of a grown connection is
            (1 - beta1) / sqrt(1 - beta2) learning rates long: 3.16 at (0.9, 0.999); {"exp_avg_sq": "mean"} makes it an ordinary one.
        track: note overlap and exploration in the history, see `Update`; costs O(nnz log nnz) on the CPU an update.
        on_resize: called without arguments after an update that changed the number of connections of a layer, for what holds on to
            the sizes of parameters (captured graphs; DistributedDataParallel makes its buckets anew by itself).
        group: the processes that train this model together, where they average its gradients themselves. Found where it is wrapped in
            DistributedDataParallel or sharded by fully_shard; then every rank must call `step()`, see `snack.dst.processes`.
        scaler: the torch.amp.GradScaler of the training, for methods that record several steps (SNFS): those weigh by the scale they had. It may
            be put into the attribute later.
        Names used in papers are understood too: zeta and alpha for drop_fraction, delta_t for every.

    Attributes:
        steps: optimiser steps seen. updates: updates made. history: list of `Update`.

    Raises: SnackError: no sparse layers, an optimiser that does not hold their values, options out of range or unknown.
    """

    default_drop: object = None
    default_grow: object = None
    default_schedule: type = Constant
    default_fraction = 0.3
    default_every = 100
    default_scope = "layer"
    default_redistribute: object = None
    default_track = False
    moves = True
    option_names = options.NAMES

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        drop: object = None,
        grow: object = None,
        drop_fraction: object = None,
        every: int | None = None,
        start: int = 0,
        t_end: float | None = None,
        seed: int = 0,
        grow_init: object = 0.0,
        candidates: int | str | None = None,
        scope: str | None = None,
        redistribute: object = None,
        state: object = "zero",
        track: bool | None = None,
        on_resize: Callable[[], object] | None = None,
        group: object = None,
        scaler: torch.amp.GradScaler | None = None,
        **aliases: object,
    ):
        who = type(self).__name__
        given = options.resolve_aliases(who, self.option_names, aliases, drop_fraction=drop_fraction, every=every)
        drop_fraction = self.default_fraction if given["drop_fraction"] is None else given["drop_fraction"]
        every = self.default_every if given["every"] is None else given["every"]
        if self.moves:
            self._drop = rules.resolve_drop(self.default_drop if drop is None else drop, who)
            self._grow = self._resolve_grow(self.default_grow if grow is None else grow, candidates, who)
        self.every, self.start, self.t_end = options.check_times(who, every, start, t_end)
        self.schedule = drop_fraction if callable(drop_fraction) else self.default_schedule(check_fraction(drop_fraction, who))
        options.check_schedule(who, self.schedule, self.t_end)
        self.seed = options.check_seed(who, seed)
        self._grow_init = options.check_grow_init(who, grow_init)
        self._scope = options.check_scope(who, self.default_scope if scope is None else scope, getattr(self, "_drop", None))
        self._weight = options.resolve_redistribution(
            who, (self.default_redistribute if redistribute is None else redistribute), self._scope
        )
        self._state = options.check_state_policy(who, state)
        self._on_resize = options.check_on_resize(who, on_resize)
        self._group = options.check_group(who, group)
        self.scaler = options.check_scaler(who, scaler)
        self.model, self.optimizer = model, optimizer
        options.check_model(who, model, optimizer)
        options.check_optimizer(who, optimizer, self._trained())
        if self.moves:
            options.check_layers(who, self._trained())

        self.steps = 0
        self.updates = 0
        self.history: list[Update] = []
        self._tracker = Tracker() if (self.default_track if track is None else track) else None
        if self._tracker:
            self._tracker.begin(self._layers())
        self._due: tuple[int, list[dict[SparseLinear, Recorder]]] | None = None  # step with an update, and what was recorded for it
        self._armed: dict[SparseLinear, Recorder] = {}  # layers recording the coming step
        self._recorded: list[dict[SparseLinear, Recorder]] = []  # of the last steps, newest first
        self._notices = Notices(who)
        self._calls = self._steps_at_call = 0  # of step() since the optimiser's last one
        self._team = Team(None, who)  # of the update that is being made
        self._fixed: set[SparseLinear] = set()  # layers whose number of connections cannot change in it
        self._followers: list[Follower] = []
        self._watch_optimizer()
        self._arm()

    def __getstate__(self) -> dict[str, object]:
        """What was recorded does not travel with copies."""
        due = None if self._due is None else (self._due[0], [])
        return self.__dict__ | {"_armed": {}, "_recorded": [], "_due": due, "_team": Team(None, type(self).__name__), "_fixed": set()}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)
        self._watch_optimizer()
        if "_modules" in self.model.__dict__:  # not yet there where the model holds the stepper and is itself being copied
            self._arm()

    def _resolve_grow(self, rule: object, candidates: object, who: str) -> rules.Grow:
        return rules.resolve_grow(rule, candidates, who)

    # ---- what a training loop calls ----

    def step(self) -> Update | None:
        """Make the update that the last optimiser step made due. Returns its record, or None when none was due."""
        if self._due is None:
            self._announce_idle()
            return None
        (step, recorded), self._due = self._due, None
        begin = time.perf_counter()
        options.check_optimizer(type(self).__name__, self.optimizer, self._trained())
        layers = list(self._layers().values())
        self._fixed = {layer for layer in layers if is_sharded(layer.values)}
        self._team = Team(self._group or group_of(layers), type(self).__name__)
        with torch.no_grad(), gathered(layers, self.optimizer):
            return self._update(step, self._fraction(step), recorded, begin)

    def is_update(self, step: int) -> bool:
        """Whether optimiser step number `step` (1, 2, ...) is followed by an update."""
        return self._is_time(step)

    @property
    def armed(self) -> bool:
        """Whether the coming step is recorded for growth by gradient. Compiled code has a variant of its own for such steps; a captured CUDA
        graph of an ordinary step cannot serve them: run them eagerly, or replay one that was captured within `recording()`."""
        return bool(self._armed)

    def count_step(self, recording: Recording | None = None) -> None:
        """Tell the stepper of an optimiser step that it cannot see: one replayed from a CUDA graph. Then call `step()` as usual.

        recording: what `recording()` returned, where the replayed graph was captured within it. An armed step needs it. With a
            scaler, call this before scaler.update().
        """
        self._count(recording)

    def follow(self, copy: nn.Module) -> None:
        """Let every edit be made in a copy of the model too, such as `torch.optim.swa_utils.AveragedModel(model)`.

        Averages stay with their connections; that of a dropped one is forgotten, and that of a grown one begins with the value the connection
        begins with. Names may have a prefix (`module.`). Not part of `state_dict()`: call it again in a run that is continued.

        Raises: SnackError when a trained layer has no counterpart with its topology, or when the copy averages buffers (use_buffers=True), which
            hold the topology.
        """
        self._followers.append(Follower(type(self).__name__, copy, self._layers()))

    @contextmanager
    def recording(self) -> Iterator[Recording]:
        """Within it every layer behaves as in an armed step, whatever the schedule says. Nothing is counted as an armed step.

        To compile the armed variant before training begins: run forward and backward within it, then zero_grad(). To capture an armed step in
        a CUDA graph: capture it within, keep the `Recording`, and give it to `count_step` after every replay.
        """
        _disarm(self._armed)  # what a rehearsal computes is no gradient of the coming step
        recording = Recording({layer: Recorder(layer) for _, _, layer in self._trained() if self._can_change(layer)} if self._window() else {})
        try:
            yield recording
        finally:
            recording.remove()
            self._arm()

    def state_dict(self) -> dict[str, object]:
        """Counters, seed and schedule, as plain numbers and strings. Topology and values are in the model's own state dict."""
        return {
            "version": options.STATE_VERSION,
            "method": type(self).__name__,
            "steps": self.steps,
            "updates": self.updates,
            "seed": self.seed,
            "every": self.every,
            "start": self.start,
            "t_end": self.t_end,
            "schedule": schedules.to_state(self.schedule),
        }

    def load_state_dict(self, state: dict[str, object]) -> None:
        """Continue where `state` was taken. Its schedule replaces this one's, a function of yours too; where it was itself a function, which no
        state can hold, this stepper must have been given one, and keeps it.

        Raises: SnackError when it is not the state of the same method, or its function is missing; nothing is changed then.
        """
        for name, value in self._read_state(state).items():
            setattr(self, name, value)
        self._due = None
        self._recorded.clear()
        self._arm()

    def _read_state(self, state: object) -> dict[str, object]:
        return options.read_state(type(self).__name__, state, self.schedule)

    # ---- the schedule ----

    def _is_time(self, step: int) -> bool:
        return step > 0 and step % self.every == 0 and step >= self.start and (self.t_end is None or step < self.t_end)

    def _fraction(self, step: int) -> float:
        return check_fraction(self.schedule(step, self.t_end), f"{type(self).__name__} schedule")

    def _watch_optimizer(self) -> None:
        me = weakref.ref(self)

        @torch._disable_dynamo  # the counters would be constants of compiled code
        def after_step(optimizer, args, kwargs) -> None:
            stepper = me()
            if is_capturing():  # recorded, not made: what it is called on is replayed later
                return
            if stepper is not None and not _was_skipped(optimizer):
                stepper._count()

        handle = self.optimizer.register_step_post_hook(after_step)
        # A stepper that nobody holds any more leaves nothing behind.
        weakref.finalize(self, handle.remove)
        weakref.finalize(self, _disarm, self._armed)

    def _count(self, recording: Recording | None = None) -> None:
        self.steps += 1
        if self._armed:
            if recording is None and self._window() > 1:
                recording = Recording(dict(self._armed))  # the next step may fill the same input buffer
            self._recorded.insert(0, dict(self._armed) if recording is None else recording.snapshot(self.scaler))
            del self._recorded[self._window() :]
        if self.is_update(self.steps):
            self._due = (self.steps, list(self._recorded))
        self._arm()

    def _window(self) -> int:
        """Steps to record before an update."""
        return rules.recorded_steps(self._drop, self._grow) if self.moves else 0

    def _arm(self) -> None:
        """Put recorders on the layers if an update reads gradients of the coming step; take off the old ones."""
        _disarm(self._armed)
        if any(self.is_update(self.steps + ahead) for ahead in range(1, self._window() + 1)):
            self._armed.update((layer, Recorder(layer)) for _, _, layer in self._trained() if self._can_change(layer))
        else:
            self._recorded.clear()

    def _trained(self) -> Iterator[tuple[str, int, SparseLinear]]:
        """(name, number, layer) of the layers whose values are trained. Looked up anew, as models get wrapped and changed."""
        sparse = ((name, module) for name, module in unwrapped(self.model).named_modules() if isinstance(module, SparseLinear))
        return ((name, number, layer) for number, (name, layer) in enumerate(sparse) if layer.values.requires_grad)

    def _layers(self) -> dict[str, SparseLinear]:
        """The trained layers by name."""
        return {name: layer for name, _, layer in self._trained()}

    # ---- an update ----

    def _update(self, step: int, fraction: float, recorded: list[dict], begin: float) -> Update:
        layers = self._layers()
        if self._tracker:
            self._tracker.begin(layers)  # somebody else may have edited since
        jobs = self._plan(step, fraction, recorded)
        before = {name: layer.nnz for name, layer in layers.items()}
        dropped, grown = dict.fromkeys(layers, 0), dict.fromkeys(layers, 0)
        try:
            for job in jobs:
                job.apply(self._state)
                for follower in self._followers:
                    follower.edit(job)
                dropped[job.name], grown[job.name] = job.moved
        finally:
            nnz = {name: layer.nnz for name, layer in layers.items()}
            overlap, explored = self._tracker.end(layers) if self._tracker else (None, None)
            seconds = time.perf_counter() - begin
            record = Update(step, self.updates, fraction, dropped, grown, nnz, seconds, overlap, explored, self._notices)
            self.updates += 1
            self.history.append(record)
        if self._on_resize is not None and nnz != before:
            self._on_resize()
        settle(self.history, layers, self._notices)
        return record

    def _plan(self, step: int, fraction: float, recorded: list[dict]) -> list[Job | Exchange]:
        """What to change in which layers, on all processes alike; nothing is changed yet."""
        layers = self._layers()
        counters = {"optimiser steps": step, "updates": self.updates}
        pairs = self._team.share(counters, layers, lambda: self._pairs(step, fraction, recorded))
        return self._team.agree(lambda: self._choose(step, fraction, pairs), describe_jobs)[0]

    def _pairs(self, step: int, fraction: float, recorded: list[dict]) -> dict[str, list[Pair | None]]:
        """x and dY of every recorded step, newest first, of the layers that will look at them."""
        found: dict[str, list[Pair | None]] = {}
        for name, _, layer in self._trained() if self._window() else ():
            try:
                if self._takes_part(layer, self._drops(name, layer, step, fraction)):
                    found[name] = alike([step.get(layer) for step in recorded])
            except SnackError as error:
                raise SnackError(f"{type(self).__name__}: layer '{name}': {error}") from error
        if self._window() > 1 and self.scaler is None:
            self._announce_scaling(found)
        return found

    def _choose(self, step: int, fraction: float, pairs: dict[str, list[Pair | None]]) -> list[Job | Exchange]:
        """The edits of all layers, by the rules."""
        has_gradient = [layer.values.grad is not None for _, _, layer in self._trained()]
        require(
            not self._reads_gradient() or any(has_gradient) or not has_gradient,
            f"{type(self).__name__}: the drop rule reads values.grad, and no layer has one; call zero_grad() after step(), not before it.",
        )
        jobs = [job for name, number, layer in self._trained() if (job := self._job(name, number, layer, step, fraction, pairs))]
        if not jobs:
            return []
        for job in jobs:
            with naming(job.name):
                check_fills(job.layer, self.optimizer, self._state)
        names = self._exchange_rules()
        if names is not None and all(_is_on_card(job.layer) and not rules.samples(self._grow, job.layer) for job in jobs):
            operands = [self._grow.operands(job.context) if names[1] == "gradient" else (None, None) for job in jobs]
            return [Exchange(job.name, job.layer, job.context, job.k, *names, pair, self._grow_init) for job, pair in zip(jobs, operands)]
        who = type(self).__name__
        try:
            choose_drops(self._drop, jobs, self._scope)
            self._share(jobs)
            jobs = [job for job in jobs if job.drop.numel() or job.grows]
            for job in jobs:
                with naming(job.name):
                    self._check_size(job)
                    place_growth(self._drop, self._grow, job, self._scope, self._grow_init)
            for follower in self._followers:
                for job in jobs:
                    follower.check(job)
        except SnackError as error:
            raise SnackError(f"{who}: {error}") from error
        return jobs

    def _exchange_rules(self) -> tuple[str, str] | None:
        """The rules by the names that `SparseLinear.exchange` knows; None where the update needs lists of slots and positions."""
        if self._scope != "layer" or self._weight is not None or callable(self._grow_init) or self._followers:
            return None
        return exchange_rules(self._drop, self._grow)

    def _job(self, name: str, number: int, layer: SparseLinear, step: int, fraction: float, pairs: dict[str, list]) -> Job | None:
        """A layer's part in the update; None where it has none."""
        empty = _empty(layer)
        k = self._drops(name, layer, step, fraction)
        if not self._takes_part(layer, k) or (self._reads_gradient() and layer.values.grad is None):
            return None
        operands = tuple(pair for pair in pairs.get(name, ()) if pair is not None)
        if self._window() and not operands:
            self._announce_unused(name)
            return None
        key = ops.random_key(self.seed, self.updates, number)
        return Job(name, layer, rules.Context(name, number, step, self.updates, fraction, empty, key, self.optimizer, operands), k)

    def _drops(self, name: str, layer: SparseLinear, step: int, fraction: float) -> int:
        """How many connections of a layer to drop. Where it grows as many, no more than it has other places for."""
        k = int(fraction * layer.nnz)
        return k if self._weight is not None else min(k, _empty(layer))

    def _reads_gradient(self) -> bool:
        return bool(getattr(self._drop, "reads_gradient", False))

    def _can_change(self, layer: SparseLinear) -> bool:
        """Whether an update may change the layer."""
        return layer.nnz > 0 and (_empty(layer) > 0 or self._weight is not None)

    def _takes_part(self, layer: SparseLinear, k: int) -> bool:
        """Whether a layer that is to drop `k` connections has a part in the update."""
        return k > 0

    def _share(self, jobs: list[Job]) -> None:
        """How many connections each layer grows."""
        share_growth(jobs, self._weight)

    def _check_size(self, job: Job) -> None:
        require(
            job.grows == job.drop.numel() or job.layer not in self._fixed,
            f"its values are sharded by fully_shard, so it must grow as many connections as it drops, not {job.grows} for {job.drop.numel()}; use "
            "DistributedDataParallel, or a method that keeps the connections of every layer.",
        )

    def _announce_idle(self) -> None:
        """A stepper whose optimiser takes no steps has been given the wrong one."""
        self._calls = 0 if self.steps != self._steps_at_call else self._calls + 1
        self._steps_at_call = self.steps
        if self._calls == _IDLE_CALLS and not is_capturing():
            self._notices.say(
                "idle",
                f"step() was called {_IDLE_CALLS} times while the optimiser it was given took no step; give the stepper the optimiser that trains "
                "the model, or count_step() where a CUDA graph is replayed.",
                stacklevel=3,
            )

    def _announce_scaling(self, pairs: dict[str, list[Pair | None]]) -> None:
        """Gradients in float16 are usually scaled."""
        if any(pair is not None and pair[1].dtype == torch.float16 for steps in pairs.values() for pair in steps):
            self._notices.say(
                "scaling",
                "gradients of several steps are recorded, in float16, and no scaler= was given: where a GradScaler changes its scale between these "
                "steps, they weigh as they were scaled; give scaler=, or one with enabled=False where there is none.",
                stacklevel=7,
            )

    def _announce_unused(self, name: str) -> None:
        self._notices.say(
            f"unused '{name}'",
            f"layer '{name}' took no part in the step before an update, so there is no gradient to grow by and it keeps its connections. If that "
            "step is a replayed CUDA graph, capture it within dst.recording() and give what that returns to dst.count_step().",
            stacklevel=9,
        )


def _is_on_card(layer: SparseLinear) -> bool:
    return layer.values.is_cuda


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
