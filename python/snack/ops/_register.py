"""What PyTorch must know of the operators: shapes without data (fakes), derivatives, autocast.

The three products are closed under differentiation, so any order of derivative works:
    spmm(v, x) = x W^T + b     d/dx = spmm_t(v, dy)    d/dv = sddmm(dy, x)    d/db = sum dy
    spmm_t(v, dy) = dy W       d/ddy = spmm(v, g)      d/dv = sddmm(dy, g)
    sddmm(dy, x)               d/ddy = spmm(g, x)      d/dx = spmm_t(g, dy)
sddmm_update and exchange_ change their arguments and have no derivative.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .. import _lib  # noqa: F401  (loads the operators)

_ops = torch.ops.snack


@torch.library.register_fake("snack::spmm")
def _(index, tile_ptr, values, x, bias, out_features, in_features, regime=0):
    torch._check(x.dim() == 2 and x.shape[1] == in_features, lambda: f"spmm: x must be (batch, {in_features})")
    return x.new_empty((x.shape[0], out_features))


@torch.library.register_fake("snack::spmm_t")
def _(index, tile_ptr, values, dy, out_features, in_features, regime=0):
    torch._check(dy.dim() == 2 and dy.shape[1] == out_features, lambda: f"spmm_t: dy must be (batch, {out_features})")
    return dy.new_empty((dy.shape[0], in_features))


@torch.library.register_fake("snack::sddmm")
def _(index, tile_ptr, dy, x, out_features, in_features, regime=0):
    torch._check(dy.dim() == 2 and x.dim() == 2, lambda: "sddmm: dy and x must be (batch, features)")
    return x.new_empty((index.shape[0],))


@torch.library.register_fake("snack::sddmm_update")
def _(index, tile_ptr, values, state, dy, x, lr, step, rule, numbers, out_features, in_features, regime=0):
    torch._check(dy.dim() == 2 and x.dim() == 2, lambda: "sddmm_update: dy and x must be (batch, features)")


def _packed(like: Tensor, out_features: int, in_features: int, nnz: int) -> tuple[Tensor, Tensor]:
    is_narrow, words = _ops.geometry(out_features, in_features, int(nnz))
    index = like.new_empty((nnz,), dtype=torch.int16 if is_narrow else torch.int32)
    return index, like.new_empty((words,), dtype=torch.int64)


@torch.library.register_fake("snack::rewire")
def _(index, tile_ptr, drop, grow_rows, grow_cols, out_features, in_features):
    nnz = index.shape[0] - drop.shape[0] + grow_rows.shape[0]
    return (*_packed(index, out_features, in_features, nnz), index.new_empty((nnz,), dtype=torch.int64))


@torch.library.register_fake("snack::pack")
def _(rows, cols, out_features, in_features, sum_duplicates=False):
    return (*_packed(rows, out_features, in_features, rows.shape[0]), torch.empty_like(rows))


@torch.library.register_fake("snack::unpack")
def _(index, tile_ptr, out_features, in_features):
    return index.new_empty(index.shape, dtype=torch.int32), index.new_empty(index.shape, dtype=torch.int32)


@torch.library.register_fake("snack::select_smallest")
def _(values, k, sign=0):
    return values.new_empty((k,), dtype=torch.int64)


@torch.library.register_fake("snack::grow_uniform")
def _(index, tile_ptr, drop, k, key, out_features, in_features):
    return index.new_empty((k,), dtype=torch.int64), index.new_empty((k,), dtype=torch.int64)


@torch.library.register_fake("snack::grow_gradient")
def _(index, tile_ptr, drop, dy, x, k, out_features, in_features):
    return index.new_empty((k,), dtype=torch.int64), index.new_empty((k,), dtype=torch.int64)


@torch.library.register_fake("snack::exchange_")
def _(index, tile_ptr, carried, fills, drop_rule, fraction, k, grow_rule, key, dy, x, out_features, in_features):
    return index.new_empty((2,), dtype=torch.int64)


def spmm_context(ctx, inputs, output):
    """What the backward pass of spmm needs."""
    index, tile_ptr, values, x, bias, ctx.out, ctx.in_, ctx.regime = inputs
    ctx.has_bias = bias is not None
    ctx.save_for_backward(index, tile_ptr, values, x)


def spmm_backward(ctx, dy, sddmm=_ops.sddmm):
    """Gradients of values, x and bias; `sddmm` computes that of the values."""
    index, tile_ptr, values, x = ctx.saved_tensors
    _, _, needs_values, needs_x, needs_bias, *_ = ctx.needs_input_grad
    tail = (ctx.out, ctx.in_, ctx.regime)
    dbias = dy.sum(0) if ctx.has_bias and needs_bias else None
    dx = _ops.spmm_t(index, tile_ptr, values, dy, *tail) if needs_x else None
    dvalues = sddmm(index, tile_ptr, dy, x, *tail) if needs_values else None  # last, as in _eager
    return None, None, dvalues, dx, dbias, None, None, None


def _spmm_t_context(ctx, inputs, output):
    index, tile_ptr, values, dy, ctx.out, ctx.in_, ctx.regime = inputs
    ctx.save_for_backward(index, tile_ptr, values, dy)


def _spmm_t_backward(ctx, g):
    index, tile_ptr, values, dy = ctx.saved_tensors
    _, _, needs_values, needs_dy, *_ = ctx.needs_input_grad
    tail = (ctx.out, ctx.in_, ctx.regime)
    ddy = _ops.spmm(index, tile_ptr, values, g, None, *tail) if needs_dy else None
    dvalues = _ops.sddmm(index, tile_ptr, dy, g, *tail) if needs_values else None
    return None, None, dvalues, ddy, None, None, None


def sddmm_context(ctx, inputs, output):
    """What the backward pass of sddmm needs."""
    index, tile_ptr, dy, x, ctx.out, ctx.in_, ctx.regime = inputs
    ctx.save_for_backward(index, tile_ptr, dy, x)


def sddmm_backward(ctx, g):
    """Gradients of dy and x."""
    index, tile_ptr, dy, x = ctx.saved_tensors
    _, _, needs_dy, needs_x, *_ = ctx.needs_input_grad
    tail = (ctx.out, ctx.in_, ctx.regime)
    g = g.contiguous()  # g plays the part of values
    ddy = _ops.spmm(index, tile_ptr, g, x, None, *tail) if needs_dy else None
    dx = _ops.spmm_t(index, tile_ptr, g, dy, *tail) if needs_x else None
    return None, None, ddy, dx, None, None, None


torch.library.register_autograd("snack::spmm", spmm_backward, setup_context=spmm_context)
torch.library.register_autograd("snack::spmm_t", _spmm_t_backward, setup_context=_spmm_t_context)
torch.library.register_autograd("snack::sddmm", sddmm_backward, setup_context=sddmm_context)


def register_autocast(device: str, key: str, names: tuple[str, ...]) -> torch.library.Library:
    """Under autocast these products run in autocast's dtype, as nn.Linear does; sums stay in float32 inside the kernels."""
    library = torch.library.Library("snack", "IMPL", key)
    keyset = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))

    def cast_inputs(op):
        def run(*args):
            dtype = torch.get_autocast_dtype(device)
            cast = [
                a.to(dtype) if isinstance(a, Tensor) and a.is_floating_point() and a.dtype != torch.float64 else a for a in args
            ]
            with torch._C._ExcludeDispatchKeyGuard(keyset):
                return op(*cast)

        return run

    for name in names:
        library.impl(name, cast_inputs(getattr(_ops, name)))
    return library


AUTOCAST = (("cpu", "AutocastCPU"), ("cuda", "AutocastCUDA"))
_autocast = [register_autocast(*device, ("spmm", "spmm_t", "sddmm")) for device in AUTOCAST]


def _register_copies() -> torch.library.Library:
    """Operators on topologies that have no CUDA kernel in this version: on CUDA tensors they run on the CPU, through copies.

    Results go to the device of the first tensor.
    """
    library = torch.library.Library("snack", "IMPL", "CUDA")

    def through_the_cpu(op):
        def run(*args):
            device = next(a.device for a in args if isinstance(a, Tensor))
            results = op(*(a.cpu() if isinstance(a, Tensor) else a for a in args))
            return results.to(device) if isinstance(results, Tensor) else tuple(r.to(device) for r in results)

        return run

    for name in ON_THE_CPU:
        library.impl(name, through_the_cpu(getattr(_ops, name)))
    return library


ON_THE_CPU = ("pack", "unpack")
_copies = _register_copies()
