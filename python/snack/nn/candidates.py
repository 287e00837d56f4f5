"""Which linear layers of a model can become sparse, and why the others cannot."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from ..errors import SnackError


@dataclass
class Candidate:
    """A linear layer and every place that refers to it."""

    layer: nn.Linear
    places: list[tuple[nn.Module | None, str]] = field(default_factory=list)  # (parent, key in it); parent None: the model
    names: list[str] = field(default_factory=list)
    obstacle: str = ""

    @property
    def title(self) -> str:
        return " = ".join(name or "(model)" for name in self.names)

    @property
    def shape(self) -> tuple[int, int]:
        return (self.layer.out_features, self.layer.in_features)

    def matches(self, glob: str) -> bool:
        """Whether one of its names matches."""
        return any(fnmatch.fnmatchcase(name, glob) for name in self.names)


def find_linears(model: nn.Module) -> list[Candidate]:
    """Every nn.Linear (subclasses too) once, with all names and places."""
    found: dict[int, Candidate] = {}
    if isinstance(model, nn.Linear):
        found[id(model)] = Candidate(model, [(None, "")], [""])
    for prefix, parent in model.named_modules(remove_duplicate=False):
        for key, child in parent._modules.items():
            if isinstance(child, nn.Linear):
                candidate = found.setdefault(id(child), Candidate(child))
                name = f"{prefix}.{key}" if prefix else key
                if name not in candidate.names:
                    candidate.names.append(name)
                if (parent, key) not in candidate.places:
                    candidate.places.append((parent, key))
    return list(found.values())


def pruned_weight(layer: nn.Linear) -> tuple[nn.Parameter, Tensor] | None:
    """(parameter, mask) of a layer whose weight is parameter * mask: one of torch.nn.utils.prune or torch.ao.pruning; else None."""
    original, mask = layer._parameters.get("weight_orig"), layer._buffers.get("weight_mask")
    if original is not None and mask is not None:
        return original, mask
    if not parametrize.is_parametrized(layer) or list(layer.parametrizations) != ["weight"] or len(layer.parametrizations.weight) != 1:
        return None
    original, mask = getattr(layer.parametrizations.weight, "original", None), getattr(layer.parametrizations.weight[0], "mask", None)
    if not isinstance(original, nn.Parameter) or not isinstance(mask, Tensor) or mask.shape != original.shape or original.is_meta:
        return None
    # Whatever the class is called: it masks if the weight is the product.
    return (original, mask) if torch.equal(layer.weight.detach(), original.detach() * mask) else None


def note_obstacles(model: nn.Module, candidates: list[Candidate], classes: tuple[type, ...], how: str) -> None:
    """Fill `obstacle`, a clause for people, of every candidate that must stay as it is."""
    owners: dict[int, set[int]] = {}
    for module in model.modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                owners.setdefault(id(parameter), set()).add(id(module))
    attention = {id(child): type(m).__name__ for m in model.modules() if isinstance(m, nn.MultiheadAttention) for child in m.children()}
    for candidate in candidates:
        candidate.obstacle = _obstacle(candidate.layer, owners, attention, classes, how)


def _obstacle(layer: nn.Linear, owners: dict[int, set[int]], attention: dict[int, str], classes: tuple[type, ...], how: str) -> str:
    if id(layer) in attention:
        return f"nn.{attention[id(layer)]} reads its weight directly"
    pruned = pruned_weight(layer)
    if pruned is None and parametrize.is_parametrized(layer):
        return "it is parametrized; call torch.nn.utils.parametrize.remove_parametrizations first"
    kind = parametrize.type_before_parametrizations(layer)
    if kind not in (nn.Linear, *classes):
        return f"it is a {kind.__name__}, whose own behaviour would be lost; put the class into `include` to convert it"
    if pruned is not None and how != "nonzero":
        return (
            "its weight is masked by torch.nn.utils.prune or torch.ao.pruning; pass how='nonzero' to take the mask over, or make the "
            "pruning permanent first (prune.remove, squash_mask)"
        )
    if pruned is None and "weight" not in layer._parameters:
        return "its weight is computed from other parameters (weight_norm, spectral_norm); remove that first"
    parameters = [p for p in (*layer._parameters.values(), pruned and pruned[0]) if p is not None]
    if any(len(owners[id(p)]) > 1 for p in parameters):
        return "it shares a parameter with another module (tied weights)"
    for p in parameters:
        if isinstance(p, nn.parameter.UninitializedParameter):
            return "it has no shape yet; run one batch through the model first"
        if p.dtype not in (torch.float32, torch.float16, torch.bfloat16, torch.float64):
            return f"its dtype is {str(p.dtype).removeprefix('torch.')}"
        if how != "random" and p.is_meta:
            return f"it is on the meta device, where how='{how}' has no numbers to look at or to draw"
    return ""


def match_globs(candidates: list[Candidate], globs: Iterable[str], what: str, who: str) -> dict[str, list[Candidate]]:
    """Candidates that each glob names. Raises: SnackError on a glob that names none."""
    matched = {glob: [c for c in candidates if c.matches(glob)] for glob in globs}
    for glob, hits in matched.items():
        if not hits:
            names = [name for c in candidates for name in c.names]
            listed = ", ".join(repr(name) for name in names[:12]) + (f" and {len(names) - 12} more" if len(names) > 12 else "")
            raise SnackError(f"{who}: {what} {glob!r} matches no linear layer; the linear layers are {listed}.")
    return matched
