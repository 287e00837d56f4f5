"""The picture of a training run: accuracy curves, memory, time, and where the input's connections went.

``draw(document, path)`` needs only the JSON document that ``snack train --json`` writes, so a committed run gives the same picture again.
"""

from __future__ import annotations

import math
import statistics
from pathlib import Path

from snack.cli.common import human_bytes, human_ratio, human_time
from snack.plot.look import BLUE, GREY, INK, ORANGE, require_picture, save, style

LABELS = {"dense": "dense", "dense_mask": "dense + mask", "snack": "SNACK"}
# With line styles to match in print.
COLOURS = {"dense": GREY, "dense_mask": ORANGE, "snack": BLUE}
STYLES = {"dense": (0, (5, 2)), "dense_mask": (0, (1.5, 1.2)), "snack": "solid"}
PARTS = {"weights": "weights", "indices": "indices / masks", "gradients": "gradients", "optimizer": "optimiser state"}
SHADES = (0.0, 0.30, 0.55, 0.75)  # how far each part is mixed with white
METHODS = {
    "set": "SET", "set-magnitude": "SET (magnitude)", "rigl": "RigL", "snfs": "SNFS", "gmp": "GMP", "mest": "MEST", "itop": "ITOP", "srigl": "SRigL",
    "static": "static",
}  # fmt: skip
# Of SNACK with several methods; the rest of Okabe and Ito's.
METHOD_COLOURS = {
    "set": "#0072B2", "set-magnitude": "#0072B2", "rigl": "#D55E00", "snfs": "#CC79A7", "gmp": "#009E73", "mest": "#56B4E9", "itop": "#7A5C00",
    "srigl": "#8A3B12", "static": "#F0B400",
}  # fmt: skip


def label(name: str, short: bool = False) -> str:
    """A contender in words: its kind, and the method where several are compared ("snack:rigl")."""
    kind, _, method = name.partition(":")
    kinds = {"dense": "dense", "dense_mask": "mask", "snack": "SNACK"} if short else LABELS
    return f"{kinds[kind]} {METHODS[method]}" if method else kinds[kind]


def colour(name: str) -> str:
    """Of a contender; a masked twin has a lighter shade of its method's."""
    kind, _, method = name.partition(":")
    if not method:
        return COLOURS[kind]
    return METHOD_COLOURS[method] if kind == "snack" else _lighter(METHOD_COLOURS[method], 0.45)


def draw(document: dict, path) -> Path:
    """Draws a document of ``snack train --json`` into a PNG of 1920 × 1080 pixels (other suffixes: whatever matplotlib knows)."""
    require_picture(path)
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    names = dict.fromkeys(r["contender"] for r in document["records"])
    runs = {name: [r for r in document["records"] if r["contender"] == name] for name in names}
    figure = Figure(figsize=(12, 6.75), dpi=160, facecolor="white")
    FigureCanvasAgg(figure)
    grid = figure.add_gridspec(2, 2, left=0.075, right=0.97, top=0.80, bottom=0.085, hspace=0.52, wspace=0.30, width_ratios=(1.15, 1))
    _title(figure, runs)
    _accuracy(figure.add_subplot(grid[0, 0]), runs)
    _memory(figure.add_subplot(grid[0, 1]), runs)
    _times(figure, grid[1, 1], runs)
    shown = [records[0] for records in runs.values() if "connectivity" in records[0]]
    if shown:  # of methods that move connections, where there are some
        _connectivity(figure, grid[1, 0], min(shown, key=lambda record: record["method"] in ("static", "gmp")))
    return save(figure, path)


# ---- the words at the top --------------------------------------------------------------------------------------------------------------


def _title(figure, runs) -> None:
    first = next(iter(runs.values()))[0]
    accuracy = {name: 100 * statistics.fmean(r["accuracy"] for r in records) for name, records in runs.items()}
    compared = any(":" in name for name in runs)
    if compared:  # the masked twins have their curves
        accuracy = {name: value for name, value in accuracy.items() if not name.startswith("dense_mask")}
    named = {name: METHODS.get(name.partition(":")[2], name) if compared else label(name) for name in accuracy}
    words = ("SNACK: " if compared else "") + "  ·  ".join(f"{named[name]} {value:.1f} %" for name, value in reversed(accuracy.items()))
    words += f"  on {_pretty(first['data'])}"
    figure.text(0.075, 0.925, words, fontsize=min(19.0, 19.0 * 72 / len(words)), fontweight="bold", color=INK)
    seeds = len(next(iter(runs.values())))
    how = f"Test accuracy{f', mean of {seeds} seeds' if seeds > 1 else ''}.  Network {first['network'].replace('-', '–')}, "
    method = "" if compared else f"{METHODS[first['method']]}, "
    how += f"{100 * first['sparsity']:.4g} % sparse, {method}batch {first['batch_size']}, {_device(first)}"
    figure.text(0.075, 0.882, how, fontsize=11.5, color=GREY)


def _pretty(name: str) -> str:
    return {"mnist": "MNIST", "fashion-mnist": "Fashion-MNIST", "cifar10": "CIFAR-10", "madelon": "Madelon"}.get(name, name)


def _device(record) -> str:
    if record["device"] != "cpu":
        return record["device"]
    return f"CPU, {record['threads']} thread{'s' if record['threads'] > 1 else ''}"


# ---- the panels ------------------------------------------------------------------------------------------------------------------------


def _accuracy(axes, runs) -> None:
    from matplotlib.ticker import MaxNLocator

    style(axes, "Test accuracy")
    low = []
    few = not any(":" in name for name in runs)
    for name, records in runs.items():
        curves = [[100 * value for _, value in record["accuracy_curve"]] for record in records]
        epochs = [epoch for epoch, _ in records[0]["accuracy_curve"]]
        mean = [statistics.fmean(values) for values in zip(*curves)]
        low += [v for curve in curves for e, v in zip(epochs, curve) if e >= 0.1 * epochs[-1]]
        kind = name.partition(":")[0]
        look = {"color": colour(name), "zorder": {"snack": 2, "dense": 3, "dense_mask": 4}[kind]}  # thin dots stay visible on the thick line
        for curve in curves if len(curves) > 1 else ():
            axes.plot(epochs[: len(curve)], curve, linewidth=0.9, alpha=0.45, **look)
        width, marker = 3.4 if kind == "snack" else 2.0, "o" if len(epochs) == 1 else None
        axes.plot(
            epochs[: len(mean)],
            mean,
            linestyle=STYLES[kind],
            linewidth=width,
            marker=marker,
            markersize=4 * width,
            label=label(name) if few or kind != "dense_mask" else None,
            **look,
        )
    bottom = min(low) - 0.12 * (100 - min(low)) - 0.2
    axes.set_ylim(max(0, bottom), min(100.4, max(low) + 0.25 * (100 - bottom)))
    axes.set_xlim(left=0)
    axes.set_xlabel("epoch", fontsize=10.5, color=INK)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.yaxis.set_major_formatter("{x:g} %")
    axes.grid(axis="y", color="#e5e5e5", linewidth=0.8)
    handles = axes.get_legend_handles_labels()[0]
    if not few and any(name.startswith("dense_mask") for name in runs):
        handles += axes.plot([], [], color="#777777", linestyle=STYLES["dense_mask"], linewidth=2.0, label="their masked twins")
    axes.legend(handles=handles, loc="best", frameon=False, fontsize=11 if few else 9.5, handlelength=2.6, ncols=1 if few else 2)


def _memory(axes, runs) -> None:
    from matplotlib.patches import Patch

    names, totals = list(runs), {name: _total_bytes(records[0]) for name, records in runs.items()}
    saved = totals["dense"] / totals["snack"] if {"dense", "snack"} <= totals.keys() else None
    style(axes, "Memory in training" + (f": {human_ratio(saved)} less than dense" if saved and saved > 1 else ""))
    for row, name in enumerate(names):
        left = 0.0
        for part, shade in zip(PARTS, SHADES):
            size = runs[name][0]["bytes"][part]
            axes.barh(row, size, left=left, color=_lighter(colour(name), shade), edgecolor="white", linewidth=0.6, height=0.62)
            left += size
        axes.annotate(human_bytes(left), (left, row), xytext=(6, 0), textcoords="offset points", va="center", fontsize=11, color=INK)
    _rows(axes, names, max(totals.values()))
    patches = [Patch(facecolor=_lighter("#333333", shade), label=PARTS[part]) for part, shade in zip(PARTS, SHADES)]
    axes.legend(
        handles=patches,
        loc="upper center",
        bbox_to_anchor=(0.44, 0.02),
        ncols=4,
        frameon=False,
        fontsize=9.5,
        handlelength=1,
        columnspacing=1.1,
    )


def _times(figure, cell, runs) -> None:
    panels = [("step_time_us", "One training step"), ("infer_time_us", "Inference, one sample")]
    grid = cell.subgridspec(1, 2, wspace=0.12)
    for column, (key, title) in enumerate(panels):
        axes = figure.add_subplot(grid[0, column])
        style(axes, title)
        times = {
            name: statistics.median(r[key] for r in records if key in r) for name, records in runs.items() if any(key in r for r in records)
        }
        if not times:
            axes.text(0.5, 0.5, "not measured", transform=axes.transAxes, ha="center", color="#777777")
        for row, (name, value) in enumerate(times.items()):
            axes.barh(row, value, color=colour(name), height=0.62)
            axes.annotate(human_time(value), (value, row), xytext=(5, 0), textcoords="offset points", va="center", fontsize=10.5, color=INK)
        _rows(axes, list(times), max(times.values(), default=1.0), room=1.45)
        if column == 1:
            axes.set_yticklabels([])


def _connectivity(figure, cell, record) -> None:
    """Outgoing connections of each input feature before and after training, on one scale: images, or bars where there is no image."""
    shape, counts = record.get("image_shape"), record["connectivity"]
    heading = f"Outgoing connections of each input {'feature' if shape is None else 'pixel'}"
    heading += f", {METHODS[record['method']]}" if ":" in record["contender"] else ""
    pictures = [("before", "before training"), ("after", "after training")]
    top = max(max(counts["before"]), max(counts["after"]), 1)
    if shape is None:
        grid = cell.subgridspec(1, 2, wspace=0.12)
        for column, (when, words) in enumerate(pictures):
            axes = figure.add_subplot(grid[0, column])
            style(axes, heading if column == 0 else "")
            axes.bar(range(len(counts[when])), counts[when], width=1.0, color=COLOURS["snack"])
            axes.set_ylim(0, 1.05 * top)
            axes.set_xlabel(f"input feature, {words}", fontsize=10.5, color=INK)
            if column == 1:
                axes.set_yticklabels([])
        return
    images = [_as_image(counts[when], shape) for when, _ in pictures]
    grid = cell.subgridspec(1, 4, width_ratios=(1, 1, 0.045, 0.1), wspace=0.08)
    for column, (pixels, (_, words)) in enumerate(zip(images, pictures)):
        axes = figure.add_subplot(grid[0, column])
        axes.set_title(heading if column == 0 else "", loc="left", fontsize=12.5, fontweight="bold", color=INK)
        drawn = axes.imshow(pixels, cmap="viridis", vmin=0, vmax=max(max(row) for image in images for row in image) or 1)
        axes.set_xlabel(words, fontsize=10.5, color=INK)
        axes.set(xticks=[], yticks=[], anchor="W")
        axes.spines[:].set_visible(False)
    bar = figure.colorbar(drawn, cax=figure.add_subplot(grid[0, 2]))
    bar.outline.set_visible(False)
    bar.ax.tick_params(labelsize=9.5, colors=INK, length=0)
    bar.ax.set_anchor("W")


def _as_image(counts, shape) -> list[list[int]]:
    """Rows of pixels; the channels of a pixel are added up."""
    height, width, channels = (*shape, 1)[:3]
    pixels = [sum(counts[i : i + channels]) for i in range(0, len(counts), channels)]
    return [pixels[row * width : (row + 1) * width] for row in range(height)]


# ---- common to the panels --------------------------------------------------------------------------------------------------------------


def _rows(axes, names, largest: float, room: float = 1.2) -> None:
    """Rows of horizontal bars: names on the left, first on top, no axis (the bars carry their numbers)."""
    axes.set_yticks(range(len(names)), [label(name, short=len(names) > 4) for name in names])
    if len(names) > 4:
        axes.tick_params(axis="y", labelsize=8.5)
    axes.set_ylim(len(names) - 0.45, -0.55)
    axes.set_xlim(0, room * largest)
    axes.set_xticks([])
    axes.spines["bottom"].set_visible(False)


def _lighter(colour: str, shade: float) -> str:
    """A colour #rrggbb mixed with white."""
    parts = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return "#" + "".join(f"{round(p + (255 - p) * shade):02x}" for p in parts)


def _total_bytes(record) -> int:
    return sum(v for k, v in record["bytes"].items() if not math.isnan(v))
