"""Fingerprints of the sources, so that a number, or a compiled library, tells what it was made from. Needs nothing but Python."""

from __future__ import annotations

import hashlib
from pathlib import Path

# Everything that can change a number: kernels, bindings, the Python on the way to them, the measuring code.
HASHED = (
    "CMakeLists.txt", "cmake", "include", "src", "torch", "python/snack/formats", "python/snack/ops", "python/snack/nn",
    "python/snack/dst", "python/snack/bench", "python/snack/data.py", "python/snack/_lib.py",
)
# What a compiled library, C++ test or C++ example is made of.
COMPILED = ("CMakeLists.txt", "cmake", "include", "src", "torch", "tests/cpp", "examples/cpp")


def source_hash(root: Path, tops: tuple[str, ...] = HASHED) -> str:
    """16 hex digits over the names and contents of the files in `tops`."""
    digest = hashlib.sha256()
    for top in tops:
        path = root / top
        files = [path] if path.is_file() else sorted(f for f in path.rglob("*") if f.is_file() and "__pycache__" not in f.parts)
        for file in files:
            digest.update(file.relative_to(root).as_posix().encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()[:16]
