"""The cheapest eager route to spmm.

The registered operator (see _register.py) passes through PyTorch's Python autograd layer on every call, which costs more
than the product of a small layer. Eager calls therefore skip it: without gradients the kernel is called directly, with
gradients through one autograd.Function. Anything that needs the registered operator (torch.compile, export, autocast,
function transforms) gets it. Results are the same.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import _register  # noqa: F401

_spmm = torch.ops.snack.spmm.default
_spmm_t = torch.ops.snack.spmm_t.default
_sddmm = torch.ops.snack.sddmm.default
_below_autograd = torch._C._AutoDispatchBelowAutograd


class _Spmm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, index, tile_ptr, values, x, bias, out, in_, regime):
        ctx.save_for_backward(index, tile_ptr, values, x)
        ctx.tail = (out, in_, regime)
        ctx.has_bias = bias is not None
        with _below_autograd():
            return _spmm(index, tile_ptr, values, x, bias, out, in_, regime)

    @staticmethod
    def backward(ctx, dy):
        index, tile_ptr, values, x = ctx.saved_tensors
        _, _, needs_values, needs_x, needs_bias, *_ = ctx.needs_input_grad
        if torch.is_grad_enabled():  # a second derivative is wanted: the registered operators have one
            dvalues = _sddmm(index, tile_ptr, dy, x, *ctx.tail) if needs_values else None
            dx = _spmm_t(index, tile_ptr, values, dy, *ctx.tail) if needs_x else None
        else:
            with _below_autograd():
                dvalues = _sddmm(index, tile_ptr, dy, x, *ctx.tail) if needs_values else None
                dx = _spmm_t(index, tile_ptr, values, dy, *ctx.tail) if needs_x else None
        dbias = dy.sum(0) if ctx.has_bias and needs_bias else None
        return None, None, dvalues, dx, dbias, None, None, None


def spmm(index: Tensor, tile_ptr: Tensor, values: Tensor, x: Tensor, bias: Tensor | None, out: int, in_: int, regime: int) -> Tensor:
    """torch.ops.snack.spmm by the cheapest route that gives the same result."""
    if (
        torch.compiler.is_compiling()
        or x.is_meta
        or torch.is_autocast_enabled(x.device.type)
        or torch._C._are_functorch_transforms_active()
    ):
        return torch.ops.snack.spmm(index, tile_ptr, values, x, bias, out, in_, regime)
    if torch.is_grad_enabled() and (values.requires_grad or x.requires_grad or (bias is not None and bias.requires_grad)):
        return _Spmm.apply(index, tile_ptr, values, x, bias, out, in_, regime)
    with _below_autograd():
        return _spmm(index, tile_ptr, values, x, bias, out, in_, regime)
