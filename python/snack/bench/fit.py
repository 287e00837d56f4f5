"""Costs of the CUDA kernels from measured times: the fit behind the cost tables. Needs nothing but Python.

A record has {"kernel", "element", "width", "variant", "terms": [...], "time_us"}; the model is time = sum of cost * term with costs >= 0, one row
of costs for every (kernel, element, width, variant). Fitted to the least sum of squared relative errors.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import combinations
from math import log2

TERMS = ("launches", "KB staged", "k slots", "k segments", "MB of the format", "MB beyond L2")  # cost_terms in src/plan/cuda_costs.cpp
LAUNCH_US = 1.5  # of an empty kernel in a replayed graph: no fit goes below
_WIDTHS, _SLOTWISE, _LINES = ((1, 0), (2, 0), (4, 0), (8, 0)), ((1, 0),), ((16, 0), (32, 0))
# (width, variant) that a plan may have.
FORMS = {
    "spmm_rows": _WIDTHS, "spmm_batch": ((16, 0), (16, 1), (32, 0), (32, 1), (64, 0), (64, 1)), "spmm_stream": ((1, 0), (4, 0), (8, 0)),
    "spmm_fixed": _SLOTWISE, "spmm_coo": _SLOTWISE, "spmm_t_rows": ((1, 0), (1, 1), (2, 0), (2, 1), (4, 0), (4, 1)),
    "spmm_t_batch": _LINES, "spmm_t_stream": ((1, 0), (1, 1), (4, 0), (4, 1)),
    "spmm_t_fixed": _SLOTWISE, "spmm_t_coo": _SLOTWISE, "sddmm_chunks": _WIDTHS, "sddmm_batch": _LINES,
    "sddmm_stream": ((1, 0), (4, 0), (8, 0)), "sddmm_slots": _SLOTWISE,
}  # fmt: skip
Key = tuple[str, int, int, int]


def key_of(record: dict) -> Key:
    """The row that a record belongs to."""
    return record["kernel"], record["element"], record["width"], record["variant"]


def predict(costs: list[float], record: dict) -> float:
    """Microseconds."""
    return _dot(costs, record["terms"])


def fit(records: list[dict]) -> list[float]:
    """Costs of one row, rounded to four digits: of all subsets of the terms, the best fit whose costs are all positive; a launch
    takes LAUNCH_US at least."""
    rows = [[term / r["time_us"] for term in r["terms"]] for r in records]
    aims = [1 - LAUNCH_US * row[0] for row in rows]  # what is left beside the least that launches take
    scale = [max(column) for column in zip(*rows, strict=True)]
    columns = [[value / s if s else 0.0 for value in column] for column, s in zip(zip(*rows, strict=True), scale, strict=True)]
    normal, right = [[_dot(a, b) for b in columns] for a in columns], [_dot(a, aims) for a in columns]
    best, most = [0.0] * len(scale), 0.0
    for size in range(1, len(scale) + 1):
        for chosen in combinations([i for i, s in enumerate(scale) if s], size):
            costs = _solve([[normal[i][j] for j in chosen] + [right[i]] for i in chosen])
            if costs is None or min(costs) < 0:
                continue
            explained = sum(cost * right[i] for i, cost in zip(chosen, costs, strict=True))  # of the sum of squares of the aims
            if explained > most + 1e-9:
                best, most = [0.0] * len(scale), explained
                for i, cost in zip(chosen, costs, strict=True):
                    best[i] = cost / scale[i]
    best[0] += LAUNCH_US
    return [float(f"{cost:.4g}") for cost in best]


def _dot(a: Sequence[float], b: Sequence[float]) -> float:
    return sum(x * y for x, y in zip(a, b, strict=True))


def _solve(rows: list[list[float]]) -> list[float] | None:
    """x of A x = b, rows [A | b], by elimination with pivots; None where A is as good as singular."""
    rows, size = [list(row) for row in rows], len(rows)
    for i in range(size):
        pivot = max(range(i, size), key=lambda k: abs(rows[k][i]))
        rows[i], rows[pivot] = rows[pivot], rows[i]
        if abs(rows[i][i]) < 1e-10:
            return None
        for k in range(size):
            if k != i:
                factor = rows[k][i] / rows[i][i]
                rows[k] = [a - factor * b for a, b in zip(rows[k], rows[i], strict=True)]
    return [rows[i][size] / rows[i][i] for i in range(size)]


def table(records: Iterable[dict], provenance: dict, note: str) -> str:
    """The cost table of a card, as the library reads it (docs/plan.md).

    provenance: {"card", "capability": six numbers, "copy_tb_s", "kernels"}. A form of a kernel that was not measured takes twice the costs of
    the nearest that was, so that it is chosen only where nothing else comes near.
    """
    head = {"card": provenance["card"], "kernels": provenance["kernels"], "capability": " ".join(map(str, provenance["capability"])),
            "copy_tb_s": provenance["copy_tb_s"]}  # fmt: skip
    lines = ["snack-costs 1", f"# {note}", *(f"{key} {value}" for key, value in head.items())]
    lines.append(f"# kernel, bytes of a value, width, variant; microseconds a unit of: {', '.join(TERMS)}")
    found = {key: fit(group) for key, group in groups(records).items()}
    for kernel, forms in FORMS.items():
        for wanted in ((kernel, element, *form) for element in (2, 4) for form in forms):
            near = [key for key in found if key[0] == kernel]
            if not near:
                continue
            key = min(near, key=lambda k: (k[1] != wanted[1], k[3] != wanted[3], abs(log2(k[2] / wanted[2])), -k[2]))
            factor, remark = (1, "") if key == wanted else (2, f"  # not measured: twice {key[1]} {key[2]} {key[3]}")
            lines.append(" ".join([*map(str, wanted), *(f"{factor * cost:.4g}" for cost in found[key])]) + remark)
    return "\n".join(lines) + "\n"


def groups(records: Iterable[dict]) -> dict[Key, list[dict]]:
    """The records by row, in a stable order; those without a time (a kernel that cannot serve the problem) are left out."""
    found: dict[Key, list[dict]] = {}
    for record in records:
        if "time_us" in record and "terms" in record:
            found.setdefault(key_of(record), []).append(record)
    return dict(sorted(found.items()))
