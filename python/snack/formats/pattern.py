"""The topology of a sparse matrix: where its non-zeros are, without the values."""

from __future__ import annotations

import math
from numbers import Integral

import torch
from torch import Tensor

from .. import _lib  # loads the operators
from ..errors import SnackError, SnackMemoryError, require

SLOT_ORDER = 1
"""Version of the slot order: slots are sorted by (col // 1024, row, col). Saved beside every values tensor."""

MAX_EXTENT = 2**31 - 1


def check_shape(shape: object) -> tuple[int, int]:
    """`shape` as (out, in) of Python ints; SnackError unless both are in [0, 2**31)."""
    try:
        out, in_ = shape  # type: ignore[misc]
    except (TypeError, ValueError):
        raise SnackError(f"Pattern: shape {shape!r} is not a pair (out_features, in_features).") from None
    for extent in (out, in_):
        require(
            isinstance(extent, Integral) and 0 <= extent <= MAX_EXTENT,
            f"Pattern: shape ({out}, {in_}) must hold two integers between 0 and {MAX_EXTENT}.",
        )
    return int(out), int(in_)


def check_sparsity(sparsity: object, who: str) -> float:
    """`sparsity` as float; SnackError unless it is a number in [0, 1)."""
    try:
        value = float(sparsity)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        raise SnackError(f"{who}: sparsity {sparsity!r} is not a number; give the fraction of zeros, 0 <= sparsity < 1.") from None
    require(
        math.isfinite(value) and 0.0 <= value < 1.0,
        f"{who}: sparsity {sparsity!r} is outside 0 <= sparsity < 1; it is the fraction of connections that do not exist.",
    )
    return value


def index_list(name: str, data: object, device: torch.device | str = "cpu") -> Tensor:
    """A list of indices as a contiguous 1-D int64 tensor on `device`; SnackError when it is not one of integers."""
    tensor = torch.as_tensor(data)
    require(tensor.dim() == 1, f"{name}: expected a 1-D list of integers, got {tensor.dim()} dimensions.")
    is_empty = tensor.numel() == 0
    require(
        is_empty or not (tensor.dtype.is_floating_point or tensor.dtype.is_complex or tensor.dtype == torch.bool),
        f"{name}: expected integers, got {str(tensor.dtype).removeprefix('torch.')}.",
    )
    return tensor.detach().to(torch.int64).to(device).contiguous()


def call(op, *args):
    """Call an operator; its complaints become SnackError without PyTorch's wrapping."""
    if torch.compiler.is_compiling():
        return op(*args)
    try:
        return op(*args)
    except RuntimeError as error:
        text, name = str(error).split("\nException raised from", 1)[0].strip(), getattr(op, "__name__", str(op))
        if "from the 'CUDA' backend" in text:  # PyTorch's way to say that nothing is registered there
            raise SnackError(f"{name}: the tensors are on a card, and {_lib.cuda_problem() or 'there is no such CUDA operator'}.") from None
        if isinstance(error, torch.OutOfMemoryError) or _NO_MEMORY in text:
            text = text if text.startswith(_OURS) else f"{name}: out of memory: {text.splitlines()[0]}"
            raise SnackMemoryError(text) from None
        if "vector::" in text or "bad_alloc" in text:
            raise SnackError("there is not enough memory for an index of so many connections; ask for fewer.") from None
        if "Expected a value of type" in text:
            raise SnackError(f"an argument has the wrong type: {text.splitlines()[0]}") from None
        if not text.startswith(_OURS):
            raise
        raise SnackError(text) from None


# How the C++ layer begins its sentences; everything else is PyTorch's own error and stays what it is.
_OURS = (
    "Pattern", "spmm", "sddmm", "fused_grad", "rewire", "exchange_", "select_smallest", "grow_", "unpack", "explain", "cannot ", "slot ",
    "connection ", "PyTorch's dense", "snack: ",
)
_NO_MEMORY = ": out of memory: "


class Pattern:
    """Positions of the non-zeros of a matrix W (out, in), packed once and shared by W and its transpose.

    Args:
        rows, cols: integers, 1-D, equally long: the position of every connection, in any order.
        shape: (out_features, in_features).

    Raises:
        SnackError: an index outside the shape, a position listed twice, lengths that differ.

    The order of a matrix's `values` is the *slot order* (version `SLOT_ORDER`): sorted by (col // 1024, row, col).
    `Pattern` alone forgets the order in which positions were listed; use `snack.formats.from_coo` to sort values along.
    Storage: 2 bytes a connection (4 when the matrix is too empty to fill 64 x 1024 tiles), plus tile pointers.
    On a card: packing and `coordinates` run on the CPU, through copies; a pattern is where `rows` were.
    """

    __slots__ = ("index", "tile_ptr", "shape")

    def __init__(self, rows: object, cols: object, shape: object):
        self.shape = check_shape(shape)
        row_list, col_list = index_list("Pattern: rows", rows), index_list("Pattern: cols", cols)
        index, tile_ptr, _ = call(torch.ops.snack.pack, row_list, col_list, *self.shape)
        device = rows.device if isinstance(rows, Tensor) else torch.device("cpu")
        self.index, self.tile_ptr = index.to(device), tile_ptr.to(device)

    @classmethod
    def from_packed(cls, index: Tensor, tile_ptr: Tensor, shape: tuple[int, int]) -> Pattern:
        """A view on packed tensors, which are trusted: they come from another Pattern."""
        self = object.__new__(cls)
        self.index, self.tile_ptr, self.shape = index, tile_ptr, shape
        return self

    @classmethod
    def random(cls, shape: object, nnz: int, seed: int) -> Pattern:
        """nnz distinct uniform positions; the same (shape, nnz, seed) gives the same topology everywhere.

        Costs O(nnz log nnz) time and memory, whatever out * in is. Drawn on the CPU, where the result is.
        """
        out, in_ = check_shape(shape)
        require(isinstance(nnz, Integral), f"Pattern.random: nnz={nnz!r} must be a whole number of connections.")
        require(
            0 <= nnz <= out * in_,
            f"Pattern.random: {nnz} connections do not fit into shape ({out}, {in_}), which has {out * in_} positions.",
        )
        index, tile_ptr = call(torch.ops.snack.sample, out, in_, nnz, signed64(seed))
        return cls.from_packed(index, tile_ptr, (out, in_))

    @property
    def nnz(self) -> int:
        """Number of connections."""
        return self.index.numel()

    @property
    def density(self) -> float:
        """nnz / (out * in); 0 for an empty shape."""
        positions = self.shape[0] * self.shape[1]
        return self.nnz / positions if positions else 0.0

    @property
    def sparsity(self) -> float:
        """1 - density."""
        return 1.0 - self.density

    @property
    def device(self) -> torch.device:
        return self.index.device

    @property
    def nbytes(self) -> int:
        """Bytes of everything kept, for both directions."""
        return self.index.nbytes + self.tile_ptr.nbytes

    def coordinates(self) -> tuple[Tensor, Tensor]:
        """(rows, cols), int32 (nnz,), in slot order, on the pattern's device; unpacked on every call."""
        return call(torch.ops.snack.unpack, self.index, self.tile_ptr, *self.shape)

    @property
    def rows(self) -> Tensor:
        """Row of every connection, int32 (nnz,), in slot order."""
        return self.coordinates()[0]

    @property
    def cols(self) -> Tensor:
        """Column of every connection, int32 (nnz,), in slot order."""
        return self.coordinates()[1]

    def to(self, device: torch.device | str) -> Pattern:
        """The same topology on another device."""
        return Pattern.from_packed(self.index.to(device), self.tile_ptr.to(device), self.shape)

    def clone(self) -> Pattern:
        """A copy with memory of its own."""
        return Pattern.from_packed(self.index.clone(), self.tile_ptr.clone(), self.shape)

    def equals(self, other: Pattern) -> bool:
        """Same shape and same positions, on whatever devices."""
        return (
            self.shape == other.shape
            and self.nnz == other.nnz
            and torch.equal(self.index, other.index.to(self.device))
            and torch.equal(self.tile_ptr, other.tile_ptr.to(self.device))
        )

    def __repr__(self) -> str:
        return f"Pattern(shape={self.shape}, nnz={self.nnz}, sparsity={self.sparsity:.4g}, device='{self.device}')"


def signed64(value: int) -> int:
    """The 64-bit pattern of `value` as a signed integer, which operators take."""
    value &= 2**64 - 1
    return value - 2**64 if value >= 2**63 else value
