"""Which connections of a dense model stay, judged once: by magnitude, by SNIP or by GraSP."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from ..errors import SnackError, require
from ..formats.pattern import check_sparsity
from ..nn import sparsify
from ..nn.candidates import Candidate, find_linears
from ..nn.convert import convert_layers, require_some, select_layers, warn_left_dense

Choice = str | type | Iterable[str | type] | None
Loss = Callable[[nn.Module], Tensor]


def magnitude(
    model: nn.Module,
    sparsity: float | Mapping[str, float],
    distribution: str = "uniform",
    scope: str = "layer",
    include: Choice = None,
    exclude: str | Iterable[str] = (),
) -> nn.Module:
    """Keep the connections of largest |weight|; in place, like `snack.sparsify`, whose arguments and report it shares.

    Args:
        scope: "layer" is `snack.sparsify(how="magnitude")`: `distribution` decides how many connections each layer keeps, and a
            layer keeps its largest. "global" compares the weights of all layers, so some layers become sparser than others (as
            Frankle & Carbin 2019 do for deep networks); it takes one number as sparsity and no distribution. Ties: the first in
            the order of the model, row by row.

    Kept weights keep their values. The connections of all converted layers sum to round((1 - sparsity) * positions). A layer
    that loses every connection is named in a UserWarning. Raises: SnackError; the model is then unchanged.
    """
    require(scope in ("layer", "global"), f"prune.magnitude: scope {scope!r} is unknown; choose 'layer' or 'global'.")
    if scope == "layer":
        model = sparsify(model, sparsity, distribution, "magnitude", include, exclude)
        _warn_empty(model, "magnitude")
        return model
    require(distribution == "uniform", "prune.magnitude: a global comparison has no distribution; leave it out, or choose scope='layer'.")
    return _keep_best(model, sparsity, lambda candidates: [c.layer.weight.detach().abs() for c in candidates], include, exclude, "magnitude")


def snip(model: nn.Module, loss: Loss, sparsity: float, include: Choice = None, exclude: str | Iterable[str] = ()) -> nn.Module:
    """Keep the connections of largest |gradient * weight| over all layers (SNIP: Lee, Ajanthan & Torr 2019, ICLR).

    Args:
        model: in place, like `snack.sparsify`; usually untrained, in training mode.
        loss: function of the model that returns a scalar, of one batch: `lambda m: cross_entropy(m(x), y)`. It is called once.
        sparsity: fraction to remove over all converted layers; connections sum to round((1 - sparsity) * positions). Ties: the
            first in the order of the model, row by row.
        include, exclude: as in `snack.sparsify`.

    Kept weights keep their values; gradients (`.grad`) and buffers (the statistics of a BatchNorm) are as before the call. A layer
    that loses every connection is named in a UserWarning; one that the loss does not use has score 0.
    Raises: SnackError on a loss that is no scalar or has no gradient, gradients that are not finite, a frozen layer; the model is
        then unchanged.
    """

    def scores(candidates: list[Candidate]) -> list[Tensor]:
        weights = _weights(candidates, "snip")
        with _buffers_kept(model), torch.enable_grad():
            gradients = torch.autograd.grad(_value(model, loss, "snip"), weights, allow_unused=True)
        return [(_wide(w) * (0.0 if g is None else _wide(g))).abs() for g, w in zip(gradients, weights)]

    return _keep_best(model, sparsity, scores, include, exclude, "snip")


def grasp(model: nn.Module, loss: Loss, sparsity: float, include: Choice = None, exclude: str | Iterable[str] = ()) -> nn.Module:
    """Keep the gradient flow (GraSP: Wang, Zhang & Grosse 2020, ICLR): remove the largest -weight * (H g) over all layers.

    g is the gradient of the loss with respect to the weights that can be pruned, H its Hessian; H g takes a second backward pass,
    through the gradient. The paper divides the logits by a temperature of 200: do so in `loss`.
    Arguments, warnings and errors: see `snip`; the loss must be differentiable twice.
    """

    def scores(candidates: list[Candidate]) -> list[Tensor]:
        weights = _weights(candidates, "grasp")
        with _buffers_kept(model), torch.enable_grad():
            gradients = torch.autograd.grad(_value(model, loss, "grasp"), weights, create_graph=True, allow_unused=True)
            flow = sum((g * g.detach()).sum() for g in gradients if g is not None and g.requires_grad)
            require(isinstance(flow, Tensor), "prune.grasp: the gradient does not depend on the weights, so there is no second derivative.")
            try:
                products = torch.autograd.grad(flow, weights, allow_unused=True)
            except RuntimeError as error:
                reason = str(error).splitlines()[0]
                raise SnackError(f"prune.grasp: the loss cannot be differentiated twice: {reason}") from None
        return [_wide(w) * (0.0 if p is None else _wide(p)) for p, w in zip(products, weights)]

    return _keep_best(model, sparsity, scores, include, exclude, "grasp")


def _keep_best(
    model: nn.Module, sparsity: object, scores: Callable[[list[Candidate]], list[Tensor]], include: Choice, exclude: object, who: str
) -> nn.Module:
    """Convert the layers that can be, keeping the positions of highest score over all of them. Called by the public functions."""
    require(isinstance(model, nn.Module), f"prune.{who}: expected an nn.Module, got {type(model).__name__}.")
    fraction = check_sparsity(sparsity, f"prune.{who}")
    candidates = find_linears(model)
    require_some(model, candidates, f"prune.{who}")
    reasons = select_layers(model, candidates, include, exclude, "magnitude", f"prune.{who}")
    chosen = [c for c in candidates if id(c) not in reasons]
    masks = []
    if chosen:
        judged = scores(chosen)
        for candidate, score in zip(chosen, judged):
            require(bool(score.isfinite().all()), f"prune.{who}: the scores of layer '{candidate.title}' are not all finite numbers.")
        masks = best(judged, round((1.0 - fraction) * sum(score.numel() for score in judged)))
    model = convert_layers(model, candidates, reasons, zip(chosen, masks), who=f"snack.prune.{who}")
    warn_left_dense(candidates, reasons, f"snack.prune.{who}", stacklevel=4)
    _warn_empty(model, who, stacklevel=4)
    return model


def best(scores: list[Tensor], count: int) -> list[Tensor]:
    """Masks, shaped as the scores, of the `count` highest ones of all together; ties: the first in the order of the list."""
    dtype = torch.float64 if any(score.dtype == torch.float64 for score in scores) else torch.float32
    flat = torch.cat([score.detach().flatten().to(scores[0].device, dtype) for score in scores])
    if count == 0:
        keep = torch.zeros_like(flat, dtype=torch.bool)
    else:
        threshold = flat.kthvalue(flat.numel() - count + 1).values
        keep = flat > threshold
        ties = (flat == threshold).nonzero().flatten()
        keep[ties[: count - int(keep.sum())]] = True
    parts = keep.split([score.numel() for score in scores])
    return [part.view(score.shape).to(score.device) for part, score in zip(parts, scores)]


def _warn_empty(model: nn.Module, who: str, stacklevel: int = 3) -> None:
    empty = [f"'{layer.name}'" for layer in model.sparsify_report.converted if layer.nnz == 0 and layer.shape[0] * layer.shape[1]]
    if empty:
        advice = "a lower sparsity, or exclude it" if len(empty) == 1 else "a lower sparsity, or exclude them"
        text = f"snack.prune.{who} left no connection in {', '.join(empty)}, where only biases act now; choose {advice}."
        warnings.warn(text, stacklevel=stacklevel)


def _wide(tensor: Tensor) -> Tensor:
    """Products of 16-bit numbers are taken in float32."""
    return tensor.detach().to(torch.promote_types(tensor.dtype, torch.float32))


def _weights(candidates: list[Candidate], who: str) -> list[nn.Parameter]:
    for candidate in candidates:
        require(
            candidate.layer.weight.requires_grad,
            f"prune.{who}: layer '{candidate.title}' is frozen (requires_grad=False), so the loss says nothing about it; exclude it.",
        )
    return [candidate.layer.weight for candidate in candidates]


def _value(model: nn.Module, loss: Loss, who: str) -> Tensor:
    require(callable(loss), f"prune.{who}: loss is a {type(loss).__name__}, expected a function of the model that returns a scalar.")
    value = loss(model)
    is_scalar = isinstance(value, Tensor) and value.numel() == 1
    kind = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
    require(is_scalar, f"prune.{who}: the loss returned {kind}, expected a scalar tensor.")
    require(value.requires_grad, f"prune.{who}: the loss has no gradient; compute it with the model's parameters, without no_grad or detach.")
    return value.reshape(())


@contextmanager
def _buffers_kept(model: nn.Module) -> Iterator[None]:
    """Put every buffer back as it was: the forward pass of a score is none of the model's training."""
    kept = [(module, key, b, None if b is None else b.clone()) for module in model.modules() for key, b in module._buffers.items()]
    try:
        yield
    finally:
        with torch.no_grad():
            for module, key, buffer, content in kept:
                module._buffers[key] = buffer
                if buffer is not None and not torch.equal(buffer, content):
                    buffer.copy_(content)
