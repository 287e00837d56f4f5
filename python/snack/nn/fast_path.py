"""nn.TransformerEncoderLayer's inference fast path hands `linear1.weight` and `linear2.weight` to one fused kernel.

A sparse layer has no such weight, so the fast path of a layer that holds one is switched off where PyTorch looks:
`activation_relu_or_gelu` (read by nothing else) and, in nn.TransformerEncoder, `use_nested_tensor`. The ordinary path,
which calls the layers, computes the same function.
"""

from __future__ import annotations

from torch import nn

from .linear import SparseLinear

_SWITCHES = ((nn.TransformerEncoderLayer, "activation_relu_or_gelu", 0), (nn.TransformerEncoder, "use_nested_tensor", False))


def update(model: nn.Module) -> None:
    """Switch the fast path off in every encoder that holds a sparse layer, and on again where none is left."""
    for module in model.modules():
        for kind, attribute, off in _SWITCHES:
            if not isinstance(module, kind) or not hasattr(module, attribute):
                continue
            kept = f"_snack_{attribute}"
            is_sparse = any(isinstance(part, SparseLinear) for part in module.modules())
            if is_sparse and not hasattr(module, kept):
                setattr(module, kept, getattr(module, attribute))
                setattr(module, attribute, off)
            elif not is_sparse and hasattr(module, kept):
                setattr(module, attribute, getattr(module, kept))
                delattr(module, kept)
