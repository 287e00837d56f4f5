"""Pictures of sparse layers and of how they were trained; updates for TensorBoard. Needs matplotlib (not for TensorBoard) when called.

Every picture is drawn into the matplotlib Axes given as `ax=`, or into a new figure of its own, and the Axes are returned. pyplot is never
used, so nothing is shown and no global state changes: `axes.figure.savefig("a.png")` writes the picture, and a notebook shows `axes.figure`.
"""

from .history import exploration, overlap
from .model import connectivity, degrees, density
from .tensorboard import TensorBoardLog

__all__ = ["TensorBoardLog", "connectivity", "degrees", "density", "exploration", "overlap"]
