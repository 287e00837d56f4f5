"""The ways in which a state dict says which connections of a weight exist, brought to one form.

    torch.nn.utils.prune      X_orig and X_mask
    torch.ao.pruning          P.parametrizations.X.original, its mask in P.parametrizations.X.0.mask or in sparsifier.state_dict()
    cstorch, RigL, ITOP, …    X, and X_mask or a mapping of masks kept apart
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..errors import SnackError, require

_PARAMETRIZED = re.compile(r"(?P<owner>(?:.*\.)?)parametrizations\.(?P<key>[^.]+)\.(?P<rest>.+)")


@dataclass
class Entries:
    """A state dict without masks."""

    tensors: dict[str, Tensor]
    """{name: tensor}; a masked one under its own name, not yet multiplied."""
    masks: dict[str, Tensor] = field(default_factory=dict)
    """{name: mask of the same shape}."""
    notes: dict[str, str] = field(default_factory=dict)
    """{name: why it was left as it is}."""


def resolve(state: Mapping[str, object], masks: Mapping[str, object] | None) -> Entries:
    """Pair every masked tensor with its mask. `state` is left alone.

    Raises: SnackError on an entry that is not a tensor, a mask of another shape, one that is not 0 or 1, or one for nothing.
    """
    require(isinstance(state, Mapping), f"import: the state dict is a {type(state).__name__}, expected a mapping from names to tensors.")
    for name in state:
        require(isinstance(name, str), f"import: the state dict has the key {name!r}, a {type(name).__name__}, expected names.")
    tensors = {name: as_tensor(name, entry) for name, entry in state.items()}
    given = _mask_list(masks)
    notes = _plain_names(tensors, given)
    found: dict[str, Tensor] = {}
    for name in [n for n in tensors if n.endswith("_orig")]:
        stem = name.removesuffix("_orig")
        if stem + "_mask" not in tensors:
            continue
        require(stem not in tensors, f"import: the state dict holds '{stem}' beside '{name}' and '{stem}_mask'; remove one of them.")
        tensors[stem], found[stem] = tensors.pop(name), tensors.pop(stem + "_mask")
    for name in [n for n in tensors if n.endswith(("weight_mask", "bias_mask"))]:
        stem = name.removesuffix("_mask")
        if stem in tensors:
            require(stem not in found, f"import: the state dict holds two masks of '{stem}'; remove one of them.")
            found[stem] = tensors.pop(name)
    for name, mask in given.items():
        stem = next((n for n in (name, f"{name}.weight", "weight" if name == "" else name) if n in tensors), None)
        require(stem is not None, f"import: there is a mask for '{name}', and no such tensor; masks are named like their weights.")
        require(stem not in found, f"import: '{stem}' has a mask in the state dict and another one in `masks`; leave one of them out.")
        found[stem] = mask
    for name, mask in found.items():
        _check(name, tensors[name], mask)
    return Entries(tensors, found, notes)


def as_tensor(name: str, entry: object) -> Tensor:
    """An entry of a state dict (tensor, numpy array, scipy sparse matrix) as a detached tensor; SnackError on anything else."""
    if isinstance(entry, Tensor):
        require(not entry.is_meta, f"import: '{name}' is on the meta device and has no numbers.")
        return entry.detach()
    if hasattr(entry, "tocoo"):
        coo = entry.tocoo()
        require(len(coo.shape) == 2, f"import: '{name}' is a sparse array of shape {tuple(coo.shape)}, expected a matrix (out, in).")
        indices = torch.stack([torch.from_numpy(coo.row.astype("int64")), torch.from_numpy(coo.col.astype("int64"))])
        return torch.sparse_coo_tensor(indices, torch.from_numpy(coo.data.copy()), coo.shape, check_invariants=False)
    if type(entry).__module__ == "numpy":
        try:
            return torch.from_numpy(entry.astype(entry.dtype.newbyteorder("="), copy=True))
        except TypeError:
            raise SnackError(f"import: '{name}' is a numpy array of {entry.dtype}, which PyTorch does not have; give numbers.") from None
    raise SnackError(f"import: '{name}' is a {type(entry).__name__}, expected a tensor, a numpy array or a scipy sparse matrix.")


def _mask_list(masks: Mapping[str, object] | None) -> dict[str, Tensor]:
    """{name: mask} of a mapping, or of the state_dict of a sparsifier of torch.ao.pruning: {"state": {name: {"mask": mask}}}."""
    if masks is None:
        return {}
    require(isinstance(masks, Mapping), f"import: masks is a {type(masks).__name__}, expected a mapping from weight names to masks.")
    if isinstance(masks.get("state"), Mapping):
        masks = masks["state"]
    flat = {name: mask["mask"] if isinstance(mask, Mapping) and "mask" in mask else mask for name, mask in masks.items()}
    return {name: as_tensor(name, mask) for name, mask in flat.items()}


def _plain_names(tensors: dict[str, Tensor], given: dict[str, Tensor]) -> dict[str, str]:
    """Rename masked parametrizations to X_orig and X_mask, in place; returns {name: why} of the other ones."""
    notes: dict[str, str] = {}
    groups: dict[tuple[str, str], dict[str, str]] = {}
    for name in tensors:
        match = _PARAMETRIZED.fullmatch(name)
        if match:
            groups.setdefault((match["owner"], match["key"]), {})[match["rest"]] = name
    for (owner, key), names in groups.items():
        stem = owner + key
        is_given = stem in given or (key == "weight" and owner.removesuffix(".") in given)
        if names.keys() == {"original", "0.mask"}:
            tensors[f"{stem}_mask"] = tensors.pop(names["0.mask"])
            tensors[f"{stem}_orig"] = tensors.pop(names["original"])
        elif names.keys() == {"original"} and is_given:
            tensors[stem] = tensors.pop(names["original"])
        else:
            why = "it is parametrized, and not by a mask alone"
            if names.keys() == {"original"}:
                why = "it is parametrized and has no mask (torch.ao.pruning keeps its masks in sparsifier.state_dict(): give them as masks)"
            notes |= {name: why for name in names.values()}
    return notes


def _check(name: str, tensor: Tensor, mask: Tensor) -> None:
    require(
        tensor.layout == torch.strided and mask.layout == torch.strided and mask.shape == tensor.shape,
        f"import: the mask of '{name}' has shape {tuple(mask.shape)}, the tensor {tuple(tensor.shape)}; both must be dense and alike.",
    )
    is_binary = mask.dtype == torch.bool or bool(((mask == 0) | (mask == 1)).all())
    require(is_binary, f"import: the mask of '{name}' has entries other than 0 and 1; a connection exists or not.")
