"""sparsify: nn.Linear layers of a model become SparseLinear, in place, with an exact budget. densify: the way back."""

from __future__ import annotations

import math
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from numbers import Real

import torch
from torch import Tensor, nn
from torch.nn.utils.prune import BasePruningMethod

from ..errors import SnackError, require
from ..formats import Pattern
from ..formats.pattern import check_sparsity
from . import fast_path, stale
from .candidates import Candidate, find_linears, match_globs, note_obstacles, pruned_weight
from .distribution import DISTRIBUTIONS, allocate, erdos_renyi
from .linear import SparseLinear, meta_pattern
from .report import LayerReport, Report
from .select import DRAWN, check_how, choose, draw_seed

DEFAULT_SPARSITY = 0.9

_HOOKS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_is_full_backward_hook",
)


def sparsify(
    model: nn.Module,
    sparsity: float | Mapping[str, float] | None = None,
    distribution: str = "uniform",
    how: str = "random",
    include: str | type | Iterable[str | type] | None = None,
    exclude: str | Iterable[str] = (),
    rescale: bool | None = None,
    generator: torch.Generator | None = None,
    epsilon: float | None = None,
) -> nn.Module:
    """Replace the nn.Linear layers of `model` by SparseLinear, in place, and return the model.

    Build the optimiser afterwards: the old weights no longer belong to the model (a step of an older optimiser raises).

    Args:
        model: any module; of a bare nn.Linear the new layer is returned.
        sparsity: fraction of absent connections over all converted layers (default 0.9), or {glob of layer names: fraction},
            where the first glob that matches counts, every glob has a budget of its own, and unmatched layers stay dense.
            The budget is exact: connections sum to round((1 - sparsity) * positions), by largest remainder.
        distribution: "uniform" (every layer alike), or "er" = "erk" (density proportional to (out + in) / (out * in);
            Mocanu et al. 2018, Evci et al. 2020); a layer whose share is all of its positions stays an nn.Linear.
        how: "random" (uniform positions), "row" (as "random", and all rows have equally many: constant fan-in; a remainder goes to
            the first rows), "magnitude" (largest |weight|), or "nonzero" (what is not zero stays, or the mask
            of torch.nn.utils.prune or torch.ao.pruning; takes no sparsity): for a model that was pruned elsewhere.
        include: what to convert: globs of layer names, classes derived from nn.Linear (default "*": every nn.Linear, no
            derived class; ["*", MyLinear] adds one). exclude: globs of layers that stay dense.
        rescale: multiply the kept weights by sqrt(1 / density), which keeps the variance of the outputs; for a fresh
            nn.Linear that is its initialisation scaled to the effective fan-in. Default: only with how="random" and "row".
        generator: source of the random positions (default: PyTorch's global state).
        epsilon: instead of sparsity and distribution: every layer gets round(epsilon * (out + in)) connections, or all of its positions
            (Erdos-Renyi as SET writes it, Mocanu et al. 2018, eq. 1).

    `model.sparsify_report` (a `Report`; print it) says what was converted and what not, and why. Layers that were asked for
    and could not be converted (attention's out_proj, tied, parametrized or pruned weights) are also named in a UserWarning.

    Raises: SnackError on a sparsity outside [0, 1), an unknown name, a glob that matches nothing, a model without nn.Linear;
        the model is then unchanged.
    """
    _check_arguments(model, sparsity, distribution, how, epsilon)
    candidates = find_linears(model)
    require_some(model, candidates, "sparsify")
    fractions = _fractions(candidates, sparsity)
    reasons = select_layers(model, candidates, include, exclude, how, "sparsify", fractions)
    jobs = _counts(candidates, fractions, reasons, distribution, how, epsilon)
    model = convert_layers(model, candidates, reasons, jobs, how, how in DRAWN if rescale is None else rescale, generator)
    warn_left_dense(candidates, reasons, "snack.sparsify")
    return model


Job = int | Tensor | tuple[Pattern, Tensor] | str | None
"""What becomes of a layer: so many connections; those of a mask (out, in); a pattern and its values; None: what is not zero;
a sentence: it stays dense, for that reason."""


def convert_layers(
    model: nn.Module,
    candidates: list[Candidate],
    reasons: dict[int, str],
    jobs: Iterable[tuple[Candidate, Job]],
    how: str = "magnitude",
    rescale: bool = False,
    generator: torch.Generator | None = None,
    who: str = "snack.sparsify",
) -> nn.Module:
    """Carry out the jobs and return the model with its `sparsify_report`; `reasons` of the candidates without a job stand there too.

    Every new layer is made before the model is touched.
    """
    report = {id(c): LayerReport(c.title, c.shape, "skipped", math.prod(c.shape), reasons.get(id(c), "")) for c in candidates}
    pending: list[tuple[Candidate, SparseLinear]] = []
    for candidate, job in jobs:
        entry = report[id(candidate)]
        if isinstance(job, str):
            entry.status, entry.reason = "kept dense", job
            continue
        layer = _convert(candidate.layer, job, how, rescale, generator)
        entry.status, entry.nnz = "converted", layer.nnz
        entry.reason = "" if layer.nnz else "it has no connections left; only its bias acts"
        pending.append((candidate, layer))

    for candidate, layer in pending:
        take_hooks(candidate.layer, layer)
        model = replace(model, candidate.places, layer)
    stale.mark_replaced([(p, c.title) for c, layer in pending for p in _given_up(c.layer, layer)], who)
    fast_path.update(model)
    model.sparsify_report = Report(list(report.values()))
    return model


def _check_arguments(model: object, sparsity: object, distribution: object, how: str, epsilon: object) -> None:
    require(isinstance(model, nn.Module), f"sparsify: expected an nn.Module, got {type(model).__name__}.")
    check_how(how)
    require(distribution in DISTRIBUTIONS, f"sparsify: distribution {distribution!r} is unknown; choose one of {', '.join(DISTRIBUTIONS)}.")
    require(
        sparsity is None or how != "nonzero",
        "sparsify: how='nonzero' keeps what is not zero; leave `sparsity` out (or choose how='magnitude').",
    )
    if epsilon is not None:
        is_number = isinstance(epsilon, Real) and not isinstance(epsilon, bool) and math.isfinite(epsilon) and epsilon >= 0
        require(is_number, f"sparsify: epsilon={epsilon!r} must be a number of at least 0.")
        require(
            sparsity is None and distribution == "uniform" and how != "nonzero",
            "sparsify: epsilon says how many connections every layer gets; leave sparsity, distribution and how='nonzero' out.",
        )


def require_some(model: nn.Module, candidates: list[Candidate], who: str) -> None:
    """SnackError unless there is an nn.Linear."""
    if not candidates:
        has_sparse = any(isinstance(module, SparseLinear) for module in model.modules())
        why = "; its layers are sparse already." if has_sparse else "."
        raise SnackError(f"{who}: {type(model).__name__} holds no nn.Linear to convert{why}")


def _counts(
    candidates: list[Candidate], fractions: dict[str, float], reasons: dict[int, str], distribution: str, how: str,
    epsilon: float | None,
) -> Iterator[tuple[Candidate, Job]]:
    """What becomes of every layer that can be converted."""
    groups: dict[str, list[Candidate]] = {glob: [] for glob in fractions}
    for c in candidates:
        if id(c) not in reasons:
            groups[next(glob for glob in fractions if c.matches(glob))].append(c)
    for glob, members in groups.items():
        if how == "nonzero":
            yield from ((c, None) for c in members)
            continue
        shapes = [c.shape for c in members]
        counts, overflows = allocate(shapes, fractions[glob], distribution) if epsilon is None else erdos_renyi(shapes, epsilon)
        full = f"its share by '{distribution if epsilon is None else f'epsilon={epsilon:g}'}' is every position"
        yield from zip(members, (full if over else count for count, over in zip(counts, overflows)))


def warn_left_dense(candidates: list[Candidate], reasons: dict[int, str], who: str, stacklevel: int = 3) -> None:
    """Name the layers that were asked for and could not be converted, by reason; the warning stands `stacklevel` calls up."""
    names: dict[str, list[str]] = {}
    for c in candidates:
        if c.obstacle and reasons[id(c)] == c.obstacle:
            names.setdefault(c.obstacle, []).append(f"'{c.title}'")
    if names:
        listed = "; ".join(f"{', '.join(titles)}: {obstacle}" for obstacle, titles in names.items())
        warnings.warn(f"{who} left dense {listed}. Name them in `exclude` to silence this.", stacklevel=stacklevel)


def _as_list(globs: object) -> list:
    return [globs] if isinstance(globs, (str, type)) else list(globs)


def _fractions(candidates: list[Candidate], sparsity: float | Mapping[str, float] | None) -> dict[str, float]:
    """{glob: sparsity}, checked; every glob is one budget."""
    if not isinstance(sparsity, Mapping):
        return {"*": check_sparsity(DEFAULT_SPARSITY if sparsity is None else sparsity, "sparsify")}
    require(len(sparsity) > 0, "sparsify: sparsity is an empty mapping; give {glob of layer names: fraction}.")
    match_globs(candidates, sparsity, "sparsity", "sparsify")
    return {glob: check_sparsity(fraction, f"sparsify: {glob!r}") for glob, fraction in sparsity.items()}


def select_layers(
    model: nn.Module, candidates: list[Candidate], include: object, exclude: object, how: str, who: str, fractions: Iterable[str] = ("*",)
) -> dict[int, str]:
    """{id of candidate: reason} of those that stay dense: by include, exclude, the globs of `fractions`, or an obstacle."""
    wanted = ["*"] if include is None else _as_list(include)
    unwanted = _as_list(exclude)
    classes = tuple(item for item in wanted if isinstance(item, type))
    globs = [item for item in wanted if isinstance(item, str)]
    for item in wanted:
        is_class = isinstance(item, type) and issubclass(item, nn.Linear)
        require(
            isinstance(item, str) or is_class, f"{who}: {item!r} in include is neither a glob of layer names nor a class of nn.Linear."
        )
    for item in unwanted:
        require(
            isinstance(item, str),
            f"{who}: {item!r} in exclude is not a glob of layer names; a derived class stays dense unless included.",
        )
    match_globs(candidates, globs, "include", who)
    match_globs(candidates, unwanted, "exclude", who)
    note_obstacles(model, candidates, classes, how)
    reasons = {}
    for c in candidates:
        if any(c.matches(glob) for glob in unwanted):
            reasons[id(c)] = "excluded"
        elif not any(c.matches(glob) for glob in globs) and type(c.layer) not in classes:
            reasons[id(c)] = "not included"
        elif not any(c.matches(glob) for glob in fractions):
            reasons[id(c)] = "no glob of `sparsity` matches it"
        elif c.obstacle:
            reasons[id(c)] = c.obstacle
    return reasons


@torch.no_grad()
def _convert(dense: nn.Linear, job: Job, how: str, rescale: bool, generator: torch.Generator | None) -> SparseLinear:
    """The sparse layer of a job; takes the bias Parameter itself over."""
    pruned = pruned_weight(dense)
    original, mask = pruned if pruned is not None else (dense.weight, None)
    weight = original.detach() if mask is None else original.detach() * mask
    mask = job if isinstance(job, Tensor) else mask
    shape, seed = (dense.out_features, dense.in_features), 0
    if isinstance(job, tuple):
        pattern, values = job[0].to(weight.device), job[1].to(weight)
    elif weight.is_meta:
        seed = draw_seed(generator)
        pattern, values = meta_pattern(shape, job), torch.empty(job, dtype=weight.dtype, device="meta")
    else:
        pattern, values = choose(weight, None, mask, how, generator, job if isinstance(job, int) else None)
    if rescale and values.numel():
        values = values * math.sqrt(weight.numel() / values.numel())
    layer = SparseLinear.__new__(SparseLinear)
    layer._setup(pattern, values, None, seed)
    layer.values.requires_grad_(original.requires_grad)
    bias = dense._parameters.get("bias")
    if bias is None and dense.bias is not None:  # pruned too: a plain tensor computed from bias_orig and bias_mask
        bias = nn.Parameter(dense.bias.detach().clone(), requires_grad=dense._parameters["bias_orig"].requires_grad)
    layer.register_parameter("bias", bias)
    return layer.train(dense.training)


def take_hooks(old: nn.Module, new: nn.Module) -> None:
    """The user's hooks go along, and their handles still remove them; those of torch.nn.utils.prune stay behind."""
    for name in _HOOKS:
        setattr(new, name, getattr(old, name))
    ours = {key: hook for key, hook in old._forward_pre_hooks.items() if not isinstance(hook, BasePruningMethod)}
    if len(ours) < len(old._forward_pre_hooks):
        new._forward_pre_hooks = OrderedDict(ours)


def _given_up(old: nn.Module, new: nn.Module) -> list[nn.Parameter]:
    kept = {id(p) for p in new.parameters()}
    return [p for p in old.parameters() if id(p) not in kept]


Places = list[tuple[nn.Module | None, str]]
"""(parent, key in it) of every place of a module; the parent None: it is the model itself."""


def find_places(model: nn.Module, is_wanted: Callable[[nn.Module | None], bool]) -> list[tuple[nn.Module, str, Places]]:
    """(module, its first name, its places) of every module that is wanted, once."""
    found: dict[int, tuple[nn.Module, str, Places]] = {}
    if is_wanted(model):
        found[id(model)] = (model, "(model)", [(None, "")])
    for prefix, parent in model.named_modules():
        for key, child in parent._modules.items():
            if is_wanted(child):
                found.setdefault(id(child), (child, f"{prefix}.{key}".lstrip("."), []))[2].append((parent, key))
    return list(found.values())


def replace(model: nn.Module, places: Places, layer: nn.Module) -> nn.Module:
    """Put `layer` into every place; returns the model, which is `layer` where the place is the model itself."""
    for parent, key in places:
        if parent is None:
            model = layer
        else:
            parent._modules[key] = layer
    return model


@torch.no_grad()
def densify(model: nn.Module) -> nn.Module:
    """Replace every SparseLinear by an nn.Linear with the same function, in place, and return the model.

    Memory grows to out * in entries a layer. Build the optimiser afterwards. A model without SparseLinear is returned as is.
    """
    require(isinstance(model, nn.Module), f"densify: expected an nn.Module, got {type(model).__name__}.")
    found = find_places(model, lambda module: isinstance(module, SparseLinear))
    pending = [(sparse, sparse.to_dense(), name, places) for sparse, name, places in found]
    replaced = []
    for sparse, dense, name, places in pending:
        dense.bias = sparse.bias
        take_hooks(sparse, dense)
        model = replace(model, places, dense)
        replaced.append((sparse.values, name))
    stale.mark_replaced(replaced, "snack.densify")
    fast_path.update(model)
    if replaced and hasattr(model, "sparsify_report"):
        del model.sparsify_report
    return model
