"""Finds and loads the compiled operators; remembers why when that fails. Never touches a GPU."""

from __future__ import annotations

import os
from pathlib import Path

import torch

LIBRARY = "libsnack_ops.so"


def _candidates() -> list[Path]:
    """$SNACK_LIB_DIR wins over the library inside the package."""
    override = os.environ.get("SNACK_LIB_DIR")
    if override:
        return [Path(override) / LIBRARY]
    return [Path(__file__).parent / "lib" / LIBRARY]


def _load() -> Path:
    tried = _candidates()
    for path in tried:
        if path.is_file():
            try:
                torch.ops.load_library(str(path))
            except OSError as error:
                raise ImportError(
                    f"snack: {path} does not load with PyTorch {torch.__version__} (2.11 or later is needed): {error}"
                ) from error
            return path
    raise ImportError(
        f"snack: the compiled operators {LIBRARY} were not found at {', '.join(map(str, tried))}. "
        "Install the package (pip install .) or set SNACK_LIB_DIR to the build folder."
    )


PATH = _load()


def status() -> dict[str, object]:
    """What is loaded: path of the library, instruction set chosen, threads, PyTorch version."""
    return {
        "library": str(PATH),
        "isa": torch.ops.snack.cpu_isa(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "cuda": "the CUDA kernels are not part of this version; computations run on the CPU",
    }
