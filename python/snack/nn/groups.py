"""Parameter groups for weight decay: connections decay, biases and norms do not."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Iterable

from torch import nn

from ..errors import SnackError, require
from .linear import SparseLinear

_NORMS = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.modules.batchnorm._NormBase)


def param_groups(model: nn.Module, weight_decay: float, no_decay: str | Iterable[str] = ()) -> list[dict]:
    """Two groups for any optimiser: one decayed, one not.

    The usual recipe, "decay parameters with two dimensions or more", would skip the 1-D `values` of sparse layers; here they
    are decayed with the weights. Biases, other 1-D parameters and the parameters of normalisation layers are not.

    Args:
        weight_decay: of the first group, finite and >= 0. no_decay: globs of parameter names that must not decay either.

    Returns: [{"params": [...], "weight_decay": weight_decay}, {"params": [...], "weight_decay": 0.0}]; every parameter that
        requires a gradient is in one of them, once.
    Raises: SnackError on a weight decay that is no such number, or a glob that matches no parameter.
    """
    try:
        weight_decay = float(weight_decay)
    except (TypeError, ValueError):
        raise SnackError(f"param_groups: weight_decay {weight_decay!r} is not a number; give one >= 0, such as 0.01.") from None
    require(math.isfinite(weight_decay) and weight_decay >= 0, f"param_groups: weight_decay {weight_decay} is not a finite number >= 0.")
    globs = [no_decay] if isinstance(no_decay, str) else list(no_decay)
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    for glob in globs:
        listed = ", ".join(names[:12]) + (" ..." if len(names) > 12 else "")
        is_known = any(fnmatch.fnmatchcase(name, glob) for name in names)
        require(is_known, f"param_groups: no_decay {glob!r} matches no parameter; the parameters are {listed}.")
    exempt = {id(p) for name, p in model.named_parameters(remove_duplicate=False) if any(fnmatch.fnmatchcase(name, g) for g in globs)}
    connections = set()
    for module in model.modules():
        if isinstance(module, SparseLinear):
            connections.add(id(module.values))
        elif isinstance(module, _NORMS):
            exempt.update(id(p) for p in module.parameters(recurse=False))
    trained = [p for p in model.parameters() if p.requires_grad]
    decays = [id(p) not in exempt and (id(p) in connections or p.dim() >= 2) for p in trained]
    return [
        {"params": [p for p, yes in zip(trained, decays) if yes], "weight_decay": weight_decay},
        {"params": [p for p, yes in zip(trained, decays) if not yes], "weight_decay": 0.0},
    ]
