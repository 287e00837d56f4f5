"""Fails when a wheel is not what users need: both libraries in it, which link to nothing of CUDA, keep to PyTorch's stable ABI from
2.11 on, know no folder of the machine that built them, and run on Linux with glibc 2.34.

Usage: python tools/check_wheel.py WHEEL      (needs auditwheel, patchelf, torch-abi-audit and binutils)
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

LIBRARIES = ("snack/lib/libsnack_ops.so", "snack/lib/libsnack_ops_cuda.so")
MAY_NEED = re.compile(r"(libtorch|libtorch_cpu|libstdc\+\+|libm|libgcc_s|libc|ld-linux-x86-64|libpthread|libdl|librt)\.so[.\d]*$")
# Symbols that only a CUDA build of PyTorch, the driver or the toolkit's shared libraries define.
FOREIGN = re.compile(r"_?_?(cuda|cublas|cusparse|nvrtc|nvml|cu)[A-Z_]|.*_cuda_stream")
MAY_BE_WEAK = {"aoti_torch_get_current_cuda_stream"}
OLDEST_TORCH = (2, 11)
NEWEST_GLIBC = (2, 34)


def run(*command: object) -> str:
    result = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    if result.returncode:
        raise SystemExit(f"check_wheel: {' '.join(map(str, command))} failed: {(result.stderr or result.stdout).strip()}")
    return result.stdout + result.stderr


def link_problems(name: str, dynamic: str, symbols: str) -> list[str]:
    """Of `objdump -p` and `nm -D` of one library."""
    problems = [f"{name} needs {needed}, which is not on every machine" for needed in re.findall(r"NEEDED\s+(\S+)", dynamic)
                if not MAY_NEED.match(needed)]
    for path in re.findall(r"(?:RUN|R)PATH\s+(\S+)", dynamic):
        problems.append(f"{name} looks for libraries in {path}, a folder of the machine that built it")
    for line in symbols.splitlines():
        *_, kind, symbol = line.split()
        symbol = symbol.split("@")[0]
        if not FOREIGN.match(symbol):
            continue
        if kind == "U":
            problems.append(f"{name} needs the symbol {symbol}: it would not load beside a CPU build of PyTorch")
        elif kind in "wv" and symbol not in MAY_BE_WEAK:
            problems.append(f"{name} has the weak symbol {symbol}, which is not expected")
        elif kind not in "Uwv":
            problems.append(f"{name} exports {symbol}: another library's call could land there")
    return problems


def abi_problems(name: str, report: dict) -> list[str]:
    """Of the JSON of torch-abi-audit about one library."""
    torch = report["bundled_libs"][0]["torch"]
    if not torch["uses_torch"] or not torch["stable"]:
        return [f"{name} leaves PyTorch's stable ABI: {', '.join(torch['unstable_symbols']) or 'no torch symbol found'}"]
    oldest = tuple(int(part) for part in torch["min_torch_version"].split(".")[:2])
    return [f"{name} needs PyTorch {torch['min_torch_version']}, later than promised"] if oldest > OLDEST_TORCH else []


def tag_problems(file_name: str) -> list[str]:
    match = re.search(r"manylinux_(\d+)_(\d+)_x86_64", file_name)
    if match is None or (int(match[1]), int(match[2])) > NEWEST_GLIBC:
        return [f"auditwheel tags it {file_name}, expected manylinux_2_34_x86_64 or earlier"]
    return []


def main() -> int:
    if len(sys.argv) != 2 or not Path(sys.argv[1]).is_file():
        print(__doc__)
        return 2
    wheel, tools = Path(sys.argv[1]), Path(sys.executable).parent

    def tool(name: str) -> str:
        found = shutil.which(name, path=tools) or shutil.which(name)
        return found or sys.exit(f"check_wheel: {name} is not installed (requirements/test.txt)")

    problems = []
    with tempfile.TemporaryDirectory() as folder:
        with zipfile.ZipFile(wheel) as archive:
            missing = [name for name in LIBRARIES if name not in archive.namelist()]
            problems += [f"{name} is not in the wheel" for name in missing]
            archive.extractall(folder)
        for name in LIBRARIES:
            path = Path(folder) / name
            if name not in missing:
                problems += link_problems(path.name, run("objdump", "-p", path), run("nm", "-D", path))
                problems += abi_problems(path.name, json.loads(run(tool("torch-abi-audit"), "--json", path)))
        repaired = Path(folder) / "repaired"
        run(tool("auditwheel"), "repair", "--exclude", "libtorch*", "--exclude", "libc10*", "--wheel-dir", repaired, wheel)
        tagged = next(repaired.glob("*.whl")).name
        problems += tag_problems(tagged)
    print("\n".join(problems) if problems else f"wheel: {tagged}, {wheel.stat().st_size / 1e6:.1f} MB, links and stable ABI are as promised")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
