"""Models in safetensors files: plain tensors, no code, readable anywhere. Loading changes the whole model or nothing.

A sparse layer is `values`, `rows`, `cols` (int32, slot order), `shape`, `slot_order` and `bias`, as in its state_dict; every
other entry is the model's own. Metadata: {"format": "pt", "snack": "1", ...what the caller adds}; tensors that are one in the
model are stored once, and "snack.shared" (JSON, {name: stored name}) tells the other names.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from ..errors import SnackError, require
from ..formats import Pattern
from . import state
from .linear import SparseLinear

FILE_VERSION = "1"
TRAINING = "snack.training"
"""Header key of files that hold a whole training (snack.save_training), and the folder of what is not the model there."""
_RESERVED = ("format", "snack", "snack.shared", TRAINING)
_ITEM_BYTES = {"F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2}


def _safetensors():
    try:
        import safetensors
        import safetensors.torch
    except ImportError:
        raise SnackError("safetensors is not installed, and model files are in its format: pip install safetensors.") from None
    return safetensors


# ---- writing ----


def _split_shared(tensors: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """(tensors with memory of their own, {other name: stored name} of those that are the same memory)."""
    stored: dict[str, Tensor] = {}
    shared: dict[str, str] = {}
    views: dict[tuple, str] = {}
    storages: set[int] = set()
    for name, tensor in tensors.items():
        view = (tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())
        if tensor.numel() and view in views:
            shared[name] = views[view]
            continue
        views[view] = name
        storage = tensor.untyped_storage().data_ptr()
        tensor = tensor.detach()
        stored[name] = tensor.clone(memory_format=torch.contiguous_format) if storage in storages else tensor.contiguous()
        storages.add(storage)
    return stored, shared


def _mode(path: Path) -> int:
    """Permissions of the file to be replaced, or those of any new file (safetensors makes private ones)."""
    if path.exists():
        return path.stat().st_mode & 0o777
    mask = os.umask(0)
    os.umask(mask)
    return 0o666 & ~mask


def save(model: nn.Module, path: str | os.PathLike, metadata: Mapping[str, object] | None = None) -> None:
    """Write the model's state_dict to a safetensors file; an existing file is replaced only when the new one is complete.

    metadata: kept in the header as strings; `read_header` gives it back.
    Raises: SnackError when safetensors is missing, an entry is not a tensor with numbers, or the file cannot be written.
    """
    _safetensors()
    entries = entries_of(model)
    header = {str(key): str(value) for key, value in (metadata or {}).items()}
    for key in _RESERVED:
        require(key not in header, f"save: metadata key {key!r} is used by the file format itself; choose another.")
    write(Path(path), entries, header)


def entries_of(model: nn.Module, who: str = "save") -> dict[str, Tensor]:
    """The model's state dict. Raises: SnackError where an entry is not a tensor with numbers."""
    entries = model.state_dict()
    for name, entry in entries.items():
        require(
            isinstance(entry, Tensor),
            f"{who}: '{name}' is a {type(entry).__name__}, and a safetensors file holds tensors only; remove it from the state.",
        )
        require(
            not entry.is_meta,
            f"{who}: '{name}' is on the meta device and has no numbers; give the model memory with to_empty and load or initialise it.",
        )
    for layer_name, layer in model.named_modules():
        require(
            not (isinstance(layer, SparseLinear) and layer.index.is_meta),
            f"{who}: layer '{layer_name}' is on the meta device and has no topology yet.",
        )
    return entries


def write(path: Path, entries: dict[str, Tensor], header: dict[str, str], who: str = "save") -> None:
    """A whole file, or none: it is written under another name first, and then takes the place of the old one."""
    library = _safetensors()
    stored, shared = _split_shared(entries)
    header = header | {"format": "pt", "snack": FILE_VERSION} | ({"snack.shared": json.dumps(shared)} if shared else {})
    scratch = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        library.torch.save_file(stored, str(scratch), metadata=header)
        os.chmod(scratch, _mode(path))
        os.replace(scratch, path)
    except (OSError, library.SafetensorError) as error:
        raise SnackError(f"{who}: {path} cannot be written: {error}") from None
    finally:
        scratch.unlink(missing_ok=True)


# ---- reading ----


def _open(path: Path, who: str):
    library = _safetensors()
    require(path.exists(), f"{who}: there is no file {path}.")
    require(path.is_file(), f"{who}: {path} is not a file; give a model file written by snack.save.")
    try:
        return library.safe_open(str(path), framework="pt")
    except (OSError, library.SafetensorError) as error:
        raise SnackError(f"{who}: {path} is not a readable safetensors file (cut short, or of another format): {error}") from None


def _shared_names(metadata: dict[str, str], names: set[str], path: Path) -> dict[str, str]:
    try:
        shared = json.loads(metadata.get("snack.shared", "{}"))
        is_valid = all(isinstance(k, str) and k not in names and v in names for k, v in shared.items())
    except (ValueError, AttributeError, TypeError):
        is_valid = False
    require(is_valid, f"load: {path} lists shared tensors that it does not hold; the file is damaged.")
    return shared


def read_tensors(path: str | os.PathLike) -> dict[str, Tensor]:
    """{name: tensor} of the model in a file, shared ones under all their names. Raises: SnackError on an unreadable file."""
    return {name: tensor for name, tensor in read(path)[0].items() if not name.startswith(f"{TRAINING}/")}


def read(path: str | os.PathLike, who: str = "load") -> tuple[dict[str, Tensor], dict[str, str]]:
    """(everything in a file, its header)."""
    path = Path(path)
    with _open(path, who) as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}
        header = dict(file.metadata() or {})
        shared = _shared_names(header, set(tensors), path)
    return tensors | {name: tensors[stored] for name, stored in shared.items()}, header


def load(path: str | os.PathLike, like: nn.Module) -> nn.Module:
    """Load a file into the model `like`, in place, and return it.

    Sparse layers may have another sparsity than in the file, and take a dense `weight` (its non-zero entries). Dtype and
    device stay those of the model. Everything is checked before anything is written: a file that lies (indices out of range
    or listed twice, wrong lengths, shapes or dtypes, missing or unknown entries) leaves the whole model as it was.

    Raises: SnackError, naming the first few problems.
    """
    require(isinstance(like, nn.Module), f"load: like is a {type(like).__name__}, expected the model to load into.")
    return load_tensors(like, read_tensors(path), f"load: {path}")


def load_tensors(model: nn.Module, tensors: Mapping[str, Tensor], what: str) -> nn.Module:
    """`load` from {name: tensor} instead of a file; `what` names them in errors."""
    parsed, problems = check(model, tensors)
    complain(problems, what)
    try:
        with state.prepared(parsed):
            model.load_state_dict(tensors)
    except RuntimeError as error:
        raise SnackError(f"{what} does not fit the model: {error}") from None
    return model


def complain(problems: list[str], what: str) -> None:
    """SnackError with the first few problems, if there are any."""
    if problems:
        more = f"; and {len(problems) - 4} more" if len(problems) > 4 else ""
        raise SnackError(f"{what} does not fit the model, which is unchanged: {'; '.join(problems[:4])}{more}")


def check(model: nn.Module, tensors: Mapping[str, Tensor]) -> tuple[dict[str, state.Parsed], list[str]]:
    """({prefix: parsed entries of a sparse layer}, problems)."""
    parsed: dict[str, state.Parsed] = {}
    problems: list[str] = []
    known: set[str] = set()
    for name, module in model.named_modules(remove_duplicate=False):
        prefix = f"{name}." if name else ""
        expected: dict[str, object] = {}
        if isinstance(module, SparseLinear):
            nn.Module._save_to_state_dict(module, expected, prefix, True)
            expected = {key: entry for key, entry in expected.items() if key.removeprefix(prefix) not in state.KEYS}
            known.update(prefix + key for key in state.KEYS if key != "bias" or module.bias is not None)
            try:
                parsed[prefix] = state.parse(module, tensors, prefix)
            except SnackError as error:
                problems.append(str(error).rstrip("."))
            else:
                problems.extend(_missing(module, parsed[prefix], name, prefix))
        else:
            module._save_to_state_dict(expected, prefix, True)
        if prefix + "weight" in expected and prefix + "weight" not in tensors and prefix + "values" in tensors:
            problems.append(f"'{name}' is sparse in the file and dense in the model (call snack.sparsify first)")
            known.update(prefix + key for key in state.KEYS)
            continue
        known.update(expected)
        for key, entry in expected.items():
            if key not in tensors:
                problems.append(f"'{key}' is not in the file")
            elif isinstance(entry, Tensor) and entry.shape != tensors[key].shape:
                problems.append(f"'{key}' has shape {tuple(tensors[key].shape)} in the file and {tuple(entry.shape)} in the model")
    problems.extend(f"'{key}' of the file is unknown to the model" for key in tensors if key not in known)
    return parsed, problems


def _missing(layer: SparseLinear, found: state.Parsed, name: str, prefix: str) -> list[str]:
    if found.pattern is None:
        return [f"'{name}' is not in the file"]
    return [f"'{prefix}bias' is not in the file"] if layer.bias is not None and found.bias is None else []


def read_header(path: str | os.PathLike) -> dict:
    """What a file holds, without loading it.

    Returns: {"path", "file_bytes", "metadata": {str: str}, "tensors": [{"name", "dtype", "shape", "bytes"}], "layers":
        [{"name", "shape": (out, in), "nnz", "sparsity", "dtype", "bytes"}]}: layers are the sparse ones, their bytes those
        of the file (values and the int32 rows and cols). Raises: SnackError on an unreadable file.
    """
    path = Path(path)
    with _open(path, "inspect") as file:
        tensors = []
        for name in sorted(file.keys()):
            part = file.get_slice(name)
            shape, dtype = tuple(part.get_shape()), part.get_dtype()
            count = 1
            for extent in shape:
                count *= extent
            tensors.append({"name": name, "dtype": dtype, "shape": shape, "bytes": count * _ITEM_BYTES.get(dtype, 1)})
        metadata = dict(file.metadata() or {})
        by_name = {t["name"]: t for t in tensors}
        by_name |= {name: by_name[stored] for name, stored in _shared_names(metadata, set(by_name), path).items()}
        prefixes = [n.removesuffix("slot_order") for n in by_name if n.split(".")[-1] == "slot_order"]
        layers = [_layer_header(file, prefix, by_name, path) for prefix in prefixes]
    return {"path": str(path), "file_bytes": path.stat().st_size, "metadata": metadata, "tensors": tensors, "layers": layers}


def read_patterns(path: str | os.PathLike) -> dict[str, Pattern]:
    """{name: pattern} of the sparse layers of a file, without the model's code; by name, numbers in their order (9 before 10).

    A layer that is the whole model is '(model)'. Values are not read. Raises: SnackError on an unreadable file, or on a damaged layer.
    """
    names = [layer["name"] for layer in read_header(path)["layers"]]
    names.sort(key=lambda name: [(part.isdecimal(), int(part) if part.isdecimal() else part) for part in name.split(".")])
    path, patterns = Path(path), {}
    with _open(path, "load") as file:
        shared = _shared_names(file.metadata() or {}, set(file.keys()), path)
        for name in names:
            keys = [key if name == "(model)" else f"{name}.{key}" for key in ("rows", "cols", "shape")]
            rows, cols, shape = (file.get_tensor(shared.get(key, key)) for key in keys)
            try:
                patterns[name] = Pattern(rows, cols, shape.tolist())
            except SnackError as error:
                raise SnackError(f"load: layer '{name}' of {path} is damaged: {error}") from None
    return patterns


def _layer_header(file, prefix: str, by_name: dict[str, dict], path: Path) -> dict:
    parts = [by_name.get(prefix + key) for key in ("values", "rows", "cols", "shape")]
    is_whole = all(parts) and by_name[prefix + "shape"]["shape"] == (2,) and len(by_name[prefix + "values"]["shape"]) == 1
    name = prefix.rstrip(".") or "(model)"
    require(is_whole, f"inspect: layer '{name}' of {path} is damaged: a sparse layer has values, rows, cols and a shape of two integers.")
    out, in_ = (int(extent) for extent in file.get_tensor(by_name[prefix + "shape"]["name"]).tolist())
    nnz = by_name[prefix + "values"]["shape"][0]
    for key, extent in (("rows", out), ("cols", in_)):
        listed = file.get_tensor(by_name[prefix + key]["name"])
        is_sound = listed.shape == (nnz,) and (nnz == 0 or (int(listed.min()) >= 0 and int(listed.max()) < extent))
        require(is_sound, f"inspect: layer '{name}' of {path} is damaged: its {key} are not {nnz} integers from 0 to {extent - 1}.")
    positions = out * in_
    return {
        "name": name,
        "shape": (out, in_),
        "nnz": nnz,
        "sparsity": 1.0 - nnz / positions if positions > 0 else 0.0,
        "dtype": by_name[prefix + "values"]["dtype"],
        "bytes": sum(part["bytes"] for part in parts[:3]),
    }
