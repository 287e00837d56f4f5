"""Who takes part in a product, each in its best setting, and how wrong each is against float64.

A `Problem` is random: W dense and full (no zeros), the mask of its connections, the values there, x and dy. Dense products multiply
all of W; everybody else computes the product of W where the mask is 1. A peer that cannot do a job raises; that is its result.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import linear

from .. import ops
from ..formats import Pattern
from .case import Case
from .timing import Run

SAMPLES = 192  # rows or columns, and 64 times as many connections, whose result is compared with float64


class Topology:
    """Where the connections of a matrix are: pattern on the device, rows and cols int64 (nnz,) in slot order, and compressed forms."""

    def __init__(self, pattern: Pattern):
        self.pattern = pattern
        self.rows, self.cols = (c.long() for c in pattern.coordinates())
        self._compressed: dict[bool, tuple[Tensor, Tensor, Tensor]] = {}

    @classmethod
    def random(cls, shape: tuple[int, int], sparsity: float, device: torch.device | str, seed: int = 1) -> Topology:
        """Uniform positions."""
        return cls(Pattern.random(shape, round((1 - sparsity) * shape[0] * shape[1]), seed).to(device))

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
class Problem:
    """W: topology, weight (out, in), mask (out, in) in the weight's dtype, values (nnz,); x (batch, in); dy (batch, out)."""

    routine: str
    topology: Topology
    weight: Tensor
    mask: Tensor
    values: Tensor
    x: Tensor
    dy: Tensor

    @classmethod
    def random(cls, case: Case, topology: Topology, device: torch.device | str) -> Problem:
        """Weights by the shape, x and dy by the batch, all from fixed seeds."""
        dtype, (out, in_) = getattr(torch, case.dtype), case.shape
        generator = torch.Generator(device).manual_seed(1)
        weight = torch.randn(out, in_, device=device, generator=generator).to(dtype)
        mask = torch.zeros_like(weight)
        mask[topology.rows, topology.cols] = 1
        return cls(case.routine, topology, weight, mask, weight[topology.rows, topology.cols], weight, weight).with_batch(case)

    def with_batch(self, case: Case) -> Problem:
        """The same weights with the routine and batch of another case."""
        generator = torch.Generator(self.weight.device).manual_seed(2)
        x, dy = (torch.randn(case.batch, n, device=self.weight.device, generator=generator) for n in case.shape[::-1])
        return replace(self, routine=case.routine, x=x.to(self.weight.dtype), dy=dy.to(self.weight.dtype))

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
    """`runs`: calls that take turns (copies of the weights); `error`: of a result, where it is compared; `note`: its setting;
    `finish`: waits for the last call, of a library that the stream of PyTorch does not wait for; `parameters`: of a layer;
    `why_eager`: why its calls must not be captured in a graph, if so (a capture that fails can leave the allocator unusable)."""

    runs: list[Run]
    error: Callable[[object], float] | None = None
    note: str = ""
    finish: Run | None = None
    parameters: int | None = None
    why_eager: str = ""


def snack(problem: Problem, copies: int = 1) -> Peer:
    """Our product with so many copies of the weights."""
    pattern = problem.topology.pattern
    stores = [(pattern, problem.values)] + [(pattern.clone(), problem.values.clone()) for _ in range(copies - 1)]
    return Peer([lambda p=p, v=v: problem.product(p, v) for p, v in stores], problem.error)


def dense(problem: Problem, copies: int = 1) -> Peer:
    """The product with the full W in its own dtype; float32 without TF32."""
    weights = [problem.weight] + [problem.weight.clone() for _ in range(copies - 1)]
    return Peer([lambda w=w: problem.dense(w) for w in weights], lambda y: problem.error(y, masked=False))


def dense_tf32(problem: Problem) -> Peer:
    """The same with TF32 multiplications."""
    def run() -> Tensor:
        torch.set_float32_matmul_precision("high")
        try:
            return problem.dense(problem.weight)
        finally:
            torch.set_float32_matmul_precision("highest")

    return Peer([run], lambda y: problem.error(y, masked=False))


def dense_bf16(problem: Problem, copies: int = 1) -> Peer:
    """The product in bfloat16, operands too: what an unpruned layer would be run in."""
    half = {name: getattr(problem, name).bfloat16() for name in ("weight", "x", "dy")}
    peer = dense(replace(problem, **half), copies)
    return Peer(peer.runs, lambda y: problem.error(y, masked=False), "weights, x and y in bfloat16")


def _masked(problem: Problem, mask: Tensor, note: str) -> Peer:
    if problem.routine == "sddmm":
        return Peer([lambda: problem.dense(problem.weight) * mask], problem.error, note)
    return Peer([lambda: problem.dense(problem.weight * mask)], problem.error, note)


def dense_mask(problem: Problem) -> Peer:
    """W * mask, then the dense product; the gradient (sddmm): the dense product, then * mask. The mask as pruning libraries keep it."""
    return _masked(problem, problem.mask, "mask in the weight's dtype")


def dense_mask_bool(problem: Problem) -> Peer:
    """The same with the smallest mask: one byte a position."""
    return _masked(problem, problem.mask.bool(), "mask of one byte a position")


def coo_atomics(problem: Problem) -> Peer:
    """The mapping of the SNACK paper: a thread a connection and sample, sums by atomics."""
    return Peer([lambda: problem.product(problem.topology.pattern, problem.values, "coo")], problem.error, "regime 'coo'")


def _csr(problem: Problem) -> Tensor:
    """W for spmm and sddmm, its transpose for spmm_t."""
    transposed = problem.routine == "spmm_t"
    pointers, indices, slots = problem.topology.compressed(transposed)
    size = tuple(problem.weight.shape)
    return torch.sparse_csr_tensor(pointers, indices, problem.values[slots], size[::-1] if transposed else size, check_invariants=False)


def torch_csr(problem: Problem) -> Iterator[Peer]:
    """torch.sparse CSR (cuSPARSE) in all its forms; the fastest counts."""
    csr = _csr(problem)
    if problem.routine == "sddmm":
        slots = problem.topology.compressed(False)[2]

        def error(result: Tensor) -> float:
            in_slot_order = torch.empty_like(result.values())
            in_slot_order[slots] = result.values()
            return problem.error(in_slot_order)

        left, right = problem.dy.t(), problem.x
        yield Peer([lambda: torch.sparse.sampled_addmm(csr, left, right, beta=0.0)], error, "sampled_addmm, in CSR order")
        return
    m = problem.x if problem.routine == "spmm" else problem.dy
    where = "" if problem.routine == "spmm" else ", on a second, transposed copy of W"
    if m.shape[0] == 1:
        vector = m[0]
        yield Peer([lambda: csr @ vector], lambda y: problem.error(y[None]), "csr @ x[0]" + where)
    rows = csr.shape[0]
    yield Peer([lambda: linear(m, csr)], problem.error, "F.linear(x, csr)" + where)
    yield Peer([lambda: torch.mm(csr, m.t(), out=m.new_empty(m.shape[0], rows).t()).t()], problem.error, "mm(csr, x.t(), out=y.t())" + where)
    yield Peer([lambda: (csr @ m.t()).t().contiguous()], problem.error, "contiguous((csr @ x.t()).t())" + where)
    yield Peer([lambda: (csr @ m.t().contiguous()).t().contiguous()], problem.error, "contiguous((csr @ contiguous(x.t())).t())" + where)


def torch_coo(problem: Problem) -> Peer:
    """torch.sparse COO."""
    if problem.routine == "sddmm":
        raise NotImplementedError("torch.sparse has no sampled product for COO")
    csr = _csr(problem)
    rows = torch.repeat_interleave(torch.arange(csr.shape[0], device=csr.device), csr.crow_indices().diff().long())
    coo = torch.sparse_coo_tensor(torch.stack([rows, csr.col_indices().long()]), csr.values(), csr.shape, is_coalesced=True, check_invariants=False)
    m = problem.x if problem.routine == "spmm" else problem.dy
    where = "" if problem.routine == "spmm" else ", on a second, transposed copy of W"
    return Peer([lambda: torch.sparse.mm(coo, m.t()).t().contiguous()], problem.error, "contiguous(sparse.mm(coo, x.t()).t())" + where)


def torch_bsr(problem: Problem) -> Iterator[Peer]:
    """torch.sparse BSR: blocks that hold a connection are dense; the block size that is fastest counts."""
    if problem.routine == "sddmm":
        raise NotImplementedError("torch.sparse has no sampled product for BSR")
    weight, m, where = problem.weight * problem.mask, problem.x, ""
    if problem.routine == "spmm_t":
        weight, m, where = weight.t().contiguous(), problem.dy, ", on a second, transposed copy of W"
    sizes = [size for size in (64, 32, 16, 4) if not (weight.shape[0] % size or weight.shape[1] % size)]
    if not sizes:
        raise ValueError(f"no block size from 4 to 64 divides {weight.shape[0]} and {weight.shape[1]}")
    for size in sizes:
        bsr = weight.to_sparse_bsr((size, size))
        words = f"blocks of {size}x{size}{where}"
        yield Peer([lambda bsr=bsr: linear(m, bsr)], problem.error, f"F.linear(x, bsr), {words}")
        yield Peer([lambda bsr=bsr: (bsr @ m.t()).t().contiguous()], problem.error, f"contiguous((bsr @ x.t()).t()), {words}")


def _cupy(problem: Problem, layout: str) -> Peer:
    """CuPy's matrix (cuSPARSE); it takes and gives column-major matrices, which are our row-major ones transposed."""
    if problem.routine == "sddmm":
        raise NotImplementedError("CuPy has no sampled product")
    if problem.values.dtype != torch.float32:
        raise TypeError(f"CuPy's sparse matrices have no {str(problem.values.dtype).removeprefix('torch.')}")
    import cupy
    from cupyx.scipy import sparse

    csr = _csr(problem)
    parts = tuple(cupy.from_dlpack(t) for t in (csr.values(), csr.col_indices(), csr.crow_indices()))
    matrix = sparse.csr_matrix(parts, shape=tuple(csr.shape))
    if layout == "coo":
        matrix = matrix.tocoo()
    with contextlib.suppress(AttributeError):
        matrix.has_canonical_format = True  # else it is checked, with a wait, at the first product
    m = problem.x if problem.routine == "spmm" else problem.dy
    operand = cupy.from_dlpack(m[0] if m.shape[0] == 1 else m)

    def run() -> object:
        with cupy.cuda.ExternalStream(torch.cuda.current_stream().cuda_stream):
            return matrix @ operand if operand.ndim == 1 else (matrix @ operand.T).T

    def error(result: object) -> float:
        torch.cuda.synchronize()
        found = torch.from_dlpack(result)
        return problem.error(found[None] if found.dim() == 1 else found)

    where = "" if problem.routine == "spmm" else ", on a second, transposed copy of W"
    return Peer([run], error, f"CuPy {cupy.__version__}, int32 indices{where}")


def cupy_csr(problem: Problem) -> Peer:
    """CuPy's CSR matrix."""
    return _cupy(problem, "csr")


def cupy_coo(problem: Problem) -> Peer:
    """CuPy's COO matrix, which it converts in every call."""
    return _cupy(problem, "coo")


def jax_bsr(problem: Problem) -> Peer:
    """JAX's compressed rows (BCSR), compiled, through cuSPARSE."""
    if problem.routine == "sddmm":
        raise NotImplementedError("JAX's compressed rows have no sampled product")
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # else it takes three quarters of the card
    import jax
    from jax.experimental import sparse

    jax.config.update("jax_bcoo_cusparse_lowering", True)  # through cuSPARSE, which is not JAX's default
    csr = _csr(problem)
    data, indices, pointers = (jax.dlpack.from_dlpack(t.contiguous()) for t in (csr.values(), csr.col_indices(), csr.crow_indices()))
    matrix = sparse.BCSR((data, indices, pointers), shape=tuple(csr.shape), indices_sorted=True, unique_indices=True)
    m = jax.dlpack.from_dlpack(problem.x if problem.routine == "spmm" else problem.dy)
    product = jax.jit(lambda matrix, m: (matrix @ m.T).T)
    last: list = []

    def run() -> object:
        last[:] = [product(matrix, m)]
        return last[0]

    note = f"JAX {jax.__version__}, BCSR through cuSPARSE, compiled: its block sparse rows are batches, not blocks"
    return Peer([run], lambda y: problem.error(torch.from_dlpack(y)), note, finish=lambda: last[0].block_until_ready())


def sparselab(problem: Problem) -> Peer:
    """SparseLab's layer without a bias; it has the forward product alone, and weights of its own."""
    if problem.x.is_cuda:
        raise NotImplementedError("SparseLab runs on processors alone")
    if problem.routine != "spmm":
        raise NotImplementedError("SparseLab shows its forward product alone; layer_step has the others")
    from sparselab import SparseLinear as Theirs

    out, in_ = problem.weight.shape
    layer = Theirs(in_, out, bias=False, sparsity=problem.topology.pattern.sparsity)
    return Peer([lambda: layer(problem.x)], note="Padded-CSR, timed after the others")


def sputnik(problem: Problem) -> Peer:
    """Sputnik's kernels of 2020."""
    raise NotImplementedError("Sputnik is C++ source without a Python package; this command builds no other project's code")


def flashsparse(problem: Problem) -> Peer:
    """FlashSparse's tensor-core kernels."""
    raise NotImplementedError("FlashSparse is CUDA source without a released package; this command builds no other project's code")


PEERS: dict[str, Callable[[Problem], Peer | Iterator[Peer]]] = {
    maker.__name__: maker
    for maker in (
        dense, dense_tf32, dense_bf16, dense_mask, dense_mask_bool, coo_atomics, torch_csr, torch_coo, torch_bsr, cupy_csr, cupy_coo,
        jax_bsr, sparselab, sputnik, flashsparse,
    )
}
LATE = ("sparselab",)  # timed after the others: its own OpenMP runtime keeps threads spinning beside PyTorch's
