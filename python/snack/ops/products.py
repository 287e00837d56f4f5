"""spmm, spmm_t, sddmm: the three products of a sparse layer, on a Pattern and its values.

Shapes: x (..., in), W (out, in), y (..., out); values (nnz,) in slot order. Tensors of one product share a floating dtype
(float32, float16, bfloat16; on the CPU also float64) and a device; 16-bit products are summed in float32. Any strides are
accepted. All three are differentiable to any order.

Absent connections pass nothing on: an Inf or NaN in x, dy or values arrives exactly where a connection leads, while a dense
product would spread it through 0 * Inf. On a card a product runs on the current stream of the tensors' device, is
deterministic in every regime but "coo", and can be captured in a CUDA graph.
"""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from ..errors import SnackError, require
from ..formats import Pattern
from ..formats.pattern import call
from . import _eager

REGIMES = {"auto": 0, "coo": 1, "stream": 2, "tensor": 3, "panel": 4}
# Of cards, in the order of kCudaKernels (include/snack/plan/plan.hpp): any of them can be forced in place of a regime.
KERNELS = (
    "spmm_rows", "spmm_batch", "spmm_stream", "spmm_fixed", "spmm_coo", "spmm_t_rows", "spmm_t_batch", "spmm_t_stream", "spmm_t_fixed",
    "spmm_t_coo", "sddmm_chunks", "sddmm_batch", "sddmm_stream", "sddmm_slots",
)  # fmt: skip
_FIRST_KERNEL = 16  # kFirstKernel in torch/compat.hpp


def regime_code(regime: str, m: object = None) -> int:
    """The number an operator takes for a regime's or a kernel's name. `m`: an operand; atomics on a card may be forbidden there."""
    code = REGIMES.get(regime) if isinstance(regime, str) else None
    if code is None:
        require(regime in KERNELS, f"regime {regime!r} is unknown; choose one of {', '.join(REGIMES)}, or on a card a kernel by its name.")
        require(not isinstance(m, Tensor) or m.is_cuda, f"regime {regime!r} is a kernel of cards; move the tensors to one, or use 'auto'.")
        code = _FIRST_KERNEL + KERNELS.index(regime)
    if regime in ("coo", "spmm_coo", "spmm_t_coo") and isinstance(m, Tensor) and m.is_cuda and torch.are_deterministic_algorithms_enabled():
        text = (
            "regime 'coo' adds with atomics in any order, and torch.use_deterministic_algorithms(True) forbids that; "
            "use 'auto' or 'stream', which repeat bit for bit."
        )
        require(torch.is_deterministic_algorithms_warn_only_enabled(), text)
        warnings.warn(text, stacklevel=3)
    return code


def check_product(who: str, features_name: str, features: int, m: Tensor, values: Tensor, name: str = "x") -> None:
    """Cheap checks with plain sentences; the operator repeats them for other callers."""
    if not isinstance(m, Tensor):
        raise SnackError(f"{who}: {name} is a {type(m).__name__}, expected a tensor.")
    if not isinstance(values, Tensor):
        raise SnackError(f"{who}: values are a {type(values).__name__}, expected a tensor with one entry a connection.")
    if m.layout != torch.strided:
        raise SnackError(f"{who}: {name} is a sparse tensor; the activations are dense, call .to_dense() first.")
    if m.dim() == 0 or m.shape[-1] != features:
        raise SnackError(
            f"{who}: {name} has shape {tuple(m.shape)}, the layer expects {features_name}={features} as its last dimension."
        )
    if m.device != values.device:
        raise SnackError(f"{who}: {name} is on {m.device} and the values are on {values.device}; move one of them.")
    if m.device.type not in ("cpu", "cuda", "meta"):
        raise SnackError(f"{who}: tensors are on {m.device}, and there are kernels for 'cpu' and 'cuda'; move them to one of these.")
    if m.dtype != values.dtype and not (m.is_floating_point() and torch.is_autocast_enabled(m.device.type)):
        raise SnackError(
            f"{who}: {name} is {str(m.dtype).removeprefix('torch.')} and the values are "
            f"{str(values.dtype).removeprefix('torch.')}; convert one of them or use autocast."
        )


def linear(
    who: str, index: Tensor, tile_ptr: Tensor, values: Tensor, x: Tensor, bias: Tensor | None, out: int, in_: int, regime: int
) -> Tensor:
    """spmm on packed tensors, for `snack.ops.spmm` and `SparseLinear`: flattens the leading dimensions of x."""
    if _eager.is_ordinary(values, x) and x.dim() == 2:
        try:
            return _eager.ordinary_spmm(index, tile_ptr, values, x, bias, out, in_, regime)
        except RuntimeError:
            pass  # the long way says in a plain sentence what is wrong
    check_product(who, "in_features", in_, x, values)
    if x.dim() == 2:
        return call(_eager.spmm, index, tile_ptr, values, x, bias, out, in_, regime)
    leading = x.shape[:-1]
    y = call(_eager.spmm, index, tile_ptr, values, x.reshape(leading.numel(), in_), bias, out, in_, regime)
    return y.reshape(*leading, out)


def spmm(pattern: Pattern, values: Tensor, x: Tensor, bias: Tensor | None = None, regime: str = "auto") -> Tensor:
    """y = x W^T + bias.

    Args:
        values: (nnz,). x: (..., in). bias: (out,) or None.
        regime: "auto", or force "stream" (every connection read once a batch block), on the CPU "panel" (bounded panels of W
            decoded and multiplied by the vendor's dense product), on a card "coo" (a thread for every connection and sample,
            with atomics: the baseline; not deterministic) or a kernel by its name (`SparseLinear.explain` has the names).

    Returns: (..., out).
    Raises: SnackError on shapes, dtypes or devices that do not fit, or a regime the device does not have.
    """
    return linear("spmm", pattern.index, pattern.tile_ptr, values, x, bias, *pattern.shape, regime_code(regime, x))


def spmm_t(pattern: Pattern, values: Tensor, dy: Tensor, regime: str = "auto") -> Tensor:
    """dx = dy W, from the same copy of the values. dy (..., out) -> (..., in). Raises like `spmm`."""
    out, in_ = pattern.shape
    check_product("spmm_t", "out_features", out, dy, values, "dy")
    flat = dy.reshape(dy.shape[:-1].numel(), out)
    dx = call(_eager.spmm_t, pattern.index, pattern.tile_ptr, values, flat, out, in_, regime_code(regime, dy))
    return dx.reshape(*dy.shape[:-1], in_)


def sddmm(pattern: Pattern, dy: Tensor, x: Tensor, regime: str = "auto") -> Tensor:
    """The gradient of the values: sum over the batch of dy[b, row] * x[b, col] at every connection.

    dy (..., out), x (..., in), equal leading dimensions -> (nnz,). Raises like `spmm`.
    """
    out, in_ = pattern.shape
    check_product("sddmm", "out_features", out, dy, x, "dy")
    check_product("sddmm", "in_features", in_, x, x)
    require(
        dy.shape[:-1] == x.shape[:-1],
        f"sddmm: dy has leading dimensions {tuple(dy.shape[:-1])} and x {tuple(x.shape[:-1])}; both are the batch.",
    )
    batch = x.shape[:-1].numel()
    flat = (dy.reshape(batch, out), x.reshape(batch, in_))
    return call(_eager.sddmm, pattern.index, pattern.tile_ptr, *flat, out, in_, regime_code(regime, x))
