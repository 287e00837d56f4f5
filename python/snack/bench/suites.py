"""The suites by name: lists of cases. The paper is "Beyond Masked Sparsity: SNACK Enables Truly Sparse Neural Networks on GPU"."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from .case import PRODUCTS, Case, cases
from .tune import tune_cases

_LAYER = ("layer_infer", "layer_step")
_CAP_GIB = 4.0  # of paper-memory: a small card


@dataclass(frozen=True)
class Suite:
    """`device`: where it is measured unless another is asked for."""

    device: str
    what: str
    make: Callable[[], Iterable[Case]]


def _square(*sizes: int) -> tuple[tuple[int, int], ...]:
    return tuple((size, size) for size in sizes)


def _cpu() -> Iterable[Case]:
    peers = ("dense", "dense_mask", "torch_csr", "sparselab")
    shape, sparsities = _square(2048), (0.5, 0.8, 0.9, 0.95, 0.99)
    yield from cases(["memory"], shape, sparsities, (64,), peers=("dense",))
    yield from cases(PRODUCTS, shape, sparsities, (1, 16, 64, 256), peers=("dense", "torch_csr", "sparselab"))
    yield from cases(["layer_step"], shape, sparsities, (64,), optimizer="SGD(momentum=0.9)", peers=peers)


def _cuda() -> Iterable[Case]:
    dtypes = ("float32", "bfloat16")
    yield from cases(["layer_step", "layer_infer"], _square(10_000), (0.9,), (4,))
    yield from cases(["layer_step", "layer_infer"], _square(500), (0.9,), (1,))  # what a call costs
    for optimizer in ("SGD(momentum=0.9)", "SGD", "Adam"):
        yield from cases(["update"], _square(10_000), (0.9,), (4,), optimizer=optimizer)
    for sparsity in (0.9, 0.95, 0.99):
        yield from cases(PRODUCTS, _square(10_000), (sparsity,), (1,), dtypes, l2=("warm", "cold"))
        yield from cases(PRODUCTS, _square(10_000), (sparsity,), (4, 16), dtypes)
    yield from cases(PRODUCTS, _square(4096), (0.95,), (1, 16), dtypes)
    yield from cases(PRODUCTS, _square(1024), (0.9,), (1, 8), dtypes)
    yield from cases(PRODUCTS, _square(4096, 10_000), (0.9,), (8,), dtypes)
    yield from cases(["spmm"], _square(10_000), (0.95, 0.99), (32, 64), ("bfloat16",))
    yield from cases(["spmm"], _square(10_000), (0.99,), (256, 1024), ("bfloat16",))
    yield from cases(PRODUCTS, _square(500), (0.9, 0.99), (1,), dtypes)


def quick(all_cases: Iterable[Case]) -> list[Case]:
    """The numbers of the suite `cuda` that matter most."""
    wanted = {(10_000, 0.95): (1, 4, 16), (10_000, 0.9): (1, 4), (500, 0.9): (1,)}
    return [case for case in all_cases if case.batch in wanted.get((case.shape[0], case.sparsity), ())]


def _paper_kernels() -> Iterable[Case]:
    sizes = _square(500, 1000, 2500, 5000, 7500, 10_000)
    yield from cases(PRODUCTS, sizes, (0.95,), (1, 4))
    yield from cases(["spmm"], sizes, (0.95,), (1, 4), ("bfloat16",))
    yield from cases(["spmm"], _square(5000), (0.5, 0.6, 0.7, 0.8, 0.9, 0.98, 0.99), (1, 2))
    yield from cases(["spmm"], _square(5000), (0.95,), (2,))


def _paper_layer() -> Iterable[Case]:
    outs, batches, sparsities = (2500, 5000, 7500, 10_000, 12_500), (1, 2, 4, 8, 16, 32, 64), (0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99)
    shapes = [(out, 10_000) for out in outs]
    watched = {"energy": ("snack", "dense", "dense_mask")}
    # The tables with energy: every size at 90 %, and one sweep of the sparsity.
    yield from cases(_LAYER, shapes, (0.9,), (4,), **watched)
    yield from cases(["layer_step"], [(10_000, 10_000)], (0.5, 0.8, 0.95, 0.99), (4,), **watched)
    for shape in shapes:
        some = sparsities if shape == (10_000, 10_000) else (0.5, 0.9, 0.99)
        for sparsity in some:
            yield from cases(_LAYER, [shape], (sparsity,), batches if sparsity == 0.9 or shape[0] == 10_000 else (4,))


def _paper_memory() -> Iterable[Case]:
    shapes = [(10_000, in_) for in_ in range(2500, 30_001, 2500)]
    for sparsity in (0.9, 0.99):
        yield from cases(["memory"], shapes, (sparsity,), (4,), caps=(None, _CAP_GIB), peers=("dense", "dense_mask"))


SUITES = {
    "cpu": Suite("cpu", "products, a training step and the memory of one layer on the processor", _cpu),
    "cuda": Suite("cuda", "products, a training step and a topology update on a card", _cuda),
    "paper-kernels": Suite("cuda", "the paper's tables 2, 11 and 12 and figure 2: the products by size and by sparsity", _paper_kernels),
    "paper-layer": Suite("cuda", "the paper's tables 3 and 10 and figures 3, 5-9: one layer, time, memory and energy", _paper_layer),
    "tune": Suite("cuda", "every kernel alone, over a grid: what the plan's cost table is made of", tune_cases),
    "paper-memory": Suite("cuda", f"the paper's figure 4: memory by input size, freely and within {_CAP_GIB:g} GiB", _paper_memory),
}


def suite_cases(name: str, device: str) -> list[Case]:
    """The cases of a suite on a device, each once. The processor has no graphs to replay and no cap to its memory."""
    found: dict[str, Case] = {}
    for case in SUITES[name].make():
        if device == "cpu":
            if case.cap_gib is not None:
                continue
            case = replace(case, mode="eager")
        found.setdefault(str(case), case)
    return list(found.values())
