"""Which fraction of a layer's connections an update replaces.

A schedule is any callable (step, t_end) -> fraction in [0, 1]: `step` counts optimiser steps from 1, `t_end` is the step at
which updates cease (None: never).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Real

from ..errors import SnackError

Schedule = Callable[[int, "int | None"], float]


def check_fraction(fraction: object, who: str) -> float:
    """`fraction` as float; SnackError unless it is a number in [0, 1]."""
    is_number = isinstance(fraction, Real) and not isinstance(fraction, bool)
    if not is_number or not 0.0 <= float(fraction) <= 1.0:  # NaN fails the comparison
        raise SnackError(
            f"{who}: drop_fraction {fraction!r} is not a number between 0 and 1; it is the part of a layer's connections to replace."
        )
    return float(fraction)


@dataclass(frozen=True)
class Constant:
    """The same fraction at every update (zeta of SET, Mocanu et al. 2018)."""

    fraction: float

    def __post_init__(self):
        check_fraction(self.fraction, "Constant")

    def __call__(self, step: int, t_end: int | None) -> float:
        return self.fraction


@dataclass(frozen=True)
class Cosine:
    """fraction / 2 * (1 + cos(pi * step / t_end)): falls to 0 at t_end (RigL, Evci et al. 2020, eq. 1). Needs t_end."""

    fraction: float
    needs_t_end = True

    def __post_init__(self):
        check_fraction(self.fraction, "Cosine")

    def __call__(self, step: int, t_end: int | None) -> float:
        return self.fraction / 2 * (1 + math.cos(math.pi * step / t_end))
