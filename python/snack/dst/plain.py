"""Plain data with tensors in it, as JSON and a dictionary of tensors: what optimisers, schedulers and random generators keep, without pickle.

    None, bool, int, float, str, list      themselves
    everything else                        {"kind": ..., "of": ...}, so that nothing can be mistaken for something else
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from numbers import Integral, Real

import torch
from torch import Tensor

from ..errors import SnackError


def encode(data: object, path: str, tensors: dict[str, Tensor]) -> object:
    """JSON of `data`; its tensors go into `tensors`, by their path. Raises: SnackError on what is neither numbers, text nor a container."""
    if data is None or isinstance(data, (bool, str)):
        return data
    if isinstance(data, Integral):
        return int(data)
    if isinstance(data, Real):
        return float(data)
    if isinstance(data, Tensor):
        while path in tensors:  # keys 1 and "1"
            path += "'"
        tensors[path] = data.detach()
        return {"kind": "tensor", "of": path}
    if isinstance(data, torch.dtype):
        return {"kind": "dtype", "of": str(data).removeprefix("torch.")}
    if isinstance(data, (list, tuple)):
        parts = [encode(part, f"{path}.{number}", tensors) for number, part in enumerate(data)]
        return parts if isinstance(data, list) else {"kind": "tuple", "of": parts}
    if isinstance(data, Mapping):
        kind = "counter" if isinstance(data, Counter) else "dict"
        return {"kind": kind, "of": [[encode(key, path, tensors), encode(part, f"{path}.{key}", tensors)] for key, part in data.items()]}
    raise SnackError(f"save_training: '{path}' is a {type(data).__name__}, and a resume file holds numbers, text, tensors and containers of these.")


def decode(data: object, tensors: dict[str, Tensor]) -> object:
    """What `encode` was given. Raises: KeyError, TypeError, ValueError or AttributeError where it is something else."""
    if isinstance(data, list):
        return [decode(part, tensors) for part in data]
    if not isinstance(data, dict):
        return data
    kind, inside = data["kind"], data["of"]
    if kind == "tensor":
        return tensors[inside]
    if kind == "dtype":
        return getattr(torch, inside)
    if kind == "tuple":
        return tuple(decode(part, tensors) for part in inside)
    if kind not in ("dict", "counter"):
        raise ValueError(kind)
    found = {decode(key, tensors): decode(part, tensors) for key, part in inside}
    return Counter(found) if kind == "counter" else found
