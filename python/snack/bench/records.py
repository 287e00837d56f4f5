"""Records of measurement: one JSON object a suite, with where the numbers come from (schema 1).

{"schema": 1, "suite": ..., "provenance": {...}, "records": [{"routine", "out", "in", "batch", "sparsity", "nnz", "dtype",
"regime", "mode", "time_us", "time_iqr_us", "bytes", "rel_error", "peers": {name: {"time_us", "note"} | {"not_run": why}}}]}
A quantity that was not measured is absent.
"""

from __future__ import annotations

import datetime
import hashlib
import platform
import subprocess
import sys
from pathlib import Path

import torch

from .. import _lib
from ..errors import SnackError

SCHEMA = 1

# Everything that can change a number: kernels, bindings, the Python on the way to them, the measuring code.
HASHED = (
    "CMakeLists.txt", "cmake", "include", "src", "torch", "python/snack/formats", "python/snack/ops", "python/snack/nn",
    "python/snack/dst", "python/snack/bench", "python/snack/data.py", "python/snack/_lib.py",
)


def checkout() -> Path | None:
    """The source tree that the current folder belongs to, if it is one of this project."""
    for folder in (Path.cwd(), *Path.cwd().parents):
        if (folder / "include/snack/formats/pattern.hpp").is_file() and (folder / "CMakeLists.txt").is_file():
            return folder
    return None


def source_hash(root: Path) -> str:
    """16 hex digits over the names and contents of the files in HASHED."""
    digest = hashlib.sha256()
    for top in HASHED:
        path = root / top
        files = [path] if path.is_file() else sorted(f for f in path.rglob("*") if f.is_file() and "__pycache__" not in f.parts)
        for file in files:
            digest.update(file.relative_to(root).as_posix().encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def provenance() -> dict[str, object]:
    """Machine, versions, commit and source hash of what is running now."""
    from importlib import metadata

    status = _lib.status()
    facts: dict[str, object] = {
        "device": f"cpu-{status['isa']}",
        "cpu": _cpu_name(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"),
        "command": " ".join(["snack", *sys.argv[1:]]),
    }
    try:
        facts["snack"] = metadata.version("snack-sparse")
    except metadata.PackageNotFoundError:
        pass
    root = checkout()
    if root is not None:
        facts["source_hash"] = source_hash(root)
        commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=root, capture_output=True, text=True)
        if commit.returncode == 0:
            facts["commit"] = commit.stdout.strip()[:12]
    return facts


def read(path: str | Path) -> dict:
    """A results file; SnackError when it is not readable, cut off, or of another schema."""
    import json

    try:
        document = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise SnackError(f"{path} cannot be read: {error.strerror}.") from None
    except ValueError as error:
        raise SnackError(f"{path} is not complete JSON ({error}); was its writing interrupted?") from None
    if not isinstance(document, dict) or document.get("schema") != SCHEMA or not isinstance(document.get("records"), list):
        raise SnackError(f"{path} is not a results file of schema {SCHEMA}.")
    return document
