"""The networks that are trained side by side, and what can be counted in them."""

from __future__ import annotations

import copy

import torch
from torch import nn

from snack.bench.twins import MaskedLinear
from snack.nn import SparseLinear


def mlp(features: int, hidden: tuple[int, ...], classes: int, activation: type[nn.Module] = nn.ReLU, dropout: float = 0.0) -> nn.Sequential:
    """features → hidden… → classes, an activation between the layers and, if wanted, dropout after it."""
    sizes = [features, *hidden, classes]
    layers: list[nn.Module] = []
    for fan_in, fan_out in zip(sizes, sizes[1:]):
        layers += [nn.Linear(fan_in, fan_out), activation(), *([nn.Dropout(dropout)] if dropout else [])]
    return nn.Sequential(*layers[: -2 if dropout else -1])


@torch.no_grad()
def he_(model: nn.Module) -> None:
    """Weights of all linear layers uniform within sqrt(6/in) (He et al. 2015), biases 0; in place, from PyTorch's global stream."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            bound = (6 / module.in_features) ** 0.5
            module.weight.uniform_(-bound, bound)
            module.bias.zero_()


def sparse_layers(model: nn.Module) -> dict[str, nn.Module]:
    """SNACK's layers in ``model`` by name, in order."""
    return {name: module for name, module in model.named_modules() if isinstance(module, SparseLinear)}


def masked_start(sparse: nn.Module) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """A dense copy of ``sparse`` with the same numbers, and {layer: mask} of its topology: what :class:`MaskedTwin` starts from."""
    model, masks = copy.deepcopy(sparse), {}
    for name, layer in sparse_layers(sparse).items():
        rows, cols, values = (t.detach() for t in layer.to_coo())
        linear = nn.Linear(layer.in_features, layer.out_features, layer.bias is not None, device=values.device, dtype=values.dtype)
        at = (rows.long(), cols.long())
        with torch.no_grad():
            linear.weight.zero_()[at] = values
            if layer.bias is not None:
                linear.bias.copy_(layer.bias)
        masks[name] = torch.zeros_like(linear.weight, dtype=torch.bool)
        masks[name][at] = True
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, linear)
    return model, masks


def connectivity(model: nn.Module) -> torch.Tensor:
    """Outgoing connections of each input feature in the first layer, int64 (features,). A layer that stayed dense has all of them."""
    known = sparse_layers(model).values()
    first = next(m for m in model.modules() if isinstance(m, nn.Linear) or m in known)
    if isinstance(first, nn.Linear):
        return torch.full((first.in_features,), first.out_features)
    return torch.bincount(first.pattern.cols.long().cpu(), minlength=first.in_features)


def connections(model: nn.Module) -> int:
    """Live connections of the whole network, biases not counted: what is not masked away or not stored does not count."""
    total = 0
    for module in model.modules():
        if isinstance(module, MaskedLinear) or module in sparse_layers(module).values():
            total += module.nnz
        elif isinstance(module, nn.Linear):
            total += module.weight.numel()
    return total
