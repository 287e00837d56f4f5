"""A callback for `transformers.Trainer`."""

from __future__ import annotations

import warnings

from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState

from ..errors import require
from .stepping import Stepping, numbers

STATE_KEY = "snack.dst"
"""Name of the stepper's state in `trainer_state.json`, among the stateful callbacks."""


class TransformersCallback(Stepping, TrainerCallback):
    """Dynamic sparse training in `transformers.Trainer`.

        model = snack.sparsify(model, sparsity=0.9)
        callback = snack.integrations.TransformersCallback(snack.RigL, every=100, drop_fraction=0.3, t_end=0.75)
        Trainer(model, args, train_dataset=data, callbacks=[callback]).train()

    The stepper is built in `train()`, when the optimiser exists. Its state is part of `trainer_state.json`, so
    `train(resume_from_checkpoint=...)` continues it, with the schedule of the checkpoint. Every update is an entry of
    `trainer.state.log_history`; `attach(trainer)`, in place of `callbacks=[...]`, also sends it to TensorBoard, W&B and the like.

    Arguments, attributes and errors: as `Stepping`.
    """

    def __init__(self, method, /, **options):
        super().__init__(method, **options)
        self._trainer: Trainer | None = None

    def attach(self, trainer: Trainer) -> TransformersCallback:
        """Add this callback to `trainer`, and report updates by its `log()`: the Trainer tells its callbacks nothing of itself."""
        require(isinstance(trainer, Trainer), f"TransformersCallback: attach was given a {type(trainer).__name__}, expected a transformers.Trainer.")
        if self not in trainer.callback_handler.callbacks:
            trainer.add_callback(self)
        self._trainer = trainer
        return self

    def on_train_begin(self, args, state: TrainerState, control: TrainerControl, *, model, optimizer, **kwargs):
        saved = state.stateful_callbacks.get(STATE_KEY) if state.global_step else None
        if state.global_step and saved is None:
            warnings.warn(
                f"TransformersCallback: the checkpoint of step {state.global_step} holds no state of a stepper (it was made without this "
                "callback), so the stepper counts its steps from 0.",
                stacklevel=2,
            )
        self._begin(model, [optimizer], lambda: state.max_steps, saved, getattr(optimizer, "scaler", None))  # accelerate's has it
        state.stateful_callbacks[STATE_KEY] = self.dst.state_dict()

    def on_step_end(self, args, state: TrainerState, control: TrainerControl, **kwargs):
        # Not an ExportableState: the Trainer would rebuild the callback from JSON, and methods and rules are functions.
        state.stateful_callbacks[STATE_KEY] = self.dst.state_dict()
        for record in self._fresh_records():
            if self._trainer is None:
                state.log_history.append({**numbers(record), "epoch": state.epoch, "step": state.global_step})
                continue
            should_log = control.should_log  # log() takes it for its own
            self._trainer.log(numbers(record))
            control.should_log = should_log

    def on_train_end(self, args, state: TrainerState, control: TrainerControl, **kwargs):
        self._end()
