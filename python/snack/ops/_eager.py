"""The eager route to the three products: cheap calls, and derivatives of every kind.

The registered operators (see _register.py) pass through PyTorch's Python autograd layer on every call, which costs more than
the product of a small layer, and do not know forward mode or function transforms. Eager calls therefore go around it: straight
to the kernel where nothing is differentiated; through `_Ordinary` where y = x W^T + b is, in reverse; else through an
autograd.Function with jvp and vmap rules, whose `apply` binds its arguments by name on every call, which costs more than all
else. torch.compile, export and autocast use the registered operators. The products are closed under differentiation, as _register.py explains.
"""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ..formats.pattern import call
from . import _register  # noqa: F401
from .deferred import deferred

_ops = torch.ops.snack
_spmm, _spmm_t, _sddmm = _ops.spmm.default, _ops.spmm_t.default, _ops.sddmm.default
_below_autograd = torch._C._AutoDispatchBelowAutograd


def _uses_registered(m: Tensor) -> bool:
    return torch.compiler.is_compiling() or m.is_meta or torch.is_autocast_enabled("cuda" if m.is_cuda else "cpu")


def _is_transformed() -> bool:
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def _is_differentiated(*tensors: Tensor | None) -> bool:
    return _is_transformed() or (torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors))


def is_ordinary(values: Tensor, m: Tensor) -> bool:
    """Two tensors on CPUs or on cards, and no compiler, autocast, function transform or forward mode at work."""
    if torch.compiler.is_compiling() or _is_transformed() or not (isinstance(values, Tensor) and isinstance(m, Tensor)):
        return False
    if m.is_cuda:
        return values.is_cuda and not torch.is_autocast_enabled("cuda")
    return m.is_cpu and values.is_cpu and not torch.is_autocast_enabled("cpu")


def ordinary_spmm(
    index: Tensor, tile_ptr: Tensor, values: Tensor, x: Tensor, bias: Tensor | None, out: int, in_: int, regime: int
) -> Tensor:
    """`spmm` where `is_ordinary(values, x)`: with as little around the kernel as a call can have."""
    if torch.is_grad_enabled() and (values.requires_grad or x.requires_grad or (bias is not None and bias.requires_grad)):
        return _apply_ordinary(values, x, bias, (index, tile_ptr), (out, in_, regime))
    with _below_autograd():
        return _spmm(index, tile_ptr, values, x, bias, out, in_, regime)


def spmm(index: Tensor, tile_ptr: Tensor, values: Tensor, x: Tensor, bias: Tensor | None, out: int, in_: int, regime: int) -> Tensor:
    """torch.ops.snack.spmm by the cheapest route that gives the same result."""
    if _uses_registered(x):
        return _ops.spmm(index, tile_ptr, values, x, bias, out, in_, regime)
    if _is_transformed():
        return _Spmm.apply(index, tile_ptr, values, x, bias, out, in_, regime)
    return ordinary_spmm(index, tile_ptr, values, x, bias, out, in_, regime)


def spmm_t(index: Tensor, tile_ptr: Tensor, values: Tensor, dy: Tensor, out: int, in_: int, regime: int) -> Tensor:
    """torch.ops.snack.spmm_t by the cheapest route that gives the same result."""
    if _uses_registered(dy):
        return _ops.spmm_t(index, tile_ptr, values, dy, out, in_, regime)
    if _is_differentiated(values, dy):
        return _SpmmT.apply(index, tile_ptr, values, dy, out, in_, regime)
    with _below_autograd():
        return _spmm_t(index, tile_ptr, values, dy, out, in_, regime)


def sddmm(index: Tensor, tile_ptr: Tensor, dy: Tensor, x: Tensor, out: int, in_: int, regime: int) -> Tensor:
    """torch.ops.snack.sddmm by the cheapest route that gives the same result."""
    if _uses_registered(x):
        return _ops.sddmm(index, tile_ptr, dy, x, out, in_, regime)
    if _is_differentiated(dy, x):
        return _Sddmm.apply(index, tile_ptr, dy, x, out, in_, regime)
    with _below_autograd():
        return _sddmm(index, tile_ptr, dy, x, out, in_, regime)


def _sum(*terms: Tensor | None) -> Tensor | None:
    present = [t for t in terms if t is not None]
    return sum(present[1:], present[0]) if present else None


class _Product(torch.autograd.Function):
    """What the three share: they keep (index, tile_ptr) and their two factors for both directions of differentiation."""

    generate_vmap_rule = True

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.tail = inputs[-3:]
        ctx.save_for_backward(*inputs[:4])
        ctx.save_for_forward(*inputs[:4])


def _spmm_gradients(ctx, dy: Tensor, needs_values: bool, needs_x: bool, needs_bias: bool, may_defer: bool = False) -> list[Tensor | None]:
    """[dvalues, dx, dbias]. Where nobody differentiates further, the tests that every product makes are made once."""
    index, tile_ptr, values, x = ctx.saved_tensors
    dvalues = None
    if torch.is_grad_enabled() or not is_ordinary(values, dy):
        transposed, sampled, guard = spmm_t, sddmm, nullcontext
    else:
        transposed, sampled, guard = _spmm_t, _sddmm, _below_autograd
        if needs_values and may_defer:
            dvalues = deferred(ctx, index, tile_ptr, dy, x, ctx.tail)
    with guard():
        dbias = dy.sum(0) if needs_bias else None
        dx = transposed(index, tile_ptr, values, dy, *ctx.tail) if needs_x else None
        if needs_values and dvalues is None:  # last: the optimiser finds what a card's L2 cache holds of it
            dvalues = sampled(index, tile_ptr, dy, x, *ctx.tail)
        return [dvalues, dx, dbias]


class _Ordinary(torch.autograd.Function):
    """spmm for reverse mode alone. What is not differentiated comes in two tuples: every argument costs time."""

    @staticmethod
    def forward(ctx, values, x, bias, packed, tail):
        ctx.tail = tail
        ctx.save_for_backward(*packed, values, x)
        with _below_autograd():
            return _spmm(*packed, values, x, bias, *tail)

    @staticmethod
    def backward(ctx, dy):
        return *call(_spmm_gradients, ctx, dy, *ctx.needs_input_grad[:3], True), None, None


_apply_ordinary = super(torch.autograd.Function, _Ordinary).apply  # Function.apply itself looks for transforms again


class _Spmm(_Product):
    @staticmethod
    def forward(index, tile_ptr, values, x, bias, out, in_, regime):
        with _below_autograd():
            return _spmm(index, tile_ptr, values, x, bias, out, in_, regime)

    @staticmethod
    def backward(ctx, dy):
        return None, None, *call(_spmm_gradients, ctx, dy, *ctx.needs_input_grad[2:5]), None, None, None

    @staticmethod
    def jvp(ctx, _index, _tile_ptr, values_t, x_t, bias_t, *_):
        index, tile_ptr, values, x = ctx.saved_tensors
        from_values = None if values_t is None else spmm(index, tile_ptr, values_t, x, None, *ctx.tail)
        from_x = None if x_t is None else spmm(index, tile_ptr, values, x_t, None, *ctx.tail)
        total = _sum(from_values, from_x)
        if bias_t is None:
            return total
        return bias_t.expand(x.shape[0], -1).clone() if total is None else total + bias_t


class _SpmmT(_Product):
    @staticmethod
    def forward(index, tile_ptr, values, dy, out, in_, regime):
        with _below_autograd():
            return _spmm_t(index, tile_ptr, values, dy, out, in_, regime)

    @staticmethod
    def backward(ctx, g):
        index, tile_ptr, values, dy = ctx.saved_tensors
        _, _, needs_values, needs_dy, *_ = ctx.needs_input_grad
        ddy = call(spmm, index, tile_ptr, values, g, None, *ctx.tail) if needs_dy else None
        dvalues = call(sddmm, index, tile_ptr, dy, g, *ctx.tail) if needs_values else None
        return None, None, dvalues, ddy, None, None, None

    @staticmethod
    def jvp(ctx, _index, _tile_ptr, values_t, dy_t, *_):
        index, tile_ptr, values, dy = ctx.saved_tensors
        from_values = None if values_t is None else spmm_t(index, tile_ptr, values_t, dy, *ctx.tail)
        from_dy = None if dy_t is None else spmm_t(index, tile_ptr, values, dy_t, *ctx.tail)
        return _sum(from_values, from_dy)


class _Sddmm(_Product):
    @staticmethod
    def forward(index, tile_ptr, dy, x, out, in_, regime):
        with _below_autograd():
            return _sddmm(index, tile_ptr, dy, x, out, in_, regime)

    @staticmethod
    def backward(ctx, g):
        index, tile_ptr, dy, x = ctx.saved_tensors
        _, _, needs_dy, needs_x, *_ = ctx.needs_input_grad
        g = g.contiguous()  # it plays the part of values
        ddy = call(spmm, index, tile_ptr, g, x, None, *ctx.tail) if needs_dy else None
        dx = call(spmm_t, index, tile_ptr, g, dy, *ctx.tail) if needs_x else None
        return None, None, ddy, dx, None, None, None

    @staticmethod
    def jvp(ctx, _index, _tile_ptr, dy_t, x_t, *_):
        index, tile_ptr, dy, x = ctx.saved_tensors
        from_dy = None if dy_t is None else sddmm(index, tile_ptr, dy_t, x, *ctx.tail)
        from_x = None if x_t is None else sddmm(index, tile_ptr, dy, x_t, *ctx.tail)
        return _sum(from_dy, from_x)
