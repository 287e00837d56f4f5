"""Fails when a dependency points the wrong way, a torch or CUDA header stands where it must not, or a kernel does not await its stream.

C++    core <- formats <- plan <- kernels <- backends (reference, cpu, cuda: none includes another) <- defaults, torch/
Python errors, _lib <- formats <- ops <- optim <- nn <- dst, io, prune <- integrations, plot <- bench <- cli
Usage: python tools/check_layers.py [root]
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

CPP_ORDER = ["core", "formats", "plan", "kernels"]
BACKENDS = ["reference", "cpu", "cuda"]
TOP = ["defaults", "torch"]  # they may use everything, and nothing uses them; snack/snack.hpp includes defaults
PYTHON_ORDER = ["errors", "_lib", "formats", "ops", "optim", "nn", "dst", "io", "prune", "integrations", "plot", "data", "bench", "cli"]

NEVER = ("__restrict__", "__ldg")
CUDA_HEADER = re.compile(r"cuda\w*\.h$|(cub|thrust|cute|cutlass|cooperative_groups)/")
INCLUDE = re.compile(r'^\s*#\s*include\s*["<]([^">]+)[">]', re.MULTILINE)
CPP_SUFFIXES = {".hpp", ".cpp", ".cu", ".cuh", ".h"}


def cpp_layer(path: str) -> str | None:
    """Layer of a repository path or of an include, e.g. include/snack/plan/plan.hpp -> plan."""
    parts = path.split("/")
    if parts[0] == "torch":
        return "torch"
    if path.endswith("snack/snack.hpp"):
        return "defaults"
    for part in parts[:-1]:
        if part in CPP_ORDER or part in BACKENDS or part in TOP:
            return part
    return None


def may_include(layer: str | None, target: str | None) -> bool:
    if target is None or layer is None or layer == target or layer == "torch":
        return True
    if target in TOP:
        return False
    if layer in TOP:
        return True
    if layer in BACKENDS:
        return target == layer or target in CPP_ORDER
    return target in CPP_ORDER and CPP_ORDER.index(target) <= CPP_ORDER.index(layer)


def check_cpp(root: Path) -> list[str]:
    problems = []
    files = [f for top in ("include", "src", "torch") for f in (root / top).rglob("*") if f.suffix in CPP_SUFFIXES]
    for file in files:
        name = file.relative_to(root).as_posix()
        layer = cpp_layer(name)
        for included in INCLUDE.findall(file.read_text()):
            if included.startswith(("torch/", "ATen/", "c10/")) and not name.startswith("torch/"):
                problems.append(f"{name}: includes {included}; torch headers belong in torch/ only")
            if CUDA_HEADER.match(included) and not name.startswith(("src/cuda/", "torch/")):
                problems.append(f"{name}: includes {included}; CUDA headers belong in src/cuda/ only")
            is_relative = included.startswith(".")
            target = cpp_layer((file.parent / included).resolve().relative_to(root.resolve()).as_posix() if is_relative else included)
            if not may_include(layer, target):
                problems.append(f"{name} ({layer}): includes {included} ({target}); the arrow points the wrong way")
    return problems if files else ["no C++ files found: is this the repository root?"]


def check_kernels(root: Path) -> list[str]:
    """Every CUDA kernel calls await_stream(), and none takes memory for constant: launch() may start it before the one in front has ended."""
    problems, count = [], 0
    for file in sorted((root / "src/cuda").rglob("*.cu*")):
        for kernel in file.read_text().split("__global__")[1:]:
            count += 1
            if "await_stream();" not in kernel:
                head = re.sub(r"__launch_bounds__\(.*?\)\s+(?=\w+\()", "", kernel.split("{")[0], flags=re.DOTALL)
                problems.append(f"{file.relative_to(root).as_posix()}: kernel {head.split('(')[0].split()[-1]} does not call await_stream()")
        code = "\n".join(line.split("//")[0] for line in file.read_text().splitlines())
        problems += [f"{file.relative_to(root).as_posix()}: {word}, but the kernel before may still write" for word in NEVER if word in code]
    return problems if count else ["no CUDA kernel found: is this the repository root?"]


def imported_layers(tree: ast.AST, package: list[str]) -> list[tuple[int, str]]:
    """(line, layer) of every import of a snack module inside a module of `package` (path below python/)."""
    found = []
    for node in ast.walk(tree):
        targets: list[list[str]] = []
        if isinstance(node, ast.Import):
            targets = [alias.name.split(".") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            base = base + (node.module.split(".") if node.module else [])
            targets = [base + [alias.name] for alias in node.names]
        found += [(node.lineno, t[1]) for t in targets if t[0] == "snack" and len(t) > 1]
    return found


def check_python(root: Path) -> list[str]:
    problems = []
    package_root = root / "python"
    files = sorted((package_root / "snack").rglob("*.py"))
    for file in files:
        parts = list(file.relative_to(package_root).with_suffix("").parts)
        if len(parts) < 3 and parts[-1] not in PYTHON_ORDER:
            continue  # snack/__init__.py and __main__.py gather everything
        layer = parts[1]
        if layer not in PYTHON_ORDER:
            problems.append(f"{file.relative_to(root)}: layer '{layer}' is not listed in tools/check_layers.py")
            continue
        for line, target in imported_layers(ast.parse(file.read_text()), parts[:-1]):
            if target in PYTHON_ORDER and PYTHON_ORDER.index(target) > PYTHON_ORDER.index(layer):
                problems.append(f"{file.relative_to(root)}:{line} ({layer}): imports snack.{target}; the arrow points the wrong way")
    return problems if files else ["no Python files found: is this the repository root?"]


def main() -> int:
    root = Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parent.parent)
    problems = check_cpp(root) + check_kernels(root) + check_python(root)
    print("\n".join(problems) if problems else "layers: every arrow points the right way, every kernel awaits its stream")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
