"""Conversions between a (Pattern, values) pair and every format people have.

All take and give `values` in slot order. Nothing but `from_dense`, `from_mask` and `to_dense`, which hold a dense matrix
anyway, costs O(out * in). An explicit zero is a live connection everywhere; only `from_dense` reads zeros as absent.
"""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from ..errors import SnackError, require
from .pattern import Pattern, call, check_shape, index_list


def check_values(values: object, count: int, who: str) -> Tensor:
    """`values` as a 1-D floating tensor of `count` entries."""
    values = torch.as_tensor(values)
    require(
        values.dtype.is_floating_point,
        f"{who}: values are {str(values.dtype).removeprefix('torch.')}, expected a floating dtype (float32, float16, bfloat16, float64).",
    )
    require(
        values.dim() == 1 and values.numel() == count,
        f"{who}: values have shape {tuple(values.shape)}, expected ({count},): one for every connection.",
    )
    return values


def from_coo(rows: object, cols: object, values: object, shape: object, sum_duplicates: bool = False) -> tuple[Pattern, Tensor]:
    """Sort a COO list into slot order.

    Args:
        rows, cols: integers (n,), any order. values: floating (n,). shape: (out, in).
        sum_duplicates: add the values of a position listed several times; otherwise that is an error.

    Returns: (pattern, values (nnz,) in slot order), both on the device of the given values. Sorting runs on the CPU.
    """
    out, in_ = check_shape(shape)
    rows, cols = index_list("from_coo: rows", rows), index_list("from_coo: cols", cols)
    values = check_values(values, rows.numel(), "from_coo")
    index, tile_ptr, slots = call(torch.ops.snack.pack, rows, cols, out, in_, sum_duplicates)
    slots = slots.to(values.device)
    # Duplicates of 16-bit values are added in float32, as everywhere.
    summed = values.float() if values.dtype.itemsize < 4 else values
    sorted_values = torch.zeros(index.numel(), dtype=summed.dtype, device=values.device).index_add(0, slots, summed)
    pattern = Pattern.from_packed(index.to(values.device), tile_ptr.to(values.device), (out, in_))
    return pattern, sorted_values.to(values.dtype)


def from_dense(dense: Tensor) -> tuple[Pattern, Tensor]:
    """The non-zero entries of a floating (out, in) matrix."""
    require(isinstance(dense, Tensor) and dense.dim() == 2, "from_dense: expected a 2-D tensor (out, in).")
    return from_mask(dense != 0, dense)


def from_mask(mask: Tensor, values: Tensor | None = None) -> tuple[Pattern, Tensor]:
    """The positions where `mask` (out, in) is true (non-zero), with the entries of dense `values` there.

    Without `values` they are float32 ones. Masked-out entries vanish; a kept entry may be 0.
    """
    require(isinstance(mask, Tensor) and mask.dim() == 2, "from_mask: expected a 2-D mask (out, in).")
    if values is None:
        values = torch.ones(mask.shape, device=mask.device)
    require(
        values.shape == mask.shape,
        f"from_mask: the mask has shape {tuple(mask.shape)} but the values have {tuple(values.shape)}; they must be equal.",
    )
    rows, cols = mask.nonzero(as_tuple=True)
    return from_coo(rows, cols, values[rows, cols], tuple(mask.shape))


def _expand_pointers(pointers: object, extent: int, count: int, who: str) -> Tensor:
    pointers = index_list(f"{who}: pointers", pointers)
    require(
        pointers.numel() == extent + 1 and bool((pointers.diff() >= 0).all()) and int(pointers[0]) == 0 and int(pointers[-1]) == count,
        f"{who}: the pointers must be {extent + 1} ascending integers from 0 to {count}, the number of listed connections.",
    )
    return torch.repeat_interleave(torch.arange(extent, device="cpu"), pointers.diff())


def from_csr(crow: object, cols: object, values: object, shape: object, sum_duplicates: bool = False) -> tuple[Pattern, Tensor]:
    """Compressed rows: crow (out + 1), cols (n), values (n); columns of a row in any order."""
    out, _ = check_shape(shape)
    cols = index_list("from_csr: cols", cols)
    return from_coo(_expand_pointers(crow, out, cols.numel(), "from_csr"), cols, values, shape, sum_duplicates)


def from_csc(ccol: object, rows: object, values: object, shape: object, sum_duplicates: bool = False) -> tuple[Pattern, Tensor]:
    """Compressed columns: ccol (in + 1), rows (n), values (n); rows of a column in any order."""
    _, in_ = check_shape(shape)
    rows = index_list("from_csc: rows", rows)
    return from_coo(rows, _expand_pointers(ccol, in_, rows.numel(), "from_csc"), values, shape, sum_duplicates)


def from_torch_sparse(tensor: Tensor, sum_duplicates: bool = False) -> tuple[Pattern, Tensor]:
    """A 2-D torch sparse COO, CSR or CSC tensor; an uncoalesced COO tensor needs `sum_duplicates=True` if it repeats."""
    require(isinstance(tensor, Tensor) and tensor.dim() == 2, "from_torch_sparse: expected a 2-D sparse tensor.")
    tensor = tensor.detach()
    if tensor.layout == torch.sparse_coo:
        require(tensor.sparse_dim() == 2, "from_torch_sparse: the COO tensor is hybrid (dense rows); give one with two sparse dimensions.")
        rows, cols = tensor._indices()
        return from_coo(rows, cols, tensor._values(), tuple(tensor.shape), sum_duplicates)
    if tensor.layout == torch.sparse_csr:
        return from_csr(tensor.crow_indices(), tensor.col_indices(), tensor.values(), tuple(tensor.shape), sum_duplicates)
    if tensor.layout == torch.sparse_csc:
        return from_csc(tensor.ccol_indices(), tensor.row_indices(), tensor.values(), tuple(tensor.shape), sum_duplicates)
    raise SnackError(f"from_torch_sparse: layout {tensor.layout} is not COO, CSR or CSC; use from_dense for a strided tensor.")


def from_scipy(matrix: object, sum_duplicates: bool = False) -> tuple[Pattern, Tensor]:
    """Any scipy.sparse matrix or array; stored zeros are live connections."""
    require(hasattr(matrix, "tocoo"), f"from_scipy: expected a scipy.sparse matrix, got {type(matrix).__name__}.")
    coo = matrix.tocoo()
    values = torch.from_numpy(coo.data.copy())
    return from_coo(torch.from_numpy(coo.row.copy()), torch.from_numpy(coo.col.copy()), values, tuple(coo.shape), sum_duplicates)


def to_dense(pattern: Pattern, values: Tensor) -> Tensor:
    """(out, in) with zeros where there is no connection; differentiable in `values`."""
    check_values(values, pattern.nnz, "to_dense")
    rows, cols = (c.to(values.device).long() for c in pattern.coordinates())
    return torch.zeros(pattern.shape, dtype=values.dtype, device=values.device).index_put((rows, cols), values)


def to_coo(pattern: Pattern, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(rows, cols, values): int32, int32, as given; in slot order."""
    return (*(c.to(values.device) for c in pattern.coordinates()), check_values(values, pattern.nnz, "to_coo"))


def to_csr(pattern: Pattern, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(crow (out + 1), cols (nnz), values (nnz)), int64 indices, columns ascending in a row."""
    return _compress(pattern, values, by_row=True)


def to_csc(pattern: Pattern, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(ccol (in + 1), rows (nnz), values (nnz)), int64 indices, rows ascending in a column."""
    return _compress(pattern, values, by_row=False)


def _compress(pattern: Pattern, values: Tensor, by_row: bool) -> tuple[Tensor, Tensor, Tensor]:
    check_values(values, pattern.nnz, "to_csr" if by_row else "to_csc")
    rows, cols = (c.to(values.device).long() for c in pattern.coordinates())
    major, minor, extent = (rows, cols, pattern.shape[0]) if by_row else (cols, rows, pattern.shape[1])
    # Slots are sorted by row inside a panel, so a stable sort by the major index leaves the minor one ascending.
    order = torch.argsort(major, stable=True)
    pointers = torch.zeros(extent + 1, dtype=torch.int64, device=values.device)
    torch.cumsum(torch.bincount(major, minlength=extent), 0, out=pointers[1:])
    return pointers, minor[order], values[order]


def to_torch_coo(pattern: Pattern, values: Tensor) -> Tensor:
    """torch.sparse_coo_tensor, coalesced."""
    check_values(values, pattern.nnz, "to_torch_coo")
    rows, cols = (c.to(values.device) for c in pattern.coordinates())
    indices = torch.stack([rows.long(), cols.long()])
    return torch.sparse_coo_tensor(indices, values.detach(), pattern.shape, check_invariants=False).coalesce()


def to_torch_csr(pattern: Pattern, values: Tensor) -> Tensor:
    """torch.sparse_csr_tensor."""
    return _quiet(torch.sparse_csr_tensor, *to_csr(pattern, values.detach()), size=pattern.shape, check_invariants=False)


def to_torch_csc(pattern: Pattern, values: Tensor) -> Tensor:
    """torch.sparse_csc_tensor."""
    return _quiet(torch.sparse_csc_tensor, *to_csc(pattern, values.detach()), size=pattern.shape, check_invariants=False)


def _quiet(make, *args, **kwargs) -> Tensor:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Sparse CS[RC] tensor support is in beta")
        return make(*args, **kwargs)


def to_scipy(pattern: Pattern, values: Tensor):
    """scipy.sparse.csr_array (float16 and bfloat16, which scipy lacks, become float32)."""
    import scipy.sparse

    crow, cols, sorted_values = to_csr(pattern, values.detach().cpu())
    if sorted_values.dtype in (torch.float16, torch.bfloat16):
        sorted_values = sorted_values.float()
    return scipy.sparse.csr_array((sorted_values.numpy(), cols.numpy(), crow.numpy()), shape=pattern.shape)
