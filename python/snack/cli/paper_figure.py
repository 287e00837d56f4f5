"""The pictures of the suites paper-kernels, paper-layer and paper-memory.

``draw(document, path)`` needs only the JSON document; a panel whose records are not there yet says so.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

from snack.cli.common import human_ratio
from snack.cli.figure import COLOURS
from snack.errors import SnackError
from snack.plot.look import GREEN, GREY, INK, PURPLE, VERMILION, require_picture, save, style

# Who is shown, of several ways to one library the fastest; SNACK last, on top.
CONTENDERS = {
    "dense + mask": ("dense_mask",), "dense": ("dense",), "dense, bf16": ("dense_bf16",),
    "cuSPARSE": ("torch_csr", "torch_coo", "cupy_csr", "cupy_coo"), "SNACK": ("snack",),
}
LOOKS = {
    "dense + mask": {"color": COLOURS["dense_mask"], "marker": "s"}, "dense": {"color": COLOURS["dense"], "marker": "D"},
    "dense, bf16": {"color": GREEN, "marker": "^"}, "cuSPARSE": {"color": PURPLE, "marker": "v"},
    "SNACK": {"color": COLOURS["snack"], "marker": "o", "linewidth": 3.2},
}
X = {
    "size": (lambda r: r["out"], "rows"), "in": (lambda r: r["in"], "inputs"), "batch": (lambda r: r["batch"], "batch"),
    "sparsity": (lambda r: 100 * (1 - r["sparsity"]), "connections that are there"),
}


def draw(document: dict, path) -> Path:
    """Draws a document of ``snack bench paper-…`` into a PNG of 1920 × 1080 pixels (other suffixes: whatever matplotlib knows)."""
    require_picture(path)
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    if not document["records"]:
        raise SnackError("there is nothing to draw: the file holds no record.")
    figure = Figure(figsize=(12, 6.75), dpi=160, facecolor="white")
    FigureCanvasAgg(figure)
    SUITES[document["suite"]](figure, document["records"], document["provenance"])
    return save(figure, path)


# ---- suites ------------------------------------------------------------------------------------------------------------------------------


def _kernels(figure, records: list[dict], facts: dict) -> None:
    spmm = [r for r in records if r["routine"] == "spmm" and r["dtype"] == "float32" and r["batch"] == 1]
    by_size = [r for r in spmm if r["sparsity"] == 0.95]
    sweep = [r for r in spmm if r["out"] == 5000]
    left, right = _panels(figure, 1, 2)
    style(left, "By size, 95 % sparse")
    _lines(left, by_size, "size", _ratio("time_us"), list(CONTENDERS))
    _log(left, "how many times SNACK's time")
    style(right, "By sparsity, 5000 × 5000")
    _lines(right, sweep, "sparsity", _side("time_us"), list(CONTENDERS))
    _log(right, "µs a product")
    best = max(by_size, key=lambda r: r["out"], default=None)
    _title(figure, best, "time_us", "y = x Wᵀ, batch 1, float32, replays of CUDA graphs", facts)


def _layer(figure, records: list[dict], facts: dict) -> None:
    steps = [r for r in records if r["routine"] == "layer_step"]
    at_90 = [r for r in steps if r["sparsity"] == 0.9 and r["batch"] == 4]
    square = [r for r in steps if r["out"] == 10_000]
    a, b, c, d = _panels(figure, 2, 2)
    names = ["dense + mask", "dense", "dense, bf16", "SNACK"]
    style(a, "Training step by sparsity, 10,000 × 10,000, batch 4")
    _lines(a, [r for r in square if r["batch"] == 4], "sparsity", _ratio("time_us"), names)
    _log(a, "× SNACK's time")
    style(b, "Training step by batch, 10,000 × 10,000, 90 %")
    _lines(b, [r for r in square if r["sparsity"] == 0.9], "batch", _ratio("time_us"), names)
    _log(b, "× SNACK's time")
    style(c, "Peak memory of the step, 90 %, batch 4")
    _lines(c, at_90, "size", _side("peak_bytes", 2**-20), ["dense + mask", "dense", "SNACK"])
    _log(c, "MiB")
    style(d, "Energy of the step, 90 %, batch 4")
    _lines(d, at_90, "size", _side("energy_mj"), ["dense + mask", "dense", "SNACK"])
    _log(d, "mJ")
    best = next((r for r in at_90 if r["out"] == 10_000), None)
    _title(figure, best, "time_us", "One layer's training step (forward, backward, SGD), float32", facts)


def _memory(figure, records: list[dict], facts: dict) -> None:
    caps = sorted({r["params"]["cap_gib"] for r in records if "cap_gib" in r.get("params", {})})
    free = [r for r in records if "cap_gib" not in r.get("params", {})]
    sparsities = sorted({r["sparsity"] for r in records})
    names = ["dense + mask", "dense", "SNACK"]
    for axes, sparsity in zip(_panels(figure, 1, len(sparsities)), sparsities):
        style(axes, f"{100 * sparsity:g} % sparse")
        found = [r for r in free if r["sparsity"] == sparsity]
        _lines(axes, found, "in", _side("peak_bytes", 2**-30), names, scale="linear")
        axes.set_ylabel("GiB, the most in a training step", fontsize=10.5, color=INK)
        if caps and found:
            axes.axhline(caps[0], color=VERMILION, linewidth=1.2, linestyle=(0, (6, 3)), zorder=2.7)
            axes.annotate(f"a card of {caps[0]:g} GiB", (0.02, caps[0]), xycoords=("axes fraction", "data"), xytext=(0, 4),
                          textcoords="offset points", fontsize=10, color=VERMILION)
        capped = [r for r in records if r["sparsity"] == sparsity and "cap_gib" in r.get("params", {})]
        _crosses(axes, capped, found, names)
    best = max((r for r in free if r["sparsity"] == sparsities[0]), key=lambda r: r["in"], default=None)
    how = "Training with Adam, float32; crosses: too much for that card"
    _title(figure, best, "peak_bytes", how, facts)


def _crosses(axes, capped: list[dict], free: list[dict], names: list[str]) -> None:
    """A cross on the line of whoever did not fit below the cap."""
    for name in names:
        height = dict(_points(free, "in", _side("peak_bytes", 2**-30), name))
        out = [r["in"] for r in capped if "not_run" in _best(r, name, "peak_bytes") and r["in"] in height]
        axes.plot(out, [height[x] for x in out], linestyle="none", marker="x", markersize=13, markeredgewidth=2.6, color=VERMILION, zorder=6)


SUITES: dict[str, Callable] = {"paper-kernels": _kernels, "paper-layer": _layer, "paper-memory": _memory}


# ---- common to the panels ----------------------------------------------------------------------------------------------------------------


def _best(record: dict, name: str, key: str) -> dict:
    """The side of a contender: of several, the one that has least of the key; of none that has it, the first."""
    sides = [record if peer == "snack" else record["peers"].get(peer, {}) for peer in CONTENDERS[name]]
    ran = [side for side in sides if key in side and "not_run" not in side]
    return min(ran, key=lambda side: side[key]) if ran else sides[0]


def _side(key: str, scale: float = 1.0) -> Callable[[dict, str], float | None]:
    def value(record: dict, name: str) -> float | None:
        found = _best(record, name, key)
        return None if "not_run" in found or key not in found else scale * found[key]

    return value


def _ratio(key: str) -> Callable[[dict, str], float | None]:
    def value(record: dict, name: str) -> float | None:
        theirs = _side(key)(record, name)
        return None if theirs is None or key not in record else theirs / record[key]

    return value


def _points(records: list[dict], x: str, value, name: str) -> list[tuple[float, float]]:
    found = {X[x][0](r): value(r, name) for r in records}
    return sorted((at, number) for at, number in found.items() if number is not None)


def _lines(axes, records: list[dict], x: str, value, names: list[str], scale: str = "log") -> None:
    """One line a contender over the records; its name at its right end."""
    from matplotlib.ticker import NullLocator

    ends = []
    for name in names:
        points = _points(records, x, value, name)
        if points:
            axes.plot(*zip(*points), **{"linewidth": 2.0, "markersize": 6, "zorder": 5 if name == "SNACK" else 3, **LOOKS[name]})
            ends.append((points[-1] if x != "sparsity" else points[0], name))
    if not ends:
        axes.text(0.5, 0.5, "not measured yet", transform=axes.transAxes, ha="center", color="#777777")
        axes.set(xticks=[], yticks=[])
        return
    axes.set_xscale(scale)
    axes.set_yscale(scale)
    if scale == "linear":
        axes.set_ylim(bottom=-0.02 * axes.get_ylim()[1])
    ticks = _apart(sorted({X[x][0](r) for r in records}), scale)
    words = {"sparsity": lambda v: f"{v:.3g} %"}.get(x, lambda v: f"{v:,.0f}")
    axes.set_xticks(ticks, [words(tick) for tick in ticks])
    axes.xaxis.set_minor_locator(NullLocator())
    if x == "sparsity":
        axes.invert_xaxis()
    axes.set_xlabel(X[x][1], fontsize=10.5, color=INK)
    axes.grid(axis="y", color="#e5e5e5", linewidth=0.8)
    _name_ends(axes, ends)


def _apart(ticks: list[float], scale: str) -> list[float]:
    """Those whose labels do not touch, the largest among them."""
    at = {tick: math.log(tick) if scale == "log" else tick for tick in ticks}
    kept = ticks[-1:]
    for tick in reversed(ticks):
        if at[kept[-1]] - at[tick] > 0.15 * (at[ticks[-1]] - at[ticks[0]]):
            kept.append(tick)
    return kept[::-1]


def _name_ends(axes, ends) -> None:
    """Names beside the right ends of the lines, moved apart where they would touch."""
    axes.figure.canvas.draw()
    height, below = 15 * axes.figure.dpi / 72, -1e9
    for (x, y), name in sorted(ends, key=lambda end: end[0][1]):
        at = axes.transData.transform((x, y))[1]
        below = max(at, below + height)
        shift = (below - at) * 72 / axes.figure.dpi
        axes.annotate(name, (x, y), xytext=(10, shift), textcoords="offset points", va="center", fontsize=11, color=LOOKS[name]["color"],
                      fontweight="bold" if name == "SNACK" else "normal", annotation_clip=False)


def _log(axes, label: str) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axes.set_ylabel(label, fontsize=10.5, color=INK)
    if axes.get_yscale() == "log":
        low, high = axes.get_ylim()
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if high / low < 200 else (1.0,)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())


def _panels(figure, rows: int, columns: int) -> list:
    grid = figure.add_gridspec(rows, columns, left=0.075, right=0.885, top=0.79, bottom=0.095, hspace=0.55, wspace=0.46)
    return [figure.add_subplot(grid[row, column]) for row in range(rows) for column in range(columns)]


def _title(figure, best: dict | None, key: str, how: str, facts: dict) -> None:
    words = []
    for name in ("dense + mask", "dense") if best is not None else ():
        ratio = _ratio(key)(best, name)
        if ratio is not None:
            words.append(f"{human_ratio(ratio)} {'less memory than' if 'bytes' in key else 'as fast as'} {name}")
    figure.text(0.035, 0.925, "  ·  ".join(words) or "Nothing to compare yet", fontsize=19, fontweight="bold", color=INK)
    where = facts.get("card") or f"{facts.get('cpu', 'CPU')}, {facts.get('threads', '?')} threads"
    shape = "" if best is None else f" (title: {best['out']:,} × {best['in']:,}, {100 * best['sparsity']:g} %, batch {best['batch']})"
    figure.text(0.035, 0.882, f"{how}{shape}. {where}, PyTorch {facts.get('torch', '?')}", fontsize=11.5, color=GREY)
