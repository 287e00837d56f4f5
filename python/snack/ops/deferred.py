"""A gradient of connections that is computed when somebody looks at it.

    gradient = sddmm(dy, x)

Where an optimiser asks for it (`defer`), the backward pass of an eager layer leaves in `values.grad` a DeferredGradient: dy and x
in place of their product. An optimiser that finds it pending can use dy and x in one kernel with its update (snack.optim). For
everybody else it is the gradient: any operation on it (clipping, unscaling, accumulation, a hook, DistributedDataParallel's
buckets) computes the product first, and from then on it is an ordinary tensor with one more step to every call.

Deferred is only what is safe and pays: the first backward pass since the gradient was cleared, made by `backward()` and not by
`autograd.grad`, not compiled, not under autocast, and dy and x together no larger than the gradient. All else is computed as ever.
"""

from __future__ import annotations

import weakref

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from ..errors import SnackError

_aten = torch.ops.aten


class Operands:
    """What a gradient is computed from, and the gradient once it is. Aliases of a gradient share one.

    It is `pending` (dy and x are there), zero (neither they nor a result) or computed (`result`). used: a step was made with it.
    """

    def __init__(self, index: Tensor, tile_ptr: Tensor, dy: Tensor | None, x: Tensor | None, tail: tuple[int, int, int]):
        self.index, self.tile_ptr, self.dy, self.x, self.tail = index, tile_ptr, dy, x, tail
        self.result: Tensor | None = None
        self.used = False
        self._versions = self._now() if self.pending else ()

    @property
    def pending(self) -> bool:
        """Whether nobody has looked at the gradient."""
        return self.dy is not None

    @property
    def is_zero(self) -> bool:
        """Whether the gradient was set to 0 before anybody looked."""
        return self.dy is None and self.result is None

    def _now(self) -> tuple[int, int, int]:
        return self.index._version, self.dy._version, self.x._version

    def checked(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """index, tile_ptr, dy, x. Raises: SnackError when one was overwritten since the backward pass."""
        if self._now() != self._versions:
            index, _, x = (now == then for now, then in zip(self._now(), self._versions))
            what = "the layer's connections were" if not index else "the layer's input was" if not x else "the gradient of its output was"
            raise SnackError(
                f"fused_grad: {what} changed between backward() and the use of the gradient; call optimizer.step() or zero_grad() "
                "before, or build the optimiser with fused_grad=False."
            )
        return self.index, self.tile_ptr, self.dy, self.x

    def gradient(self, like: Tensor) -> Tensor:
        """The gradient (nnz,), computed once. `like`: of its shape, dtype and device."""
        if self.is_zero:
            self.result = torch.zeros(like.shape, dtype=like.dtype, device=like.device)
        elif self.pending:
            with torch.no_grad(), torch.autocast(self.index.device.type, enabled=False):
                self.result = torch.ops.snack.sddmm(*self.checked(), *self.tail)
            self.forget()
        return self.result

    def forget(self) -> None:
        """Let go of dy and x."""
        self.dy = self.x = None

    def take_over(self, other: Operands) -> None:
        """0 + other."""
        self.__dict__.update(other.__dict__)


class DeferredGradient(Tensor):
    """A tensor (nnz,) that is `operands.gradient()` to everybody who computes with it."""

    operands: Operands
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, operands: Operands, like: Tensor):
        self = torch.Tensor._make_wrapper_subclass(cls, operands.index.shape, dtype=like.dtype, device=like.device)
        self.operands = operands
        return self

    def __init__(self, operands: Operands, like: Tensor):
        pass

    @property
    def nbytes(self) -> int:
        """Bytes of the gradient that are stored: none before somebody looks at it."""
        return 0 if self.operands.result is None else self.operands.result.nbytes

    def __repr__(self, **_) -> str:
        return f"DeferredGradient({self.operands.gradient(self)!r})"

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        first = args[0]
        # What autograd and zero_grad do with a gradient needs no look at it.
        if func is _aten.detach.default:
            return cls(first.operands, first)
        if func is _aten.clone.default and first.operands.pending:
            index, tile_ptr, dy, x = first.operands.checked()
            return cls(Operands(index, tile_ptr, dy, x, first.operands.tail), first)
        if func is _aten.zero_.default and first.operands.result is None:
            first.operands.forget()
            return first
        if func is _aten.add_.Tensor and not kwargs and is_cleared(first) and type(args[1]) is cls and args[1].operands.pending:
            first.operands.take_over(args[1].operands)
            return first
        wrappers: dict[int, DeferredGradient] = {}

        def unwrap(gradient: DeferredGradient) -> Tensor:
            real = gradient.operands.gradient(gradient)
            wrappers[id(real)] = gradient
            return real

        args, kwargs = tree_map_only(DeferredGradient, unwrap, (args, kwargs))
        result = func(*args, **kwargs)
        return tree_map_only(Tensor, lambda t: wrappers.get(id(t), t), result)  # in-place operations return what they changed


def is_pending(gradient: Tensor | None) -> bool:
    """Whether it is a deferred gradient that nobody has looked at."""
    return type(gradient) is DeferredGradient and gradient.operands.pending


def is_cleared(gradient: Tensor | None) -> bool:
    """None, or a deferred gradient that was set to 0."""
    return gradient is None or (type(gradient) is DeferredGradient and gradient.operands.is_zero)


# Parameters whose gradient may be deferred: id -> (the parameter, who asked).
_asked: dict[int, tuple[weakref.ref, weakref.ref]] = {}


def defer(parameter: Tensor, owner: object) -> None:
    """From now on gradients of `parameter` may be deferred, as long as `owner` lives."""
    key = id(parameter)
    _asked[key] = (weakref.ref(parameter, lambda _: _asked.pop(key, None)), weakref.ref(owner))


def _is_asked(parameter: Tensor) -> bool:
    reference, owner = _asked.get(id(parameter), (None, None))
    return reference is not None and reference() is parameter and owner() is not None


def deferred(ctx, index: Tensor, tile_ptr: Tensor, dy: Tensor, x: Tensor, tail: tuple[int, int, int]) -> DeferredGradient | None:
    """The gradient of values, which are the first input of the autograd node `ctx`, in the backward pass that runs now; None where it
    must be computed."""
    if not _asked:
        return None
    node = ctx.next_functions[0][0]
    values = getattr(node, "variable", None)
    if values is None or not _is_asked(values) or not is_cleared(values.grad) or dy.numel() + x.numel() > values.numel():
        return None
    try:
        if not torch._C._will_engine_execute_node(node):
            return None
    except RuntimeError:  # autograd.grad with respect to the values
        return None
    return DeferredGradient(Operands(index, tile_ptr, dy.detach(), x.detach(), tail), values)
