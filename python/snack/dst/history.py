"""What updates did: one plain record each.

On a card an update does not wait for its own results: the numbers of connections that moved are read when somebody looks at them.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping

from torch import Tensor


class Update:
    """Record of one topology update.

    Attributes:
        step: optimiser steps taken when it happened. number: of the update, from 0.
        fraction: as scheduled; with `GMP` the sparsity aimed at.
        layers, grown_layers: connections dropped and grown in every trained sparse layer, by name.
        nnz: connections of every layer after the update.
        seconds: wall time of the host.
        overlap, explored: with track=True, else None: by layer, the part of the connections before the update that are there after it,
            too; and the part of all positions that ever had a connection (R_s of in-time over-parameterisation, Liu et al. 2021).
    """

    __slots__ = ("step", "number", "fraction", "nnz", "seconds", "overlap", "explored", "_dropped", "_grown", "_who")

    def __init__(
        self,
        step: int,
        number: int,
        fraction: float,
        dropped: Mapping[str, int | Tensor],
        grown: Mapping[str, int | Tensor],
        nnz: Mapping[str, int],
        seconds: float = 0.0,
        overlap: Mapping[str, float] | None = None,
        explored: Mapping[str, float] | None = None,
        who: str = "DST",
    ):
        self.step, self.number, self.fraction, self.seconds = step, number, fraction, seconds
        self.nnz, self.overlap, self.explored = dict(nnz), overlap, explored
        self._dropped, self._grown, self._who = dict(dropped), dict(grown), who

    def _read(self) -> None:
        """Numbers in place of what a card still held."""
        for name, moved in self._dropped.items():
            if not isinstance(moved, Tensor):
                continue
            count, error = moved.tolist()
            self._dropped[name] = self._grown[name] = count
            if error:
                warnings.warn(
                    f"{self._who}: at step {self.step} layer '{name}' kept its connections: too few of its positions have a gradient "
                    "that is a number; the others are NaN.",
                    stacklevel=4,
                )

    @property
    def layers(self) -> dict[str, int]:
        """Connections dropped, by layer; 0 where nothing could or had to move."""
        self._read()
        return self._dropped

    @property
    def grown_layers(self) -> dict[str, int]:
        """Connections grown, by layer."""
        self._read()
        return self._grown

    @property
    def dropped(self) -> int:
        """Connections dropped in all layers."""
        return sum(self.layers.values())

    @property
    def grown(self) -> int:
        """Connections grown in all layers."""
        return sum(self.grown_layers.values())

    def as_dict(self) -> dict[str, object]:
        """Plain numbers and strings, for JSON."""
        record = {key: getattr(self, key) for key in ("step", "number", "fraction", "layers", "grown_layers", "nnz", "seconds")}
        return record | {key: getattr(self, key) for key in ("overlap", "explored") if getattr(self, key) is not None}

    @classmethod
    def from_dict(cls, record: Mapping[str, object]) -> Update:
        """What `as_dict` described."""
        rest = {key: record[key] for key in ("step", "number", "fraction", "nnz", "seconds")}
        return cls(dropped=record["layers"], grown=record["grown_layers"], overlap=record.get("overlap"), explored=record.get("explored"), **rest)

    def __repr__(self) -> str:
        return f"Update(step={self.step}, number={self.number}, fraction={self.fraction:.4g}, dropped={self.dropped}, grown={self.grown})"
