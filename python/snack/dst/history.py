"""What updates did: one plain record each.

On a card an update does not wait for its own results: the numbers of connections that moved are read when somebody looks at them, and
those of `MOST_PENDING` updates together where nobody does. A diverged training is noticed then, and on the CPU at once.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from ..nn import SparseLinear
from .notices import Notices

MOST_PENDING = 64
"""Records whose numbers may still be on a card: the host waits for it once in so many updates, and each takes 1 KiB a layer there."""


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

    __slots__ = ("step", "number", "fraction", "nnz", "seconds", "overlap", "explored", "_dropped", "_grown", "_notices")

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
        notices: Notices | None = None,
    ):
        self.step, self.number, self.fraction, self.seconds = step, number, fraction, seconds
        self.nnz, self.overlap, self.explored = dict(nnz), overlap, explored
        self._dropped, self._grown = dict(dropped), dict(grown)

    @property
    def is_pending(self) -> bool:
        """Whether numbers of it may still be on a card."""
        return any(isinstance(moved, Tensor) for moved in self._dropped.values())

    def _read(self) -> None:
        if self.is_pending:
            fetch([self])

    def _put(self, name: str, count: int, error: int) -> None:
        """The connections that moved in a layer."""
        self._dropped[name] = self._grown[name] = count
        if error:
            self._notices.say(
                f"gradient of '{name}' at step {self.step}",
                f"at step {self.step} layer '{name}' kept its connections: too few of its positions have a gradient that is a number; the others "
                "are NaN.",
                stacklevel=5,
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


def fetch(records: Iterable[Update]) -> None:
    """Plain numbers in place of what cards still hold of these records, in one copy for all."""
    moved = [(record, name, numbers) for record in records for name, numbers in record._dropped.items() if isinstance(numbers, Tensor)]
    for (record, name, _), (count, error) in zip(moved, _numbers([numbers for *_, numbers in moved])):
        record._put(name, count, error)


def settle(history: Sequence[Update], layers: Mapping[str, SparseLinear], notices: Notices) -> None:
    """To be called when a record was appended. Fetches what too many records keep on a card. Where the host need not wait, or has just waited, it
    looks whether the layers' values are finite, as their sum is where all are."""
    if len(history) % MOST_PENDING == 0:
        fetch(history[-MOST_PENDING:])
    elif history[-1].is_pending:
        return
    values = {name: layer.values.detach() for name, layer in layers.items()}
    sums = _numbers([each.sum(dtype=torch.promote_types(each.dtype, torch.float32)) for each in values.values()])
    bad = next((name for name, total in zip(values, sums) if not math.isfinite(total)), None)
    if bad is not None:
        notices.say(
            "diverged",
            f"after the update at step {history[-1].step} layer '{bad}' has weights that are NaN or infinite, so the training has diverged; later "
            "updates move connections by weights that mean nothing. Start again from a checkpoint, with a smaller learning rate.",
            stacklevel=6,
        )


def _numbers(tensors: Sequence[Tensor]) -> list:
    """Small tensors as numbers: one copy for each device and dtype."""
    found: list = [None] * len(tensors)
    kinds = [(tensor.device, tensor.dtype) for tensor in tensors]
    for kind in dict.fromkeys(kinds):
        places = [i for i, other in enumerate(kinds) if other == kind]
        for i, numbers in zip(places, torch.stack([tensors[i] for i in places]).tolist()):
            found[i] = numbers
    return found
