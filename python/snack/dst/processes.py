"""Updates on several processes that train one model: every rank makes the same edit, or none does.

    before      counters, topology hashes, sizes of what was recorded     all_gather_object, about 100 bytes a layer and rank
    gradients   x and dY of the step, layer by layer, in rank order       all_gather, batch * (in + out) numbers a layer and rank
    after       hash of the edits that were worked out                    all_gather_object, about 100 bytes a layer and rank

The middle part is sent for rules that look at gradients of absent connections alone (RigL, SRigL, SNFS); all else that rules read is equal
on all ranks already: values, averaged gradients, optimiser states, counter-based random numbers. The ranks' batches are joined rather
than their candidates merged, so that growth is exactly that of one process with the whole batch: the k largest entries of a sum are not
among the k largest of its terms. Where a batch is so large that lists of candidates would be shorter, it stays exact.

An error on one rank, or a difference between ranks, is an error on all, before anything is changed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor
from torch import distributed as dist

from ..errors import SnackError
from ..nn import SparseLinear
from ..nn.parallel import all_objects, bytes_of, first_difference, hash_of, topology_hash
from .scope import Exchange, Job

Pair = tuple[Tensor, Tensor]  # x (batch, in), dY (batch, out)
Result = TypeVar("Result")


class Team:
    """The processes of `group`; with None, one process, and nothing is sent. `who`: the method, for messages."""

    def __init__(self, group: dist.ProcessGroup | None, who: str):
        self.group, self.who = group, who

    def agree(self, make: Callable[[], Result], describe: Callable[[Result], dict[str, object]]) -> tuple[Result, list[dict[str, object]]]:
        """make() and, of every rank, what describe says of its result. Entries with a name (not starting with "_") must be equal.

        Raises: on every rank, where make raised on one (there, the error itself), or where ranks differ.
        """
        if self.group is None:
            return make(), []
        result, report, error = None, {}, None
        try:
            result = make()
            report = describe(result)
        except Exception as caught:  # the others wait for this rank: whatever it is, they must hear of it
            error = caught
        heard = all_objects((None if error is None else f"{type(error).__name__}: {error}", report), self.group)
        if error is not None:
            raise error
        for rank, (problem, _) in enumerate(heard):
            if problem is not None:
                raise SnackError(f"{self.who}: nothing was changed, because rank {rank} failed: {problem.removeprefix('SnackError: ')}")
        reports = [report for _, report in heard]
        difference = first_difference([{key: entry for key, entry in report.items() if not key.startswith("_")} for report in reports])
        if difference is not None:
            rank, key = difference
            raise SnackError(
                f"{self.who}: nothing was changed, because rank {rank} and rank 0 disagree about {key}; "
                "all ranks must train one model, with equal options, steps and averaged gradients."
            )
        return result, reports

    def share(
        self, counters: dict[str, int], layers: dict[str, SparseLinear], collect: Callable[[], dict[str, list[Pair | None]]]
    ) -> dict[str, list[Pair | None]]:
        """What was recorded, of all ranks: {layer: a pair for every recorded step, newest first, or None}. Compares the topologies, too.

        x of the ranks is joined in rank order, and so is dY, divided by their number: dY^T x is the mean gradient, as `values.grad` is.
        """

        def describe(found: dict[str, list[Pair | None]]) -> dict[str, object]:
            report: dict[str, object] = {f"the number of {what}": count for what, count in counters.items()}
            report |= {f"the connections of layer '{name}'": (layer.nnz, topology_hash(layer)) for name, layer in layers.items()}
            report |= {f"what was recorded of layer '{name}'": len(pairs) for name, pairs in found.items()}
            return report | {"_sizes": {name: [_size(pair) for pair in pairs] for name, pairs in found.items()}}

        found, reports = self.agree(collect, describe)
        if self.group is None:
            return found
        sizes = [report["_sizes"] for report in reports]
        return {
            name: [self._join(layers[name], pair, [size[name][i] for size in sizes]) for i, pair in enumerate(pairs)]
            for name, pairs in found.items()
        }

    def _join(self, layer: SparseLinear, pair: Pair | None, sizes: Sequence[tuple[int, str] | None]) -> Pair | None:
        """The pairs of all ranks as one. `sizes`: batch and dtype on every rank, None without a use; "all": joined before, and saved."""
        if sizes[0] is not None and sizes[0][1] == "all":
            return pair
        present = [size for size in sizes if size is not None]
        if not present:
            return None
        dtype = present[0][1] if len({name for _, name in present}) == 1 else "float32"  # ranks under different autocasts
        dtype, width, longest = getattr(torch, dtype), layer.in_features + layer.out_features, max(batch for batch, _ in present)
        own = torch.zeros(longest, width, dtype=dtype, device=layer.index.device)  # one length for all, as collectives want it
        if pair is not None:
            x, dy = pair
            own[: len(x), : layer.in_features] = x
            own[: len(x), layer.in_features :] = dy
        everyone = torch.empty(len(sizes) * longest, width, dtype=dtype, device=own.device)
        _gather(bytes_of(everyone), bytes_of(own), group=self.group)
        if any(size is None or size[0] != longest for size in sizes):
            everyone = torch.cat([everyone[r * longest : r * longest + size[0]] for r, size in enumerate(sizes) if size is not None])
        x, dy = everyone.split([layer.in_features, layer.out_features], dim=1)
        return x.contiguous(), dy / len(sizes)


def _gather(everyone: Tensor, own: Tensor, group: dist.ProcessGroup) -> None:
    """One collective by its newer or its older name."""
    getattr(dist, "all_gather_single", dist.all_gather_into_tensor)(everyone, own, group=group)


class Joined(tuple):
    """A pair that holds the batches of all ranks already, equal on all of them."""


def _size(pair: Pair | None) -> tuple[int, str] | None:
    if pair is None:
        return None
    x, dy = pair
    return len(x), "all" if isinstance(pair, Joined) else str(dy.dtype).removeprefix("torch.")


def describe_jobs(jobs: list[Job | Exchange]) -> dict[str, object]:
    """Hashes of the edits: what every layer drops, where it grows, with which values; of an exchange, all that its choices are made from."""

    def lists(job: Job | Exchange) -> list[Tensor]:
        parts = (job.layer.values, *job.operands) if isinstance(job, Exchange) else (job.drop, job.rows, job.cols, job.values)
        return [part.to(job.layer.index.device) for part in parts if isinstance(part, Tensor)]

    hashes = [hash_of(lists(job)) for job in jobs]
    return {f"what to change in layer '{job.name}'": (job.k, int(found)) for job, found in zip(jobs, hashes)}
