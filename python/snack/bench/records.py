"""Records of measurement: one JSON object a suite, with where the numbers come from (schema 1).

{"schema": 1, "suite": ..., "provenance": {...}, "records": [{"routine", "out", "in", "batch", "sparsity", "nnz", "dtype",
"regime", "kernel", "predicted_us", "mode", "l2", "time_us", "time_iqr_us", "eager_us", "bytes", "floor_us", "peak_bytes", "rel_error",
"peers": {name: {"time_us", "note"} | {"not_run": why}}}]}
A quantity that was not measured is absent.
"""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
import sys
from pathlib import Path

import torch

from .. import _costs, _lib
from ..errors import SnackError
from .hashing import COMPILED, HASHED, source_hash

SCHEMA = 1

__all__ = ["COMPILED", "HASHED", "SCHEMA", "card_name", "checkout", "provenance", "read", "source_hash"]


def checkout() -> Path | None:
    """The source tree that the current folder belongs to, if it is one of this project."""
    for folder in (Path.cwd(), *Path.cwd().parents):
        if (folder / "include/snack/formats/pattern.hpp").is_file() and (folder / "CMakeLists.txt").is_file():
            return folder
    return None


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def card_name(name: str, count: int = 1) -> str:
    """Folder of a card's results: "NVIDIA H200" -> "h200", two of them "h200x2"."""
    words = [word for word in name.lower().replace("/", "-").split() if word not in ("nvidia", "geforce")]
    return "-".join(words) + (f"x{count}" if count > 1 else "")


def _nvml(index: int) -> dict[str, object]:
    """Driver version, and the power that the card takes now; absent where NVML is."""
    try:
        import pynvml

        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(index).uuid}")
        driver, power = pynvml.nvmlSystemGetDriverVersion(), pynvml.nvmlDeviceGetPowerUsage(handle)
        return {"driver": driver if isinstance(driver, str) else driver.decode(), "idle_w": round(power / 1000, 1)}
    except Exception:  # an optional package on a machine that may forbid it: then the facts are absent
        return {}


def _device_facts(device: torch.device | None) -> dict[str, object]:
    if device is None or device.type == "cpu":
        return {"device": f"cpu-{_lib.status()['isa']}", "cpu": _cpu_name(), "threads": torch.get_num_threads()}
    index = torch.cuda.current_device() if device.index is None else device.index
    name = torch.cuda.get_device_name(index)
    return {"device": card_name(name, torch.cuda.device_count()), "card": name, **_nvml(index), "cuda": torch.version.cuda, "cpu": _cpu_name(),
            "costs": "own" if _costs.is_own() else "built-in"}  # fmt: skip


def _commit(root: Path) -> str | None:
    """$SNACK_COMMIT where a copy of a checkout is measured, else what git says."""
    if os.environ.get("SNACK_COMMIT"):
        return os.environ["SNACK_COMMIT"][:12]
    try:
        commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=root, capture_output=True, text=True)
    except FileNotFoundError:
        return None
    return commit.stdout.strip()[:12] if commit.returncode == 0 else None


def provenance(device: torch.device | None = None) -> dict[str, object]:
    """Machine (of `device`; default the CPU), versions, commit and source hash of what is running now."""
    from importlib import metadata

    facts: dict[str, object] = {
        **_device_facts(device),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"),
        # Without folders: they are of the machine, not of the measurement.
        "command": " ".join(["snack", *(word.rsplit("/", 1)[-1] for word in sys.argv[1:])]),
    }
    try:
        facts["snack"] = metadata.version("snack-sparse")
    except metadata.PackageNotFoundError:
        pass
    root = checkout()
    if root is not None:
        facts["source_hash"] = source_hash(root)
        commit = _commit(root)
        if commit:
            facts["commit"] = commit
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
