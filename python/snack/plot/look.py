"""The look that all pictures share: colours that colour-blind readers tell apart, plain axes, figures without pyplot's global state."""

from __future__ import annotations

from pathlib import Path

from ..errors import SnackError

INK, GREY = "#222222", "#555555"
# Okabe and Ito's palette (2008), without its yellow, which is too pale for a line on white.
BLUE, ORANGE, GREEN, VERMILION, PURPLE, SKY = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9"
PALETTE = (BLUE, ORANGE, GREEN, VERMILION, PURPLE, SKY, INK)
DASHES = ("solid", (0, (5, 2)), (0, (1.5, 1.2)), (0, (6, 1.5, 1.5, 1.5)))


def require_matplotlib(otherwise: str = "") -> None:
    """Raises SnackError where matplotlib is missing; ``otherwise`` ends the sentence."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise SnackError(f"a picture needs matplotlib, which is not installed: pip install 'snack-sparse[plot]'{otherwise}") from error


def require_picture(path, otherwise: str = "") -> None:
    """Raises SnackError where matplotlib is missing or does not know the suffix of ``path``; call it before the work to be drawn."""
    require_matplotlib(otherwise)
    from matplotlib.backend_bases import FigureCanvasBase

    known = sorted(FigureCanvasBase.get_supported_filetypes())
    if Path(path).suffix.lower().removeprefix(".") not in known:
        raise SnackError(f"the figure {path} has no suffix of a picture: expected one of {', '.join(known)}, for example run.png")


def new_figure(width: float, height: float):
    """A Figure of so many inches, with a canvas of its own."""
    require_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=120, facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def panels(ax, count: int, who: str, width: float, height: float, below: bool = False) -> list:
    """``count`` Axes: those given as ``ax`` (one, or as many in a sequence), else those of a new figure, side by side or one below the other.

    Raises: SnackError when matplotlib is missing, or ``ax`` is something else.
    """
    require_matplotlib()
    from matplotlib.axes import Axes

    if ax is None:
        figure = new_figure(width, height)
        return list(figure.subplots(count if below else 1, 1 if below else count, sharex=below, squeeze=False).flat)
    if isinstance(ax, Axes):
        given = [ax]
    else:
        given = list(getattr(ax, "flat", ax)) if hasattr(ax, "__iter__") else [None]
    if len(given) != count or not all(isinstance(a, Axes) for a in given):
        expected = "one matplotlib Axes" if count == 1 else f"a sequence of {count} matplotlib Axes"
        raise SnackError(f"{who}: ax is a {type(ax).__name__}, expected {expected}; leave it out for a figure of its own.")
    return given


def style(axes, title: str) -> None:
    """A bold title on the left, no box, no tick marks."""
    axes.set_title(title, loc="left", fontsize=12.5, fontweight="bold", color=INK)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color("#aaaaaa")
    axes.tick_params(colors=INK, length=0, labelsize=10.5)


def label(axes, x: str, y: str) -> None:
    """Names, with units, of both axes."""
    axes.set_xlabel(x, fontsize=10.5, color=INK)
    axes.set_ylabel(y, fontsize=10.5, color=INK)


def annotate(axes, words: str, x: float, y: float) -> None:
    """Words to the right of the end of a bar, over whatever line is there."""
    blank = {"facecolor": "white", "edgecolor": "none", "pad": 1.0}
    axes.annotate(words, (x, y), xytext=(5, 0), textcoords="offset points", va="center", fontsize=9.5, color=INK, bbox=blank)


def save(figure, path) -> Path:
    """Writes the picture; SnackError where that is not possible."""
    try:
        figure.savefig(path)
    except OSError as error:
        raise SnackError(f"the figure {path} cannot be written ({error}): give a .png file in a folder that you may write to") from error
    return Path(path)
