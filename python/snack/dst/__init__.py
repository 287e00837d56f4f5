"""Dynamic sparse training: connections are dropped and grown while a network trains; their number stays."""

from .presets import SET, RigL, Static
from .rules import Context, GradientGrowth, needs_gradient
from .schedules import Constant, Cosine
from .stepper import DST, Update

__all__ = ["DST", "SET", "Constant", "Context", "Cosine", "GradientGrowth", "RigL", "Static", "Update", "needs_gradient"]
