"""Updates as scalars for TensorBoard, or for whatever else has `add_scalar`."""

from __future__ import annotations

from ..errors import require
from .history import updates_of


class TensorBoardLog:
    """Writes the updates of a stepper to a `torch.utils.tensorboard.SummaryWriter`, each once.

        log = snack.plot.TensorBoardLog(SummaryWriter("runs/rigl"))
        ...
        optimizer.step(); dst.step(); log.write(dst)

    Scalars, at the optimiser step of the update: `dst/fraction`, `dst/seconds`, and of every layer `dst/nnz/LAYER`, `dst/dropped/LAYER`,
    `dst/grown/LAYER`; with a stepper made with `track=True` also `dst/overlap/LAYER` and `dst/explored/LAYER` (Rs).

    Args:
        writer: any object with `add_scalar(tag, value, global_step)`. It stays yours to flush and close.
        prefix: what the tags begin with. since: number of the first update to write; after a resumed run, `dst.updates` leaves out
            what the first run has written.

    Raises: SnackError when the writer has no `add_scalar`.
    """

    def __init__(self, writer: object, prefix: str = "dst", since: int = 0):
        require(
            callable(getattr(writer, "add_scalar", None)),
            f"plot.TensorBoardLog: a {type(writer).__name__} was given, expected an object with add_scalar, such as SummaryWriter.",
        )
        self.writer, self.prefix, self.since = writer, prefix, since

    def write(self, source: object) -> int:
        """Write what is new in a stepper or its history, in their order; on a card this waits for the updates. Returns how many were written."""
        new = updates_of(source, "plot.TensorBoardLog", self.since)
        for update in new:
            for tag, value in self._scalars(update):
                self.writer.add_scalar(f"{self.prefix}/{tag}", value, update.step)
            self.since = update.number + 1
        return len(new)

    def _scalars(self, update):
        yield "fraction", update.fraction
        yield "seconds", update.seconds
        layers = {"nnz": update.nnz, "dropped": update.layers, "grown": update.grown_layers}
        layers |= {"overlap": update.overlap or {}, "explored": update.explored or {}}
        for what, values in layers.items():
            for name, value in values.items():
                yield f"{what}/{name or '(model)'}", value
