"""The CPU suite: products, a training step and memory of one layer against dense, torch.sparse CSR and SparseLab.

Every peer does the same job, from x (batch, in) to y (batch, out), both contiguous, in its fastest form (named in its note).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from .. import ops
from ..formats import to_dense, to_torch_csr
from ..nn import SparseLinear
from .timing import interleave


@dataclass(frozen=True)
class Grid:
    """What is measured."""

    size: int = 2048
    batches: tuple[int, ...] = (1, 16, 64, 256)
    sparsities: tuple[float, ...] = (0.5, 0.8, 0.9, 0.95, 0.99)
    step_batches: tuple[int, ...] = (64,)
    samples: int = 25
    peers: tuple[str, ...] = field(default=("dense", "torch_csr", "sparselab"))


def _relative_error(y: Tensor, exact: Tensor) -> float:
    return float((y.double() - exact).abs().max() / exact.abs().max())


def _csr_forms(csr: Tensor, x: Tensor) -> dict[str, Callable[[], Tensor]]:
    """The ways to say y = x W^T with a torch.sparse CSR matrix, y (batch, out) contiguous like everybody's."""
    if x.shape[0] == 1:
        vector = x[0]
        return {"csr @ x[0]": lambda: csr @ vector, "F.linear(x, csr)": lambda: nn.functional.linear(x, csr)}
    return {
        "F.linear(x, csr)": lambda: nn.functional.linear(x, csr),
        "contiguous((csr @ x.t()).t())": lambda: (csr @ x.t()).t().contiguous(),
        "contiguous((csr @ contiguous(x.t())).t())": lambda: (csr @ x.t().contiguous()).t().contiguous(),
    }


def _best(forms: dict[str, Callable[[], Tensor]]) -> tuple[str, Callable[[], Tensor]]:
    times = interleave(forms, samples=7)
    name = min(times, key=lambda form: times[form]["time_us"])
    return name, forms[name]


def _sparselab(make_run: Callable[[nn.Module], Callable[[], object]], n: int, sparsity: float, bias: bool) -> dict:
    """Time of SparseLab's layer of the same shape and sparsity. After the others: its own OpenMP runtime keeps threads
    spinning beside PyTorch's."""
    try:
        from sparselab import SparseLinear as Theirs

        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Sparse CSR tensor support is in beta")
            run = make_run(Theirs(n, n, bias=bias, sparsity=sparsity))
            return {**interleave({"sparselab": run}, 9)["sparselab"], "note": "0.2.2, Padded-CSR, timed after the others"}
    except ImportError as error:
        return {"not_run": f"not installed ({error})"}
    except Exception as error:  # a peer's own failure is a result, not ours
        return {"not_run": f"{type(error).__name__}: {error}"}


def product_records(grid: Grid, progress: Callable[[str], None]) -> Iterator[dict]:
    """spmm, spmm_t and sddmm, fp32, against peers that can do the same."""
    n = grid.size
    for sparsity in grid.sparsities:
        layer = SparseLinear(n, n, bias=False, sparsity=sparsity, generator=torch.Generator().manual_seed(1))
        pattern, values = layer.pattern, layer.values.detach()
        dense_weight = to_dense(pattern, values)
        csr, dense = to_torch_csr(pattern, values), nn.Linear(n, n, bias=False)
        transposed = to_torch_csr(*_transposed(pattern, values))
        for batch in grid.batches:
            generator = torch.Generator().manual_seed(batch)
            x, dy = (torch.randn(batch, n, generator=generator) for _ in range(2))
            common = {
                "out": n, "in": n, "batch": batch, "sparsity": sparsity, "nnz": layer.nnz, "dtype": "float32", "mode": "eager",
                "l2": "warm", "bytes": layer.nnz * (4 + 2),
            }
            for routine in ("spmm", "spmm_t", "sddmm"):
                progress(f"{routine} {n}x{n}, {100 * sparsity:g} %, batch {batch}")
                with torch.no_grad():
                    record = _product_record(routine, common, pattern, values, x, dy, dense, dense_weight, csr, transposed, grid)
                    if routine == "spmm" and "sparselab" in grid.peers:
                        record["peers"]["sparselab"] = _sparselab(lambda theirs, x=x: lambda: theirs(x), n, sparsity, False)
                yield record


def _transposed(pattern, values):
    from ..formats import from_coo

    rows, cols = pattern.coordinates()
    return from_coo(cols, rows, values, (pattern.shape[1], pattern.shape[0]))


def _product_record(routine, common, pattern, values, x, dy, dense, dense_weight, csr, transposed, grid: Grid) -> dict:
    notes = {}
    if routine == "spmm":
        contenders = {"snack": lambda: ops.spmm(pattern, values, x), "dense": lambda: dense(x)}
        notes["torch_csr"], contenders["torch_csr"] = _best(_csr_forms(csr, x))
        exact = x.double() @ dense_weight.double().t()
        operation = 0
    elif routine == "spmm_t":
        contenders = {"snack": lambda: ops.spmm_t(pattern, values, dy), "dense": lambda: dy @ dense.weight}
        form, contenders["torch_csr"] = _best(_csr_forms(transposed, dy))
        notes["torch_csr"] = form + ", on a second, transposed copy of W"
        exact = dy.double() @ dense_weight.double()
        operation = 1
    else:
        contenders = {"snack": lambda: ops.sddmm(pattern, dy, x), "dense": lambda: dy.t() @ x}
        rows, cols = (c.long() for c in pattern.coordinates())
        exact = (dy.double().t() @ x.double())[rows, cols]
        operation = 2
    error = _relative_error(contenders["snack"](), exact)
    times = interleave({k: v for k, v in contenders.items() if k == "snack" or k in grid.peers}, grid.samples)
    plan = torch.ops.snack.explain(operation, *pattern.shape, pattern.nnz, x.shape[0], values.dtype, 0)
    return {
        "routine": routine, **common, "regime": plan.split(",")[0], **times.pop("snack"), "rel_error": error,
        "peers": {name: {**t, **({"note": notes[name]} if name in notes else {})} for name, t in times.items()},
    }


def step_records(grid: Grid, progress: Callable[[str], None]) -> Iterator[dict]:
    """A whole training step of one layer: zero_grad, forward, backward (dX, dW, db), SGD with momentum 0.9."""
    n = grid.size
    for sparsity in grid.sparsities:
        for batch in grid.step_batches:
            progress(f"training step {n}x{n}, {100 * sparsity:g} %, batch {batch}")
            layer = SparseLinear(n, n, sparsity=sparsity, generator=torch.Generator().manual_seed(1))
            dense = nn.Linear(n, n)
            masked = nn.Linear(n, n)
            mask = (torch.rand(n, n, generator=torch.Generator().manual_seed(2)) > sparsity).float()
            x = torch.randn(batch, n, generator=torch.Generator().manual_seed(3), requires_grad=True)
            target = torch.randn(batch, n, generator=torch.Generator().manual_seed(4))

            contenders = {
                "snack": _step(layer, lambda x, layer=layer: layer(x), x, target),
                "dense": _step(dense, lambda x, dense=dense: dense(x), x, target),
                "dense_mask": _step(masked, lambda x, m=masked, mask=mask: nn.functional.linear(x, m.weight * mask, m.bias), x, target),
            }
            times = interleave(contenders, grid.samples)
            peers: dict[str, dict] = {k: v for k, v in times.items() if k != "snack"}
            if "sparselab" in grid.peers:
                peers["sparselab"] = _sparselab(lambda theirs, x=x, t=target: _step(theirs, theirs, x, t), n, sparsity, True)
            yield {
                "routine": "layer_step", "out": n, "in": n, "batch": batch, "sparsity": sparsity, "nnz": layer.nnz, "dtype": "float32",
                "mode": "eager", "l2": "warm", "params": {"optimizer": "SGD(momentum=0.9)"}, **times["snack"], "peers": peers,
            }


def _step(module: nn.Module, forward: Callable[[Tensor], Tensor], x: Tensor, target: Tensor) -> Callable[[], None]:
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-6, momentum=0.9)

    def run() -> None:
        optimizer.zero_grad()
        x.grad = None
        nn.functional.mse_loss(forward(x), target).backward()
        optimizer.step()

    run()
    return run


def memory_records(grid: Grid, progress: Callable[[str], None]) -> Iterator[dict]:
    """Bytes of everything a layer keeps in training with Adam: weights, indices, gradients, optimiser state; bias included."""
    n = grid.size
    for sparsity in grid.sparsities:
        progress(f"memory {n}x{n}, {100 * sparsity:g} %")
        kept = {}
        layer = SparseLinear(n, n, sparsity=sparsity)
        for name, module in (("snack", layer), ("dense", nn.Linear(n, n))):
            optimizer = torch.optim.Adam(module.parameters())
            module(torch.randn(2, n)).sum().backward()
            optimizer.step()
            parameters = list(module.parameters())
            kept[name] = sum(p.nbytes + p.grad.nbytes for p in parameters) + sum(b.nbytes for b in module.buffers())
            kept[name] += sum(t.nbytes for p in parameters for t in optimizer.state[p].values() if isinstance(t, Tensor))
        yield {
            "routine": "memory", "out": n, "in": n, "sparsity": sparsity, "nnz": layer.nnz, "dtype": "float32", "params": {"optimizer": "Adam"},
            "kept_bytes": kept["snack"], "peers": {"dense": {"kept_bytes": kept["dense"]}},
        }


def run(grid: Grid, progress: Callable[[str], None] = lambda _: None) -> Iterator[dict]:
    """All records of the suite, one at a time, so that an interrupted run keeps what it has."""
    yield from memory_records(grid, progress)
    yield from product_records(grid, progress)
    yield from step_records(grid, progress)
