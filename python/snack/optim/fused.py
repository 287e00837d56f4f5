"""SGD and AdamW with fused_grad: at small batch the passes over `values` cost as much as the products, and one pass is enough.

The backward pass leaves dy and x in `values.grad` (snack.ops.deferred); `step` hands them to one kernel that computes the gradient of a
connection, changes its state and its value, and stores no gradient. Whatever does not fit (a gradient that somebody has looked at or
added to, dense parameters) is updated by torch.optim's own step.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.optim.optimizer import _get_scalar_dtype

from ..errors import SnackError, require
from ..ops.deferred import DeferredGradient, defer, is_pending
from ..ops.update import AdamWStep, SgdStep, update

_Pending = tuple[dict, Tensor, DeferredGradient]


class _FusedGradient(torch.optim.Optimizer):
    """What both have in common. `_plain`: the class of torch.optim; `_rules`: [(state, rule)] of parameters with pending gradients."""

    _plain: type[torch.optim.Optimizer]
    fused_grad = False
    fused_updates = 0

    def __init__(self, params, *args, fused_grad: bool = False, **kwargs):
        require(isinstance(fused_grad, bool), f"{type(self).__name__}: fused_grad={fused_grad!r} must be True or False.")
        self.fused_grad = fused_grad
        super().__init__(params, *args, **kwargs)

    def add_param_group(self, param_group: dict) -> None:
        super().add_param_group(param_group)
        if self.fused_grad:
            self._ask(self.param_groups[-1:])

    def _ask(self, groups: list[dict]) -> None:
        """For deferred gradients, after a look at the options."""
        for group in groups:
            for option in ("amsgrad", "differentiable"):
                require(not group.get(option), f"{type(self).__name__}: {option} has no fused kernel; build the optimiser with fused_grad=False.")
            for beta in group.get("betas", ()):
                require(not isinstance(beta, Tensor), f"{type(self).__name__}: betas must be numbers with fused_grad=True.")
            for parameter in group["params"]:
                defer(parameter, self)

    def __getstate__(self) -> dict:
        return super().__getstate__() | {"fused_grad": self.fused_grad}

    def __setstate__(self, state: dict) -> None:
        super().__setstate__(state)
        if self.fused_grad:
            self._ask(self.param_groups)

    def step(self, closure=None):
        """As torch.optim's. closure: computes the loss anew, and its gradients."""
        if not self.fused_grad:
            return self._plain_step(closure)
        if torch.compiler.is_compiling():
            raise SnackError(f"{type(self).__name__}: step() with fused_grad=True runs eagerly; compile the model, not the step.")
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            self._step()
        return loss

    def _plain_step(self, closure=None):
        step = self._plain.step
        if getattr(step, "hooked", False):  # its hooks are called around our own step
            step = step.__wrapped__
        return step(self, closure)

    def _step(self) -> None:
        pending: list[_Pending] = []
        for group in self.param_groups:
            for parameter in group["params"]:
                gradient = parameter.grad
                if is_pending(gradient):
                    pending.append((group, parameter, gradient))
                elif type(gradient) is DeferredGradient:
                    parameter.grad = gradient.operands.gradient(gradient)
        operands = [(*gradient.operands.checked(), gradient.operands.tail) for _, _, gradient in pending]  # before anything is changed
        try:
            for _, parameter, _ in pending:
                parameter.grad = None
            self._plain_step()
            for (_, parameter, gradient), (index, tile_ptr, dy, x, tail), (state, rule) in zip(pending, operands, self._rules(pending)):
                update(index, tile_ptr, parameter, state, dy, x, rule, *tail)
                gradient.operands.used = True
                self.fused_updates += 1
        finally:
            for _, parameter, gradient in pending:
                parameter.grad = gradient

    def _rules(self, pending: list[_Pending]) -> list[tuple[list[Tensor], SgdStep | AdamWStep]]:
        raise NotImplementedError


_DOC = """torch.optim.{name} with one option more.

Args:
    fused_grad: after a small backward pass, compute the gradient of a sparse layer's `values` and its update in one kernel, without
        storing the gradient. Otherwise, and for all other parameters, this is torch.optim.{name}; so it is with False, the default.
    All others: as torch.optim.{name} has them{but}.

State has torch.optim's names, dtypes and shapes: state dicts of both can be exchanged, and `SparseLinear.rewire` carries them.
Results equal torch.optim.{name}'s to rounding; 16-bit ones are rounded once a step. `fused_updates` counts the updates of a layer that
were fused. An update is fused where `values.grad` comes from one eager `backward()`, is not looked at before `step`, and
batch * (in + out) is at most nnz. Clipping, GradScaler, gradient accumulation, hooks, autocast, torch.compile of the model and
DistributedDataParallel work: they get, or make, the gradient itself, and torch.optim's step follows.

The input of a layer must not be overwritten between `backward` and `step`: that raises SnackError, as an edit of its connections by
other means than `rewire` does.
"""


class SGD(_FusedGradient, torch.optim.SGD):
    __doc__ = _DOC.format(name="SGD", but=" (differentiable with fused_grad=False alone)")
    _plain = torch.optim.SGD

    def _rules(self, pending):
        return [self._rule(group, parameter) for group, parameter, _ in pending]

    def _rule(self, group: dict, parameter: Tensor) -> tuple[list[Tensor], SgdStep]:
        rule = SgdStep(*(group[key] for key in ("lr", "momentum", "dampening", "weight_decay", "nesterov", "maximize")))
        if rule.momentum == 0:
            return [], rule
        state = self.state[parameter]
        rule.is_first = state.get("momentum_buffer") is None
        if rule.is_first:
            state["momentum_buffer"] = torch.empty_like(parameter)
        return [state["momentum_buffer"]], rule


class AdamW(_FusedGradient, torch.optim.AdamW):
    __doc__ = _DOC.format(name="AdamW", but=" (amsgrad, differentiable and betas as tensors with fused_grad=False alone)")
    _plain = torch.optim.AdamW

    def _rules(self, pending):
        states = [self._state_of(group, parameter) for group, parameter, _ in pending]
        if states:
            torch._foreach_add_([state["step"] for state in states], 1)
        return [([state["exp_avg"], state["exp_avg_sq"]], self._rule(group, state)) for (group, _, _), state in zip(pending, states)]

    def _rule(self, group: dict, state: dict) -> AdamWStep:
        return AdamWStep(group["lr"], group["betas"], group["eps"], group["weight_decay"], state["step"], group["maximize"])

    def _state_of(self, group: dict, parameter: Tensor) -> dict:
        state = self.state[parameter]
        if not state:
            is_beside = group["capturable"] or group["fused"]
            dtype = _get_scalar_dtype(is_fused=group["fused"])
            state["step"] = torch.zeros((), dtype=dtype, device=parameter.device if is_beside else "cpu")
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
        return state
