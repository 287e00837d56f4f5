"""The products of a layer whose x and dY somebody wants to see, for code that runs no hooks: torch.compile's.

    spmm_recorded    spmm; its backward pass computes dvalues by sddmm_recorded
    sddmm_recorded   sddmm; hands copies of x and dY to who watches the layer

A compiled backward pass that needs the gradient of the values cannot leave sddmm_recorded out, so nothing is recorded that is not in the
gradient, and nothing is missed. Copies, because compiled code uses the memory of its tensors again. Python runs in it: torch.compile's own
CUDA graphs leave it out (the tag). The layer is known by the address that its index has then, so that equal layers share their compiled code, and
a layer that was resized, moved or loaded since somebody began to watch it is found still.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..formats.pattern import call
from . import _register
from .products import check_product

_ops = torch.ops.snack
Watcher = Callable[[Tensor, Tensor], None]
_watchers: list[tuple[Callable[[], Tensor], Watcher]] = []  # (a layer's index, as it is now; who wants its (x, dy))


def watch(index: Callable[[], Tensor], watcher: Watcher) -> None:
    """From now on the backward passes of compiled armed layers whose index is index() call watcher(x (batch, in), dy (batch, out))."""
    _watchers.append((index, watcher))


def unwatch(watcher: Watcher) -> None:
    """No longer."""
    _watchers[:] = [entry for entry in _watchers if entry[1] != watcher]


def linear_recorded(index: Tensor, tile_ptr: Tensor, values: Tensor, x: Tensor, bias: Tensor | None, out: int, in_: int) -> Tensor:
    """y = x W^T + bias as `products.linear`, by the operator that records."""
    check_product("SparseLinear", "in_features", in_, x, values)
    leading = x.shape[:-1]
    flat = x if x.dim() == 2 else x.reshape(leading.numel(), in_)
    y = call(_ops.spmm_recorded, index, tile_ptr, values, flat, bias, out, in_, 0)
    return y if x.dim() == 2 else y.reshape(*leading, out)


_library = torch.library.Library("snack", "FRAGMENT")
_library.define(
    "spmm_recorded(Tensor index, Tensor tile_ptr, Tensor values, Tensor x, Tensor? bias, SymInt out_features, SymInt in_features, "
    "int regime=0) -> Tensor"
)
_library.define(
    "sddmm_recorded(Tensor index, Tensor tile_ptr, Tensor dy, Tensor x, SymInt out_features, SymInt in_features, int regime=0) -> Tensor",
    tags=(torch.Tag.cudagraph_unsafe,),
)


def _spmm_recorded(*args):
    return _ops.spmm(*args)


def _sddmm_recorded(index, tile_ptr, dy, x, *tail):
    watchers = [watcher for current, watcher in _watchers if current().data_ptr() == index.data_ptr()]
    if watchers:
        x_copy, dy_copy = x.clone(), dy.clone()
        for watcher in watchers:
            watcher(x_copy, dy_copy)
    return _ops.sddmm(index, tile_ptr, dy, x, *tail)


_library.impl("spmm_recorded", _spmm_recorded, "CompositeExplicitAutograd")
_library.impl("sddmm_recorded", _sddmm_recorded, "CompositeExplicitAutograd")


@torch.library.register_fake("snack::spmm_recorded")
def _(index, tile_ptr, values, x, bias, out_features, in_features, regime=0):
    return x.new_empty((x.shape[0], out_features))


@torch.library.register_fake("snack::sddmm_recorded")
def _(index, tile_ptr, dy, x, out_features, in_features, regime=0):
    return x.new_empty((index.shape[0],))


def _backward(ctx, dy):
    return _register.spmm_backward(ctx, dy, _ops.sddmm_recorded)


torch.library.register_autograd("snack::spmm_recorded", _backward, setup_context=_register.spmm_context)
torch.library.register_autograd("snack::sddmm_recorded", _register.sddmm_backward, setup_context=_register.sddmm_context)
_autocast = [_register.register_autocast(*device, ("spmm_recorded", "sddmm_recorded")) for device in _register.AUTOCAST]
