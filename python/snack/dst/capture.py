"""Remembers a layer's x and dY while the gradient of one optimiser step is made, for rules that score absent connections.

    dW[row, col] = sum over the batch of dY[b, row] * x[b, col]        at any position, connected or not

A `Recorder` watches its layer only while the next optimiser step is one with an update. It keeps references, no copies: x is
what autograd has saved for the backward pass anyway (compiled code, which uses its memory again, hands out copies; see
`snack.ops.recorded`). What it holds are exactly the products that `layer.values.grad` sums:

* every use of the layer in a backward pass that reaches `values` (weight sharing, several micro-batches);
* nothing of passes that do not (evaluation, no_grad, autograd.grad with respect to something else);
* nothing from before the gradient was last cleared (a step that GradScaler skipped), wherever zero_grad is called.

While a CUDA graph is captured, the tensors are the graph's own: a replay fills them anew. So they may be read after each replay, until
the next one.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

from ..errors import SnackError
from ..nn import SparseLinear
from ..nn.sharded import is_sharded
from ..ops import recorded


def is_capturing() -> bool:
    """Whether a CUDA graph is being captured on the current stream."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def _ignore(*_) -> None:
    """What a hook becomes in a copied or unpickled layer: nobody collects there."""


def _make_ignore():
    return _ignore


def _make_none() -> None:
    return None


class _Hook:
    """A method of a recorder, as a hook that does not travel with copies of the layer."""

    def __init__(self, method):
        self._method = method

    @torch._disable_dynamo
    def __call__(self, *args):
        return self._method(*args)

    def __reduce__(self):
        return _make_ignore, ()


class Saved:
    """What a recorder had collected, without the recorder: of a training that was saved, or a copy of a step. scale: of the loss then, if known."""

    def __init__(self, pair: tuple[Tensor, Tensor] | None, scale: Tensor | None = None):
        self._pair, self.scale = pair, scale

    def operands(self) -> tuple[Tensor, Tensor] | None:
        """As `Recorder.operands`."""
        return self._pair


def alike(recorded: Sequence[Saved | Recorder | None]) -> list[tuple[Tensor, Tensor] | None]:
    """x and dY of the steps in which a layer was used, dY at the smallest of their loss scales: so all weigh alike, and none overflows."""
    pairs = [None if step is None else step.operands() for step in recorded]
    scales = [step.scale for step, pair in zip(recorded, pairs) if pair is not None]
    if len(scales) < 2 or any(scale is None for scale in scales):
        return pairs
    least = torch.stack(scales).amin()
    return [pair and type(pair)((pair[0], pair[1] * (least / step.scale))) for step, pair in zip(recorded, pairs)]


class _Recorders(list):
    """The recorders of a layer: one a stepper. A copy of the layer is watched by nobody."""

    def watch(self, x: Tensor, y: Tensor) -> None:
        """The layer has made y of x."""
        for recorder in self:
            recorder.watch(x, y)

    def __reduce_ex__(self, protocol):
        return _make_none, ()


class Recorder:
    """Collects the (x, dY) of `layer` from its creation until `remove()`."""

    scale = None  # of the loss: of no matter within a step

    def __init__(self, layer: SparseLinear):
        self.layer = layer
        self._pairs: list[tuple[Tensor, int, Tensor]] = []  # x, its version, dY
        self._open: dict[int, list[tuple[Tensor, int, Tensor]]] = {}  # backward pass -> its pairs, until values.grad has them
        self._gradient: weakref.ref | None = None  # values.grad after the newest pair, and its version
        self._version = -1
        self._values = layer.values  # while the model computes, fully_shard puts gathered values in their place
        self._is_sharded = is_sharded(self._values)
        self._is_reduced = False  # gradients of sharded values were exchanged since the newest pair
        self._is_captured = False  # the pairs are tensors of a CUDA graph
        self._has_graph: int | None = None  # a backward pass with create_graph=True
        self._is_second_order = False  # another one came after it, which may have differentiated it
        self._handle = layer.values.register_post_accumulate_grad_hook(_Hook(self._after_accumulation))
        if layer._recorder is None:
            layer._recorder = _Recorders()
        layer._recorder.append(self)
        recorded.watch(lambda: layer.index, self._remember_compiled)

    def remove(self) -> None:
        """Leave the layer alone; what was collected stays."""
        self._handle.remove()
        recorded.unwatch(self._remember_compiled)
        group = self.layer._recorder
        if group is not None and self in group:
            group.remove(self)
            self.layer._recorder = group or None
        self._open.clear()

    def watch(self, x: Tensor, y: Tensor) -> None:
        """The layer has made y of x; its backward pass may follow."""
        if not y.requires_grad:
            return
        x = x.detach()
        version = x._version
        y.register_hook(lambda dy: self._remember(x, version, dy.detach()))

    def _remember_compiled(self, x: Tensor, dy: Tensor) -> None:
        self._remember(x, x._version, dy)

    @torch._disable_dynamo  # hooks run in a backward pass that a compiled function may have called
    def _remember(self, x: Tensor, version: int, dy: Tensor) -> None:
        task = torch._C._current_graph_task_id()
        if task not in self._open:
            if self._was_cleared():
                self._pairs.clear()
            self._open[task] = []
        if torch.is_grad_enabled() and self._has_graph is None:
            self._has_graph = task
        # Gradients of gathered values are not accumulated where a hook could see it: there a use counts at once.
        (self._pairs if self._is_sharded else self._open[task]).append((x, version, dy))
        self._is_reduced = False

    def _after_accumulation(self, values: Tensor) -> None:
        self._is_reduced = True  # fully_shard calls hooks of a parameter then
        task = torch._C._current_graph_task_id()
        self._is_second_order |= self._has_graph not in (None, task)
        self._pairs += self._open.pop(task, [])
        if values.grad is not None:  # another hook may have taken it away
            self._gradient, self._version = weakref.ref(values.grad), values.grad._version

    def _was_cleared(self) -> bool:
        """Whether zero_grad was called since the newest pair. Unscaling and clipping change the gradient too, but not to 0."""
        if is_capturing():  # no look at the gradient then: one captured step is taken for one gradient
            was_captured, self._is_captured = self._is_captured, True
            return not was_captured
        if self._is_sharded:  # what is not exchanged yet waits where zero_grad does not come
            return self._is_reduced and self._values.grad is None
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
        Raises: SnackError when an input was overwritten after its backward pass, or the gradient has a part of second order.
        """
        if not self._pairs:
            return None
        if self._is_second_order:
            raise SnackError(
                "the gradient of this step was made by differentiating twice (create_graph=True), and growing by gradient sees the part of first "
                "order only; leave the second-order part out of armed steps (if not dst.armed), or grow uniformly (SET)."
            )
        if not self._is_captured and any(x._version != version for x, version, _ in self._pairs):
            raise SnackError(
                "the layer's input was overwritten after the forward pass, but growing by gradient still needs it; "
                "call step() before the input buffer is filled again."
            )
        dys = [dy.reshape(-1, self.layer.out_features) for _, _, dy in self._pairs]
        xs = [x.reshape(-1, self.layer.in_features).to(dy.dtype) for (x, _, _), dy in zip(self._pairs, dys)]
        if len(xs) == 1:
            return xs[0], dys[0]
        return torch.cat(xs), torch.cat(dys)  # both promote alike


class Recording:
    """What layers recorded within `DST.recording()`. Of a captured CUDA graph it stays valid from replay to replay."""

    def __init__(self, recorders: dict[SparseLinear, Recorder]):
        self._recorders = recorders

    def remove(self) -> None:
        """Leave the layers alone; what was collected stays."""
        for recorder in self._recorders.values():
            recorder.remove()

    def snapshot(self, scaler: torch.amp.GradScaler | None = None) -> dict[SparseLinear, Saved]:
        """Copies of the x and dY of every layer, as they are now. scaler: what the loss was scaled by."""
        found = {layer: recorder.operands() for layer, recorder in self._recorders.items()}
        return {layer: Saved(pair and (pair[0].clone(), pair[1].clone()), _scale(scaler, layer)) for layer, pair in found.items()}


def _scale(scaler: torch.amp.GradScaler | None, layer: SparseLinear) -> Tensor | None:
    """The scale in force, on the layer's device and without waiting for it, as get_scale() would."""
    return None if scaler is None else scaler.scale(torch.ones((), device=layer.index.device))
