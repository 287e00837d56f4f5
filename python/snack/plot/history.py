"""Pictures of a training run with dynamic sparse training, from the records that `dst.history` keeps."""

from __future__ import annotations

from ..errors import SnackError, require
from . import look

MANY = 12
"""So many names fit into a legend; of more layers, evenly chosen ones are named."""


def updates_of(source: object, who: str, since: int = 0) -> list:
    """The records from number `since` on, of a stepper (its `history`) or of a list of records; SnackError when it is neither.

    Older ones are not looked at, so asking after every step costs the same at the end of a long run as at its beginning.
    """
    found = getattr(source, "history", source)
    new: list = []
    for update in reversed(found) if isinstance(found, (list, tuple)) else [None]:
        require(
            hasattr(update, "number") and hasattr(update, "step"),
            f"{who}: a {type(source).__name__} was given, expected a stepper such as snack.SET, or its history, a list of updates.",
        )
        if update.number < since:
            break
        new.append(update)
    return new[::-1]


def exploration(source: object, ax=None):
    """Rs of every layer after each update: the part of all positions that ever had a connection (ITOP, Liu et al. 2021).

    source: a stepper made with `track=True`, or its history. ax: matplotlib Axes (default: a new figure).

    Returns: the Axes. Raises: SnackError when matplotlib is missing, there is no update, or the updates were not tracked.
    """
    who = "plot.exploration"
    series = _series(source, "explored", who)
    (axes,) = look.panels(ax, 1, who, 8.0, 4.5)
    look.style(axes, "Positions that ever had a connection (Rs)")
    _lines(axes, series)
    look.label(axes, "optimiser step", "part of all positions (%)")
    axes.set_ylim(bottom=0)
    return axes


def overlap(source: object, ax=None):
    """What each update left of every layer's connections, and below it, how many connections it moved.

    source: a stepper made with `track=True`, or its history. ax: two matplotlib Axes (default: a new figure).

    Returns: (Axes of the overlap, Axes of the connections moved). Raises: SnackError as `exploration`.
    """
    who = "plot.overlap"
    series = _series(source, "overlap", who)
    above, below = look.panels(ax, 2, who, 8.0, 6.0, below=True)
    look.style(above, "Connections that outlived each update")
    _lines(above, series)
    look.label(above, "", "part of those before (%)")

    updates = updates_of(source, who)
    steps = [update.step for update in updates]
    counts = {"dropped": [update.dropped for update in updates], "grown": [update.grown for update in updates]}
    if counts["dropped"] == counts["grown"]:
        look.style(below, "Connections dropped in all layers, and as many grown")
        below.plot(steps, counts["dropped"], color=look.INK, **_line(steps))
    else:
        look.style(below, "Connections dropped and grown in all layers")
        looks = zip(counts.items(), (look.INK, look.GREEN), look.DASHES)
        _legend(below, {what: below.plot(steps, n, color=colour, linestyle=dash, **_line(steps))[0] for (what, n), colour, dash in looks})
    look.label(below, "optimiser step", "connections")
    below.set_ylim(bottom=0)
    below.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    _steps(below, steps)
    return above, below


def _series(source: object, field: str, who: str) -> dict[str, tuple[list[int], list[float]]]:
    """{layer: (steps, percentages)} of a tracked field."""
    updates = updates_of(source, who)
    require(bool(updates), f"{who}: there is no update in the history yet; draw it after the first one.")
    tracked = [update for update in updates if getattr(update, field) is not None]
    if not tracked:
        raise SnackError(f"{who}: the updates have no record of this; make the stepper with track=True, which keeps it.")
    series: dict[str, tuple[list[int], list[float]]] = {}
    for update in tracked:
        for name, value in getattr(update, field).items():
            steps, values = series.setdefault(name, ([], []))
            steps.append(update.step)
            values.append(100 * value)
    return series


def _lines(axes, series: dict[str, tuple[list[int], list[float]]]) -> None:
    """A line a layer. Few layers: the palette. Many: from the first to the last along a scale, told apart by depth."""
    from matplotlib import colormaps

    is_few, handles = len(series) <= len(look.PALETTE), {}
    for number, (name, (steps, values)) in enumerate(series.items()):
        colour = look.PALETTE[number] if is_few else colormaps["viridis"](0.92 * number / (len(series) - 1))
        dash = look.DASHES[number % len(look.DASHES)]
        (handles[name],) = axes.plot(steps, values, color=colour, linestyle=dash, **_line(steps))
    names = list(series)
    chosen = names if len(names) <= MANY else [names[round(i * (len(names) - 1) / (MANY - 1))] for i in range(MANY)]
    _legend(axes, {name: handles[name] for name in chosen}, "layer" if chosen == names else f"{MANY} of {len(names)} layers")
    axes.yaxis.set_major_formatter("{x:g}")
    _steps(axes, [step for steps, _ in series.values() for step in steps])


def _legend(axes, handles: dict[str, object], title: str | None = None) -> None:
    """Beside the data, never on it."""
    size = 7.5 if len(handles) > 10 else 10
    names = [name or "(model)" for name in handles]
    place = {"loc": "upper left", "bbox_to_anchor": (1.0, 1.0)}
    axes.legend(list(handles.values()), names, **place, title=title, title_fontsize=size, fontsize=size, frameon=False, handlelength=2.6)


def _steps(axes, steps: list[int]) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(nbins=7, integer=True, min_n_ticks=1, steps=[1, 2, 2.5, 5, 10]))
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.grid(axis="y", color="#e5e5e5", linewidth=0.8)
    if min(steps) == max(steps):
        axes.set_xlim(steps[0] - 1, steps[0] + 1)


def _line(steps: list) -> dict[str, object]:
    """A dot an update while they can be told apart; a single one must be seen."""
    return {"linewidth": 1.8, "marker": "o" if len(steps) <= 30 else None, "markersize": 5}
