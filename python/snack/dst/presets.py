"""Published methods: a drop rule, a grow rule and a schedule by name."""

from __future__ import annotations

from .schedules import Cosine
from .stepper import DST


class Static(DST):
    """Connections never move: the baseline. Takes the options of the others, so that a script can switch between them."""

    moves = False


class SET(DST):
    """Sparse evolutionary training (Mocanu et al. 2018, Nature Communications 9:2383).

    Drops the fraction of the positive values and of the negative ones nearest to 0, grows uniformly at random.
    drop="magnitude" is the variant that drops the smallest |value| of both signs together. Options: see `DST`.
    """

    default_drop, default_grow = "signed", "uniform"


class RigL(DST):
    """RigL (Evci et al. 2020, ICML, algorithm 1): drops the smallest |value|, grows where the gradient is largest.

    A number as drop_fraction decays by a cosine to 0 at t_end, which is needed then. Options: see `DST`.
    """

    default_drop, default_grow, default_schedule = "magnitude", "gradient", Cosine
