"""Files: {name: tensor} out of .safetensors, .pt and .npz, and models into them."""

from __future__ import annotations

import os
import pickle
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from ..errors import SnackError, require
from ..nn.persistence import read_tensors, save
from .masks import as_tensor

_PICKLED = (".pt", ".pth", ".bin", ".ckpt")
SUFFIXES = (".safetensors", *_PICKLED, ".npz")
_STATES = ("state_dict", "model_state_dict", "model")
"""Where a training checkpoint keeps the model's state dict."""


def check_suffix(path: str | os.PathLike, who: str) -> str:
    """The suffix of a file that can be read and written; SnackError on another one."""
    suffix = Path(path).suffix.lower()
    require(suffix in SUFFIXES, f"{who}: {path} ends with {suffix or 'no suffix'}, expected one of {', '.join(SUFFIXES)}.")
    return suffix


def read(path: str | os.PathLike) -> dict[str, Tensor]:
    """{name: tensor} of a file, for `as_model` and `import_state_dict`; nothing in it is executed.

    * .safetensors: its tensors.
    * .pt, .pth, .bin, .ckpt: a state dict, or a checkpoint that holds one as "state_dict", "model_state_dict" or "model"
      (torch.load with weights_only).
    * .npz: arrays by name; or one matrix (out, in) written by scipy.sparse.save_npz, which is then called "weight": unsorted
      indices, explicit zeros and duplicates stay as they are.

    Raises: SnackError on a file that is missing, cut short, of another kind, or holds other things than tensors.
    """
    suffix, path = check_suffix(path, "read"), Path(path)
    require(path.exists(), f"read: there is no file {path}.")
    require(path.is_file(), f"read: {path} is not a file.")
    if suffix == ".safetensors":
        return read_tensors(path)
    return _read_npz(path) if suffix == ".npz" else _read_pickled(path)


def _read_pickled(path: Path) -> dict[str, Tensor]:
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except MemoryError:
        raise
    except Exception as error:  # what the unpickler raises on other people's bytes has no common class
        if isinstance(error, pickle.UnpicklingError) and "GLOBAL" in str(error):
            raise SnackError(f"read: {path} holds Python objects, not tensors alone; save model.state_dict() instead of the model.") from None
        raise SnackError(f"read: {path} is not a readable PyTorch file (cut short, or of another format).") from None
    require(isinstance(content, Mapping), f"read: {path} holds a {type(content).__name__}, expected a state dict (names and tensors).")
    content = next((content[key] for key in _STATES if isinstance(content.get(key), Mapping)), content)
    other = next((name for name, entry in content.items() if not isinstance(entry, Tensor)), None)
    if other is not None:
        kind = type(content[other]).__name__
        raise SnackError(f"read: {path} holds '{other}', a {kind}, expected a state dict (names and tensors); save that alone.")
    return dict(content)


def _numpy():
    try:
        import numpy
    except ImportError:
        raise SnackError("numpy is not installed, and .npz files are in its format: pip install numpy.") from None
    return numpy


def _read_npz(path: Path) -> dict[str, Tensor]:
    numpy = _numpy()
    try:
        with numpy.load(path, allow_pickle=False) as file:
            is_scipy = {"format", "shape", "data"} <= set(file.files)
            arrays = {} if is_scipy else {name: file[name] for name in file.files}
    except (ValueError, OSError, EOFError, KeyError, zipfile.BadZipFile) as error:
        is_pickled = "pickle" in str(error) and zipfile.is_zipfile(path)
        what = "holds objects, expected arrays of numbers" if is_pickled else "is not a readable .npz file (cut short, or of another format)"
        raise SnackError(f"read: {path} {what}.") from None
    except (AttributeError, TypeError):  # numpy gives the array of an .npy file itself
        raise SnackError(f"read: {path} holds one array without a name; save it with numpy.savez(path, weight=array).") from None
    return {name: as_tensor(name, array) for name, array in ({"weight": _read_scipy(path)} if is_scipy else arrays).items()}


def _read_scipy(path: Path):
    try:
        import scipy.sparse
    except ImportError:
        raise SnackError(f"scipy is not installed, and {path} was written by scipy.sparse.save_npz: pip install scipy.") from None
    try:
        return scipy.sparse.load_npz(path)
    except (ValueError, TypeError, NotImplementedError) as error:
        raise SnackError(f"read: {path} is not a matrix that scipy.sparse.load_npz can read: {error}") from None


def write(model: nn.Module, path: str | os.PathLike, metadata: Mapping[str, object] | None = None) -> None:
    """Write the state_dict of a model in the format of the path's suffix; an old file is replaced only when the new one is complete.

    * .safetensors: `snack.save`, with `metadata`.
    * .pt, .pth, .bin, .ckpt: torch.save; torch.load(path, weights_only=True) reads it.
    * .npz: numpy.savez, names as in the state_dict; bfloat16, which numpy lacks, becomes float32.

    Sparse layers are `values`, `rows`, `cols`, `shape`, `slot_order` and `bias`; for a dense file, `snack.densify` first.
    Raises: SnackError on another suffix, an entry that is not a tensor, or a file that cannot be written.
    """
    suffix, path = check_suffix(path, "write"), Path(path)
    require(isinstance(model, nn.Module), f"write: expected an nn.Module, got {type(model).__name__}; `as_model` makes one of a state dict.")
    if suffix == ".safetensors":
        return save(model, path, metadata)
    require(not metadata, f"write: {path} has no place for metadata; choose a .safetensors file, or leave it out.")
    tensors = model.state_dict()
    for name, entry in tensors.items():
        require(isinstance(entry, Tensor) and not entry.is_meta, f"write: '{name}' is not a tensor with numbers; remove it from the state.")
    if suffix == ".npz":
        numpy = _numpy()
        arrays = {name: (t.float() if t.dtype == torch.bfloat16 else t).detach().cpu().numpy() for name, t in tensors.items()}
        require("file" not in arrays, "write: numpy.savez cannot hold an entry called 'file'; rename it, or choose another format.")
        _replace(path, lambda file: numpy.savez(file, **arrays))
    else:
        _replace(path, lambda file: torch.save(tensors, file))


def _replace(path: Path, fill: Callable) -> None:
    scratch = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with open(scratch, "wb") as file:
            fill(file)
        os.replace(scratch, path)
    except OSError as error:
        raise SnackError(f"write: {path} cannot be written: {error}") from None
    finally:
        scratch.unlink(missing_ok=True)
