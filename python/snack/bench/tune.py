"""`snack bench tune`: the grid over which kernels are measured one by one, and the cost table that comes of it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

from ..formats import Pattern
from ..formats.pattern import call
from ..ops.products import regime_code
from . import fit
from .case import PRODUCTS, Case

_LONG = (0.5, 0.8, 0.9, 0.95, 0.98, 0.99)
# Shapes and sparsities; the last patterns are too sparse for narrow tiles.
_PATTERNS = {
    (512, 512): (0.5, 0.9, 0.95), (1024, 1024): (0.5, 0.9, 0.98), (2048, 2048): (0.8, 0.95, 0.99), (4096, 4096): _LONG, (10_000, 10_000): _LONG,
    (16_384, 4096): (0.9, 0.98), (4096, 16_384): (0.9, 0.98), (20_000, 20_000): (0.9, 0.95, 0.99),
}  # fmt: skip
_HYPERSPARSE = {(10_000, 10_000): (0.9995,), (50_000, 50_000): (0.9999, 0.9998)}
# Batches by kernel: every width of a pass, and more passes than one.
_BATCHES = {
    "spmm_rows": (1, 2, 4, 8), "spmm_batch": (8, 16, 32, 64, 256), "spmm_stream": (1, 4, 8, 32), "spmm_t_rows": (1, 2, 4, 16),
    "spmm_t_batch": (8, 16, 32, 64, 256), "spmm_t_stream": (1, 4, 16), "sddmm_chunks": (1, 2, 4, 8), "sddmm_batch": (8, 16, 32, 64, 256),
    "sddmm_stream": (1, 4, 8),
}  # fmt: skip
_SLOTWISE = {"spmm_fixed": (1, 4, 32), "spmm_t_fixed": (1, 4, 32), "spmm_coo": (1, 4), "spmm_t_coo": (1, 4), "sddmm_slots": (1, 4, 32)}


def tune_cases() -> Iterable[Case]:
    """Neighbours share their pattern."""
    for patterns, batches in ((_PATTERNS, _BATCHES), (_HYPERSPARSE, _SLOTWISE)):
        for shape, sparsities in patterns.items():
            for sparsity in sparsities:
                for dtype in ("float32", "bfloat16"):
                    for kernel, counts in batches.items():
                        for batch in counts:
                            if not (kernel == "sddmm_chunks" and dtype == "float32" and batch > 4):
                                yield Case(kernel.rsplit("_", 1)[0], shape, sparsity, batch, dtype, kernel=kernel)


def random_pattern(case: Case, device: torch.device) -> Pattern:
    """Uniform positions."""
    return Pattern.random(case.shape, round((1 - case.sparsity) * case.shape[0] * case.shape[1]), 1).to(device)


def candidates(
    routine: str, shape: Sequence[int], nnz: int, batch: int, dtype: torch.dtype, capability: Sequence[int], kernel: str = "auto", costs: str = ""
) -> list[dict]:
    """What the plan knows of every kernel that can serve, the fastest first: {"kernel", "element", "width", "variant", "predicted_us", "terms"}."""
    text = call(
        torch.ops.snack.cuda_candidates, PRODUCTS.index(routine), *shape, nnz, batch, dtype, regime_code(kernel), *capability, costs
    )
    found = []
    for line in text.splitlines():
        name, element, width, variant, predicted, *terms = line.split()
        found.append({"kernel": name, "element": int(element), "width": int(width), "variant": int(variant), "predicted_us": float(predicted),
                      "terms": [float(term) for term in terms]})  # fmt: skip
    return found


def held_out(records: Sequence[dict]) -> tuple[int, int]:
    """(records that are predicted within 25 %, all) where every shape and sparsity is predicted by a fit without it."""
    good = total = 0
    for group in fit.groups(records).values():
        for pattern in {(r["out"], r["in"], r["sparsity"]) for r in group}:
            inside = [(r["out"], r["in"], r["sparsity"]) == pattern for r in group]
            rest = [r for r, is_in in zip(group, inside, strict=True) if not is_in]
            if not rest:
                continue
            costs = fit.fit(rest)
            tested = [r for r, is_in in zip(group, inside, strict=True) if is_in]
            total += len(tested)
            good += sum(abs(fit.predict(costs, r) / r["time_us"] - 1) <= 0.25 for r in tested)
    return good, total


def write_table(document: dict, path: Path) -> None:
    """The user's cost table, fitted to the records of a results file."""
    facts = document["provenance"]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(fit.table(document["records"], facts, f"measured {facts['date']} by {facts['command']}"), encoding="utf-8")
