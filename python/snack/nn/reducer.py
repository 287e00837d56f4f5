"""Which DistributedDataParallel holds a layer, and its gradient buckets, which have to be made anew when the number of connections changes."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

from torch.nn.parallel import DistributedDataParallel

if TYPE_CHECKING:
    from .linear import SparseLinear

_wrappers: weakref.WeakKeyDictionary[SparseLinear, weakref.ref] = weakref.WeakKeyDictionary()
_waiting: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()  # their buckets are made anew before the next forward pass


def remember(layer: SparseLinear, wrapper: DistributedDataParallel) -> None:
    """From now on `wrapper_of(layer)` is `wrapper`, as long as both live."""
    _wrappers[layer] = weakref.ref(wrapper)


def wrapper_of(layer: SparseLinear) -> DistributedDataParallel | None:
    """The DistributedDataParallel that averages this layer's gradients."""
    reference = _wrappers.get(layer)
    return None if reference is None else reference()


def note_resize(layer: SparseLinear) -> None:
    """The layer's values have another length now. Several resized layers cost one rebuilding, before the next forward pass."""
    wrapper = wrapper_of(layer)
    if wrapper is None or wrapper in _waiting:
        return
    _waiting.add(wrapper)

    def before_forward(module, args) -> None:
        handle.remove()
        _waiting.discard(module)
        rebuild(module)

    handle = wrapper.register_forward_pre_hook(before_forward)


def rebuild(wrapper: DistributedDataParallel) -> None:
    """Gradient buckets of the present sizes, in place: what DistributedDataParallel does when it is unpickled. Communication hooks stay."""
    hooks, wrapper._comm_hooks = list(wrapper._comm_hooks), []
    wrapper.__setstate__({key: entry for key, entry in wrapper.__dict__.items() if key not in ("reducer", "logger")})
    for hook, state in hooks:
        wrapper.register_comm_hook(state, hook)
