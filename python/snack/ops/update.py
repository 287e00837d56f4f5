"""sddmm_update: one step of SGD or AdamW on a layer's values, by a gradient that is stored nowhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import require
from ..formats import Pattern
from ..formats.pattern import call
from . import _register  # noqa: F401
from .products import check_product, regime_code

_below_autograd = torch._C._AutoDispatchBelowAutograd


@dataclass
class SgdStep:
    """The options of torch.optim.SGD. lr: a number, or a float32 tensor beside the values. is_first: the momentum buffer holds
    nothing yet. State: the momentum buffer where momentum is not 0."""

    lr: float | Tensor
    momentum: float = 0.0
    dampening: float = 0.0
    weight_decay: float = 0.0
    nesterov: bool = False
    maximize: bool = False
    is_first: bool = False

    def _arguments(self) -> tuple[Tensor | None, Tensor | None, int, list[float]]:
        lr, number = _split(self.lr)
        numbers = [number, self.momentum, self.dampening, self.weight_decay, self.nesterov, self.maximize, self.is_first]
        return lr, None, 0, [float(n) for n in numbers]


@dataclass
class AdamWStep:
    """The options of torch.optim.AdamW, and the number of the step (from 1 on). lr, step: numbers, or float32 tensors beside the
    values. State: exp_avg, exp_avg_sq."""

    lr: float | Tensor
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 1e-2
    step: float | Tensor = 1
    maximize: bool = False

    def _arguments(self) -> tuple[Tensor | None, Tensor | None, int, list[float]]:
        (lr, rate), (step, number) = _split(self.lr), _split(self.step, 1.0)
        return lr, step, 1, [float(n) for n in (rate, *self.betas, self.eps, self.weight_decay, number, self.maximize)]


def _split(number: float | Tensor, stand_in: float = 0.0) -> tuple[Tensor | None, float]:
    """(tensor for the kernel to read, a number in its place), or (None, the number). Nothing waits for a card."""
    if isinstance(number, Tensor) and not number.is_cpu:
        return number.float(), stand_in
    return None, float(number)


def update(
    index: Tensor, tile_ptr: Tensor, values: Tensor, state: Sequence[Tensor], dy: Tensor, x: Tensor, rule: SgdStep | AdamWStep, out: int,
    in_: int, regime: int,
) -> None:
    """torch.ops.snack.sddmm_update, seen by autograd as a change of the values."""
    lr, step, code, numbers = rule._arguments()
    with _below_autograd():
        call(torch.ops.snack.sddmm_update.default, index, tile_ptr, values, list(state), dy, x, lr, step, code, numbers, out, in_, regime)
    torch.autograd.graph.increment_version(values)


@torch.no_grad()
def sddmm_update(
    pattern: Pattern, values: Tensor, state: Sequence[Tensor], dy: Tensor, x: Tensor, rule: SgdStep | AdamWStep, regime: str = "auto"
) -> None:
    """Change `values` and `state` as torch.optim's SGD or AdamW does for the gradient sddmm(pattern, dy, x).

    Args:
        values: (nnz,). state: tensors like it, as many as the rule says; both are changed.
        dy: (..., out). x: (..., in), equal leading dimensions. All of one dtype and device.
        regime: "auto" or "stream"; on a card also "coo".

    It is calculated in float32 (float64 in float64) and rounded once.
    Raises: SnackError on shapes, dtypes or devices that do not fit.
    """
    out, in_ = pattern.shape
    check_product("sddmm_update", "out_features", out, dy, values, "dy")
    check_product("sddmm_update", "in_features", in_, x, values)
    require(
        dy.shape[:-1] == x.shape[:-1],
        f"sddmm_update: dy has leading dimensions {tuple(dy.shape[:-1])} and x {tuple(x.shape[:-1])}; both are the batch.",
    )
    batch = x.shape[:-1].numel()
    flat = (dy.reshape(batch, out), x.reshape(batch, in_))
    update(pattern.index, pattern.tile_ptr, values, state, *flat, rule, out, in_, regime_code(regime, x))
