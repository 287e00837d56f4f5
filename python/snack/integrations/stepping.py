"""What the callbacks have in common: a stepper that is built when the training begins and follows its optimiser.

The stepper hangs on the optimiser itself (`register_step_post_hook`), not on an event of the training loop. So an update follows exactly the
optimiser step that made it due: with gradient accumulation, with steps that GradScaler skips, with several steps a batch, and
before gradients are cleared or a checkpoint is written. The loop's events only begin, end, save and report.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable
from contextlib import ExitStack

import torch
from torch import nn

from ..dst import DST, Update
from ..errors import require
from ..nn import SparseLinear


class Stepping:
    """Base of the callbacks.

    Args:
        method: a class such as `snack.RigL`, or any function (model, optimizer, **options) -> DST.
        options: of the method. start and t_end may be a float from 0 to 1, which is a part of all optimiser steps of the training
            (t_end=0.75; t_end=1.0 is the whole of it, t_end=1 one step).

    Attributes:
        dst: the stepper, from the beginning of the training on; None before.

    Raises: SnackError: no method. What the method says to its options is raised when the training begins.
    """

    def __init__(self, method: Callable[..., DST], /, **options: object):
        require(
            callable(method),
            f"{type(self).__name__}: the method is {method!r}, expected a class such as snack.RigL or a function (model, optimizer, **options) "
            "that returns a stepper.",
        )
        self.method, self.options = method, options
        self.dst: DST | None = None
        self._reported = 0  # records of dst.history that the logger has
        self._running = ExitStack()  # the hook, closed when the training ends
        self._eager = ExitStack()  # closed when a recorded step is over
        for left in (self._running, self._eager):  # by a training that an error ended, when nobody holds the callback any more
            weakref.finalize(self, left.close)

    def _begin(
        self,
        model: nn.Module,
        optimizers: Iterable[torch.optim.Optimizer],
        total: Callable[[], float],
        state: dict | None = None,
        scaler: torch.amp.GradScaler | None = None,
    ) -> None:
        """Build the stepper and hang it on the optimiser that holds the sparse layers. state: of the run that is continued."""
        who = type(self).__name__
        self._end()
        optimizer = _holder(who, model, [_unwrap(optimizer) for optimizer in optimizers])
        dst = self.method(model, optimizer, **_in_steps(who, self.options, total))
        require(isinstance(dst, DST), f"{who}: the method returned a {type(dst).__name__}, expected a stepper (snack.DST).")
        if state is not None:
            dst.load_state_dict(state)
        dst.scaler = dst.scaler or scaler
        self.dst, self._reported = dst, len(dst.history)
        after_step = weakref.WeakMethod(self._after_step)
        handle = dst.optimizer.register_step_post_hook(lambda *_: after_step()())  # later than the stepper's own, which counts
        self._running.callback(handle.remove)
        self._record_eagerly()

    def _after_step(self) -> None:
        self.dst.step()
        self._record_eagerly()

    def _record_eagerly(self) -> None:
        """A compiled model hides a layer's operands, so a step that is recorded runs uncompiled."""
        self._eager.close()
        if self.dst.armed:
            self._eager.enter_context(torch.compiler.set_stance("force_eager"))

    def _end(self) -> None:
        """Let go of the optimiser; the stepper and its history stay readable."""
        self._running.close()
        self._eager.close()

    def _fresh_records(self) -> list[Update]:
        """Updates since the last call."""
        records = self.dst.history[self._reported :]
        self._reported += len(records)
        return records


def numbers(record: Update) -> dict[str, float]:
    """An update for a logger: dst/step, update, fraction, dropped, grown, nnz and seconds; a layer, dst/overlap/NAME and
    dst/explored/NAME where the stepper tracks them."""
    logged = {
        "dst/step": record.step,
        "dst/update": record.number,
        "dst/fraction": record.fraction,
        "dst/dropped": record.dropped,
        "dst/grown": record.grown,
        "dst/nnz": sum(record.nnz.values()),
        "dst/seconds": record.seconds,
    }
    for name in ("overlap", "explored"):
        logged |= {f"dst/{name}/{layer}": part for layer, part in (getattr(record, name) or {}).items()}
    return logged


def _unwrap(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The optimiser inside the wrappers of accelerate and Lightning: the one whose `step` runs for every real step."""
    while isinstance(inner := getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
        optimizer = inner
    return optimizer


def _holder(who: str, model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> torch.optim.Optimizer:
    """The one optimiser that holds values of sparse layers; where none does, the first, about which the stepper complains."""
    require(bool(optimizers), f"{who}: the training has no optimiser, so nothing says when to move connections; give it one.")
    values = {id(layer.values) for layer in model.modules() if isinstance(layer, SparseLinear)}
    holders = [o for o in optimizers if any(id(p) in values for group in o.param_groups for p in group["params"])]
    require(
        len(holders) <= 1,
        f"{who}: {len(holders)} optimisers hold values of sparse layers, and one stepper follows one optimiser; put these layers into one.",
    )
    return (holders or optimizers)[0]


def _in_steps(who: str, options: dict[str, object], total: Callable[[], float]) -> dict[str, object]:
    """The options with parts of the training as numbers of optimiser steps."""
    parts = {name: part for name in ("start", "t_end") if isinstance(part := options.get(name), float) and 0 <= part <= 1}
    if not parts:
        return options
    steps = total()
    name, part = next(iter(parts.items()))
    require(
        math.isfinite(steps) and steps > 0,
        f"{who}: {name}={part} is a part of all steps, and the trainer does not know how many there will be; give {name} in steps, or "
        "max_steps to the trainer.",
    )
    return options | {name: int(part * steps) for name, part in parts.items()}
