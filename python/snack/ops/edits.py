"""Operations on topologies: choose connections to drop, choose positions to grow, `rewire`, which does it; and `exchange_`, all at once.

All but the last are pure: tensors go in, new tensors come out. `SparseLinear.rewire` applies them to a layer. On CUDA tensors everything
runs on the card. The pure ones read there whether they are valid, so the host waits for them once, and they cannot be captured in a CUDA
graph; `exchange_` waits for nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..errors import SnackError, require
from ..formats import Pattern
from ..formats.pattern import call, index_list, signed64
from . import _register  # noqa: F401

SIGNS = {"any": 0, "positive": 1, "negative": 2}
DROP_RULES = {"magnitude": 0, "signed": 1}
GROW_RULES = {"uniform": 0, "gradient": 1}

_MASK = 2**64 - 1
_GAMMA = 0x9E3779B97F4A7C15


def _mix64(z: int) -> int:
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


def random_key(seed: int, *stream: int) -> int:
    """The key of a random stream, e.g. of (seed, update, layer): the same on every device, process and resumed run.

    key = mix64(seed), then key = mix64(key ^ mix64(s + 0x9E3779B97F4A7C15)) for every s, modulo 2**64; mix64 is the
    finaliser of SplitMix64. Draw i of a stream is mix64(key + (i + 1) * 0x9E3779B97F4A7C15).
    """
    key = _mix64(seed & _MASK)
    for s in stream:
        key = _mix64(key ^ _mix64((s + _GAMMA) & _MASK))
    return key


def random_uniform(key: int, draws: Tensor) -> Tensor:
    """Draws number `draws` (int64, any shape) of the stream `key` as float64 in [0, 1): the upper 53 bits, see `random_key`."""

    def shifted(z: Tensor, bits: int) -> Tensor:  # without the sign
        return (z >> bits) & ((1 << (64 - bits)) - 1)

    z = signed64(key) + (draws + 1) * signed64(_GAMMA)
    z = (z ^ shifted(z, 30)) * signed64(0xBF58476D1CE4E5B9)
    z = (z ^ shifted(z, 27)) * signed64(0x94D049BB133111EB)
    return shifted(z ^ shifted(z, 31), 11).double() * 2.0**-53


def _empty_list(device: torch.device | str = "cpu") -> Tensor:
    return torch.empty(0, dtype=torch.int64, device=device)


def _require_no_capture(operation: str, device: torch.device) -> None:
    require(
        device.type != "cuda" or not torch.cuda.is_current_stream_capturing(),
        f"{operation}: a CUDA graph is being captured, and an edit reads whether it is valid; edit between replays (at constant nnz "
        "the graph stays valid), or use exchange_.",
    )


def rewire(pattern: Pattern, drop: object = None, rows: object = None, cols: object = None) -> tuple[Pattern, Tensor]:
    """Drop connections and grow others.

    Args:
        drop: slots to remove, distinct, any order. rows, cols: positions to add; each is empty, or dropped by this edit.
            On any device; they are moved to the pattern's.

    Returns: (new pattern, source): source is int64 (new nnz,): for every new slot the old slot its connection had, or
        -(1 + g) where grown position number g is new.
    On a card the host waits once, to read whether the edit was refused; so an edit cannot be captured in a CUDA graph
        (a graph of the products can be captured before it and replayed after it).
    Raises: SnackError on a slot or position out of range or named twice, or a position that is occupied; SnackMemoryError.
    """
    device = pattern.device
    _require_no_capture("rewire", device)
    drop = _empty_list(device) if drop is None else index_list("rewire: drop", drop, device)
    require((rows is None) == (cols is None), "rewire: grow needs both rows and columns.")
    rows = _empty_list(device) if rows is None else index_list("rewire: grow rows", rows, device)
    cols = _empty_list(device) if cols is None else index_list("rewire: grow columns", cols, device)
    out, in_ = pattern.shape
    index, tile_ptr, source = call(torch.ops.snack.rewire, pattern.index, pattern.tile_ptr, drop, rows, cols, out, in_)
    return Pattern.from_packed(index, tile_ptr, pattern.shape), source


def select_smallest(values: Tensor, k: int, sign: str = "any") -> Tensor:
    """The k slots of smallest |value|, int64, ascending. Ties: the lower slot first; NaN counts as largest.

    sign: "any", "positive" (value >= 0, so a connection grown at 0 belongs here) or "negative".
    Raises: SnackError when fewer than k values have that sign.
    """
    if sign not in SIGNS:
        raise SnackError(f"select_smallest: sign {sign!r} is unknown; choose one of {', '.join(SIGNS)}.")
    _require_no_capture("select_smallest", values.device)
    return call(torch.ops.snack.select_smallest, values.detach(), k, SIGNS[sign])


def grow_uniform(pattern: Pattern, k: int, key: int, drop: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """k distinct empty positions, uniform: the first that the random stream `key` (see `random_key`) draws.

    Draw i names the linear position floor(draw * out * in / 2**64), row-major. Slots in `drop` count as empty.
    Returns: (rows, cols), int64 (k,). Raises: SnackError when fewer than k positions are empty.
    """
    _require_no_capture("grow_uniform", pattern.device)
    drop = _empty_list(pattern.device) if drop is None else index_list("grow_uniform: drop", drop, pattern.device)
    return call(torch.ops.snack.grow_uniform, pattern.index, pattern.tile_ptr, drop, k, signed64(key), *pattern.shape)


def grow_gradient(pattern: Pattern, x: Tensor, dy: Tensor, k: int, drop: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The k empty positions of largest |dy^T x| (RigL, Evci et al. 2020, eq. 1), exactly, without a dense gradient.

    x (batch, in), dy (batch, out), one dtype. Slots in `drop` count as empty. Ties: first in slot order. Memory is O(k); of the
    product exist panels of at most 1 MiB (or one row) at a time, on a card nothing. Time is that of one dense product, on a card two or
    three without tensor cores. Sums are float32 (float64 of float64).
    Returns: (rows, cols), int64 (k,), best first. Raises: SnackError when fewer than k positions are empty and have a
    gradient that is a number.
    """
    _require_no_capture("grow_gradient", pattern.device)
    drop = _empty_list(pattern.device) if drop is None else index_list("grow_gradient: drop", drop, pattern.device)
    return call(torch.ops.snack.grow_gradient, pattern.index, pattern.tile_ptr, drop, dy.detach(), x.detach(), k, *pattern.shape)


def _rule_code(what: str, rule: str, codes: dict[str, int]) -> int:
    require(rule in codes, f"exchange_: {what} rule {rule!r} is unknown; choose one of {', '.join(codes)}.")
    return codes[rule]


@torch.no_grad()
def exchange_(
    pattern: Pattern, carried: Sequence[Tensor], fills: Tensor, drop: str = "magnitude", fraction: float = 0.0, k: int = 0,
    grow: str = "uniform", key: int = 0, dy: Tensor | None = None, x: Tensor | None = None,
) -> Tensor:
    """One update of dynamic sparse training, in place: drop connections, grow as many, and carry along what belongs to each.

    The number of connections and all addresses stay. The result is that of `select_smallest`, `grow_uniform` or `grow_gradient`,
    and `rewire`, one after another.

    Args:
        pattern: its packed tensors are changed.
        carried: 1-D tensors of one entry a connection, at most 16, all changed. The first are the values, by which connections are
            dropped (float32, float16, bfloat16, float64); the others (gradient, momentum, ...) may also be integers or bool.
        fills: float32 (len(carried),), beside the values: what grown connections get in each tensor. A connection that is dropped and
            grown by the same update starts anew.
        drop: "magnitude": the k smallest |value|. "signed" (SET): floor(fraction * n) of the n negative values and as much of the
            others, those nearest to 0, and if that is more than k in all, both numbers times k over it, rounded down.
        k: connections to move, at most; 0 .. nnz.
        grow: "uniform": the first empty positions that the random stream `key` draws. "gradient": those of largest |dy^T x|, with
            dy (batch, out) and x (batch, in) of one dtype.

    Returns: int64 (2,) beside the values: connections moved; error. An error of 1 says that fewer empty positions have a gradient
        that is a number than were to be grown; nothing was changed then. On the CPU it is raised instead.
    On a card the host does not wait, and the update can be captured in a CUDA graph.
    Raises: SnackError on rules, numbers, shapes, dtypes or devices that do not fit; nothing is changed then.
    """
    codes = _rule_code("drop", drop, DROP_RULES), _rule_code("grow", grow, GROW_RULES)
    tensors = [t.detach() for t in carried]
    operands = (None if dy is None else dy.detach(), None if x is None else x.detach())
    return call(
        torch.ops.snack.exchange_, pattern.index, pattern.tile_ptr, tensors, fills, codes[0], float(fraction), k, codes[1], signed64(key),
        *operands, *pattern.shape,
    )
