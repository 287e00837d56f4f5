"""Published methods: a drop rule, a grow rule, a schedule and a scope by name. Options: see `DST`."""

from __future__ import annotations

from .pruning import GMP
from .rules import SensitivityDrop
from .schedules import Cosine
from .stepper import DST

__all__ = ["GMP", "ITOP", "MEST", "SET", "SNFS", "SRigL", "RigL", "Static"]


class Static(DST):
    """Connections never move: the baseline. Takes the options of the others, so that a script can switch between them.

    With track=True the history has a record at every step at which another method would move connections: none moved, all are there still.
    """

    moves = False

    def is_update(self, step: int) -> bool:
        """Whether optimiser step number `step` is followed by a record of the topology."""
        return self._tracker is not None and self._is_time(step)

    def _fraction(self, step: int) -> float:
        return 0.0

    def _plan(self, *_) -> list:
        return []


class SET(DST):
    """Sparse evolutionary training (Mocanu et al. 2018, Nature Communications 9:2383).

    Drops the fraction of the positive values and of the negative ones nearest to 0, grows uniformly at random.
    drop="magnitude" is the variant that drops the smallest |value| of both signs together.
    """

    default_drop, default_grow = "signed", "uniform"


class RigL(DST):
    """RigL (Evci et al. 2020, ICML, algorithm 1): drops the smallest |value|, grows where the gradient is largest.

    A number as drop_fraction decays by a cosine to 0 at t_end, which is needed then.
    """

    default_drop, default_grow, default_schedule = "magnitude", "gradient", Cosine


class SNFS(DST):
    """Sparse networks from scratch (Dettmers and Zettlemoyer 2019): drops the smallest |value|, grows where momentum is largest, and
    gives layers with more momentum a connection more of the connections that were dropped.

    The momentum of absent connections is estimated from the last steps before an update, see `MomentumGrowth`; that of live ones
    is the optimiser's. nnz of a layer changes, that of the network does not. The drop fraction decays by a cosine, as RigL's.
    """

    default_drop, default_grow, default_schedule, default_redistribute = "magnitude", "momentum", Cosine, "momentum"


class MEST(DST):
    """MEST (Yuan et al. 2021, NeurIPS): drops where |value| + |gradient| is smallest, grows uniformly at random.

    The drop fraction decays by a cosine to 0 at t_end, which is needed. Differs from the paper in that the fraction falls smoothly, and
    that no data are left out.
    """

    default_drop, default_grow, default_schedule = SensitivityDrop(), "uniform", Cosine


class ITOP(DST):
    """In-time over-parameterisation (Liu et al. 2021, ICML): SET or RigL that explores more: half of the connections, more steps between
    updates, and R_s is kept in the history. grow="gradient" is the paper's RigL-ITOP, the default its SET-ITOP."""

    default_drop, default_grow, default_fraction, default_every, default_track = "magnitude", "uniform", 0.5, 1500, True


class SRigL(DST):
    """Structured RigL (Lasby et al. 2024, ICLR): as RigL, and the number of connections of every row (constant fan-in) stays.

    Start from rows of one length: snack.sparsify(model, how="row"). Neurons are not ablated: a row that loses all of its connections
    grows as many anew.
    """

    default_drop, default_grow, default_schedule, default_scope = "magnitude", "gradient", Cosine, "row"
