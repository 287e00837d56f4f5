"""Pictures of a topology: where the connections are, how many each neuron has, how dense the layers are.

What is read is the list of connections. Cost and memory are O(nnz), whatever out * in is.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ..errors import SnackError, require
from . import look

if TYPE_CHECKING:
    from ..formats import Pattern

DOTS = 20_000
"""Up to so many connections are drawn one by one."""
BLOCKS = 256
"""More than that are counted in at most so many blocks a side."""
DEGREE_BARS = 40


# ---- what is drawn ----


def _pattern(layer: object, who: str) -> Pattern:
    """The topology of a layer, or the pattern itself; SnackError for anything else."""
    from ..formats import Pattern  # here, so that the command line can speak where the compiled operators are missing
    from ..nn import SparseLinear

    if isinstance(layer, nn.Module) and not isinstance(layer, SparseLinear):
        sparse = [name for name, module in layer.named_modules() if isinstance(module, SparseLinear)]
        listed = ", ".join(map(repr, sparse[:6])) + (", ..." if len(sparse) > 6 else "")
        advice = f"give one of its sparse layers: {listed}" if sparse else "it has no sparse layer; call snack.sparsify first"
        raise SnackError(f"{who}: a {type(layer).__name__} was given, expected a SparseLinear or a Pattern; {advice}.")
    require(
        isinstance(layer, (SparseLinear, Pattern)),
        f"{who}: a {type(layer).__name__} was given, expected a SparseLinear or a Pattern; of another matrix, make one with snack.formats.",
    )
    require(not layer.index.is_meta, f"{who}: the layer is on the meta device and has no topology yet; give it memory with to_empty first.")
    return layer.pattern if isinstance(layer, SparseLinear) else layer


def _patterns(model: object, who: str) -> dict[str, Pattern]:
    """{name: pattern} of the sparse layers of a model or of a mapping; SnackError when there is none."""
    from ..nn import SparseLinear

    if isinstance(model, Mapping):
        named = {str(name): layer for name, layer in model.items()}
    elif isinstance(model, nn.Module):
        named = {name or "(model)": module for name, module in model.named_modules() if isinstance(module, SparseLinear)}
    else:
        raise SnackError(f"{who}: a {type(model).__name__} was given, expected a model, or a dict of layers or patterns by name.")
    require(bool(named), f"{who}: there is no sparse layer to draw; call snack.sparsify(model, sparsity=...) first.")
    return {name: _pattern(layer, who) for name, layer in named.items()}


def _share(density: float) -> str:
    return f"{100 * density:.3g} %"


def _counted(nnz: int) -> str:
    return f"{nnz:,} connection{'' if nnz == 1 else 's'}"


def _titled(name: str, title: str) -> str:
    return f"{name}: {title}" if name else title[0].upper() + title[1:]


# ---- connectivity ----


def connectivity(layer: object, shape: object = None, ax=None, name: str = ""):
    """Where the connections of a layer are.

    Without `shape`: the matrix, an output a row and an input a column. Up to `DOTS` connections are dots, exactly where they are; more
    are counted in blocks of equal size, at most `BLOCKS` a side, and the colour is the density of a block.
    With `shape`: the connections of every input, as the image that the input is (SET's input-pixel map, Mocanu et al. 2018).

    Args:
        layer: a `SparseLinear` or a `Pattern`, on any device.
        shape: (height, width) or (height, width, channels) of the input, in that order in memory; channels are added up.
        ax: matplotlib Axes to draw into (default: a new figure). name: what the title begins with.

    Returns: the Axes; `ax.figure.savefig("a.png")` writes the picture.
    Raises: SnackError when matplotlib is missing, the layer is something else, or the shape does not fit it.
    """
    who = "plot.connectivity"
    pattern = _pattern(layer, who)
    size = None if shape is None else _image_shape(shape, pattern.shape[1], who)
    (axes,) = look.panels(ax, 1, who, 6.4, 5.0)
    if size is not None:
        _draw_image(axes, pattern, size, name)
        return axes
    out, in_ = pattern.shape
    rows, cols = (part.cpu() for part in pattern.coordinates())
    if pattern.nnz <= DOTS:
        _draw_dots(axes, rows, cols, pattern.shape)
    else:
        _draw_blocks(axes, rows, cols, pattern.shape)
    look.style(axes, _titled(name, f"connections, {out:,} × {in_:,}"))
    look.label(axes, f"input\n{_counted(pattern.nnz)}, density {_share(pattern.density)}", "output")
    axes.set(xlim=(-0.5, max(in_, 1) - 0.5), ylim=(max(out, 1) - 0.5, -0.5))
    _whole_ticks(axes)
    return axes


def _image_shape(shape: object, features: int, who: str) -> tuple[int, int, int]:
    try:
        extents = [int(extent) for extent in shape]  # type: ignore[attr-defined]
    except (TypeError, ValueError):
        extents = []
    require(
        len(extents) in (2, 3) and min(extents) > 0 and list(shape) == extents,
        f"{who}: shape {shape!r} is not (height, width) or (height, width, channels) of the input, such as (28, 28).",
    )
    height, width, channels = (*extents, 1)[:3]
    require(
        height * width * channels == features,
        f"{who}: an image of shape {tuple(extents)} has {height * width * channels:,} values and the layer {features:,} inputs; "
        "they must be as many.",
    )
    return height, width, channels


def _draw_image(axes, pattern: Pattern, size: tuple[int, int, int], name: str) -> None:
    height, width, channels = size
    counts = torch.bincount(pattern.cols.cpu(), minlength=height * width * channels)
    pixels = counts.reshape(height, width, channels).sum(2)
    drawn = axes.imshow(pixels.numpy(), cmap="viridis", vmin=0, vmax=max(1, int(pixels.max())), interpolation="nearest")
    look.style(axes, _titled(name, "connections of each input pixel"))
    look.label(axes, f"{_counted(pattern.nnz)} to {pattern.shape[0]:,} outputs", "")
    axes.set(xticks=[], yticks=[])
    axes.spines[:].set_visible(False)
    _colour_bar(axes, drawn, "connections of a pixel", whole=True)


def _draw_dots(axes, rows: Tensor, cols: Tensor, shape: tuple[int, int]) -> None:
    """A rectangle a connection, of its position's size as long as that can be seen."""
    box, points = axes.get_window_extent(), 72 / axes.figure.dpi
    width, height = box.width * points, box.height * points
    least = min(max(math.sqrt(0.15 * width * height / max(rows.numel(), 1)), 1.0), 4.0)
    x, y = (min(max(0.8 * side / max(extent, 1), least), 10.0) for side, extent in ((width, shape[1]), (height, shape[0])))
    corners = [(-x, -y), (x, -y), (x, y), (-x, y), (-x, -y)]
    axes.plot(cols.numpy(), rows.numpy(), linestyle="none", marker=corners, markersize=max(x, y), markeredgewidth=0, color=look.BLUE)
    if rows.numel() == 0:
        axes.text(0.5, 0.5, "no connections", transform=axes.transAxes, ha="center", va="center", fontsize=12, color=look.GREY)


def _draw_blocks(axes, rows: Tensor, cols: Tensor, shape: tuple[int, int]) -> None:
    """The density of blocks. Those at the right and lower edge may be cut off, and are divided by the positions that they have."""
    most = BLOCKS if max(shape) <= BLOCKS else min(BLOCKS, math.isqrt(rows.numel() // 4))  # four connections a block, else one sees noise
    (high, down), (wide, across) = (_blocks(extent, most) for extent in shape)
    block = torch.div(rows, high, rounding_mode="floor").long() * across + torch.div(cols, wide, rounding_mode="floor")
    counts = torch.bincount(block, minlength=down * across).reshape(down, across).double()
    heights = torch.full((down, 1), float(high), dtype=torch.float64)
    widths = torch.full((1, across), float(wide), dtype=torch.float64)
    heights[-1], widths[0, -1] = shape[0] - high * (down - 1), shape[1] - wide * (across - 1)
    extent = (-0.5, wide * across - 0.5, high * down - 0.5, -0.5)
    density = (counts / (heights * widths)).numpy()
    drawn = axes.imshow(density, cmap="Blues", vmin=0, extent=extent, aspect="auto", interpolation="nearest")
    if high == wide == 1:
        return  # white or blue: there or not
    scale, unit = (100, "%") if density.max() >= 1e-5 else (1e6, "in a million positions")
    bar = _colour_bar(axes, drawn, f"density of {high:,} × {wide:,} positions ({unit})")
    bar.ax.yaxis.set_major_formatter(lambda value, _: f"{scale * value:g}")


def _blocks(extent: int, most: int) -> tuple[int, int]:
    """(positions of a block, blocks) of one side."""
    side = math.ceil(extent / most)
    return side, math.ceil(extent / side)


def _colour_bar(axes, drawn, words: str, whole: bool = False):
    from matplotlib.ticker import MaxNLocator

    bar = axes.figure.colorbar(drawn, ax=axes, shrink=0.9)
    bar.outline.set_visible(False)
    bar.ax.tick_params(labelsize=9.5, colors=look.INK, length=0)
    bar.set_label(words, fontsize=10, color=look.INK)
    if whole:
        bar.ax.yaxis.set_major_locator(MaxNLocator(integer=True))
    return bar


def _whole_ticks(axes, sides: str = "xy") -> None:
    """Few ticks, at whole numbers, with their thousands apart."""
    from matplotlib.ticker import MaxNLocator

    for side in sides:
        axis = getattr(axes, f"{side}axis")
        axis.set_major_locator(MaxNLocator(nbins=6, integer=True, min_n_ticks=1, steps=[1, 2, 2.5, 5, 10]))
        axis.set_major_formatter(lambda value, _: f"{value:,.0f}")


# ---- degrees ----


def degrees(layer: object, ax=None, name: str = ""):
    """How many connections the neurons have: a histogram of fan-in (of the outputs) and one of fan-out (of the inputs).

    layer: a `SparseLinear` or a `Pattern`. ax: two matplotlib Axes (default: a new figure). name: what the title begins with.

    Returns: (Axes of fan-in, Axes of fan-out). Raises: SnackError as `connectivity`.
    """
    who = "plot.degrees"
    pattern = _pattern(layer, who)
    axes = look.panels(ax, 2, who, 9.6, 4.0)
    rows, cols = (part.cpu() for part in pattern.coordinates())
    _draw_degrees(axes[0], rows, pattern.shape[0], _titled(name, "fan-in"), "output")
    _draw_degrees(axes[1], cols, pattern.shape[1], _titled(name, "fan-out"), "input")
    return tuple(axes)


def _draw_degrees(axes, ends: Tensor, neurons: int, title: str, what: str) -> None:
    """Bars of equal width over whole numbers of connections. Neurons without one are counted, not listed: there may be 2^31."""
    found = torch.unique(ends, return_counts=True)[1]
    unconnected = neurons - found.numel()
    low = 0 if unconnected or neurons == 0 else int(found.min())
    high = int(found.max()) if found.numel() else 0
    width = math.ceil((high - low + 1) / DEGREE_BARS)
    bars = torch.bincount((found - low) // width, minlength=math.ceil((high - low + 1) / width))
    if unconnected:
        bars[0] += unconnected
    left = low - 0.5 + width * torch.arange(bars.numel())
    axes.bar(left.numpy(), bars.numpy(), width=width, align="edge", color=look.BLUE, edgecolor="white", linewidth=0.5)
    look.style(axes, title)
    mean = ends.numel() / neurons if neurons else 0.0
    axes.axvline(mean, color=look.VERMILION, linestyle=(0, (5, 2)), linewidth=1.6, label=f"mean {mean:.3g}")
    axes.legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), frameon=False, fontsize=10, borderaxespad=0.2)
    where = f"{low:,} to {high:,}" if high > low else f"{low:,}"
    look.label(axes, f"connections of an {what}\n{where}; {unconnected:,} of {neurons:,} have none", f"{what}s")
    axes.set_xlim(low - 0.5 - 0.02 * (high - low), low - 0.5 + width * bars.numel() + 0.02 * (high - low))
    axes.set_ylim(0, 1.06 * max(1, int(bars.max())))
    _whole_ticks(axes)


# ---- density ----


def density(model: object, ax=None):
    """The density of every sparse layer, as bars, and that of all of them together.

    model: a model with sparse layers, or a dict {name: SparseLinear or Pattern}. ax: matplotlib Axes (default: a new figure, as high as
    the layers need).

    Returns: the Axes. Raises: SnackError when matplotlib is missing or there is no sparse layer.
    """
    patterns = _patterns(model, "plot.density")
    (axes,) = look.panels(ax, 1, "plot.density", 8.0, min(24.0, 1.5 + 0.32 * len(patterns)))
    densities = [100 * pattern.density for pattern in patterns.values()]
    axes.barh(range(len(patterns)), densities, height=0.68, color=look.BLUE)
    positions = sum(pattern.shape[0] * pattern.shape[1] for pattern in patterns.values())
    nnz = sum(pattern.nnz for pattern in patterns.values())
    overall = nnz / positions if positions else 0.0
    axes.axvline(100 * overall, color=look.VERMILION, linestyle=(0, (5, 2)), linewidth=1.4, zorder=0)
    every = _label_every(axes, len(patterns))
    for row, (pattern, value) in enumerate(zip(patterns.values(), densities)):
        if every == 1:
            look.annotate(axes, f"{_share(pattern.density)}, {pattern.nnz:,}", value, row)
    names = [f"{name}  ({p.shape[0]:,} × {p.shape[1]:,})" for name, p in patterns.items()]
    look.style(axes, "Density of each layer, and its connections")
    look.label(axes, f"density (%)\ndashed: {_share(overall)} in all, {_counted(nnz)}", "")
    axes.set_yticks(range(0, len(names), every), names[::every], fontsize=9.5)
    axes.set(ylim=(len(names) - 0.45, -0.55), xlim=(0, 1.35 * max(*densities, 1e-9)))
    axes.xaxis.set_major_formatter("{x:g}")
    return axes


def _label_every(axes, count: int) -> int:
    """Every how many-th of `count` rows there is room for a line of text."""
    inches = axes.get_window_extent().height / axes.figure.dpi
    return max(1, math.ceil(count * 0.17 / max(inches, 0.1)))
