"""A whole training in one file: stopped after any step and loaded again, it continues bit for bit as if it had never stopped.

The file is a model file of `snack.save` (any program that reads those can read the model) with more tensors, below "snack.training/", and a
JSON header entry: optimiser, stepper with its history and what it has recorded, learning-rate schedule, gradient scaler, random
generators of every rank. No pickle. Everything in it is checked before anything is changed.
"""

from __future__ import annotations

import json
import os
import random
import sys
import zlib
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn
from torch import distributed as dist

from ..errors import SnackError, require
from ..nn import SparseLinear, persistence
from ..nn.parallel import all_objects, group_of, unwrapped
from . import options, plain
from .capture import Saved
from .history import Update
from .processes import Joined, Team
from .stepper import DST

VERSION = "1"
_KEY = persistence.TRAINING


# ---- saving ----


def save_training(
    path: str | os.PathLike,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    dst: DST | None = None,
    *,
    scheduler: object = None,
    scaler: object = None,
    more: object = None,
) -> None:
    """Write all that the training needs to continue exactly, after `dst.step()` of any step; an existing file is replaced when the new one
    is complete, so a run that dies while it saves leaves the old one.

    On several processes every rank calls it; rank 0 writes. Gradients are not in the file: do not save between the micro-batches of a step.

    Args:
        model: in DistributedDataParallel or torch.compile, or not; names are those of the model itself.
        optimizer: any torch.optim.Optimizer over its parameters. dst: the stepper. scaler: a torch.amp.GradScaler.
        scheduler: of the learning rate; what its state_dict() holds must be numbers, text, tensors and containers of these.
        more: plain data of yours (epoch, place in the data), given back by `load_training`.

    Raises: SnackError, on every rank, where something cannot be saved; an existing file is unchanged then.
    """
    inner = unwrapped(model)
    _check_whole("save_training", inner)
    group = _group(model, dst)
    team = Team(group, "save_training")
    recorded = _recorded(dst, team)
    generators = [_generators(inner)] if group is None else all_objects(_generators(inner), group)

    def put() -> None:
        if group is not None and dist.get_rank(group):
            return
        tensors: dict[str, Tensor] = {}
        parts = {
            "optimizer": _optimizer(inner, optimizer),
            "dst": None if dst is None else _stepper(dst, recorded),
            "scheduler": _kept(scheduler),
            "scaler": _kept(scaler),
            "generators": generators,
            "more": more,
        }
        state = {name: plain.encode(part, f"{_KEY}/{name}", tensors) for name, part in parts.items()}
        header = {_KEY: VERSION, f"{_KEY}.state": json.dumps(state)}
        persistence.write(Path(path), persistence.entries_of(inner, "save_training") | tensors, header, "save_training")

    team.agree(put, lambda _: {})


def _group(model: nn.Module, dst: DST | None) -> dist.ProcessGroup | None:
    """The processes that train together; None for one."""
    if dst is not None and dst._group is not None:
        return dst._group
    group = getattr(model, "process_group", None)  # of a DistributedDataParallel, with sparse layers or without
    if group is not None:
        return group if dist.get_world_size(group) > 1 else None
    return group_of(module for module in model.modules() if isinstance(module, SparseLinear))


def _check_whole(who: str, model: nn.Module) -> None:
    sharded = [name for name, parameter in model.named_parameters() if hasattr(parameter, "device_mesh")]
    require(
        not sharded, f"{who}: '{sharded[0] if sharded else ''}' is sharded over several processes; use torch.distributed.checkpoint, which "
        "writes every rank's part (docs/distributed.md)."
    )


def _kept(part: object) -> dict[str, object] | None:
    """A scheduler or scaler: its class and its state."""
    return None if part is None else {"class": type(part).__name__, "state": part.state_dict()}


def _names(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[list[str | None]]:
    """The parameters of every group, by their names in the model."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return [[names.get(id(parameter)) for parameter in group["params"]] for group in optimizer.param_groups]


def _optimizer(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, object]:
    names = _names(model, optimizer)
    _check_names("save_training", optimizer, names)
    return {"class": type(optimizer).__name__, "parameters": names, "state": optimizer.state_dict()}


def _check_names(who: str, optimizer: torch.optim.Optimizer, names: list[list[str | None]]) -> None:
    for number, group in enumerate(names):
        require(
            None not in group,
            f"{who}: group {number} of {type(optimizer).__name__} holds parameters that the model does not have; build the optimiser from "
            "model.parameters(), after snack.sparsify.",
        )


def _recorded(dst: DST | None, team: Team) -> dict[str, list[dict[str, object]]]:
    """What the stepper has recorded for its next update, of all ranks, and the loss scales: by layer, for every step, newest first."""
    if dst is None:
        return {}
    layers = dst._layers()

    def collect() -> dict[str, list]:
        require(dst._due is None, f"{team.who}: an update is due and not made; call dst.step() before saving.")
        begun = any(recorder.has_begun for recorder in dst._armed.values())
        require(not begun, f"{team.who}: the gradient of the coming step has begun; save after dst.step() or zero_grad().")
        return {name: [step[layer].operands() if layer in step else None for step in dst._recorded] for name, layer in layers.items()}

    pairs = team.share({"optimiser steps": dst.steps, "updates": dst.updates}, layers, collect)
    return {
        "recorded": [{name: pairs[name][number] for name in layers} for number in range(len(dst._recorded))],
        "scales": [{name: step[layer].scale for name, layer in layers.items() if layer in step} for step in dst._recorded],
    }


def _stepper(dst: DST, recorded: dict[str, list]) -> dict[str, object]:
    history = json.dumps([update.as_dict() for update in dst.history]).encode()  # long: not for the header
    return {
        "state": dst.state_dict(),
        "history": torch.frombuffer(bytearray(history), dtype=torch.uint8),
        "explored": None if dst._tracker is None else dst._tracker.seen,
        **recorded,
    }


# ---- random generators ----


def _devices(model: nn.Module) -> list[torch.device]:
    """The cards of the model, each once."""
    return list(dict.fromkeys(p.device for p in model.parameters() if p.is_cuda))


def _generators(model: nn.Module) -> dict[str, object]:
    """States of the global random generators of this process: torch's, of the CPU and of the model's cards, Python's, NumPy's."""
    version, words, gauss = random.getstate()
    found = {
        "cpu": torch.get_rng_state(),
        "cuda": [torch.cuda.get_rng_state(device) for device in _devices(model)],
        "python": (version, torch.tensor(words), gauss),
        "numpy": None,
    }
    if "numpy" in sys.modules:
        kind, words, *rest = sys.modules["numpy"].random.get_state()
        found["numpy"] = (kind, torch.tensor(words.tolist()), *rest)
    return found


def _set_generators(model: nn.Module, states: dict[str, object]) -> None:
    torch.set_rng_state(states["cpu"])
    for device, state in zip(_devices(model), states["cuda"]):
        torch.cuda.set_rng_state(state, device)
    version, words, gauss = states["python"]
    random.setstate((version, tuple(words.tolist()), gauss))
    if states["numpy"] is not None and "numpy" in sys.modules:
        kind, words, *rest = states["numpy"]
        sys.modules["numpy"].random.set_state((kind, words.numpy().astype("uint32"), *rest))


# ---- loading ----


def load_training(
    path: str | os.PathLike,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    dst: DST | None = None,
    *,
    scheduler: object = None,
    scaler: object = None,
) -> object:
    """Continue a training from a file of `save_training`, in place: build everything as at its start, then call this.

    On several processes every rank calls it, with a file it can read. Their number may be another one than when it was saved: topology, values
    and optimiser state are the same, and a rank takes the random generators that its number had; ranks that did not exist keep theirs.
    The model may have another sparsity. Dtypes must be those of the file. Gradients are dropped.

    Returns: `more`, as given to `save_training`.
    Raises: SnackError where file and objects do not fit (another model, optimiser, method or version; a damaged file); nothing is changed then.
    """
    who = f"load_training: {Path(path)}"
    inner = unwrapped(model)
    _check_whole("load_training", inner)
    group = _group(model, dst)

    def read() -> tuple[dict[str, object], dict[str, Tensor], tuple | None, int]:
        parts, entries, mark = _parts(who, path)
        _check_dtypes(who, inner, entries)
        _check_optimizer(who, inner, optimizer, parts["optimizer"])
        for name, given in (("dst", dst), ("scheduler", scheduler), ("scaler", scaler)):
            _check_presence(who, name, given, parts[name])
        stepper = None if dst is None else _read_stepper(who, dst, parts["dst"])
        persistence.complain(persistence.check(inner, entries)[1], who)
        return parts, entries, stepper, mark

    (parts, entries, stepper, _), _ = Team(group, "load_training").agree(read, lambda found: {"what is in the file": found[-1]})
    persistence.load_tensors(inner, entries, who)
    for parameter in inner.parameters():
        parameter.grad = None
    _load_optimizer(optimizer, parts["optimizer"]["state"])
    if stepper is not None:
        _set_stepper(dst, *stepper)
    for name, given in (("scheduler", scheduler), ("scaler", scaler)):
        if given is not None and parts[name]["state"]:
            given.load_state_dict(parts[name]["state"])
    rank = 0 if group is None else dist.get_rank(group)
    if rank < len(parts["generators"]):
        _set_generators(inner, parts["generators"][rank])
    return parts["more"]


def _parts(who: str, path: str | os.PathLike) -> tuple[dict[str, object], dict[str, Tensor], int]:
    """(what is not the model, by name; the model's entries; a checksum of the header, which has the steps and generators)."""
    tensors, header = persistence.read(path, "load_training")
    require(_KEY in header, f"{who} is not a resume file; write one with snack.save_training, or load the model alone with snack.load.")
    require(header[_KEY] == VERSION, f"{who} has version {header[_KEY]!r}, this one reads {VERSION}; load it with the version that wrote it.")
    try:
        text = header[f"{_KEY}.state"]
        state = json.loads(text)
        parts = {name: plain.decode(state[name], tensors) for name in ("optimizer", "dst", "scheduler", "scaler", "generators", "more")}
        parts["optimizer"]["state"]["param_groups"], parts["optimizer"]["parameters"], parts["generators"][0]["cpu"]  # noqa: B018
    except (KeyError, TypeError, ValueError, AttributeError, IndexError):
        raise SnackError(f"{who} is damaged: its header does not describe a training.") from None
    return parts, {name: tensor for name, tensor in tensors.items() if not name.startswith(f"{_KEY}/")}, zlib.crc32(text.encode())


def _check_dtypes(who: str, model: nn.Module, entries: Mapping[str, Tensor]) -> None:
    for name, entry in model.state_dict().items():
        found = entries.get(name, entry)  # one that is missing is told by another check
        require(found.dtype == entry.dtype, f"{who}: '{name}' is {found.dtype} there and {entry.dtype} in the model; build the model as it was.")


def _check_presence(who: str, name: str, given: object, kept: dict[str, object] | None) -> None:
    """The object is given where the file has its state, and nowhere else."""
    require(given is not None or kept is None, f"{who} was saved with {name}=, and none is given; give it, as the run would change without.")
    require(given is None or kept is not None, f"{who} was saved without {name}=; leave it out, or save with it.")
    if given is not None and "class" in kept:
        require(kept["class"] == type(given).__name__, f"{who}: {name} was a {kept['class']} and is a {type(given).__name__}; build the one it was.")


def _check_optimizer(who: str, model: nn.Module, optimizer: torch.optim.Optimizer, kept: dict[str, object]) -> None:
    kind = type(optimizer).__name__
    require(kept["class"] == kind, f"{who}: the optimiser was {kept['class']} and is {kind}; build the one it was.")
    names = _names(model, optimizer)
    _check_names(who, optimizer, names)
    for number, (then, now) in enumerate(zip(kept["parameters"], names)):
        different = next((pair for pair in zip(then, now) if pair[0] != pair[1]), None)
        require(different is None, f"{who}: group {number} of the optimiser had parameter {different and different[0]!r} where it has "
                f"{different and different[1]!r}; build it from the same parameters in the same order.")
    counts = [[len(group) for group in groups] for groups in (kept["parameters"], names)]
    require(counts[0] == counts[1], f"{who}: the optimiser had groups of {counts[0]} parameters and has {counts[1]}; build it as it was built.")


def _read_stepper(who: str, dst: DST, kept: dict[str, object]) -> tuple[dict, list[Update], dict | None, list[dict]]:
    """(attributes, history, explored, recorded), all checked."""
    options.check_optimizer(type(dst).__name__, dst.optimizer, dst._trained())
    attributes = dst._read_state(kept["state"])
    layers = dst._layers()
    try:
        history = [Update.from_dict(record) for record in json.loads(bytes(kept["history"].tolist()))]
        scales = kept.get("scales", [{}] * len(kept["recorded"]))
        recorded = [_read_step(layers, *step) for step in zip(kept["recorded"], scales)]
        explored = kept["explored"]
        is_sound = explored is None or explored.keys() == layers.keys()
    except (KeyError, TypeError, ValueError, AttributeError):
        is_sound = False
    require(is_sound, f"{who}: what the stepper kept is of another model: the layers have other names; build the model as it was.")
    return attributes, history, explored, recorded


def _read_step(layers: dict[str, SparseLinear], pairs: dict[str, tuple | None], scales: dict[str, Tensor | None]) -> dict[SparseLinear, Saved]:
    """One recorded step, on the devices of the layers."""
    found = {}
    for name, pair in pairs.items():
        layer, scale = layers[name], scales.get(name)
        device = layer.index.device
        found[layer] = Saved(pair and Joined(tensor.to(device) for tensor in pair), None if scale is None else scale.to(device))
    return found


def _set_stepper(dst: DST, attributes: dict, history: list[Update], explored: dict | None, recorded: list[dict]) -> None:
    for name, entry in attributes.items():
        setattr(dst, name, entry)
    dst.history[:], dst._due = history, None
    if dst._tracker is not None:
        dst._tracker.seen = dict(explored or {})
        dst._tracker.begin(dst._layers())
    dst._arm()
    dst._recorded[:] = recorded


def _load_optimizer(optimizer: torch.optim.Optimizer, state: dict[str, object]) -> None:
    """load_state_dict, and every tensor in its own dtype again: torch turns them into that of their parameter."""
    optimizer.load_state_dict(state)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for number, kept in state["state"].items():
        held = optimizer.state[parameters[number]]
        for key, entry in kept.items():
            if isinstance(entry, Tensor) and held[key].dtype != entry.dtype:
                held[key] = entry.to(held[key].device, copy=True)
    if isinstance(optimizer, torch.optim.LBFGS):
        optimizer._numel_cache = None
