"""Where connections have been: overlap of an update and exploration of a layer (in-time over-parameterisation, Liu et al. 2021, eq. 3).

Costs one sorted list of positions a layer, on the CPU, and its comparison at every update; nothing between updates.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..nn import SparseLinear


def positions(layer: SparseLinear) -> Tensor:
    """Linear positions (row-major) of all connections, int64, ascending, on the CPU."""
    rows, cols, _ = layer.to_coo()
    return (rows.long() * layer.in_features + cols.long()).cpu().sort().values


def _common(a: Tensor, b: Tensor) -> int:
    """How many entries two ascending lists without repetition share."""
    if not len(a) or not len(b):
        return 0
    place = torch.searchsorted(b, a).clamp_(max=len(b) - 1)
    return int((b[place] == a).sum())


class Tracker:
    """Follows layers from update to update."""

    def __init__(self):
        self.seen: dict[str, Tensor] = {}  # positions that ever had a connection
        self._last: dict[str, Tensor] = {}

    def begin(self, layers: dict[str, SparseLinear]) -> None:
        """Note where the connections are before an update (and at the start)."""
        for name, layer in layers.items():
            self._last[name] = positions(layer)
            self._see(name)

    def end(self, layers: dict[str, SparseLinear]) -> tuple[dict[str, float], dict[str, float]]:
        """(overlap, explored) by layer, after an update."""
        overlap, explored = {}, {}
        for name, layer in layers.items():
            before, now = self._last[name], positions(layer)
            overlap[name] = _common(before, now) / len(before) if len(before) else 1.0
            self._last[name] = now
            self._see(name)
            explored[name] = len(self.seen[name]) / max(1, layer.out_features * layer.in_features)
        return overlap, explored

    def _see(self, name: str) -> None:
        before = self.seen.get(name)
        self.seen[name] = self._last[name] if before is None else torch.cat([before, self._last[name]]).unique()
