"""State dicts of pruned models become truly sparse layers: as a model without code, or inside a model of the user's."""

from __future__ import annotations

import fnmatch
import warnings
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from ..errors import SnackError, require
from ..formats import Pattern, from_mask, from_torch_sparse
from ..nn import SparseLinear, sparsify, state
from ..nn.candidates import find_linears, note_obstacles
from ..nn.convert import convert_layers
from ..nn.persistence import check, complain, load_tensors
from .masks import Entries, resolve

Weight = tuple[Pattern, Tensor]


class Part(nn.Module):
    """Tensors and parts by name, of a model whose code is not there: it cannot run."""

    def put(self, key: str, tensor: Tensor) -> None:
        """Register a tensor under any name."""
        is_parameter = tensor.dtype.is_floating_point or tensor.dtype.is_complex
        where = self._parameters if is_parameter else self._buffers
        where[key] = nn.Parameter(tensor, requires_grad=False) if is_parameter else tensor


def as_model(
    state_dict: Mapping[str, object],
    include: str | Iterable[str] = (),
    exclude: str | Iterable[str] = (),
    masks: Mapping[str, object] | None = None,
    sum_duplicates: bool = False,
) -> nn.Module:
    """A model made of a state dict alone, so that `sparsify`, `densify`, `summary` and `save` work without the model's code.

    A layer is a name that has a 2-D floating `weight`, perhaps a `bias` (out,), and nothing else. It becomes a SparseLinear where
    the state dict says which connections exist, whatever their values:

    * in this library's own form, or as a torch.sparse tensor or scipy sparse matrix (out, in);
    * `weight_orig` and `weight_mask` (torch.nn.utils.prune), `weight` and `weight_mask`, or
      `parametrizations.weight.original` with its mask (torch.ao.pruning);
    * `masks`: {name of the weight or layer: mask (out, in) of 0 and 1}, or the state_dict of a sparsifier of torch.ao.pruning.

    Other layers become an nn.Linear; a state dict does not tell an embedding from a linear layer, so choose by name. The tensors
    themselves are used where they can be. All other masks (of biases, convolutions) are multiplied into their tensors.

    Args:
        state_dict: {name: tensor, numpy array or scipy sparse matrix}.
        include: globs of layers whose zeros are absent connections (weights pruned by SparseGPT, Wanda, prune.remove, …).
        exclude: globs of layers that are to be dense.
        sum_duplicates: add the entries of a position that a sparse matrix lists several times; otherwise that is an error.

    Returns: a module whose state_dict has the same names, but for the sparse layers. `model.import_notes` is {name: why} of what
        looks like a weight and was left as it is. It cannot run.
    Raises: SnackError on an entry that is not a tensor, a mask that does not fit, a glob that matches no layer, a damaged layer.
    """
    entries = resolve(state_dict, masks)
    weights = _sparse_weights(entries, sum_duplicates)
    model = _Builder(entries, weights, _globs(exclude)).build()
    notes = dict(entries.notes)
    names = _layer_names(model)
    dense = {name for name, module in model.named_modules(remove_duplicate=False) if isinstance(module, nn.Linear)}
    for what, globs in (("exclude", _globs(exclude)), ("include", _globs(include))):
        for glob in globs:
            require(_match(glob, names), f"import: {what} {glob!r} matches no layer; {_listed(names)}.")
    wanted = [glob for glob in _globs(include) if _match(glob, dense)]
    if wanted:
        unwanted = [glob for glob in _globs(exclude) if _match(glob, dense)]
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="snack.sparsify left dense")  # it stands in the notes
            model = sparsify(model, how="nonzero", include=wanted, exclude=unwanted)
        skipped = [layer for layer in model.sparsify_report.skipped if layer.reason not in ("excluded", "not included")]
        notes |= {"weight" if r.name == "(model)" else f"{r.name}.weight": r.reason for r in skipped}
    model.import_notes = notes
    return model


def _globs(globs: str | Iterable[str]) -> list[str]:
    return [globs] if isinstance(globs, str) else list(globs)


def _match(glob: str, names: Iterable[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, glob) for name in names)


def _layer_names(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules(remove_duplicate=False) if isinstance(module, (nn.Linear, SparseLinear))]


def _listed(names: list[str]) -> str:
    if not names:
        return "there is no 2-D weight"
    return "the layers are " + ", ".join(map(repr, names[:12])) + (f" and {len(names) - 12} more" if len(names) > 12 else "")


def _sparse_weights(entries: Entries, sum_duplicates: bool) -> dict[str, Weight]:
    """{prefix of the layer: pattern and values}; their entries leave `entries`, all but the bias."""
    tensors, weights = entries.tensors, {}
    stored: dict[int, Weight] = {}
    for prefix in [n.removesuffix("slot_order") for n in tensors if n.rpartition(".")[2] == "slot_order"]:
        weight = _own(tensors, prefix)
        twin = stored.setdefault(tensors[prefix + "values"].data_ptr(), weight)  # one layer under two names stays one
        weights[prefix] = twin if twin[0].equals(weight[0]) and weight[0].nnz else weight
        for key in ("values", *state.TOPOLOGY_KEYS):
            tensors.pop(prefix + key)
    for name in [n for n, t in tensors.items() if t.layout != torch.strided]:
        prefix, key = _split(name)
        is_matrix = key == "weight" and tensors[name].dim() == 2
        require(is_matrix, f"import: '{name}' is a {tensors[name].dim()}-D sparse tensor, and only a 2-D 'weight' can be one; densify it first.")
        weights[prefix] = _named(name, from_torch_sparse, tensors.pop(name), sum_duplicates)
    for name, mask in entries.masks.items():
        prefix, key = _split(name)
        tensor = tensors[name]
        mask = mask.to(tensor.device)
        if key == "weight" and tensor.dim() == 2 and tensor.dtype.is_floating_point:
            weights[prefix] = _named(name, from_mask, mask != 0, tensors.pop(name))
        else:
            tensors[name] = torch.where(mask != 0, tensor, torch.zeros_like(tensor))
            if tensor.dim() > 1:
                entries.notes[name] = "it is no 2-D weight, so its mask was multiplied into it"
    return weights


def _split(name: str) -> tuple[str, str]:
    """'a.b.weight' -> ('a.b.', 'weight')."""
    owner, dot, key = name.rpartition(".")
    return owner + dot, key


def _named(name: str, make, *arguments) -> Weight:
    try:
        return make(*arguments)
    except SnackError as error:
        raise SnackError(f"import: '{name}': {str(error).removeprefix('from_coo: ')}") from None


def _own(tensors: dict[str, Tensor], prefix: str) -> Weight:
    """The layer that this library wrote under `prefix`."""
    shape = tensors.get(prefix + "shape")
    is_pair = shape is not None and shape.shape == (2,) and shape.dtype == torch.int64 and bool((shape >= 0).all())
    require(is_pair, f"import: layer '{prefix.rstrip('.')}' has a slot_order and no shape of two integers; the state dict is damaged.")
    out, in_ = shape.tolist()
    like = SparseLinear.from_coo([], [], torch.empty(0), (out, in_))
    names = [prefix + key for key in ("values", *state.TOPOLOGY_KEYS)]
    parsed = state.parse(like, {name: tensors[name] for name in names if name in tensors}, prefix)
    return parsed.pattern, parsed.values


class _Builder:
    """Puts layers and tensors into a tree of modules."""

    def __init__(self, entries: Entries, weights: dict[str, Weight], exclude: list[str]):
        self.tensors, self.notes = entries.tensors, entries.notes
        self.weights, self.exclude = weights, exclude
        self.parameters: dict[tuple, nn.Parameter] = {}  # by memory: tensors that are one stay one
        self.layers: dict[tuple, SparseLinear] = {}
        self.owners: dict[str, dict[str, Tensor]] = {prefix: {} for prefix in weights}
        for name, tensor in self.tensors.items():
            prefix, key = _split(name)
            self.owners.setdefault(prefix, {})[key] = tensor
        self.parents = {p[: i + 1] for p in self.owners for i, c in enumerate(p[:-1]) if c == "."} | ({""} if len(self.owners) > 1 else set())

    def build(self) -> nn.Module:
        modules = {prefix: self._module(prefix, own) for prefix, own in self.owners.items()}
        root = modules.pop("", None) or Part()
        for prefix, module in sorted(modules.items(), key=lambda item: item[0].count(".")):
            self._place(root, prefix.removesuffix(".").split("."), module)
        return root

    def _place(self, root: nn.Module, path: list[str], module: nn.Module) -> None:
        parent = root
        for part in path[:-1]:
            parent = parent._modules.setdefault(part, Part())
        parent._modules[path[-1]] = module

    def _module(self, prefix: str, own: dict[str, Tensor]) -> nn.Module:
        weight = self.weights.get(prefix)
        shape = weight[0].shape if weight is not None else tuple(own["weight"].shape) if self._is_matrix(own) else None
        why = "" if shape is None else self._obstacle(prefix, own, shape)
        if weight is not None and not why and not any(fnmatch.fnmatchcase(prefix.removesuffix("."), glob) for glob in self.exclude):
            bias = own.get("bias")
            key = (id(weight), None if bias is None else bias.data_ptr())
            if key not in self.layers:
                self.layers[key] = SparseLinear._from_parts(*weight, bias).requires_grad_(False)
            return self.layers[key]
        if weight is not None:  # dense after all
            own["weight"] = SparseLinear._from_parts(*weight, None).to_dense().weight.detach()
        if why:
            self.notes[prefix + "weight"] = why
        if shape is not None and not why:
            return self._linear(own)
        part = Part()
        for key, tensor in own.items():
            part.put(key, tensor)
            if key in part._parameters:
                part._parameters[key] = self._parameter(tensor)
        return part

    @staticmethod
    def _is_matrix(own: dict[str, Tensor]) -> bool:
        return "weight" in own and own["weight"].dim() == 2 and own["weight"].dtype.is_floating_point

    def _obstacle(self, prefix: str, own: dict[str, Tensor], shape: tuple[int, int]) -> str:
        """Why the owner of a matrix is no linear layer."""
        others = own.keys() - {"weight", "bias"}
        if others or prefix in self.parents:
            return f"its layer holds more than a weight and a bias ({', '.join(sorted(others)) or 'layers of its own'})"
        if "bias" in own and own["bias"].shape != (shape[0],):
            return f"its bias has shape {tuple(own['bias'].shape)}, a linear layer of shape {shape} has ({shape[0]},)"
        return ""

    def _parameter(self, tensor: Tensor) -> nn.Parameter:
        key = (tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride()) if tensor.numel() else (id(tensor),)
        return self.parameters.setdefault(key, nn.Parameter(tensor, requires_grad=False))

    def _linear(self, own: dict[str, Tensor]) -> nn.Linear:
        out, in_ = own["weight"].shape
        layer = nn.Linear(in_, out, bias="bias" in own, device="meta", dtype=own["weight"].dtype)
        for key, tensor in own.items():
            layer._parameters[key] = self._parameter(tensor)
        return layer


def import_state_dict(
    model: nn.Module,
    state_dict: Mapping[str, object],
    include: str | Iterable[str] = (),
    exclude: str | Iterable[str] = (),
    masks: Mapping[str, object] | None = None,
    sum_duplicates: bool = False,
) -> nn.Module:
    """Load the state dict of a model that was pruned elsewhere into `model`, in place, and return the model.

    Layers that are sparse in the state dict (see `as_model`, which also has the arguments) become SparseLinear layers with exactly
    these connections, also where the model has an nn.Linear; all other tensors are loaded as they are. Dtype and device
    stay those of the model. Build the optimiser afterwards. A bare nn.Linear is not changed: the new layer is returned.

    Everything is checked before anything is changed. Raises: SnackError, naming the first few problems: masks or topologies
        that do not fit, missing or unknown entries, other shapes, layers that cannot be sparse (tied weights, attention's out_proj).
    """
    require(isinstance(model, nn.Module), f"import_state_dict: expected an nn.Module, got {type(model).__name__}.")
    require(isinstance(state_dict, Mapping), f"import_state_dict: the state dict is a {type(state_dict).__name__}, expected a mapping.")
    extra = {name: e for name, e in state_dict.items() if str(name).endswith("_extra_state") and not isinstance(e, Tensor)}
    others = {name: entry for name, entry in state_dict.items() if name not in extra}
    tree = as_model(others, include, exclude, masks, sum_duplicates)
    tensors = tree.state_dict() | extra
    sparse = {name: module for name, module in tree.named_modules(remove_duplicate=False) if isinstance(module, SparseLinear)}

    candidates = find_linears(model)
    note_obstacles(model, candidates, (), "nonzero")
    jobs, problems, stand_in = [], [], dict(tensors)
    for candidate in candidates:
        name = next((n for n in candidate.names if n in sparse), None)
        if name is None:
            continue
        layer = sparse[name]
        if candidate.obstacle:
            problems.append(f"'{candidate.title}' is sparse in the state dict and cannot be in the model: {candidate.obstacle}")
        elif (layer.out_features, layer.in_features) != candidate.shape:
            shape = (layer.out_features, layer.in_features)
            problems.append(f"'{candidate.title}' has shape {shape} in the state dict and {candidate.shape} in the model")
        jobs.append((candidate, (layer.pattern, layer.values.detach())))
        for place in candidate.names:
            _stand_in(stand_in, candidate.layer, f"{place}." if place else "")
    _, others = check(model, stand_in)
    reasons = [f"'{name}' was left as it is: {why}" for name, why in tree.import_notes.items() if name in tensors]
    complain([*problems, *others, *(reasons if others else [])], "import_state_dict: the state dict")
    if jobs:
        chosen = {id(candidate) for candidate, _ in jobs}
        reasons = {id(c): "dense in the state dict" for c in candidates if id(c) not in chosen}
        model = convert_layers(model, candidates, reasons, jobs, who="snack.io.import_state_dict")
    return load_tensors(model, tensors, "import_state_dict: the state dict")


def _stand_in(tensors: dict[str, Tensor], layer: nn.Linear, prefix: str) -> None:
    """Replace a sparse layer's entries by those of the dense layer it will replace, so that the rest can be checked."""
    for key in ("values", *state.TOPOLOGY_KEYS):
        tensors.pop(prefix + key, None)
    own = layer.state_dict(prefix=prefix)
    own.pop(prefix + "bias", None)  # that of `tensors` is to be looked at
    if prefix + "bias_orig" in own:  # pruned: its place is taken by a plain one
        bias = tensors.pop(prefix + "bias", None)
        if bias is None or bias.shape != layer.bias.shape:
            del own[prefix + "bias_orig"]  # reported as missing
    tensors.update(own)
