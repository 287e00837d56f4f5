"""Fingerprints of the sources, so that a number, or a compiled library, tells what it was made from. Needs nothing but Python."""

from __future__ import annotations

import hashlib
from pathlib import Path

# Everything that can change a number: kernels, bindings, the Python on the way to them, the measuring code.
HASHED = (
    "CMakeLists.txt", "cmake", "include", "src", "torch", "python/snack/formats", "python/snack/ops", "python/snack/nn",
    "python/snack/dst", "python/snack/bench", "python/snack/data.py", "python/snack/_lib.py", "python/snack/cli/bench.py",
    "CMakePresets.json", "VERSION", "requirements/cuda.txt",
)
# What a compiled library, C++ test or C++ example is made of.
COMPILED = ("CMakeLists.txt", "cmake", "include", "src", "torch", "tests/cpp", "examples/cpp")


def source_hash(root: Path, tops: tuple[str, ...] = HASHED) -> str:
    """16 hex digits over the names and contents of the files in `tops`, without what tools leave there: __pycache__, .hypothesis ..."""

    def is_source(file: Path) -> bool:
        return file.is_file() and not any(part.startswith(".") or part == "__pycache__" for part in file.relative_to(root).parts)

    digest = hashlib.sha256()
    for top in tops:
        path = root / top
        files = [path] if path.is_file() else sorted(filter(is_source, path.rglob("*")))
        for file in files:
            digest.update(file.relative_to(root).as_posix().encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()[:16]
