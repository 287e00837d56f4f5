"""Dynamic sparse training: connections are dropped and grown while a network trains."""

from .capture import Recording
from .history import Update
from .presets import GMP, ITOP, MEST, SET, SNFS, RigL, SRigL, Static
from .resume import load_training, save_training
from .rules import Context, GradientGrowth, MomentumGrowth, SensitivityDrop, needs_gradient
from .schedules import Constant, Cosine, Exponential, Linear
from .stepper import DST

__all__ = [
    "DST", "GMP", "ITOP", "MEST", "SET", "SNFS", "Constant", "Context", "Cosine", "Exponential", "GradientGrowth", "Linear", "MomentumGrowth",
    "Recording", "RigL", "SRigL", "SensitivityDrop", "Static", "Update", "load_training", "needs_gradient", "save_training",
]
