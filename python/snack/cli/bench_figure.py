"""The picture of a suite of `snack bench`: the forward product of the largest layer at each sparsity, a training step, its memory.

``draw(document, path)`` needs only the JSON document, so that committed records give the same picture again.
"""

from __future__ import annotations

from pathlib import Path

from snack.cli.common import human_bytes, human_ratio, human_time
from snack.cli.figure import COLOURS
from snack.errors import SnackError
from snack.plot.look import GREY, INK, require_picture, save, style

# Who is shown, in this order; of several ways to one library the fastest.
PEERS = {
    "dense + mask": ("dense_mask",), "dense": ("dense",), "dense, TF32": ("dense_tf32",), "COO, atomics": ("coo_atomics",),
    "torch CSR": ("torch_csr",), "cuSPARSE": ("torch_csr", "torch_coo", "cupy_csr", "cupy_coo"), "SparseLab": ("sparselab",),
}
COLOUR = {"dense + mask": COLOURS["dense_mask"], "dense": COLOURS["dense"], "SNACK": COLOURS["snack"]}
COLUMNS = 3  # sparsities side by side


def draw(document: dict, path) -> Path:
    """Draws a document of ``snack bench`` into a PNG of 1920 × 1080 pixels (other suffixes: whatever matplotlib knows).

    Raises: SnackError when the document holds no product, or the picture cannot be written.
    """
    require_picture(path)
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    products = _products(document["records"])
    if not products:
        raise SnackError("there is nothing to draw: the file holds no forward product (routine spmm) in float32.")
    on_card = "card" in document["provenance"]
    figure = Figure(figsize=(12, 6.75), dpi=160, facecolor="white")
    FigureCanvasAgg(figure)
    grid = figure.add_gridspec(2, 1, left=0.115, right=0.975, top=0.79, bottom=0.06, hspace=0.42)
    row = grid[0, 0].subgridspec(1, len(products), wspace=0.72)
    for column, record in enumerate(products):
        axes = figure.add_subplot(row[0, column])
        style(axes, f"{100 * record['sparsity']:g} % sparse")
        _bars(axes, _times(record, on_card), human_time)
    step = _step(document["records"])
    if step is not None:
        row = grid[1, 0].subgridspec(1, 2, wspace=0.42)
        axes = figure.add_subplot(row[0, 0])
        style(axes, f"One training step, {100 * step['sparsity']:g} %, batch {step['batch']}")
        _bars(axes, _times(step, on_card), human_time)
        memory = _memory(document["records"], step)
        if memory:
            axes = figure.add_subplot(row[0, 1])
            style(axes, f"Memory in training, {100 * step['sparsity']:g} %")
            _bars(axes, memory, human_bytes)
    _title(figure, products, document["provenance"])
    return save(figure, path)


def _products(records: list[dict]) -> list[dict]:
    """The forward product in float32 of the largest layer, its smallest batch, warm; the highest sparsities."""
    found = [r for r in records if r["routine"] == "spmm" and r["dtype"] == "float32" and r.get("l2", "warm") == "warm" and "time_us" in r]
    found = [r for r in found if r["out"] == max(f["out"] for f in found)]
    found = [r for r in found if r["batch"] == min(f["batch"] for f in found)]
    return sorted(found, key=lambda r: r["sparsity"])[-COLUMNS:]


def _step(records: list[dict]) -> dict | None:
    """The training step nearest to 90 % sparsity, of the largest layer."""
    steps = [r for r in records if r["routine"] == "layer_step" and "time_us" in r]
    return min(steps, key=lambda r: (abs(r["sparsity"] - 0.9), -r["out"]), default=None)


def _times(record: dict, on_card: bool) -> dict[str, float]:
    """Microseconds by name, ours last; who did not run is not shown."""
    times = {}
    for name, peers in PEERS.items():
        if name == ("torch CSR" if on_card else "cuSPARSE"):
            continue
        ran = [record["peers"][peer]["time_us"] for peer in peers if "time_us" in record["peers"].get(peer, {})]
        if ran:
            times[name] = min(ran)
    return {**times, "SNACK": record["time_us"]}


def _memory(records: list[dict], step: dict) -> dict[str, float]:
    """Bytes by name: of the step itself where it was watched, else of the record of what a layer keeps."""
    kept = [r for r in records if r["routine"] == "memory" and r["sparsity"] == step["sparsity"]]
    record, key = (step, "peak_bytes") if "peak_bytes" in step else (kept[0], "kept_bytes") if kept else (None, "")
    if record is None:
        return {}
    names = {"dense + mask": "dense_mask", "dense": "dense"}
    found = {name: record["peers"][peer][key] for name, peer in names.items() if key in record["peers"].get(peer, {})}
    return {**found, "SNACK": record[key]}


def _bars(axes, values: dict[str, float], human) -> None:
    """Horizontal bars with their numbers, and how many times ours each is."""
    for row, (name, value) in enumerate(values.items()):
        axes.barh(row, value, color=COLOUR.get(name, "#a9a9a9"), height=0.66)
        words = human(value) if name == "SNACK" else f"{human(value)}  ({human_ratio(value / values['SNACK'])})"
        axes.annotate(words, (value, row), xytext=(5, 0), textcoords="offset points", va="center", fontsize=10, color=INK)
    axes.set_yticks(range(len(values)), list(values))
    axes.set_ylim(len(values) - 0.4, -0.6)
    axes.set_xlim(0, 1.75 * max(values.values()))
    axes.set_xticks([])
    axes.spines["bottom"].set_visible(False)


def _title(figure, products: list[dict], facts: dict) -> None:
    best = products[-2] if len(products) > 1 else products[-1]
    times = _times(best, "card" in facts)
    words = [f"{human_ratio(times[name] / times['SNACK'])} as fast as {name}" for name in ("dense + mask", "dense") if name in times]
    figure.text(0.035, 0.925, f"A layer at {100 * best['sparsity']:g} %: " + "  ·  ".join(words), fontsize=19, fontweight="bold", color=INK)
    how = f"y = x Wᵀ, {best['out']:,} × {best['in']:,}, batch {best['batch']}, float32; in brackets: how many times our time. "
    where = facts.get("card") or f"{facts['cpu']}, {facts['threads']} threads"
    figure.text(0.035, 0.882, f"{how}{where}, PyTorch {facts['torch']}", fontsize=11.5, color=GREY)
