"""What rules return, checked: each check gives tensors of the right form on the layer's device, or one sentence. The caller names the layer."""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import SnackError, require


class naming:
    """Puts the layer's name before a SnackError."""

    def __init__(self, name: str):
        self._name = name

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        if isinstance(error, SnackError):
            raise SnackError(f"layer '{self._name}': {error}") from error


def _described(answer: object) -> str:
    return f"of shape {tuple(answer.shape)}" if isinstance(answer, Tensor) else f"a {type(answer).__name__}"


def _indices(what: str, data: object, device: torch.device) -> Tensor:
    try:
        tensor = torch.as_tensor(data)
    except (TypeError, ValueError, RuntimeError):
        raise SnackError(f"the {what} a {type(data).__name__}, expected a 1-D tensor of integers.") from None
    is_integral = not (tensor.dtype.is_floating_point or tensor.dtype.is_complex or tensor.dtype == torch.bool) or tensor.numel() == 0
    require(
        tensor.dim() == 1 and is_integral,
        f"the {what} {str(tensor.dtype).removeprefix('torch.')} of shape {tuple(tensor.shape)}, expected a 1-D tensor of integers.",
    )
    return tensor.detach().to(device, torch.int64).contiguous()


def check_slots(slots: object, k: int, device: torch.device) -> Tensor:
    """At most k slots, int64, on the layer's device."""
    slots = _indices("drop rule returned", slots, device)
    require(slots.numel() <= k, f"the drop rule returned {slots.numel()} slots, it was asked for at most {k}.")
    return slots


def check_positions(positions: object, k: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Exactly k (rows, cols), int64, on the layer's device."""
    is_pair = isinstance(positions, (tuple, list)) and len(positions) == 2
    require(is_pair, f"the grow rule returned a {type(positions).__name__}, expected a pair (rows, cols).")
    rows, cols = (_indices(f"grow rule returned {name} that are", p, device) for name, p in zip(("rows", "columns"), positions))
    require(
        rows.numel() == k and cols.numel() == k,
        f"the grow rule returned {rows.numel()} rows and {cols.numel()} columns, expected {k} of each, as many as are dropped.",
    )
    return rows, cols


def check_grown_values(values: object, like: Tensor, k: int) -> Tensor:
    """Exactly k initial values, with the layer's dtype and device."""
    values = torch.as_tensor(values)
    require(values.shape == (k,), f"grow_init returned shape {tuple(values.shape)}, expected ({k},), one value for every grown connection.")
    return values.detach().to(like)


def check_scores(scores: object, nnz: int) -> Tensor:
    """A drop rule's scores: one a connection."""
    fits = isinstance(scores, Tensor) and scores.shape == (nnz,)
    require(fits, f"the drop rule's scores are {_described(scores)}, expected a tensor with one entry a connection.")
    return scores.detach()


def check_row_scores(answer: object, shape: tuple[int, int], device: torch.device) -> Tensor:
    """What a grow rule's row_scores returned, checked, as a floating tensor of our own with -inf for NaN."""
    fits = isinstance(answer, Tensor) and answer.shape == shape
    require(fits, f"the grow rule's row_scores are {_described(answer)}, expected a tensor of shape {shape}: a row of scores for each row asked for.")
    scores = answer.detach().to(device, torch.promote_types(answer.dtype, torch.float32), copy=True)
    return scores.masked_fill_(scores.isnan(), -torch.inf)
