"""Checks of what a stepper is given, each ending in one sentence. Nothing here has a state."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from numbers import Integral, Real

import torch
from torch import distributed as dist
from torch import nn

from ..errors import SnackError, require
from ..nn import SparseLinear
from ..nn.state import check_state_policy as _check_state_policy
from . import schedules
from .scope import SCOPES, WEIGHTS, Job

ALIASES = {"zeta": "drop_fraction", "alpha": "drop_fraction", "delta_t": "every"}
NAMES = (
    "drop", "grow", "drop_fraction", "every", "start", "t_end", "seed", "grow_init", "candidates", "scope", "redistribute", "state", "track",
    "on_resize", "group", "scaler",
)

STATE_VERSION = 2


def resolve_aliases(who: str, names: tuple[str, ...], aliases: dict[str, object], **given: object) -> dict[str, object]:
    """drop_fraction and every, where papers' names stand in for ours; SnackError on any other name. names: the method's options."""
    for alias, value in aliases.items():
        name = ALIASES.get(alias)
        require(name is not None, f"{who}: option {alias!r} is unknown; the options are {', '.join(names)}.")
        require(given[name] is None, f"{who}: {alias} is another name of {name}; give one of them once.")
        given[name] = value
    return given


def check_whole(who: str, name: str, value: object, least: int) -> int:
    """A whole number of at least `least`."""
    is_whole = isinstance(value, Integral) and not isinstance(value, bool)
    require(is_whole and value >= least, f"{who}: {name}={value!r} must be a whole number of at least {least}.")
    return int(value)


def check_times(who: str, every: object, start: object, t_end: object) -> tuple[int, int, int | None]:
    """every >= 1, start >= 0, and t_end None or a number not below start (0.75 * total is rounded down)."""
    every, start = check_whole(who, "every", every, 1), check_whole(who, "start", start, 0)
    if t_end is None:
        return every, start, None
    is_number = isinstance(t_end, Real) and not isinstance(t_end, bool) and math.isfinite(t_end)
    require(is_number, f"{who}: t_end={t_end!r} must be a number of optimiser steps, or None for no end.")
    require(t_end >= start, f"{who}: t_end={t_end!r} lies before start={start}; updates happen at steps start <= t < t_end.")
    return every, start, int(t_end)


def check_schedule(who: str, schedule: object, t_end: int | None) -> None:
    """A schedule that decays to t_end needs one."""
    require(
        t_end is not None or not getattr(schedule, "needs_t_end", False),
        f"{who}: the drop fraction falls to 0 at t_end, which is missing; give t_end (0.75 * all steps is usual), or a fixed "
        "drop_fraction=snack.dst.Constant(0.3).",
    )


def check_seed(who: str, seed: object) -> int:
    """A whole number >= 0."""
    return check_whole(who, "seed", seed, 0)


def check_grow_init(who: str, grow_init: object) -> object:
    """A finite number as float, or a function."""
    if callable(grow_init):
        return grow_init
    is_number = isinstance(grow_init, Real) and not isinstance(grow_init, bool) and math.isfinite(grow_init)
    require(is_number, f"{who}: grow_init={grow_init!r} must be a finite number or a function (layer, rows, cols, context) -> values.")
    return float(grow_init)


def check_scope(who: str, scope: object, drop: object) -> str:
    """A known scope, and a drop rule that can serve it."""
    require(scope in SCOPES, f"{who}: scope={scope!r} is unknown; choose one of {', '.join(SCOPES)}.")
    require(
        scope != "global" or drop is None or hasattr(drop, "scores"),
        f"{who}: scope='global' compares all layers by the drop rule's scores, and {getattr(drop, '__name__', drop)!r} has none; "
        "choose drop='magnitude', or give the rule a method scores(layer, context).",
    )
    return scope


def resolve_redistribution(who: str, redistribute: object, scope: str) -> Callable[[Job], float] | None:
    """The weight of a layer by name, or the given function; None: every layer grows what it lost."""
    if redistribute is None:
        return WEIGHTS["connections"] if scope == "global" else None
    require(scope != "row", f"{who}: redistribute moves connections between layers, and scope='row' keeps those of every row; leave one out.")
    if callable(redistribute):
        return redistribute
    require(
        isinstance(redistribute, str) and redistribute in WEIGHTS,
        f"{who}: redistribute={redistribute!r} is unknown; choose one of {', '.join(WEIGHTS)}, or give a function (job) -> weight.",
    )
    return WEIGHTS[redistribute]


def check_state_policy(who: str, policy: object) -> object:
    """What grown connections start with in optimiser states."""
    try:
        return _check_state_policy(policy)
    except SnackError as error:
        raise SnackError(f"{who}: {error}") from None


def check_on_resize(who: str, function: object) -> Callable[[], object] | None:
    """A function, or None."""
    require(function is None or callable(function), f"{who}: on_resize={function!r} must be a function without arguments.")
    return function


def check_group(who: str, group: object) -> object:
    """A process group of more than one process, or None."""
    if group is None:
        return None
    is_group = dist.is_available() and isinstance(group, dist.ProcessGroup)
    require(is_group, f"{who}: group={group!r} must be a torch.distributed.ProcessGroup, such as torch.distributed.group.WORLD.")
    return group if dist.get_world_size(group) > 1 else None


def check_scaler(who: str, scaler: object) -> torch.amp.GradScaler | None:
    """A gradient scaler, or None."""
    is_scaler = scaler is None or isinstance(scaler, torch.amp.GradScaler)
    require(is_scaler, f"{who}: scaler={scaler!r} must be the torch.amp.GradScaler of the training.")
    return scaler


def check_model(who: str, model: object, optimizer: object) -> None:
    """A model with sparse layers, and an optimiser."""
    require(isinstance(model, nn.Module), f"{who}: the model is a {type(model).__name__}, expected a torch.nn.Module.")
    require(
        isinstance(optimizer, torch.optim.Optimizer),
        f"{who}: the optimizer is a {type(optimizer).__name__}, expected a torch.optim.Optimizer (of a wrapper, give the one inside).",
    )
    require(
        any(isinstance(module, SparseLinear) for module in model.modules()),
        f"{who}: the model has no sparse layers; call snack.sparsify(model, sparsity=...) first, then build the optimiser.",
    )


def check_layers(who: str, layers: Iterable) -> None:
    """No two of the (name, number, layer) share their values."""
    names: dict[int, str] = {}
    for name, _, layer in layers:
        require(
            id(layer.values) not in names,
            f"{who}: layers '{names.get(id(layer.values))}' and '{name}' share their values, so an edit of one breaks the other.",
        )
        names[id(layer.values)] = name


def check_optimizer(who: str, optimizer: torch.optim.Optimizer, trained: Iterable) -> None:
    """Every trained layer's values are in the optimiser."""
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    stale = [name for name, _, layer in trained if id(layer.values) not in held]
    require(
        not stale,
        f"{who}: the optimiser does not hold the values of {', '.join(map(repr, stale[:3]))}{', ...' if len(stale) > 3 else ''}; it was "
        "built before the model was made sparse or its parameters were replaced. Build it from model.parameters() after snack.sparsify; "
        "freeze (values.requires_grad_(False)) a layer that is not to be trained; with several optimisers, give each part of the model a "
        "stepper with its optimiser.",
    )


# ---- saved state ----


def read_state(who: str, state: object, schedule: object) -> dict[str, object]:
    """The attributes a state dict sets, checked. schedule: the present one, which stays where the state's was a function and it is one, too."""
    require(isinstance(state, dict), f"{who}: the state is a {type(state).__name__}, expected what state_dict() returned.")
    needed = ("version", "method", "steps", "updates", "seed", "every", "start", "t_end", "schedule")
    missing = [key for key in needed if key not in state]
    require(not missing, f"{who}: the state lacks {', '.join(missing)}; expected what state_dict() returned.")
    require(
        state["version"] == STATE_VERSION,
        f"{who}: the state has version {state['version']!r}, this one reads {STATE_VERSION}; load it with the version that wrote it.",
    )
    require(state["method"] == who, f"{who}: the state is of {state['method']}; continue with the method it was saved from.")
    every, start, t_end = check_times(who, state["every"], state["start"], state["t_end"])
    require(
        state["schedule"] is not None or schedules.to_state(schedule) is None,
        f"{who}: the state was saved with a function of yours as drop_fraction, which no state can hold, and this stepper has {schedule!r}; "
        "give it that function.",
    )
    if state["schedule"] is not None:
        schedule = schedules.from_state(state["schedule"], who)
    check_schedule(who, schedule, t_end)
    return {
        "steps": check_whole(who, "steps", state["steps"], 0),
        "updates": check_whole(who, "updates", state["updates"], 0),
        "seed": check_seed(who, state["seed"]),
        "every": every,
        "start": start,
        "t_end": t_end,
        "schedule": schedule,
    }
