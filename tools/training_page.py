"""The page docs/results/training-<device>.md: accuracies of the recipes of `snack train`, from the JSON records alone."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from pathlib import Path

from snack.bench.recipes import PROTOCOLS
from snack.cli.common import human_bytes, human_time
from snack.cli.figure import label
from snack.cli.train_report import by_contender

# Test accuracies in percent, by recipe, sparsity (None: the recipe's own) and contender; sources in docs/training.md.
_DENSE = {"dense": 98.69}
PUBLISHED = {
    ("lenet-300-100", 0.9): _DENSE | {"snack": 98.39}, ("lenet-300-100", 0.95): _DENSE | {"snack": 98.14},
    ("lenet-300-100", 0.98): _DENSE | {"snack": 97.74}, ("lenet-300-100", 0.99): _DENSE | {"snack": 95.80},
    ("fashion-mlp", None): {"snack:set": 84.36, "snack:static": 83.90}, ("fashion-mlp-mse", None): {"snack:set": 82.56, "snack:static": 80.60},
}  # fmt: skip
COLUMNS = ("network", "sparsity", "contender", "test accuracy", "best epoch", "published", "SNACK − its mask", "step", "memory")


def recipe_of(document: dict) -> str | None:
    """The recipe of a record of `snack train`; None of any other record."""
    name = document.get("suite", "").removeprefix("train-")
    return name if document.get("suite", "").startswith("train-") and name in PROTOCOLS else None


def _with_error(entry: dict, key: str) -> str:
    error = f" ± {entry[f'{key}_error']:.2f}" if f"{key}_error" in entry else ""
    return f"{entry[key]:.2f}{error}"


def _difference(entry: dict, twin: dict | None) -> str:
    """In points, and in standard errors of a difference of two means; bold from two on."""
    if "minus_mask" not in entry:
        return ""
    error = math.hypot(entry.get("accuracy_error", 0.0), twin.get("accuracy_error", 0.0))
    if error == 0:
        return f"{entry['minus_mask']:+.2f}"
    words = f"{entry['minus_mask']:+.2f} ({abs(entry['minus_mask']) / error:.1f} s.e.)"
    return words if abs(entry["minus_mask"]) <= 2 * error else f"**{words}**"


def _rows(document: dict) -> list[str]:
    recipe, groups = recipe_of(document), by_contender(document["records"])
    summary = {entry["contender"]: entry for entry in document["summary"]}
    rows = []
    for name, records in groups.items():
        first, entry = records[0], summary[name]
        published = PUBLISHED.get((recipe, first["sparsity"]), PUBLISHED.get((recipe, None), {})).get(name)
        sparsity = "" if first["kind"] == "dense" else f"{100 * first['sparsity']:.4g} %"
        accuracies = [f"{_with_error(entry, key)} %" for key in ("accuracy", "best_accuracy")]
        cells = [
            f"{first['data']}, {first['network']}", sparsity, label(name), *accuracies, f"{published:.2f} %" if published is not None else "",
            _difference(entry, summary.get(name.replace("snack", "dense_mask"))),
            human_time(statistics.median(r["step_time_us"] for r in records)), human_bytes(sum(first["bytes"].values())),
        ]
        rows.append(f"| {' | '.join(cells)} |")
    return rows


def training_page(documents: dict[Path, dict], source: Callable[[Path, dict], str]) -> str:
    """The text of the page of all recipes that were trained on one device."""
    lines = [
        "# Training: accuracies on real data", "",
        "Test accuracy after the last epoch and in the best one, mean ± standard error over the seeds. Protocols, and what is published: "
        "[snack train](../training.md). SNACK − its mask: the difference of the means to plain PyTorch with a mask (`snack.bench.twins`), from the "
        "same numbers on the same batches, in points and in its standard errors; bold above two. Step: a replayed CUDA graph, median; memory: "
        "weights, indices or masks, gradients and optimiser state.", "",
    ]  # fmt: skip
    for recipe in PROTOCOLS:
        found = {path: d for path, d in documents.items() if recipe_of(d) == recipe}
        if not found:
            continue
        lines += [f"## {recipe}", "", f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|"]
        for path in sorted(found, key=lambda path: found[path]["records"][0]["sparsity"]):
            lines += _rows(found[path])
        seeds = min(len(entry["seeds"]) for d in found.values() for entry in d["summary"])
        lines += ["", f"{seeds} seeds.", "", *(f"* On {d['records'][0]['device']}. {source(path, d['provenance'])}" for path, d in found.items()), ""]
    return "\n".join(lines).rstrip() + "\n"
