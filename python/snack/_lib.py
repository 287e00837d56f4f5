"""Finds and loads the compiled operators; remembers why when that fails. Loading never touches a GPU, so a fork stays safe."""

from __future__ import annotations

import os
import warnings
from pathlib import Path

import torch

from . import _costs

LIBRARY = "libsnack_ops.so"
CUDA_LIBRARY = "libsnack_ops_cuda.so"


def _folder() -> Path:
    """$SNACK_LIB_DIR wins over the libraries inside the package."""
    override = os.environ.get("SNACK_LIB_DIR")
    return Path(override) if override else Path(__file__).parent / "lib"


def _load() -> Path:
    path = _folder() / LIBRARY
    if not path.is_file():
        raise ImportError(
            f"snack: the compiled operators {LIBRARY} were not found at {path}. "
            "Install the package (pip install .) or set SNACK_LIB_DIR to the build folder."
        )
    try:
        torch.ops.load_library(str(path))
    except OSError as error:
        raise ImportError(f"snack: {path} does not load with PyTorch {torch.__version__} (2.11 or later is needed): {error}") from error
    return path


def _load_cuda() -> tuple[Path | None, str]:
    """(path of the CUDA library, "") or (None, why it is not there): the CPU works without it."""
    path = _folder() / CUDA_LIBRARY
    if not path.is_file():
        return None, f"this build of SNACK has no {CUDA_LIBRARY} beside {LIBRARY}; build it where nvcc is installed"
    try:
        torch.ops.load_library(str(path))
    except OSError as error:
        return None, f"{path} does not load with PyTorch {torch.__version__}: {str(error).splitlines()[0]}"
    return path, ""


PATH = _load()
CUDA_PATH, _cuda_missing = _load_cuda()
if CUDA_PATH is not None:
    _costs.load()


def architectures() -> str:
    """What the CUDA library has code for, e.g. "80 90a 120+PTX"; empty without it."""
    return torch.ops.snack.cuda_architectures() if CUDA_PATH is not None else ""


def _card_problem(index: int) -> str:
    major, minor = torch.cuda.get_device_capability(index)
    if torch.ops.snack.cuda_runs_on(architectures(), major, minor):
        return ""
    return (
        f"cuda:{index} ({torch.cuda.get_device_name(index)}) has compute capability {major}.{minor}, and this binary of SNACK has code "
        f"for {architectures() or 'no card'}; build it with -DSNACK_CUDA_ARCHITECTURES={major}{minor}"
    )


def cuda_problem(device: torch.device | None = None) -> str:
    """Why nothing can be computed on a card, or on that one, as one clause; empty where it can. May initialise CUDA."""
    if CUDA_PATH is None:
        return _cuda_missing
    if torch.version.cuda is None:
        return f"this PyTorch ({torch.__version__}) is built without CUDA; install a CUDA build of it"
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count == 0:
        return f"PyTorch {torch.__version__} sees no usable CUDA device here"
    index = None if device is None else device.index
    if index is None:
        index = torch.cuda.current_device()
    if index >= count:
        return f"cuda:{index} does not exist; PyTorch sees {count} CUDA device{'s' if count > 1 else ''}"
    return _card_problem(index)


def _warn_of_cards() -> None:
    for index in range(torch.cuda.device_count()):
        problem = _card_problem(index)
        if problem:
            warnings.warn(f"snack: {problem}.", stacklevel=2)


def _watch_cards() -> None:
    """Say so as soon as CUDA is initialised (not now: that would break a later fork) when a card has no code in the binary."""
    when_initialised = getattr(torch.cuda, "_lazy_call", None)
    if CUDA_PATH is not None and torch.version.cuda is not None and when_initialised is not None:
        when_initialised(_warn_of_cards)


_watch_cards()


def _cuda_status() -> str:
    problem = cuda_problem()
    if not problem:
        return f"loaded, with code for {architectures()}"
    return f"absent: {problem}" + (f"; {CUDA_LIBRARY} is here, with code for {architectures()}" if CUDA_PATH is not None else "")


def status() -> dict[str, object]:
    """What is loaded: path of the library, instruction set chosen, threads, PyTorch version, CUDA or why not, and the plan's costs."""
    return {
        "library": str(PATH),
        "isa": torch.ops.snack.cpu_isa(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "cuda": _cuda_status(),
        "costs": _costs.status(),
    }
