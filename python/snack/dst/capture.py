"""Remembers a layer's x and dY while the gradient of one optimiser step is made, for rules that score absent connections.

    dW[row, col] = sum over the batch of dY[b, row] * x[b, col]        at any position, connected or not

A `Recorder` hangs on its layer only while the next optimiser step is one with an update. It keeps references, no copies: x is
what autograd has saved for the backward pass anyway. What it holds are exactly the products that `layer.values.grad` sums:

* every use of the layer in a backward pass that reaches `values` (weight sharing, several micro-batches);
* nothing of passes that do not (evaluation, no_grad, autograd.grad with respect to something else);
* nothing from before the gradient was last cleared (a step that GradScaler skipped), wherever zero_grad is called.
"""

from __future__ import annotations

import weakref

import torch
from torch import Tensor

from ..errors import SnackError
from ..nn import SparseLinear


def _ignore(*_) -> None:
    """What a hook becomes in a copied or unpickled layer: nobody collects there."""


def _make_ignore():
    return _ignore


class _Hook:
    """A method of a recorder, as a hook that does not travel with copies of the layer."""

    def __init__(self, method):
        self._method = method

    def __call__(self, *args):
        return self._method(*args)

    def __reduce__(self):
        return _make_ignore, ()


class Saved:
    """What a recorder had collected when the training was saved."""

    def __init__(self, pair: tuple[Tensor, Tensor] | None):
        self._pair = pair

    def operands(self) -> tuple[Tensor, Tensor] | None:
        """As `Recorder.operands`."""
        return self._pair


class Recorder:
    """Collects the (x, dY) of `layer` from its creation until `remove()`."""

    def __init__(self, layer: SparseLinear):
        self.layer = layer
        self._pairs: list[tuple[Tensor, int, Tensor]] = []  # x, its version, dY
        self._open: dict[int, list[tuple[Tensor, int, Tensor]]] = {}  # backward pass -> its pairs, until values.grad has them
        self._gradient: weakref.ref | None = None  # values.grad after the newest pair, and its version
        self._version = -1
        self._handles = [
            layer.register_forward_hook(_Hook(self._after_forward), with_kwargs=True, prepend=True),
            layer.values.register_post_accumulate_grad_hook(_Hook(self._after_accumulation)),
        ]

    def remove(self) -> None:
        """Take the hooks off the layer; what was collected stays."""
        for handle in self._handles:
            handle.remove()
        self._open.clear()

    def _after_forward(self, module, args, kwargs, y) -> None:
        if not y.requires_grad:
            return
        x = (args[0] if args else kwargs["x"]).detach()
        version = x._version

        def remember(dy: Tensor) -> None:
            task = torch._C._current_graph_task_id()
            if task not in self._open:
                if self._was_cleared():
                    self._pairs.clear()
                self._open[task] = []
            self._open[task].append((x, version, dy.detach()))

        y.register_hook(remember)

    def _after_accumulation(self, values: Tensor) -> None:
        self._pairs += self._open.pop(torch._C._current_graph_task_id(), [])
        if values.grad is not None:  # another hook may have taken it away
            self._gradient, self._version = weakref.ref(values.grad), values.grad._version

    def _was_cleared(self) -> bool:
        """Whether zero_grad was called since the newest pair. Unscaling and clipping change the gradient too, but not to 0."""
        gradient = self.layer.values.grad
        if gradient is None or self._gradient is None:
            return True
        # Another tensor may hold the same gradient: DistributedDataParallel puts a view of its bucket in its place.
        is_untouched = gradient is self._gradient() and gradient._version == self._version
        return not is_untouched and not bool(gradient.any())

    @property
    def has_begun(self) -> bool:
        """Whether there is a part of the coming step's gradient."""
        return bool(self._pairs) and not self._was_cleared()

    def operands(self) -> tuple[Tensor, Tensor] | None:
        """x (batch, in) and dY (batch, out) of one dtype, the batches of all uses joined; None when there was no use.

        dY decides the dtype: under autocast it is the one in which the layer multiplied.
        Raises: SnackError when an input was overwritten after its backward pass.
        """
        if not self._pairs:
            return None
        if any(x._version != version for x, version, _ in self._pairs):
            raise SnackError(
                "the layer's input was overwritten after the forward pass, but growing by gradient still needs it; "
                "call step() before the input buffer is filled again."
            )
        dys = [dy.reshape(-1, self.layer.out_features) for _, _, dy in self._pairs]
        xs = [x.reshape(-1, self.layer.in_features).to(dy.dtype) for (x, _, _), dy in zip(self._pairs, dys)]
        if len(xs) == 1:
            return xs[0], dys[0]
        return torch.cat(xs), torch.cat(dys)  # both promote alike
