"""One generator of sparse products for tests and benchmarks: shapes, topologies, layouts in memory, dtypes; and their error bounds.

A `Problem` holds a pattern, its values and the dense operands of the three products. Equal arguments give equal numbers.
Data are random normal, never zeros. `truth` computes in float64 from the rounded operands; `bound` is the largest error
that a sum in the accumulation dtype, rounded once to the result's dtype, may have.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

import snack

OPERATIONS = ("spmm", "spmm_t", "sddmm")
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
LAYOUTS = ("contiguous", "offset", "transposed", "strided", "expanded")
TOPOLOGIES = ("uniform", "empty rows", "full rows", "one column", "diagonal", "none", "full")


@dataclass
class Problem:
    """values (nnz,), x (batch, in), dy (batch, out), bias (out,): one dtype; any of them may be misaligned or strided."""

    pattern: snack.Pattern
    values: Tensor
    x: Tensor
    dy: Tensor
    bias: Tensor

    @property
    def packed(self) -> tuple[Tensor, Tensor]:
        return self.pattern.index, self.pattern.tile_ptr

    @property
    def dtype(self) -> torch.dtype:
        return self.values.dtype

    def cpu(self) -> Problem:
        """The same numbers on the CPU."""
        return Problem(self.pattern.to("cpu"), *(t.cpu() for t in (self.values, self.x, self.dy, self.bias)))

    def dense(self, dtype: torch.dtype = torch.float64) -> Tensor:
        """W (out, in)."""
        return snack.formats.to_dense(self.pattern, self.values.to(dtype))


def layout(matrix: Tensor, kind: str) -> Tensor:
    """The same numbers (rows of row 0 for "expanded") as a view of another layout."""
    rows, cols = matrix.shape
    if kind == "contiguous":
        return matrix
    if kind == "offset":  # starts one element into its memory: misaligned for vectors
        storage = torch.empty(matrix.numel() + 1, dtype=matrix.dtype, device=matrix.device)
        view = storage[1:].view(rows, cols)
    elif kind == "transposed":
        view = torch.empty(cols, rows, dtype=matrix.dtype, device=matrix.device).t()
    elif kind == "strided":
        view = torch.full((2 * rows, 3 * cols), float("nan"), dtype=matrix.dtype, device=matrix.device)[::2, ::3]
    elif kind == "expanded":  # stride 0, as the gradient of sum() arrives
        return matrix[:1].expand(rows, cols) if rows else matrix
    else:
        raise ValueError(kind)
    return view.copy_(matrix)


def misaligned(vector: Tensor) -> Tensor:
    """A contiguous copy that starts one element into its memory."""
    return torch.cat([vector.new_zeros(1), vector])[1:]


def _positions(topology: str, out: int, in_: int, nnz: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    everywhere = torch.arange(out * in_, device="cpu")
    rows, cols = everywhere // max(1, in_), everywhere % max(1, in_)
    if topology == "uniform":
        keep = torch.randperm(out * in_, generator=generator, device="cpu")[:nnz]
    elif topology == "empty rows":  # every third row alone holds anything
        keep = everywhere[rows % 3 == 1]
        keep = keep[torch.randperm(len(keep), generator=generator, device="cpu")[:nnz]]
    elif topology == "full rows":
        keep = everywhere[rows % 5 == 0]
    elif topology == "one column":
        keep = everywhere[cols == in_ // 2]
    elif topology == "diagonal":
        keep = everywhere[rows == cols]
    elif topology == "none":
        keep = everywhere[:0]
    elif topology == "full":
        keep = everywhere
    else:
        raise ValueError(topology)
    keep = keep[torch.randperm(len(keep), generator=generator, device="cpu")]
    return rows[keep], cols[keep]


def make(
    out: int, in_: int, batch: int, density: float = 0.1, dtype: torch.dtype = torch.float32, topology: str = "uniform",
    x_layout: str = "contiguous", dy_layout: str = "contiguous", align: bool = True, seed: int = 0, device: torch.device | str = "cpu",
) -> Problem:
    """A problem of small extents (it lists every position; for large ones see `make_large`): the same numbers on every device."""
    generator = torch.Generator().manual_seed(seed)
    rows, cols = _positions(topology, out, in_, round(density * out * in_), generator)
    values = torch.randn(len(rows), generator=generator, dtype=torch.float64, device="cpu").to(dtype)
    pattern, values = snack.formats.from_coo(rows, cols, values, (out, in_))
    shapes = ((batch, in_), (batch, out), (out,))
    x, dy, bias = (torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu").to(dtype) for shape in shapes)
    pattern, values, x, dy, bias = (t.to(device) for t in (pattern, values, x, dy, bias))
    if not align:
        values, bias = misaligned(values), misaligned(bias)
        pattern = snack.Pattern.from_packed(misaligned(pattern.index), pattern.tile_ptr, pattern.shape)
    return Problem(pattern, values, layout(x, x_layout), layout(dy, dy_layout), bias)


def make_large(
    out: int, in_: int, batch: int, nnz: int, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu", seed: int = 0
) -> Problem:
    """A problem of any extents: nothing costs out * in."""
    generator = torch.Generator().manual_seed(seed)
    pattern = snack.Pattern.random((out, in_), nnz, seed)
    shapes = ((nnz,), (batch, in_), (batch, out), (out,))
    tensors = (torch.randn(shape, generator=generator, device="cpu").to(dtype).to(device) for shape in shapes)
    return Problem(pattern.to(device), *tensors)


# ---- truth and tolerance ----


def run(namespace, operation: str, p: Problem, *, with_bias: bool = True, regime: int = 0, dtype: torch.dtype | None = None) -> Tensor:
    """One of the three products from `torch.ops.snack` or `torch.ops.snack_reference`, optionally in another dtype."""
    if namespace is torch.ops.snack_reference:
        p = p.cpu()
    cast = (lambda t: t) if dtype is None else (lambda t: t.to(dtype))
    tail = (*p.pattern.shape, regime)
    if operation == "spmm":
        return namespace.spmm(*p.packed, cast(p.values), cast(p.x), cast(p.bias) if with_bias else None, *tail)
    if operation == "spmm_t":
        return namespace.spmm_t(*p.packed, cast(p.values), cast(p.dy), *tail)
    return namespace.sddmm(*p.packed, cast(p.dy), cast(p.x), *tail)


def truth(operation: str, p: Problem, with_bias: bool = True) -> Tensor:
    """The reference backend in float64, on the CPU, from the operands as they are after rounding to the problem's dtype."""
    return run(torch.ops.snack_reference, operation, p, with_bias=with_bias, dtype=torch.float64)


def bound(operation: str, p: Problem, expected: Tensor, with_bias: bool = True) -> Tensor:
    """Elementwise error bound: (terms + 2) roundings of the accumulation (float32, or float64 for float64) on the sum of
    absolute terms, and one rounding of the result to the problem's dtype (with its smallest subnormal)."""
    absolute = Problem(p.pattern, *(t.abs() for t in (p.values, p.x, p.dy, p.bias)))
    magnitude = truth(operation, absolute, with_bias)
    terms = {"spmm": p.pattern.shape[1], "spmm_t": p.pattern.shape[0], "sddmm": p.x.shape[0]}[operation]
    accumulation = torch.finfo(torch.float64 if p.dtype == torch.float64 else torch.float32)
    result = torch.finfo(p.dtype)
    return (terms + 2) * accumulation.eps * magnitude + result.eps * expected.abs() + result.tiny * result.eps


def assert_close(operation: str, p: Problem, actual: Tensor, with_bias: bool = True) -> None:
    """`actual` has the truth's shape, the problem's dtype and device, and errors within `bound`."""
    expected = truth(operation, p, with_bias)
    assert actual.shape == expected.shape and actual.dtype == p.dtype and actual.device == p.values.device
    error = (actual.cpu().double() - expected).abs()
    allowed = bound(operation, p, expected, with_bias)
    assert bool((error <= allowed).all()), f"{operation}: error {float((error - allowed).max()):.3g} over the bound"


def poison(count: int, dtype: torch.dtype, device: torch.device | str = "cpu") -> None:
    """Fill and free memory of the size of a result, so that an entry nobody writes is likely to show as NaN.

    PyTorch's CUDA allocator hands a freed block to the next request of its size, so there it is all but certain.
    """
    del_me = torch.full((count,), float("nan"), dtype=dtype, device=device)
    del del_me


def check(operation: str, p: Problem, regime: int = 0, with_bias: bool = True) -> Tensor:
    """Run one product into poisoned memory, hold it against the truth, and return it."""
    out, in_ = p.pattern.shape
    count = {"spmm": p.x.shape[0] * out, "spmm_t": p.x.shape[0] * in_, "sddmm": p.pattern.nnz}[operation]
    poison(count, p.dtype, p.values.device)
    actual = run(torch.ops.snack, operation, p, with_bias=with_bias, regime=regime)
    assert_close(operation, p, actual, with_bias)
    return actual


def dtypes(device: torch.device) -> tuple[torch.dtype, ...]:
    """The dtypes that products of that device have."""
    return DTYPES if device.type == "cpu" else DTYPES[:3]


def regimes(device: torch.device) -> tuple[int, int]:
    """The two regimes that can be forced there: stream, and panel or coo."""
    return (snack.ops.REGIMES["stream"], snack.ops.REGIMES["panel" if device.type == "cpu" else "coo"])
