"""Which connections of a dense matrix stay: exact counts, deterministic ties."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import ops
from ..errors import SnackError, require
from ..formats import Pattern, from_mask
from ..formats.pattern import check_sparsity

HOW = ("magnitude", "random", "row", "nonzero")
DRAWN = ("random", "row")
"""Those that look at no weight."""

_SCORES = 2**22  # of a panel of rows that are drawn at a time


def check_how(how: str) -> None:
    """SnackError unless `how` is known."""
    if how not in HOW:
        raise SnackError(f"how={how!r} is unknown; choose one of {', '.join(HOW)}.")


def draw_seed(generator: torch.Generator | None) -> int:
    """A 63-bit seed from PyTorch's random state (or `generator`), so torch.manual_seed governs topologies too."""
    device = generator.device if generator is not None else "cpu"
    return int(torch.randint(0, 2**63 - 1, (), generator=generator, device=device))


def equal_rows(shape: tuple[int, int], nnz: int, seed: int) -> Pattern:
    """nnz // out uniformly random positions in every row of `shape` (out, in), and one more in each of the first nnz % out rows.

    The same (shape, nnz, seed) gives the same topology everywhere: a row takes the positions p whose draws p of the stream are smallest.
    Time is O(out * in log in), memory that of the result and of one panel of rows.
    """
    out, in_ = shape
    each, more = divmod(nnz, max(1, out))
    counts = torch.full((out,), each, device="cpu")
    counts[:more] += 1
    key, step = ops.random_key(seed), max(1, _SCORES // max(1, in_))
    rows, cols = [torch.empty(0, dtype=torch.int64, device="cpu")], [torch.empty(0, dtype=torch.int64, device="cpu")]
    for begin in range(0, out, step):
        some = torch.arange(begin, min(out, begin + step), device="cpu")
        order = ops.random_uniform(key, some[:, None] * in_ + torch.arange(in_, device="cpu")).argsort(dim=1, stable=True)
        row, place = (torch.arange(in_, device="cpu") < counts[some, None]).nonzero(as_tuple=True)
        rows.append(some[row])
        cols.append(order[row, place])
    return Pattern(torch.cat(rows), torch.cat(cols), shape)


def choose(
    weight: Tensor,
    sparsity: float | None = None,
    mask: Tensor | None = None,
    how: str = "magnitude",
    generator: torch.Generator | None = None,
    nnz: int | None = None,
) -> tuple[Pattern, Tensor]:
    """(pattern, values in slot order) of the entries of `weight` (out, in) that stay; exactly `nnz` where a number is given.

    sparsity, mask, how: as in `SparseLinear.from_dense`. nnz: instead of sparsity.
    """
    check_how(how)
    if mask is not None:
        require(sparsity is None and nnz is None, "from_dense: give either sparsity or mask, not both.")
        require(
            isinstance(mask, Tensor) and mask.shape == weight.shape,
            f"from_dense: the mask has shape {tuple(getattr(mask, 'shape', ()))}, the weight {tuple(weight.shape)}; they must be equal.",
        )
        return from_mask((mask != 0).to(weight.device), weight)
    if how == "nonzero":
        require(sparsity is None and nnz is None, "from_dense: how='nonzero' keeps what is not zero; it takes no sparsity.")
        return from_mask(weight != 0, weight)
    if nnz is None:
        require(sparsity is not None, f"from_dense: how={how!r} needs a sparsity.")
        nnz = round((1.0 - check_sparsity(sparsity, "from_dense")) * weight.numel())
    if how == "magnitude":
        # A stable descending sort keeps equal magnitudes in row-major order.
        order = torch.sort(weight.abs().flatten(), descending=True, stable=True).indices[:nnz]
        keep = torch.zeros(weight.numel(), dtype=torch.bool, device=weight.device)
        keep[order] = True
        return from_mask(keep.view(weight.shape), weight)
    draw = equal_rows if how == "row" else Pattern.random
    pattern = draw(tuple(weight.shape), nnz, draw_seed(generator)).to(weight.device)
    rows, cols = pattern.coordinates()
    return pattern, weight[rows.long(), cols.long()]
