"""Rules: which connections to drop, where to grow. A rule is a plain function, yours or one of these.

    drop(layer, k, context)       -> slots       at most k distinct slots of `layer.values`, int64
    grow(layer, k, drop, context) -> rows, cols  exactly k distinct positions, each empty or given up by a slot in `drop`

They read the layer and change nothing. `drop` is called first; `grow` gets as many as it returned. What they return may be on
any device; what they get is on the layer's. Rules that look at the gradient of absent connections are marked with
`needs_gradient` and find the operands of dW = dY^T X in `context.x` and `context.dy`. Building blocks: `snack.ops.select_smallest`,
`grow_uniform`, `grow_gradient`, `sddmm`.

Two things a rule may have besides, so that it serves other scopes than one layer:

    drop.scores(layer, context) -> (nnz,)           smallest first; with scope="global" all layers are compared by them
    grow.row_scores(layer, rows, context) -> (len(rows), in)   largest first, NaN and -inf never; with scope="row" every row grows what it lost
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Integral, Real

import torch
from torch import Tensor

from .. import ops
from ..errors import SnackError, require
from ..formats import Pattern
from ..nn import SparseLinear

Drop = Callable[[SparseLinear, int, "Context"], Tensor]
Grow = Callable[[SparseLinear, int, Tensor, "Context"], "tuple[Tensor, Tensor]"]

EXACT_POSITIONS = 2**30
"""Gradient growth looks at every position of a layer up to this size (about 32,768 x 32,768), and at a sample beyond."""

CANDIDATES_PER_CONNECTION = 8
"""Size of that sample, in multiples of the connections to grow."""


@dataclass(frozen=True, eq=False)
class Context:
    """What a rule may want to know besides the layer.

    Attributes:
        name, number: the layer's name in the model and its place among the sparse layers, from 0.
        step: optimiser steps taken, from 1. update: topology updates made before this one.
        fraction: of the connections to replace, as scheduled (k is cut to it, rounded down).
        empty: positions without a connection (before the drop).
        key: of this layer's random stream in this update, see `snack.ops.random_key`.
        optimizer: its state holds momentum and the like, per slot: `optimizer.state[layer.values]`.
        recorded: (x, dy) of the last steps, newest first, for rules that ask for them: (batch, in), (batch, out).
        x, dy: those of the step just taken, or None.
    """

    name: str
    number: int
    step: int
    update: int
    fraction: float
    empty: int
    key: int
    optimizer: torch.optim.Optimizer
    recorded: tuple[tuple[Tensor, Tensor], ...] = ()

    @property
    def x(self) -> Tensor | None:
        return self.recorded[0][0] if self.recorded else None

    @property
    def dy(self) -> Tensor | None:
        return self.recorded[0][1] if self.recorded else None


def needs_gradient(rule):
    """Mark a drop or grow rule that reads `context.x` and `context.dy`. Usable as a decorator."""
    rule.needs_gradient = True
    return rule


def recorded_steps(*rules: object) -> int:
    """How many steps before an update have to be recorded for these rules: 0 where none looks at gradients of absent connections."""
    return max(int(getattr(rule, "recorded_steps", 0) or bool(getattr(rule, "needs_gradient", False))) for rule in rules)


# ---- drop ----


def _magnitudes(layer: SparseLinear, context: Context) -> Tensor:
    return layer.values.detach().abs()


def drop_magnitude(layer: SparseLinear, k: int, context: Context) -> Tensor:
    """The k connections of smallest |value|; ties: the lower slot (RigL; also a common variant of SET)."""
    return ops.select_smallest(layer.values, k)


drop_magnitude.scores = _magnitudes


def drop_signed(layer: SparseLinear, k: int, context: Context) -> Tensor:
    """SET as published (Mocanu et al. 2018): the fraction of the values >= 0 nearest to 0, and that of the negative ones.

    Both counts are rounded down, so there may be one fewer than k.
    """
    negatives = int((layer.values < 0).sum())
    below = int(context.fraction * negatives)
    above = int(context.fraction * (layer.nnz - negatives))
    if above + below > k:  # k was cut because the layer has few empty positions
        above, below = above * k // (above + below), below * k // (above + below)
    return torch.cat([ops.select_smallest(layer.values, above, "positive"), ops.select_smallest(layer.values, below, "negative")])


@dataclass(frozen=True)
class SensitivityDrop:
    """The k connections of smallest |value| + weight * |gradient| (MEST, Yuan et al. 2021, eq. 1); ties: the lower slot.

    The gradient is `values.grad` as the optimiser saw it; so call `zero_grad` after the stepper. A layer without one, which took no part in the
    step, is left alone.
    """

    weight: float = 1.0
    reads_gradient = True  # of the connections there are; not a field

    def __post_init__(self):
        is_number = isinstance(self.weight, Real) and not isinstance(self.weight, bool) and 0.0 <= self.weight < float("inf")
        require(is_number, f"SensitivityDrop: weight={self.weight!r} must be a finite number of at least 0.")

    def scores(self, layer: SparseLinear, context: Context) -> Tensor:
        gradient = layer.values.grad
        require(gradient is not None, "the drop rule reads values.grad, and there is none; call zero_grad() after step(), not before it.")
        return layer.values.detach().abs() + self.weight * gradient.detach().abs()

    def __call__(self, layer: SparseLinear, k: int, context: Context) -> Tensor:
        return ops.select_smallest(self.scores(layer, context), k)


# ---- grow ----


def grow_uniform(layer: SparseLinear, k: int, drop: Tensor, context: Context) -> tuple[Tensor, Tensor]:
    """k empty positions, uniformly at random (SET)."""
    return ops.grow_uniform(layer.pattern, k, context.key, drop)


def _random_row_scores(layer: SparseLinear, rows: Tensor, context: Context) -> Tensor:
    """Of position p the draw p of the layer's stream: its upper 53 bits, as float64."""
    positions = rows[:, None] * layer.in_features + torch.arange(layer.in_features, device=rows.device)
    return ops.random_uniform(context.key, positions)


grow_uniform.row_scores = _random_row_scores


def _is_large(layer: SparseLinear) -> bool:
    return layer.out_features * layer.in_features > EXACT_POSITIONS


def samples(rule: object, layer: SparseLinear) -> bool:
    """Whether a grow rule looks at a sample of the layer's positions only."""
    return isinstance(rule, GradientGrowth) and rule.samples(layer)


class GradientGrowth:
    """The k empty positions of largest |dY^T X| (RigL, Evci et al. 2020, algorithm 1); ties: first in slot order.

    No dense gradient is made. Exact for layers of up to `EXACT_POSITIONS` positions; larger ones grow the best of
    `CANDIDATES_PER_CONNECTION` * k uniformly drawn empty positions, with a warning, once a layer.

    candidates: draw this number for every connection to grow, whatever the layer's size; "all" is exact at any size.
    """

    needs_gradient = True

    def __init__(self, candidates: int | str | None = None):
        is_count = isinstance(candidates, Integral) and not isinstance(candidates, bool) and candidates >= 1
        if candidates is not None and candidates != "all" and not is_count:
            raise SnackError(f"RigL: candidates={candidates!r} is neither a number of at least 1 (for every connection to grow) nor 'all'.")
        self.candidates = candidates
        self._announced: set[str] = set()

    def __call__(self, layer: SparseLinear, k: int, drop: Tensor, context: Context) -> tuple[Tensor, Tensor]:
        is_large = _is_large(layer)
        x, dy = self.operands(context)
        if not self.samples(layer):
            return ops.grow_gradient(layer.pattern, x, dy, k, drop)
        wanted = min((self.candidates or CANDIDATES_PER_CONNECTION) * k, context.empty + drop.numel())
        if is_large and context.name not in self._announced:
            self._announced.add(context.name)
            _announce_sampling(layer, wanted, context)
        return _best_of_sample(layer, k, drop, wanted, context.key, x, dy)

    def samples(self, layer: SparseLinear) -> bool:
        """Whether it looks at a sample of the layer's positions only."""
        return self.candidates != "all" and (self.candidates is not None or _is_large(layer))

    def operands(self, context: Context) -> tuple[Tensor, Tensor]:
        """x (batch, in), dy (batch, out) whose product scores a position."""
        return context.x, context.dy

    def row_scores(self, layer: SparseLinear, rows: Tensor, context: Context) -> Tensor:
        x, dy = (t.float() if t.dtype.itemsize == 2 else t for t in self.operands(context))
        return (dy[:, rows].T @ x).abs()


class MomentumGrowth(GradientGrowth):
    """The k empty positions of largest |momentum| (SNFS, Dettmers and Zettlemoyer 2019), estimated; ties: first in slot order.

    The momentum of an absent connection is the sum of decay**i times its gradient i steps ago. Nobody keeps it, as that would take out * in
    numbers; here it is the sum over the last `window` steps, which is exact but for a part of decay**window. It is the product of the
    recorded x and of dY weighted by decay**i, so it costs no dense matrix: memory is window * batch * (in + out) numbers, held
    for the `window` steps before an update. What is done to gradients after the backward pass (clipping) is not in it. Where a GradScaler
    changes its scale within the window, the stepper must know it (`scaler`), or steps weigh as they were scaled.
    """

    def __init__(self, window: int = 10, decay: float = 0.9, candidates: int | str | None = None):
        super().__init__(candidates)
        is_whole = isinstance(window, Integral) and not isinstance(window, bool) and window >= 1
        require(is_whole, f"SNFS: window={window!r} must be a whole number of steps, at least 1.")
        is_part = isinstance(decay, Real) and not isinstance(decay, bool) and 0.0 <= decay <= 1.0
        require(is_part, f"SNFS: decay={decay!r} must be a number between 0 and 1, as the optimiser's momentum.")
        self.recorded_steps, self.decay = int(window), float(decay)

    def operands(self, context: Context) -> tuple[Tensor, Tensor]:
        dys = [dy * self.decay**i for i, (_, dy) in enumerate(context.recorded)]
        return torch.cat([x for x, _ in context.recorded]), torch.cat(dys)


def _best_of_sample(
    layer: SparseLinear, k: int, drop: Tensor, wanted: int, key: int, x: Tensor, dy: Tensor
) -> tuple[Tensor, Tensor]:
    candidates = Pattern(*ops.grow_uniform(layer.pattern, wanted, key, drop), layer.pattern.shape)
    # Sums of 16-bit products are scored in float32, or rounding would make ties of what is none.
    x, dy = (t.float() if t.dtype.itemsize == 2 else t for t in (x, dy))
    scores = torch.nan_to_num(ops.sddmm(candidates, dy, x).abs(), nan=-1.0, posinf=torch.inf)
    # The pattern has sorted its positions and the scores come in its order, so a stable sort keeps ties in slot order.
    best = torch.sort(scores, descending=True, stable=True).indices[:k]
    if bool((scores[best] < 0).any()):
        raise SnackError(f"grow_gradient: fewer than {k} of the {wanted} candidates have a gradient that is a number; the others are NaN.")
    rows, cols = candidates.coordinates()
    return rows[best].long(), cols[best].long()


def _announce_sampling(layer: SparseLinear, wanted: int, context: Context) -> None:
    positions, batch = layer.out_features * layer.in_features, context.x.shape[0]
    warnings.warn(
        f"RigL: layer '{context.name}' ({layer.out_features} x {layer.in_features}) has {positions:,} positions. Exact growth would "
        f"compute the gradient of every one at each update: {positions * batch:.2g} multiply-adds at batch {batch}, "
        f"{positions / max(1, layer.nnz):,.0f} times the gradient of the {layer.nnz:,} connections. Instead the best of {wanted:,} random "
        f"candidates grow; candidates=c draws c for every connection to grow, candidates='all' grows exactly.",
        stacklevel=6,
    )


DROP_RULES: dict[str, Drop] = {"magnitude": drop_magnitude, "signed": drop_signed, "sensitivity": SensitivityDrop()}
GROW_RULES: tuple[str, ...] = ("uniform", "gradient", "momentum")


def resolve_drop(rule: object, who: str) -> Drop:
    """The drop rule of that name, or the given function itself."""
    if callable(rule):
        return rule
    if isinstance(rule, str) and rule in DROP_RULES:
        return DROP_RULES[rule]
    raise SnackError(
        f"{who}: drop rule {rule!r} is unknown; choose one of {', '.join(DROP_RULES)}, or give a function drop(layer, k, context)."
    )


def resolve_grow(rule: object, candidates: int | str | None, who: str) -> Grow:
    """The grow rule of that name, or the given function itself; `candidates` belongs to "gradient"."""
    if rule in ("gradient", "momentum"):
        return GradientGrowth(candidates) if rule == "gradient" else MomentumGrowth(candidates=candidates)
    if candidates is not None:
        raise SnackError(
            f"{who}: candidates={candidates!r} belongs to grow='gradient' and 'momentum', but the grow rule is {rule!r}; leave it out."
        )
    if rule == "uniform":
        return grow_uniform
    if callable(rule):
        return rule
    raise SnackError(
        f"{who}: grow rule {rule!r} is unknown; choose one of {', '.join(GROW_RULES)}, or give a function grow(layer, k, drop, context)."
    )


def is_built_in(rule: object) -> bool:
    """Whether `rule` is of this package, whose answers need no check."""
    return getattr(rule if hasattr(rule, "__qualname__") else type(rule), "__module__", "").startswith(__package__ + ".")
