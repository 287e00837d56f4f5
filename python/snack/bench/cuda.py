"""The CUDA suite: products and a training step of one layer on the card, against dense, dense + mask, cuSPARSE and atomics.

Every peer does the same job, from x (batch, in) to y (batch, out), both contiguous, in its best setting (`cuda_peers`). Times are
replays of CUDA graphs (`cuda_timing`). "warm": every call uses the same weights; "cold": calls take turns through copies of the
weights that are several times the L2 cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..nn import SparseLinear
from .cuda_peers import PEERS, Case, Peer, Topology, dense, snack
from .cuda_timing import Run, reason

ROUTINES = ("spmm", "spmm_t", "sddmm")
COLD_BYTES = 4  # times the L2 cache that the copies of cold weights take together
Progress = Callable[[str], None]


@dataclass(frozen=True)
class Shape:
    """One square layer and what is measured of it. `cold`: batches that are also measured with cold weights."""

    size: int
    sparsities: tuple[float, ...]
    batches: tuple[int, ...]
    cold: tuple[int, ...] = ()


@dataclass(frozen=True)
class Grid:
    """What is measured."""

    shapes: tuple[Shape, ...] = (
        Shape(10_000, (0.9, 0.95, 0.99), (1, 4, 16), cold=(1,)),
        Shape(4096, (0.95,), (1, 16)),
        Shape(500, (0.9, 0.99), (1,)),
    )
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16)
    steps: tuple[tuple[int, float, int], ...] = ((10_000, 0.9, 4),)  # size, sparsity, batch
    peers: tuple[str, ...] = tuple(PEERS)


QUICK = Grid(shapes=(Shape(10_000, (0.95,), (1, 4, 16), cold=(1,)), Shape(10_000, (0.9,), (1, 4)), Shape(500, (0.9,), (1,))))


def _title(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def plan(operation: int, shape: tuple[int, int], nnz: int, batch: int, values: Tensor) -> str:
    """The regime that SNACK would choose on the device of `values`."""
    problem = (operation, *shape, nnz, batch, values.dtype, 0)
    if values.is_cuda:
        text = torch.ops.snack.explain_cuda(*problem, *torch.ops.snack.cuda_capability(values.device.index))
    else:
        text = torch.ops.snack.explain(*problem)
    return text.split(",")[0].rsplit(": ", 1)[-1]


# ---- products --------------------------------------------------------------------------------------------------------------------------


def product_records(grid: Grid, meter, facts: dict, progress: Progress) -> Iterator[dict]:
    """spmm, spmm_t and sddmm over the grid, warm, and cold where a shape asks for it."""
    generator = torch.Generator(meter.device).manual_seed(1)
    for shape in grid.shapes:
        full = torch.randn(shape.size, shape.size, device=meter.device, generator=generator)
        for sparsity in shape.sparsities:
            topology = Topology.random(shape.size, sparsity, meter.device)
            for dtype in grid.dtypes:
                weight = full.to(dtype)
                mask = torch.zeros_like(weight)
                mask[topology.rows, topology.cols] = 1
                values = weight[topology.rows, topology.cols]
                for batch in shape.batches:
                    x, dy = (torch.randn(batch, shape.size, device=meter.device, generator=generator).to(dtype) for _ in range(2))
                    for routine in ROUTINES:
                        case = Case(routine, topology, weight, mask, values, x, dy)
                        words = f"{routine} {shape.size}x{shape.size}, {100 * sparsity:g} %, batch {batch}, {_title(dtype)}"
                        progress(words)
                        yield {**_warm(case, grid, meter, facts), "sparsity": sparsity}
                        if batch in shape.cold:
                            progress(f"{words}, cold")
                            yield {**_cold(case, meter, facts), "sparsity": sparsity}
                meter.tidy()


def _record(case: Case, meter, facts: dict, l2: str) -> dict:
    out, in_ = case.weight.shape
    nnz, batch = case.values.numel(), case.x.shape[0]
    record = {
        "routine": case.routine, "out": out, "in": in_, "batch": batch, "sparsity": round(case.topology.pattern.sparsity, 6), "nnz": nnz,
        "dtype": _title(case.values.dtype), "regime": plan(ROUTINES.index(case.routine), (out, in_), nnz, batch, case.values),
        "mode": meter.mode, "l2": l2, "bytes": nnz * (case.values.element_size() + 2),
    }
    if "copy_tb_s" in facts:
        record["floor_us"] = round(record["bytes"] / facts["copy_tb_s"] / 1e6, 3)
    return record


def _warm(case: Case, grid: Grid, meter, facts: dict) -> dict:
    ours = snack(case)
    contenders, errors, peers = {"snack": ours.runs}, {"snack": ours.error(ours.runs[0]())}, {}
    notes: dict[str, str] = {}
    names = [name for name in grid.peers if name != "dense_tf32" or case.values.dtype == torch.float32]  # a mode of float32
    for name in names:
        try:
            peer = _best(PEERS[name](case), meter)
            errors[name], contenders[name], notes[name] = peer.error(peer.runs[0]()), peer.runs, peer.note
        except Exception as error:  # what a peer cannot do is a result, not a failure of the measurement
            peers[name] = {"not_run": reason(error)}
    times = meter.compare(contenders)
    eager = {name: meter.eager_us(contenders[name][0]) for name in ("snack", "dense") if name in contenders}
    for name in names:
        if name in times:
            peers[name] = times[name]
        if "time_us" in peers[name]:
            peers[name]["rel_error"] = errors[name]
            words = [w for w in (notes[name], times[name].get("note", "")) if w]
            peers[name] |= ({"note": "; ".join(words)} if words else {}) | ({"eager_us": eager[name]} if name in eager else {})
    ours_time = _required(times["snack"], errors["snack"], case.values.dtype)
    return {
        **_record(case, meter, facts, "warm"), **ours_time, "eager_us": eager["snack"], "rel_error": errors["snack"],
        "peers": {name: peers[name] for name in names},
    }


def _cold(case: Case, meter, facts: dict) -> dict:
    """Ours and dense with copies of the weights; the others' numbers are those of the warm record."""
    room = COLD_BYTES * 1e6 * facts.get("l2_mb", 1.0)
    weights = case.topology.pattern.nbytes + (0 if case.routine == "sddmm" else case.values.nbytes)
    copies = {
        "snack": 2 + int(room // max(1, weights)),
        "dense": 2 + int(room // max(1, case.weight.nbytes)),
    }
    if case.routine == "sddmm":  # dense reads no weights there
        del copies["dense"]
    makers = {"snack": snack, "dense": dense}
    contenders = {name: makers[name](case, count) for name, count in copies.items()}
    times = meter.compare({name: peer.runs for name, peer in contenders.items()})
    ours = contenders["snack"]
    error = ours.error(ours.runs[-1]())
    peers = {"dense": {**times["dense"], "note": f"{len(contenders['dense'].runs)} copies of W"}} if "dense" in times else {}
    return {
        **_record(case, meter, facts, "cold"), **_required(times["snack"], error, case.values.dtype),
        "eager_us": meter.eager_us(ours.runs[0]), "rel_error": error, "params": {"copies": len(ours.runs)}, "peers": peers,
    }


def _required(found: dict, error: float, dtype: torch.dtype) -> dict:
    """Our own time: where SNACK itself does not run, or is wrong, the suite fails."""
    if "not_run" in found:
        raise RuntimeError(f"SNACK itself did not run: {found['not_run']}")
    limit = 1e-5 if dtype == torch.float32 else 3e-2
    if not error < limit:
        raise RuntimeError(f"SNACK's result is off by {error:g}, more than the {limit:g} of {_title(dtype)}")
    return found


def _best(peer: Peer | Iterator[Peer], meter) -> Peer:
    """The fastest of the forms that run."""
    if isinstance(peer, Peer):
        return peer
    forms, problem = [], None
    for form in peer:
        try:
            form.runs[0]()
            forms.append(form)
        except Exception as error:  # a form that this PyTorch lacks
            problem = error
    if not forms:
        raise problem or NotImplementedError("no form of it exists")
    times = meter.compare({form.note: form.runs for form in forms}, samples=3) if len(forms) > 1 else {}
    return min(forms, key=lambda form: times.get(form.note, {}).get("time_us", float("inf")))


# ---- the training step -----------------------------------------------------------------------------------------------------------------


class _Masked(nn.Linear):
    """nn.Linear with a mask on its weight: autograd masks the gradient, and the optimiser updates every weight."""

    def __init__(self, mask: Tensor):
        super().__init__(mask.shape[1], mask.shape[0], device=mask.device)
        self.mask = mask

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight * self.mask, self.bias)


def step_record(size: int, sparsity: float, batch: int, meter, progress: Progress) -> dict:
    """A training step of one layer, fp32: gradients forgotten, forward, backward (dX, dW, db), SGD. `peak_bytes` is everything that
    lives during the step: weights, indices or mask, gradients, temporaries; not x and dy."""
    device, words = meter.device, f"training step {size}x{size}, {100 * sparsity:g} %, batch {batch}"
    generator = torch.Generator(device).manual_seed(3)
    x, dy = (torch.randn(batch, size, device=device, generator=generator) for _ in range(2))
    x.requires_grad_()
    topology = Topology.random(size, sparsity, device)

    def masked(dtype: torch.dtype = torch.float32) -> nn.Module:
        mask = torch.zeros(size, size, device=device, dtype=dtype)
        mask[topology.rows, topology.cols] = 1
        return _Masked(mask)

    makers: dict[str, Callable[[], nn.Module]] = {
        "snack": lambda: SparseLinear(size, size, sparsity=sparsity, device=device, generator=torch.Generator().manual_seed(1)),
        "dense": lambda: nn.Linear(size, size, device=device),
        "dense_mask": masked, "dense_mask_bool": lambda: masked(torch.bool),
    }
    progress(f"{words}: memory")
    small = torch.randn(2, 8, device=device, requires_grad=True)
    _step(nn.Linear(8, 8, device=device), small, torch.randn(2, 8, device=device))()  # cuBLAS's workspace is nobody's
    sides: dict[str, dict] = {}
    for name, make in makers.items():
        sides[name] = {"peak_bytes": meter.peak_bytes(lambda make=make: _step(make(), x, dy))}
        x.grad = None
        meter.tidy()
    progress(f"{words}: time")
    modules = {name: make() for name, make in makers.items()}
    layer = modules["snack"]
    error = _step_error(layer, x, dy)
    runs: dict[str, list[Run]] = {name: [_step(module, x, dy)] for name, module in modules.items()}
    times = meter.compare(runs)
    for name in runs:
        sides[name] |= times[name]
        if "time_us" in times[name]:
            sides[name]["eager_us"] = meter.eager_us(runs[name][0])
    return {
        "routine": "layer_step", "out": size, "in": size, "batch": batch, "sparsity": sparsity, "nnz": layer.nnz, "dtype": "float32",
        "regime": plan(0, (size, size), layer.nnz, batch, layer.values), "mode": meter.mode, "l2": "warm",
        "params": {"optimizer": "SGD"}, **_required(sides.pop("snack"), error, torch.float32), "rel_error": error, "peers": sides,
    }


def _step(module: nn.Module, x: Tensor, dy: Tensor) -> Run:
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-6)

    def run() -> None:
        optimizer.zero_grad(set_to_none=True)
        x.grad = None
        module(x).backward(dy)
        optimizer.step()

    return run


def _step_error(layer: SparseLinear, x: Tensor, dy: Tensor) -> float:
    """The largest relative error of y, dx and the gradient of the values, sampled, against float64."""
    topology = Topology(layer.pattern)
    weight = torch.zeros(layer.pattern.shape, device=x.device)
    weight[topology.rows, topology.cols] = layer.values.detach()
    y = layer(x)
    y.backward(dy)
    results = {"spmm": y.detach() - layer.bias.detach(), "spmm_t": x.grad, "sddmm": layer.values.grad}
    mask = torch.ones(1, device=x.device).expand_as(weight)
    errors = [
        Case(routine, topology, weight, mask, layer.values.detach(), x.detach(), dy).error(result) for routine, result in results.items()
    ]
    x.grad = layer.values.grad = layer.bias.grad = None
    return max(errors)


def run(grid: Grid, meter, facts: dict, progress: Progress = lambda _: None) -> Iterator[dict]:
    """All records of the suite, one at a time, so that an interrupted run keeps what it has. `facts`: what `meter.facts()` says."""
    for size, sparsity, batch in grid.steps:
        yield step_record(size, sparsity, batch, meter, progress)
        meter.tidy()
    yield from product_records(grid, meter, facts, progress)
