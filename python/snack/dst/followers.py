"""Copies of a model that keep its topology: every edit of a layer is made in the layer of the same name, too."""

from __future__ import annotations

from torch import nn

from ..errors import require
from ..nn import SparseLinear
from .scope import Job

PREFIXES = ("module.", "_orig_mod.")  # of AveragedModel and DistributedDataParallel, and of torch.compile


def _bare(name: str) -> str:
    """A name without what wrappers put before it."""
    while name.startswith(PREFIXES):
        name = name.split(".", 1)[1]
    return name


class Follower:
    """One copy of the model, with `layers` (by name) as its counterparts now."""

    def __init__(self, who: str, copy: nn.Module, layers: dict[str, SparseLinear]):
        require(isinstance(copy, nn.Module), f"{who}.follow: the copy is a {type(copy).__name__}, expected a torch.nn.Module.")
        require(
            not getattr(copy, "use_buffers", False),
            f"{who}.follow: the copy averages buffers too (use_buffers=True), and the topology is one; build it with use_buffers=False.",
        )
        own = {_bare(name): module for name, module in copy.named_modules() if isinstance(module, SparseLinear)}
        self._who, self._layers = who, {}
        for name, layer in layers.items():
            mine = own.get(_bare(name))
            require(mine is not None, f"{who}.follow: the copy has no sparse layer '{_bare(name)}'; give a copy of the model that is trained.")
            require(mine is not layer, f"{who}.follow: layer '{name}' is the trained one itself; give a copy of the model (copy.deepcopy).")
            require(
                mine.pattern.to("cpu").equals(layer.pattern.to("cpu")),
                f"{who}.follow: layer '{name}' has other connections in the copy; copy the model now, or load its state_dict into the copy.",
            )
            self._layers[name] = mine

    def check(self, job: Job) -> None:
        """Whether the edit of one layer can be made. Raises: SnackError when the counterpart's topology was changed by somebody else."""
        mine = self._layers.get(job.name)
        require(mine is not None, f"layer '{job.name}' is trained since follow() was called; call it again after such a change.")
        require(
            mine.pattern.to("cpu").equals(job.layer.pattern.to("cpu")),  # a slot of one is a slot of the other only then
            f"layer '{job.name}' has other connections than in the copy that follows it, so one of them was loaded or edited since; "
            "load the model's state_dict into the copy.",
        )

    def edit(self, job: Job) -> None:
        """Make the edit of one layer, which was checked."""
        self._layers[job.name].rewire(job.drop, (job.rows, job.cols), job.values)
