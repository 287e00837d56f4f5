"""How many connections each layer gets from a global budget. Integer arithmetic only: the sum is exact, on every machine.

`uniform`: the same density everywhere. `er` (Mocanu et al. 2018, eq. 1): density proportional to (out + in) / (out * in).
`erk` (Evci et al. 2020) adds the kernel's extents for convolutions; for linear layers it is the same as `er`.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import SnackError

DISTRIBUTIONS = ("uniform", "er", "erk")


def share(budget: int, weights: Sequence[int]) -> list[int]:
    """`budget` split in proportion to integer `weights` by largest remainder (ties: the earlier one); sums to `budget`."""
    total = sum(weights)
    if total == 0:
        return [0] * len(weights)
    counts = [budget * weight // total for weight in weights]
    by_remainder = sorted(range(len(weights)), key=lambda i: -(budget * weights[i] % total))
    for i in by_remainder[: budget - sum(counts)]:
        counts[i] += 1
    return counts


def allocate(shapes: Sequence[tuple[int, int]], sparsity: float, distribution: str) -> tuple[list[int], list[bool]]:
    """Connections of every layer, together exactly round((1 - sparsity) * positions of all layers).

    Args:
        shapes: (out, in) of every layer. sparsity: in [0, 1). distribution: one of `DISTRIBUTIONS`.

    Returns: (connections of each layer, whether it overflowed: `er` asked for more than it has positions, so it is full
        and the others share what is left).
    """
    if distribution not in DISTRIBUTIONS:
        raise SnackError(f"sparsify: distribution {distribution!r} is unknown; choose one of {', '.join(DISTRIBUTIONS)}.")
    positions = [out * in_ for out, in_ in shapes]
    budget = round((1.0 - sparsity) * sum(positions))
    if distribution == "uniform":
        return share(budget, positions), [False] * len(shapes)
    weights = [out + in_ if out * in_ else 0 for out, in_ in shapes]
    full: set[int] = set()
    while True:
        rest = [i for i in range(len(shapes)) if i not in full]
        left = budget - sum(positions[i] for i in full)
        total = sum(weights[i] for i in rest)
        overflowing = [i for i in rest if positions[i] and left * weights[i] >= positions[i] * total]
        if not overflowing:
            break
        full.update(overflowing)
    counts = list(positions)
    for i, count in zip(rest, share(left, [weights[i] for i in rest])):
        counts[i] = count
    return counts, [i in full for i in range(len(shapes))]


def erdos_renyi(shapes: Sequence[tuple[int, int]], epsilon: float) -> tuple[list[int], list[bool]]:
    """round(epsilon * (out + in)) connections for every layer (Mocanu et al. 2018, eq. 1), and whether that is all of its positions or more."""
    counts = [min(round(epsilon * (out + in_)), out * in_) for out, in_ in shapes]
    return counts, [count == out * in_ > 0 for count, (out, in_) in zip(counts, shapes)]
