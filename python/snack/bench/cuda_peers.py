"""Who takes part in a product on the card, each in its best setting, and how wrong each is against float64.

A `Case` holds one random problem: W dense and full (random, no zeros), the mask of its connections, the values there, x and dy.
Dense products multiply all of W; everybody else computes the product of W where the mask is 1.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import linear

from .. import ops
from ..formats import Pattern
from .cuda_timing import Run

SAMPLES = 192  # rows or columns, and 64 times as many connections, whose result is compared with float64


class Topology:
    """Where the connections of a matrix are: pattern on the device, rows and cols int64 (nnz,) in slot order, and compressed forms."""

    def __init__(self, pattern: Pattern):
        self.pattern = pattern
        self.rows, self.cols = (c.long() for c in pattern.coordinates())
        self._compressed: dict[bool, tuple[Tensor, Tensor, Tensor]] = {}

    @classmethod
    def random(cls, size: int, sparsity: float, device: torch.device | str, seed: int = 1) -> Topology:
        """Uniform positions in (size, size)."""
        return cls(Pattern.random((size, size), round((1 - sparsity) * size * size), seed).to(device))

    def compressed(self, transposed: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Of W, or of its transpose, sorted: pointers int32 (extent + 1), indices int32 (nnz,), the slot of every entry."""
        if transposed not in self._compressed:
            major, minor = (self.cols, self.rows) if transposed else (self.rows, self.cols)
            order = torch.argsort(major * max(self.pattern.shape) + minor)
            pointers = torch.zeros(self.pattern.shape[transposed] + 1, dtype=torch.int64, device=major.device)
            torch.cumsum(torch.bincount(major, minlength=pointers.numel() - 1), 0, out=pointers[1:])
            self._compressed[transposed] = (pointers.int(), minor[order].int(), order)
        return self._compressed[transposed]


@dataclass
class Case:
    """W: topology, weight (out, in), mask (out, in) in the weight's dtype, values (nnz,); x (batch, in); dy (batch, out)."""

    routine: str
    topology: Topology
    weight: Tensor
    mask: Tensor
    values: Tensor
    x: Tensor
    dy: Tensor

    def product(self, pattern: Pattern, values: Tensor, regime: str = "auto") -> Tensor:
        """Ours, with this copy of the weights."""
        if self.routine == "spmm":
            return ops.spmm(pattern, values, self.x, regime=regime)
        if self.routine == "spmm_t":
            return ops.spmm_t(pattern, values, self.dy, regime=regime)
        return ops.sddmm(pattern, self.dy, self.x, regime=regime)

    def dense(self, weight: Tensor) -> Tensor:
        """The dense product of the same job."""
        if self.routine == "spmm":
            return linear(self.x, weight)
        return self.dy @ weight if self.routine == "spmm_t" else self.dy.t() @ self.x

    def error(self, result: Tensor, masked: bool = True) -> float:
        """Largest error of sampled entries over the largest exact one. `result`: (batch, out or in); of sddmm (nnz,) in slot order
        or dense (out, in)."""
        if self.routine == "sddmm":
            slots = torch.arange(64 * SAMPLES, device=result.device) * 7919 % self.topology.rows.numel()
            rows, cols = self.topology.rows[slots], self.topology.cols[slots]
            exact = (self.dy.double()[:, rows] * self.x.double()[:, cols]).sum(0)
            ours = result[rows, cols] if result.dim() == 2 else result[slots]
        else:
            forward = self.routine == "spmm"
            features = torch.arange(SAMPLES, device=result.device) * 997 % self.weight.shape[0 if forward else 1]
            weight = self.weight[features] if forward else self.weight[:, features].t()
            if masked:
                weight = weight * (self.mask[features] if forward else self.mask[:, features].t())
            exact = (self.x if forward else self.dy).double() @ weight.double().t()
            ours = result[:, features]
        return float((ours.double() - exact).abs().max() / exact.abs().max())


@dataclass
class Peer:
    """`runs`: calls that take turns (copies of the weights); `error`: of a result; `note`: its setting."""

    runs: list[Run]
    error: Callable[[object], float]
    note: str = ""


def snack(case: Case, copies: int = 1) -> Peer:
    """Our product with so many copies of the weights."""
    pattern = case.topology.pattern
    stores = [(pattern, case.values)] + [(pattern.clone(), case.values.clone()) for _ in range(copies - 1)]
    return Peer([lambda p=p, v=v: case.product(p, v) for p, v in stores], case.error)


def dense(case: Case, copies: int = 1) -> Peer:
    """The product with the full W in its own dtype; float32 without TF32."""
    weights = [case.weight] + [case.weight.clone() for _ in range(copies - 1)]
    return Peer([lambda w=w: case.dense(w) for w in weights], lambda y: case.error(y, masked=False))


def dense_tf32(case: Case) -> Peer:
    """The same with TF32 multiplications."""
    def run() -> Tensor:
        torch.set_float32_matmul_precision("high")
        try:
            return case.dense(case.weight)
        finally:
            torch.set_float32_matmul_precision("highest")

    return Peer([run], lambda y: case.error(y, masked=False))


def _masked(case: Case, mask: Tensor, note: str) -> Peer:
    if case.routine == "sddmm":
        return Peer([lambda: case.dense(case.weight) * mask], case.error, note)
    return Peer([lambda: case.dense(case.weight * mask)], case.error, note)


def dense_mask(case: Case) -> Peer:
    """W * mask, then the dense product; the gradient (sddmm): the dense product, then * mask. The mask as pruning libraries keep it."""
    return _masked(case, case.mask, "mask in the weight's dtype")


def dense_mask_bool(case: Case) -> Peer:
    """The same with the smallest mask: one byte a position."""
    return _masked(case, case.mask.bool(), "mask of one byte a position")


def coo_atomics(case: Case) -> Peer:
    """The mapping of the SNACK paper: a thread a connection and sample, sums by atomics."""
    return Peer([lambda: case.product(case.topology.pattern, case.values, "coo")], case.error, "regime 'coo'")


def _csr(case: Case) -> Tensor:
    """W for spmm and sddmm, its transpose for spmm_t."""
    transposed = case.routine == "spmm_t"
    pointers, indices, slots = case.topology.compressed(transposed)
    size = tuple(case.weight.shape)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Sparse CSR tensor support is in beta")
        return torch.sparse_csr_tensor(pointers, indices, case.values[slots], size[::-1] if transposed else size, check_invariants=False)


def torch_csr(case: Case) -> Iterator[Peer]:
    """torch.sparse CSR (cuSPARSE) in all its forms; the fastest counts."""
    csr = _csr(case)
    if case.routine == "sddmm":
        slots = case.topology.compressed(False)[2]

        def error(result: Tensor) -> float:
            in_slot_order = torch.empty_like(result.values())
            in_slot_order[slots] = result.values()
            return case.error(in_slot_order)

        left, right = case.dy.t(), case.x
        yield Peer([lambda: torch.sparse.sampled_addmm(csr, left, right, beta=0.0)], error, "sampled_addmm, in CSR order")
        return
    m = case.x if case.routine == "spmm" else case.dy
    where = "" if case.routine == "spmm" else ", on a second, transposed copy of W"
    if m.shape[0] == 1:
        vector = m[0]
        yield Peer([lambda: csr @ vector], lambda y: case.error(y[None]), "csr @ x[0]" + where)
    rows = csr.shape[0]
    yield Peer([lambda: torch.mm(csr, m.t(), out=m.new_empty(m.shape[0], rows).t()).t()], case.error, "mm(csr, x.t(), out=y.t())" + where)
    yield Peer([lambda: (csr @ m.t()).t().contiguous()], case.error, "contiguous((csr @ x.t()).t())" + where)
    yield Peer([lambda: (csr @ m.t().contiguous()).t().contiguous()], case.error, "contiguous((csr @ contiguous(x.t())).t())" + where)


def torch_coo(case: Case) -> Peer:
    """torch.sparse COO."""
    if case.routine == "sddmm":
        raise NotImplementedError("torch.sparse has no sampled product for COO")
    csr = _csr(case)
    rows = torch.repeat_interleave(torch.arange(csr.shape[0], device=csr.device), csr.crow_indices().diff().long())
    coo = torch.sparse_coo_tensor(torch.stack([rows, csr.col_indices().long()]), csr.values(), csr.shape, is_coalesced=True, check_invariants=False)
    m = case.x if case.routine == "spmm" else case.dy
    where = "" if case.routine == "spmm" else ", on a second, transposed copy of W"
    return Peer([lambda: torch.sparse.mm(coo, m.t()).t().contiguous()], case.error, "contiguous(sparse.mm(coo, x.t()).t())" + where)


def cupy_csr(case: Case) -> Peer:
    """CuPy's CSR matrix (cuSPARSE); it takes and gives column-major matrices, which are our row-major ones transposed."""
    if case.routine == "sddmm":
        raise NotImplementedError("CuPy has no sampled product")
    if case.values.dtype != torch.float32:
        raise TypeError(f"CuPy's sparse matrices have no {str(case.values.dtype).removeprefix('torch.')}")
    import cupy
    from cupyx.scipy import sparse

    csr = _csr(case)
    parts = tuple(cupy.from_dlpack(t) for t in (csr.values(), csr.col_indices(), csr.crow_indices()))
    matrix = sparse.csr_matrix(parts, shape=tuple(csr.shape))
    with contextlib.suppress(AttributeError):
        matrix.has_canonical_format = True  # else it is checked, with a wait, at the first product
    m = case.x if case.routine == "spmm" else case.dy
    operand = cupy.from_dlpack(m[0] if m.shape[0] == 1 else m)

    def run() -> object:
        with cupy.cuda.ExternalStream(torch.cuda.current_stream().cuda_stream):
            return matrix @ operand if operand.ndim == 1 else (matrix @ operand.T).T

    def error(result: object) -> float:
        torch.cuda.synchronize()
        found = torch.from_dlpack(result)
        return case.error(found[None] if found.dim() == 1 else found)

    where = "" if case.routine == "spmm" else ", on a second, transposed copy of W"
    return Peer([run], error, f"CuPy {cupy.__version__}, int32 indices{where}")


PEERS: dict[str, Callable[[Case], Peer | Iterator[Peer]]] = {
    "dense": dense, "dense_tf32": dense_tf32, "dense_mask": dense_mask, "dense_mask_bool": dense_mask_bool,
    "coo_atomics": coo_atomics, "torch_csr": torch_csr, "torch_coo": torch_coo, "cupy_csr": cupy_csr,
}
