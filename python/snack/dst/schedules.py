"""Which fraction of a layer's connections an update replaces, and how sparse a network that is pruned gradually should be.

A drop schedule is any callable (step, t_end) -> fraction in [0, 1]: `step` counts optimiser steps from 1, `t_end` is the step at
which updates cease (None: never). The ones below are plain values: they can be compared, printed and saved.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from numbers import Real

from ..errors import SnackError, require

Schedule = Callable[[int, "int | None"], float]


def check_fraction(fraction: object, who: str, what: str = "drop_fraction") -> float:
    """`fraction` as float; SnackError unless it is a number in [0, 1]."""
    is_number = isinstance(fraction, Real) and not isinstance(fraction, bool)
    if not is_number or not 0.0 <= float(fraction) <= 1.0:  # NaN fails the comparison
        raise SnackError(f"{who}: {what} {fraction!r} is not a number between 0 and 1; it is the part of a layer's connections to replace.")
    return float(fraction)


def _check_positive(value: object, who: str, what: str) -> None:
    is_number = isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
    require(is_number and value > 0, f"{who}: {what} {value!r} must be a number above 0.")


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


@dataclass(frozen=True)
class Linear:
    """fraction * (1 - step / t_end) ** power: falls to 0 at t_end (RigL's "inverse power", Evci et al. 2020, appendix G). Needs t_end."""

    fraction: float
    power: float = 1.0
    needs_t_end = True

    def __post_init__(self):
        check_fraction(self.fraction, "Linear")
        _check_positive(self.power, "Linear", "power")

    def __call__(self, step: int, t_end: int | None) -> float:
        return self.fraction * max(0.0, 1.0 - step / t_end) ** self.power


@dataclass(frozen=True)
class Exponential:
    """fraction * 2 ** (-step / half_life): halves every `half_life` optimiser steps, and never ends by itself."""

    fraction: float
    half_life: float

    def __post_init__(self):
        check_fraction(self.fraction, "Exponential")
        _check_positive(self.half_life, "Exponential", "half_life")

    def __call__(self, step: int, t_end: int | None) -> float:
        return self.fraction * 2.0 ** (-step / self.half_life)


SCHEDULES: dict[str, type] = {kind.__name__: kind for kind in (Constant, Cosine, Linear, Exponential)}


def to_state(schedule: Schedule) -> dict[str, object] | None:
    """A schedule of this module as plain numbers; None for a function of the user's."""
    return {"kind": type(schedule).__name__, **asdict(schedule)} if type(schedule) in SCHEDULES.values() else None


def from_state(state: object, who: str) -> Schedule:
    """The schedule that `to_state` described. Raises: SnackError when it is not one."""
    kind = SCHEDULES.get(state.get("kind")) if isinstance(state, dict) else None
    require(kind is not None, f"{who}: the state's schedule {state!r} is unknown; known are {', '.join(SCHEDULES)}.")
    try:
        return kind(**{key: value for key, value in state.items() if key != "kind"})
    except TypeError:
        raise SnackError(f"{who}: the state's schedule {state!r} does not fit {kind.__name__}; the file is damaged.") from None


def cubic(initial: float, final: float, step: int, start: int, t_end: int) -> float:
    """Sparsity of gradual pruning at `step`: final + (initial - final) * (1 - (step - start) / (t_end - start)) ** 3, held at its ends.

    Source: Zhu and Gupta 2017, eq. 1.
    """
    if step >= t_end:
        return final
    left = 1.0 - max(0, step - start) / (t_end - start)
    return final + (initial - final) * left**3
