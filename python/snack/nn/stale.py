"""Says so at once when an optimiser still holds weights that a conversion replaced, instead of training nothing in silence."""

from __future__ import annotations

import weakref

import torch
from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from ..errors import SnackError

# id of a replaced Parameter -> (weak reference to it, name of its layer, the function that replaced it)
_replaced: dict[int, tuple[weakref.ref, str, str]] = {}
# Optimisers checked since the last conversion: their further steps cost one look-up, or none once nobody holds a
# replaced parameter any more.
_cleared: weakref.WeakSet[Optimizer] = weakref.WeakSet()
_hook = None


def mark_replaced(parameters: list[tuple[nn.Parameter, str]], who: str) -> None:
    """Remember (parameter, name of its layer) pairs which the function `who` took out of a model.

    Their gradients are freed: from now on a gradient tells that some other model still uses the parameter.
    """
    global _hook
    for parameter, name in parameters:
        key = id(parameter)
        parameter.grad = None
        _replaced[key] = (weakref.ref(parameter, lambda _, key=key: _replaced.pop(key, None)), name, who)
    _cleared.clear()
    if _hook is None:
        _hook = register_optimizer_step_pre_hook(_check)


def _check(optimizer: Optimizer, args: tuple, kwargs: dict) -> None:
    if not _replaced or torch.compiler.is_compiling() or optimizer in _cleared:
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            reference, name, who = _replaced.get(id(parameter), (None, "", ""))
            if reference is not None and reference() is parameter and parameter.grad is None:
                raise SnackError(
                    f"{type(optimizer).__name__} holds a parameter of layer '{name}' that {who} replaced, so it would train nothing there: "
                    f"build the optimiser from model.parameters() after {who}."
                )
    _cleared.add(optimizer)
