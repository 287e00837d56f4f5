"""A callback for Lightning's Trainer, of either of its two packages."""

from __future__ import annotations

import importlib
import sys
import warnings

from ..errors import require
from .stepping import Stepping, numbers


def _lightning():
    """`lightning.pytorch` or `pytorch_lightning`, the same code twice: the one that is imported already, else one that is installed."""
    names = ("lightning.pytorch", "pytorch_lightning")
    for name in sorted(names, key=lambda name: name not in sys.modules):
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            reason = error
    raise reason


class LightningCallback(Stepping, _lightning().Callback):
    """Dynamic sparse training in Lightning's Trainer.

        module = MyModule(snack.sparsify(network, sparsity=0.9))
        callback = snack.integrations.LightningCallback(snack.RigL, every=100, drop_fraction=0.3, t_end=0.75)
        Trainer(max_epochs=10, callbacks=[callback]).fit(module, loader)

    Works with automatic and manual optimisation; of several optimisers it follows the one that holds the sparse layers. The
    stepper is built when the training starts. Its state is part of the trainer's checkpoints, so `fit(..., ckpt_path=...)`
    continues it, with the schedule of the checkpoint. Every update goes to all loggers of the trainer, at its optimiser step.

    With manual optimisation the trainer does not know how many steps there will be: give start and t_end in steps.
    Arguments, attributes and errors: as `Stepping`.
    """

    def __init__(self, method, /, **options):
        super().__init__(method, **options)
        self._restored: dict | None = None

    @property
    def state_key(self) -> str:
        return "snack.LightningCallback"

    def state_dict(self) -> dict[str, object]:
        """The stepper's, for the trainer's checkpoints."""
        return self.dst.state_dict() if self.dst is not None else self._restored or {}

    def load_state_dict(self, state_dict: dict[str, object]) -> None:
        """Keep the state until the training starts and there is a stepper to load it."""
        self._restored = state_dict

    def on_train_start(self, trainer, pl_module) -> None:
        state, self._restored = self._restored, None
        if trainer.global_step and state is None:
            if self.dst is not None:  # a further fit() of a trainer that goes on
                state = self.dst.state_dict()
            else:
                warnings.warn(
                    f"LightningCallback: the checkpoint of step {trainer.global_step} holds no state of a stepper (it was made without this "
                    "callback), so the stepper counts its steps from 0.",
                    stacklevel=2,
                )

        def total() -> float:
            require(
                pl_module.automatic_optimization,
                "LightningCallback: with manual optimisation the trainer does not know how many optimiser steps there will be; give start and "
                "t_end in steps, not as a part.",
            )
            return trainer.estimated_stepping_batches

        self._begin(pl_module, trainer.optimizers, total, state, getattr(trainer.precision_plugin, "scaler", None))

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        for record in self._fresh_records():
            for logger in trainer.loggers:
                logger.log_metrics(numbers(record), step=record.step)

    def on_train_end(self, trainer, pl_module) -> None:
        self._end()

    def on_exception(self, trainer, pl_module, exception) -> None:
        self._end()
