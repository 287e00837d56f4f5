"""What a topology edit did to the slots of a layer, and how to carry tensors along."""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import require


class SlotMap:
    """Result of `SparseLinear.rewire`.

    Attributes:
        source: int64 (new nnz,): for every new slot the old slot its connection had, or -(1 + g) for grown position g.
        old_nnz: number of slots before the edit.
    """

    __slots__ = ("source", "old_nnz")

    def __init__(self, source: Tensor, old_nnz: int):
        self.source, self.old_nnz = source, old_nnz

    @property
    def nnz(self) -> int:
        """Number of slots after the edit."""
        return self.source.numel()

    @property
    def grown(self) -> Tensor:
        """New slots of the grown connections, int64, ascending."""
        return (self.source < 0).nonzero().flatten()

    @property
    def old_to_new(self) -> Tensor:
        """int64 (old nnz,): the new slot of every old one, -1 if it was dropped."""
        survivors = (self.source >= 0).nonzero().flatten()
        mapping = torch.full((self.old_nnz,), -1, dtype=torch.int64, device=self.source.device)
        mapping[self.source[survivors]] = survivors
        return mapping

    def apply(self, tensor: Tensor, fill: float | Tensor = 0.0) -> Tensor:
        """`tensor` (old nnz,) carried to the new slots, as a new tensor (new nnz,).

        fill: what grown slots get: a number, a tensor of one entry, or one entry for every grown position in the order given to `rewire`.
        """
        require(
            tensor.shape == (self.old_nnz,),
            f"SlotMap.apply: the tensor has shape {tuple(tensor.shape)}, expected ({self.old_nnz},), one entry for every old slot.",
        )
        # Gathers alone, no boolean masks: on a card those would make the host wait for their lengths.
        source = self.source.to(tensor.device)
        is_grown = source < 0
        moved = tensor.index_select(0, source.clamp(min=0)) if self.old_nnz else tensor.new_zeros(self.nnz)
        if not isinstance(fill, Tensor) or fill.dim() == 0:
            return moved.masked_fill_(is_grown, fill)
        if fill.numel() == 0:
            return moved
        return torch.where(is_grown, fill.to(moved).index_select(0, (-1 - source).clamp(min=0)), moved)
