"""Scopes: among which connections an update compares. "layer": each layer drops and grows for itself. "row": a layer drops as a whole and
every row grows what it lost, so that its number of connections stays. "global": all layers are compared as one.

Redistribution: how the connections that were dropped are shared out to grow. None: every layer grows what it lost. Otherwise in proportion
to a weight of each layer, by largest remainder; what a layer has no room for goes to the others.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from numbers import Real

import torch
from torch import Tensor

from .. import ops
from ..errors import SnackError, require
from ..nn import SparseLinear
from ..nn.distribution import share
from .answers import check_grown_values, check_positions, check_row_scores, check_scores, check_slots, naming
from .rules import EXACT_POSITIONS, Context, Drop, GradientGrowth, Grow, MomentumGrowth, drop_magnitude, drop_signed, grow_uniform, is_built_in

SCOPES = ("layer", "row", "global")
_ROW_SCORES = 2**22  # of a panel of rows that are scored at a time


@dataclass(eq=False)
class Job:
    """One layer in one update. Filled in step by step: what to drop, how many to grow, where, and with what."""

    name: str
    layer: SparseLinear
    context: Context
    k: int
    drop: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    grows: int = 0
    rows: Tensor | None = None
    cols: Tensor | None = None
    values: Tensor | float = 0.0

    def apply(self, state: object) -> None:
        """Make the edit. state: policy for the optimiser states of grown connections."""
        self.layer.rewire(self.drop, (self.rows, self.cols), self.values, self.context.optimizer, state=state)

    @property
    def moved(self) -> tuple[int, int]:
        """Connections dropped and grown."""
        return self.drop.numel(), self.grows

    @property
    def room(self) -> int:
        """Positions to grow at: empty ones, and those given up."""
        return self.context.empty + self.drop.numel()


@dataclass(eq=False)
class Exchange:
    """One layer in one update by built-in rules: the choice is made where the layer is, by the operation that makes the edit."""

    name: str
    layer: SparseLinear
    context: Context
    k: int
    drop_rule: str
    grow_rule: str
    operands: tuple[Tensor | None, Tensor | None]
    values: float
    result: Tensor | None = None

    def apply(self, state: object) -> None:
        """Make the edit, without waiting for it."""
        x, dy = self.operands
        self.result = self.layer.exchange(
            self.drop_rule, self.grow_rule, k=self.k, fraction=self.context.fraction, key=self.context.key, x=x, dy=dy, values=self.values,
            optimizer=self.context.optimizer, state=state,
        )

    @property
    def moved(self) -> tuple[Tensor, Tensor]:
        """Connections moved, and an error, both still on the card."""
        return self.result, self.result


def exchange_rules(drop: Drop, grow: Grow) -> tuple[str, str] | None:
    """The rules by the names that `SparseLinear.exchange` knows; None where it does not know one of them."""
    name = "magnitude" if drop is drop_magnitude else "signed" if drop is drop_signed else None
    by_gradient = type(grow) in (GradientGrowth, MomentumGrowth)
    grow_name = "uniform" if grow is grow_uniform else "gradient" if by_gradient else None
    return (name, grow_name) if name and grow_name else None


# ---- drop ----


def choose_drops(rule: Drop, jobs: list[Job], scope: str) -> None:
    """Fill in `drop`. Raises: SnackError, naming the layer, where a rule or its answer is wrong."""
    if scope == "global":
        _drop_globally(rule, jobs)
        return
    for job in jobs:
        with naming(job.name):
            job.drop = check_slots(rule(job.layer, job.k, job.context), job.k, job.layer.values.device)


def _drop_globally(rule: Drop, jobs: list[Job]) -> None:
    """The smallest scores of all layers, as many as their k together; ties: the earlier layer, the lower slot."""
    device = jobs[0].layer.values.device
    scores = []
    for job in jobs:
        with naming(job.name):
            found = check_scores(rule.scores(job.layer, job.context), job.layer.nnz)
        scores.append(found.to(device, torch.promote_types(job.layer.values.dtype, torch.float32)))
    together, k = torch.cat(scores), sum(job.k for job in jobs)
    # Ours are never negative, so the quicker selection of the smallest |score| serves; a stable sort also has NaN last and ties in order.
    chosen = ops.select_smallest(together, k) if is_built_in(rule) else together.sort(stable=True).indices[:k].sort().values
    ends = torch.tensor([job.layer.nnz for job in jobs], device=device).cumsum(0)
    cuts = torch.searchsorted(chosen, ends).tolist()
    begin = first = 0
    for job, cut in zip(jobs, cuts):
        job.drop = (chosen[begin:cut] - first).to(job.layer.values.device)
        begin, first = cut, first + job.layer.nnz


# ---- how many each layer grows ----


def _by_connections(job: Job) -> float:
    """Connections that are left (DSR, Mostafa and Wang 2019)."""
    return float(job.layer.nnz - job.drop.numel())


def _mean_of(job: Job, tensor: Tensor | None) -> float:
    return 0.0 if tensor is None or not tensor.numel() else float(tensor.detach().abs().double().mean())


def _by_momentum(job: Job) -> float:
    """Mean |momentum| of a connection (SNFS); of the gradient, where the optimiser keeps no momentum."""
    state = job.context.optimizer.state.get(job.layer.values, {})
    momentum = state.get("momentum_buffer", state.get("exp_avg"))
    return _mean_of(job, job.layer.values.grad if momentum is None else momentum)


def _by_gradient(job: Job) -> float:
    """Mean |gradient| of a connection."""
    return _mean_of(job, job.layer.values.grad)


WEIGHTS: dict[str, Callable[[Job], float]] = {"connections": _by_connections, "momentum": _by_momentum, "gradient": _by_gradient}


def _number(job: Job, weight: object) -> float:
    is_number = isinstance(weight, Real) or (isinstance(weight, Tensor) and weight.numel() == 1)
    fits = is_number and 0.0 <= float(weight) < float("inf")  # NaN fails the comparison
    require(fits, f"layer '{job.name}': its weight for redistribution is {weight!r}, expected a finite number of at least 0.")
    return float(weight)


def share_growth(jobs: list[Job], weight: Callable[[Job], float] | None) -> None:
    """Fill in `grows`: together as many as were dropped."""
    for job in jobs:
        job.grows = job.drop.numel()
    if weight is None:
        return
    weights = [_number(job, weight(job)) for job in jobs]
    if not sum(weights):
        is_blind = weight in (_by_momentum, _by_gradient) and jobs and all(job.layer.values.grad is None for job in jobs)
        require(not is_blind, "redistribution reads values.grad, and there is none; call zero_grad() after step(), not before it.")
        return
    scale = 2**40 / max(weights)  # whole numbers, so that every machine shares alike
    whole = [int(w * scale) for w in weights]
    left, counts, open_jobs = sum(job.grows for job in jobs), [0] * len(jobs), list(range(len(jobs)))
    while left and open_jobs:
        parts = share(left, [whole[i] for i in open_jobs])
        if not sum(parts):  # only layers without a weight have room
            parts = share(left, [1] * len(open_jobs))
        for i, part in zip(open_jobs, parts):
            counts[i] += min(part, jobs[i].room - counts[i])
        left = sum(job.grows for job in jobs) - sum(counts)
        open_jobs = [i for i in open_jobs if counts[i] < jobs[i].room]
    for job, count in zip(jobs, counts):
        job.grows = count


# ---- grow ----


def place_growth(drop: Drop, grow: Grow, job: Job, scope: str, initial: float | Callable) -> None:
    """Fill in `rows`, `cols` and `values`. Raises: SnackError where a rule or its answer is wrong."""
    pattern, is_foreign = job.layer.pattern, not is_built_in(drop)
    if is_foreign and scope == "row":
        ops.rewire(pattern, job.drop)  # pure: rows are looked up by these slots, so complaints about them are heard first
    job.rows, job.cols = check_positions(_positions(grow, job, scope), job.grows, job.layer.values.device)
    if is_foreign or not is_built_in(grow):
        ops.rewire(pattern, job.drop, job.rows, job.cols)  # pure: only to hear its complaints before anything is changed
    job.values = initial
    if callable(initial):
        job.values = check_grown_values(initial(job.layer, job.rows, job.cols, job.context), job.layer.values, job.grows)


def _positions(rule: Grow, job: Job, scope: str) -> tuple[Tensor, Tensor]:
    if not job.grows:
        return (torch.empty(0, dtype=torch.int64),) * 2
    return _grow_in_rows(rule, job) if scope == "row" else rule(job.layer, job.grows, job.drop, job.context)


def _grow_in_rows(rule: Grow, job: Job) -> tuple[Tensor, Tensor]:
    """For every row as many as it lost, those of largest score; ties: the lower column. A score of NaN or -inf never grows."""
    layer, scores_of = job.layer, getattr(rule, "row_scores", None)
    require(scores_of is not None, "the grow rule has no row_scores, which scope='row' compares; use scope='layer', or give it one.")
    positions = layer.out_features * layer.in_features
    require(
        positions <= EXACT_POSITIONS,
        f"scope='row' scores every position of the rows that lost connections, and the layer has {positions:,}, more than {EXACT_POSITIONS:,}; "
        "use scope='layer' there.",
    )
    rows, cols = (t.long() for t in layer.pattern.coordinates())
    is_live = torch.ones(layer.nnz, dtype=torch.bool, device=rows.device)
    is_live[job.drop] = False
    lost, counts = rows[job.drop].unique(return_counts=True)
    live_rows, live_cols = rows[is_live], cols[is_live]
    found: list[tuple[Tensor, Tensor]] = []
    step = max(1, _ROW_SCORES // max(1, layer.in_features))
    for begin in range(0, len(lost), step):
        some, wanted = lost[begin : begin + step], counts[begin : begin + step]
        scores = check_row_scores(scores_of(layer, some, job.context), (len(some), layer.in_features), some.device)
        place = torch.searchsorted(some, live_rows).clamp_(max=len(some) - 1)
        inside = some[place] == live_rows
        scores[place[inside], live_cols[inside]] = -torch.inf
        best = scores.sort(dim=1, descending=True, stable=True)
        chosen = torch.arange(layer.in_features, device=some.device) < wanted[:, None]
        if bool((best.values[chosen] == -torch.inf).any()):
            raise SnackError("fewer positions of a row have a gradient that is a number than it lost connections; the others are NaN.")
        where = chosen.nonzero()
        found.append((some[where[:, 0]], best.indices[chosen]))
    return torch.cat([r for r, _ in found]), torch.cat([c for _, c in found])
