"""Measures a case: builds its contenders, compares errors and times side by side, watches memory and energy, and writes one record.

What a peer cannot do is a result of its own ("not_run"), and so is our own lack of memory; another failure of SNACK ends the run, and so
does a result of ours that is wrong.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from functools import partial

import torch

from .. import _costs, ops
from ..errors import SnackError
from ..formats import Pattern
from ..nn import SparseLinear
from . import layers
from .case import PRODUCTS, Case
from .energy import EnergyMeter
from .peers import LATE, PEERS, Peer, Problem, Topology, snack
from .timing import Meter, Player, is_out_of_memory, reason
from .tune import candidates, random_pattern

EAGER = ("snack", "snack_fused", "dense", "dense_mask")  # whose eager time stands beside the graph's
COLD_TIMES = 4  # times the L2 cache that the copies of cold weights take together
Make = Callable[[], "Peer | Iterator[Peer]"]


def regime(layer: SparseLinear, routine: str, batch: int) -> str:
    """The regime that SNACK chooses, the first word of `explain`."""
    return layer.explain(batch)[routine].split(",")[0].rsplit(": ", 1)[-1]


class Bench:
    """Measures cases on the device of a meter. `facts`: what `meter.facts()` says; `energy`: None where no energy is measured."""

    def __init__(self, meter: Meter, facts: dict | None = None, energy: EnergyMeter | None = None):
        self.meter, self.facts, self.energy = meter, facts or {}, energy
        self.energy_problem = ""
        self._problem: tuple[tuple, Problem] | None = None  # neighbours of a suite share their weights
        self._tuned: tuple[tuple, Pattern] | None = None

    def measure(self, case: Case) -> dict:
        """The record of a case."""
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=r"Sparse \w+ tensor support is in beta|bsr_dense_addmm uses non-optimal")
            return self._head(case) | self._measure(case)

    def _measure(self, case: Case) -> dict:
        try:
            if case.kernel:
                return self._kernel(case)
            if case.routine in PRODUCTS:
                return self._product(case)
            self._problem = None  # its memory is needed now
            self.meter.tidy()
            if case.routine == "memory":
                return self._memory(case)
            return self._update(case) if case.routine == "update" else self._layer(case)
        finally:
            self.meter.tidy()

    def _head(self, case: Case) -> dict:
        out, in_ = case.shape
        params = {"optimizer": case.optimizer or None, "cap_gib": case.cap_gib}
        params = {key: value for key, value in params.items() if value is not None}
        return {
            "case": str(case), "routine": case.routine, "out": out, "in": in_, "batch": case.batch, "sparsity": case.sparsity,
            "nnz": round((1 - case.sparsity) * out * in_), "dtype": case.dtype, "mode": case.mode, "l2": case.l2,
            **({"params": params} if params else {}),
        }

    # ---- what the routines do ----

    def _product(self, case: Case) -> dict:
        problem = self._problem_of(case)
        sizes = {"snack": problem.topology.pattern.nbytes + (0 if case.routine == "sddmm" else problem.values.nbytes)}
        copies = self._copies({**sizes, **dict.fromkeys(case.peers, problem.weight.nbytes)}) if case.l2 == "cold" else {}
        makes: dict[str, Make] = {"snack": partial(snack, problem, copies.get("snack", 1))}
        makes |= {name: partial(PEERS[name], problem, copies[name]) if name in copies else partial(PEERS[name], problem) for name in case.peers}
        record = {
            "regime": regime(SparseLinear._from_parts(problem.topology.pattern, problem.values, None), case.routine, case.batch),
            "bytes": problem.values.numel() * (problem.values.element_size() + 2),
        }
        if "capability" in self.facts:
            card, values = self.facts["capability"], problem.values
            best = candidates(case.routine, case.shape, values.numel(), case.batch, values.dtype, card, costs=_costs.text_of(card))[0]
            record |= {"kernel": best["kernel"], "predicted_us": best["predicted_us"]} if best["predicted_us"] < float("inf") else {}
        if "copy_tb_s" in self.facts:
            record["floor_us"] = round(record["bytes"] / self.facts["copy_tb_s"] / 1e6, 3)
        return record | ({"params": {"copies": copies}} if copies else {}) | self._sides(case, makes)

    def _kernel(self, case: Case) -> dict:
        """One kernel alone, with what the cost model says it has to do; who cannot serve the case, or lacks memory, has the reason."""
        side = {"kernel": case.kernel, "peers": {}}
        try:
            pattern, operands = self._operands(case)
            dtype = operands[0].dtype
            known = candidates(case.routine, pattern.shape, pattern.nnz, case.batch, dtype, self.facts["capability"], case.kernel)[0]
            side |= {key: value for key, value in known.items() if value != float("inf")}
            run = partial(getattr(ops, case.routine), pattern, *operands, regime=case.kernel)
            return side | self.meter.compare({"snack": self.meter.player([run], case.mode)}, samples=5)["snack"]
        except Exception as error:
            if not (isinstance(error, SnackError) or is_out_of_memory(error)):
                raise
            return side | {"not_run": reason(error)}

    def _operands(self, case: Case) -> tuple[Pattern, tuple[torch.Tensor, ...]]:
        """A random pattern, which neighbours share, and ones for what is multiplied."""
        if self._tuned is None or self._tuned[0] != (case.shape, case.sparsity):
            self._tuned = None  # two at a time need not fit
            self._tuned = ((case.shape, case.sparsity), random_pattern(case, self.meter.device))
        pattern = self._tuned[1]
        dy, x = (torch.ones(case.batch, n, device=self.meter.device, dtype=getattr(torch, case.dtype)) for n in case.shape)
        if case.routine == "sddmm":
            return pattern, (dy, x)
        return pattern, (torch.ones(pattern.nnz, device=x.device, dtype=x.dtype), x if case.routine == "spmm" else dy)

    def _problem_of(self, case: Case) -> Problem:
        key = (case.shape, case.sparsity, case.dtype)
        if self._problem is None or self._problem[0] != key:
            same = self._problem is not None and self._problem[0][:2] == key[:2]
            topology = self._problem[1].topology if same else None
            self._problem = None  # two at a time need not fit
            topology = topology or Topology.random(case.shape, case.sparsity, self.meter.device)
            self._problem = (key, Problem.random(case, topology, self.meter.device))
        return self._problem[1].with_batch(case)

    def _copies(self, sizes: dict[str, int]) -> dict[str, int]:
        """How many copies of weights of such sizes take turns, so that none is in the L2 cache when its turn comes."""
        room = COLD_TIMES * 1e6 * self.facts.get("l2_mb", 1.0)
        return {name: 2 + int(room // max(1, size)) for name, size in sizes.items()}

    def _layer(self, case: Case) -> dict:
        device = self.meter.device
        try:
            record = self._layer_facts(case)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            record = {}  # the times will say that it does not fit
        copies = record.get("params", {}).get("copies", {})
        makes = {name: layers.maker(name, case, device, copies.get(name, 1)) for name in ("snack", *case.peers)}
        peaks = {name: self._peak(make) for name, make in makes.items()}
        record |= self._sides(case, makes)
        for name, peak in peaks.items():
            side = record if name == "snack" else record["peers"][name]
            side |= {} if peak is None else {"peak_bytes": peak}
        return record

    def _layer_facts(self, case: Case) -> dict:
        layer = layers.build("snack", case, self.meter.device)
        error = layers.error_of(layer, case, self.meter.device)
        self._require_right(error, case)
        record = {"nnz": layer.nnz, "regime": regime(layer, "spmm", case.batch), "rel_error": error}
        if case.l2 == "cold":
            dense = layer.values.element_size() * case.shape[0] * case.shape[1]
            sizes = {"snack": layer.values.nbytes + layer.pattern.nbytes, **dict.fromkeys(case.peers, dense)}
            record["params"] = {"copies": self._copies(sizes)}
        return record

    def _peak(self, make: Make) -> int | None:
        """Of one contender alone; None where it does not run: the times will say why."""
        try:
            return self.meter.peak_bytes(lambda: make().runs[0])
        except Exception:
            return None
        finally:
            self.meter.tidy()

    def _update(self, case: Case) -> dict:
        makes = {name: partial(layers.UPDATES[name], case, self.meter.device) for name in ("snack", *case.peers)}
        record = self._sides(case, makes, mode="eager")  # as a training loop calls it
        for name in makes:
            if "not_run" in (side := record if name == "snack" else record["peers"][name]):
                continue
            run = makes[name]().runs[0]
            found = {"gpu_us": self.meter.gpu_us(run), "extra_bytes": self.meter.peak_bytes(lambda run=run: run)}
            side |= {key: value for key, value in found.items() if value is not None}
            del run
            self.meter.tidy()
        return record | {"mode": "eager"}

    def _memory(self, case: Case) -> dict:
        """Kept, and the most in a training step and in inference; who does not fit has the reason."""
        sides: dict[str, dict] = {}
        small = Case("memory", (8, 8), 0.5, 2, case.dtype, optimizer=case.optimizer)
        dict(layers.memory("dense", small, self.meter))  # what cuBLAS keeps is nobody's
        layers.prototype(case, self.meter.device)
        with self.meter.capped(case.cap_gib):
            for name in ("snack", *case.peers):
                side = sides[name] = {}
                try:
                    for key, value in layers.memory(name, case, self.meter):
                        side[key] = value
                except Exception as error:
                    if name == "snack" and not is_out_of_memory(error):
                        raise
                    side["not_run"] = reason(error)
                self.meter.tidy()
        return sides.pop("snack") | {"peers": sides}

    # ---- side by side ----

    def _sides(self, case: Case, makes: dict[str, Make], mode: str | None = None) -> dict:
        """Ours, with "peers": times, errors, notes and energy of everybody."""
        sides: dict[str, dict] = {name: {} for name in makes}
        peers: dict[str, Peer] = {}
        players = {}
        for late in (False, True):
            group = [name for name in makes if (name in LATE) == late]
            for name in group:
                try:
                    peer = self._best(makes[name](), mode or case.mode)
                    if peer.error is not None:
                        sides[name]["rel_error"] = peer.error(peer.runs[-1]())
                    if peer.parameters is not None:
                        sides[name]["parameters"] = peer.parameters
                    players[name], peers[name] = self._player(peer, mode or case.mode), peer
                except Exception as error:
                    if name == "snack" and not is_out_of_memory(error):
                        raise
                    sides[name] = {"not_run": reason(error)}
            for name, times in self.meter.compare({name: players[name] for name in group if name in players}).items():
                notes = "; ".join(words for words in (peers[name].note, times.pop("note", "")) if words)
                sides[name] |= times | ({"note": notes} if notes else {})
        for name in EAGER:
            is_replayed = name in players and (mode or case.mode) == "graph"
            eager = self.meter.eager_us(peers[name].runs[0]) if is_replayed else None
            sides.get(name, {}).update({} if eager is None else {"eager_us": eager})
        watched = {name: (players[name].play, players[name].calls) for name in case.energy if name in players}
        if self.energy is not None and watched:
            try:
                for name, found in self.energy.compare(watched).items():
                    sides[name] |= found
            except SnackError as error:  # the other numbers stand without it
                self.energy, self.energy_problem = None, str(error)
        if "rel_error" in sides["snack"]:
            self._require_right(sides["snack"]["rel_error"], case)
        return sides.pop("snack") | {"peers": sides}

    def _player(self, peer: Peer, mode: str) -> Player:
        if mode != "graph" or not peer.why_eager:
            return self.meter.player(peer.runs, mode, peer.finish)
        player = self.meter.player(peer.runs, "eager", peer.finish)
        player.note = {"mode": "eager", "note": f"not captured in a graph: {peer.why_eager}"}
        return player

    def _best(self, peer: Peer | Iterator[Peer], mode: str) -> Peer:
        """The fastest of the forms that run."""
        if isinstance(peer, Peer):
            return peer
        forms, players, problem = {}, {}, None
        for form in peer:
            try:
                form.runs[0]()
                players[form.note] = self._player(form, mode)
                forms[form.note] = form
            except Exception as error:  # a form that this PyTorch lacks
                problem = error
        if not forms:
            raise problem or NotImplementedError("no form of it exists")
        if len(forms) == 1:
            return next(iter(forms.values()))
        times = self.meter.compare(players, samples=3)
        return forms[min(times, key=lambda note: times[note]["time_us"])]

    def _require_right(self, error: float, case: Case) -> None:
        limit = {"float32": 1e-5, "bfloat16": 3e-2, "float16": 4e-3}[case.dtype]
        if not error < limit:
            raise SnackError(f"snack bench: SNACK's result of {case} is off by {error:g}, more than {limit:g}; please report it.")
