"""The table of a training run, and the means and differences behind it."""

from __future__ import annotations

import math
import statistics

from snack.cli.common import human_bytes, human_ratio, human_time, print_table, say
from snack.cli.figure import METHODS, label


def complete(records: list[dict]) -> list[dict]:
    """The records without the seed that Ctrl-C cut short, if there is another one: means are over complete runs."""
    return [r for r in records if not r["interrupted"]] or records


def by_contender(records: list[dict]) -> dict[str, list[dict]]:
    """Records of every contender, in the order of the first seed."""
    groups: dict[str, list[dict]] = {}
    for record in records:
        groups.setdefault(record["contender"], []).append(record)
    return groups


def mean_and_error(values: list[float]) -> tuple[float, float | None]:
    """(mean, its standard error); None where there is one value."""
    return statistics.fmean(values), (statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None)


def summary(records: list[dict]) -> list[dict]:
    """One entry a contender: test accuracy after the last epoch and in the best one, mean and standard error over the seeds, in percent; and of
    SNACK the mean difference to its masked twin, seed by seed."""
    groups, entries = by_contender(records), []
    for name, group in groups.items():
        entry: dict[str, object] = {"contender": name, "seeds": [r["seed"] for r in group]}
        for key, value in (("accuracy", lambda r: r["accuracy"]), ("best_accuracy", lambda r: max(a for _, a in r["accuracy_curve"]))):
            entry[key], error = mean_and_error([100 * value(r) for r in group])
            if error is not None:
                entry[f"{key}_error"] = error
        twin = {r["seed"]: r["accuracy"] for r in groups.get(name.replace("snack", "dense_mask"), [])} if name.startswith("snack") else {}
        differences = [100 * (r["accuracy"] - twin[r["seed"]]) for r in group if r["seed"] in twin]
        if differences:
            entry["minus_mask"], error = mean_and_error(differences)
            if error is not None:
                entry["minus_mask_error"] = error
        entries.append(entry)
    return entries


def report(document: dict, runs) -> None:
    """Prints the table: one column a contender, and how SNACK compares with dense; with several methods one row a contender."""
    groups = by_contender(document["records"])
    (_compared if runs[0].config.compare else _side_by_side)(groups, _title(document, runs))
    for entry in summary(document["records"]):
        if "minus_mask" in entry and "minus_mask_error" in entry:
            say(f"{label(entry['contender'])} minus its mask: {entry['minus_mask']:+.2f} ± {entry['minus_mask_error']:.2f} points, seed by seed")
    if max(r["step_time_iqr_us"] / r["step_time_us"] for r in document["records"]) > 0.5:
        say("The times of single steps vary by more than half: other work ran on this machine, so repeat the run on an idle one.")


def _title(document: dict, runs) -> str:
    first, seeds = runs[0], len(by_contender(document["records"])[document["records"][0]["contender"]])
    config, network = first.config, document["records"][0]["network"]
    words = f"mean ± standard error of {seeds} seeds" if seeds > 1 else f"seed {config.seed}"
    method = "" if config.compare else f"{METHODS[config.method]}, "
    title = f"{first.dataset.name}, {network}, {100 * config.sparsity:.4g} % sparse, {method}batch {config.batch_size}, "
    return f"{title}{config.epochs} epoch{'s' if config.epochs > 1 else ''}, {words}"


# What a row says: title, value of a contender's records, words for it, and whether a ratio makes sense.
_ROWS = [
    ("test accuracy", lambda rs: [100 * r["accuracy"] for r in rs], lambda values: _accuracy(values), False),
    ("connections that count", lambda rs: rs[0]["nnz"], "{:,}".format, True),
    ("parameters stored", lambda rs: rs[0]["params"], "{:,}".format, True),
    ("weights", lambda rs: rs[0]["bytes"]["weights"], human_bytes, True),
    ("indices or masks", lambda rs: rs[0]["bytes"]["indices"], human_bytes, True),
    ("gradients", lambda rs: rs[0]["bytes"]["gradients"], human_bytes, True),
    ("optimiser state", lambda rs: rs[0]["bytes"]["optimizer"], human_bytes, True),
    ("memory, all of these", lambda rs: sum(rs[0]["bytes"].values()), human_bytes, True),
    ("time a training step", lambda rs: _median(rs, "step_time_us"), human_time, True),
    ("inference, one sample", lambda rs: _median(rs, "infer_time_us"), human_time, True),
    ("topology updates", lambda rs: rs[0]["updates"], "{:,}".format, False),
]
_SHORT = ("weights", "indices or masks", "gradients", "optimiser state", "parameters stored")  # left out where there are many contenders


def _side_by_side(groups: dict[str, list[dict]], title: str) -> None:
    has_ratio = {"dense", "snack"} <= groups.keys()
    columns, rows = ["", *(label(name) for name in groups), *(["SNACK / dense"] if has_ratio else [])], []
    for what, value, words, is_ratio in _ROWS:
        values = {name: value(records) for name, records in groups.items()}
        cells = [words(v) if v is not None else "not measured" for v in values.values()]
        if has_ratio:
            cells.append(human_ratio(values["snack"] / values["dense"]) if is_ratio and values["dense"] and values["snack"] else "")
        rows.append([what, *cells])
    say()
    print_table(title, columns, rows, strong=len(groups))


def _compared(groups: dict[str, list[dict]], title: str) -> None:
    chosen = [row for row in _ROWS if row[0] not in _SHORT]
    rows = []
    for name, records in groups.items():
        values = [(value(records), words) for _, value, words, _ in chosen]
        rows.append([label(name), *(words(v) if v is not None else "not measured" for v, words in values)])
    say()
    print_table(title, ["", *(row[0] for row in chosen)], rows)


def _accuracy(values: list[float]) -> str:
    mean, error = mean_and_error(values)
    return f"{mean:.2f} %" + (f" ± {error:.2f}" if error is not None else "")


def _median(records: list[dict], key: str) -> float | None:
    values = [r[key] for r in records if key in r]
    return statistics.median(values) if values else None
