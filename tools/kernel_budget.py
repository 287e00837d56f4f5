"""Registers, stack and static shared memory of every CUDA kernel in a library, against tests/budget/<architecture>.json.

A kernel fails when it needs more than its budget or has none; a budget without a kernel fails too. --update writes what is there,
but a stack of 0 where none was excused by hand: that is where registers are spilled to, so such a kernel is changed or excused. Numbers are
those of `cuobjdump --dump-resource-usage` (sm_90 and later count 1,024 bytes of shared memory that CUDA keeps for itself), for one
version of the compiler (requirements/cuda.txt). Kernels of CUB are not ours and have no budget.

Usage: python tools/kernel_budget.py [LIBRARY] [--cuobjdump PATH] [--budget FOLDER] [--update]      after make cpp-test
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FIELDS = {"registers": "REG", "stack": "STACK", "shared": "SHARED"}


def short_name(demangled: str) -> str:
    """`void snack::cuda::k<float, 4>(snack::cuda::Args<float>)` -> `snack::cuda::k<float, 4>`."""
    text = demangled.replace("(anonymous namespace)::", "")
    depth = 0
    for position, character in enumerate(text):
        if character == "<":
            depth += 1
        elif character == ">":
            depth -= 1
        elif character == "(" and depth == 0:
            text = text[:position]
            break
    depth = 0
    for position in range(len(text) - 1, -1, -1):  # the return type ends at the last space outside template arguments
        depth += {">": 1, "<": -1}.get(text[position], 0)
        if text[position] == " " and depth == 0:
            return text[position + 1 :]
    return text


def parse(output: str) -> dict[str, dict[str, dict[str, int]]]:
    """{architecture: {kernel: {"registers", "stack", "shared"}}} of cuobjdump's text, demangled. A kernel compiled into several
    objects appears once, with the largest numbers."""
    found: dict[str, dict[str, dict[str, int]]] = {}
    architecture = kernel = None
    for line in output.splitlines():
        if match := re.match(r"arch = (\S+)", line):
            architecture, kernel = match[1], None
            found.setdefault(architecture, {})
        elif match := re.match(r" Function (.+):$", line):
            kernel = short_name(match[1])
        elif kernel and "REG:" in line:
            numbers = {field: int(re.search(rf"\b{key}:(\d+)", line)[1]) for field, key in FIELDS.items()}
            if kernel.startswith("snack::"):
                old = found[architecture].setdefault(kernel, numbers)
                found[architecture][kernel] = {field: max(old[field], numbers[field]) for field in FIELDS}
            kernel = None
    return found


def read_library(library: Path, cuobjdump: str) -> dict[str, dict[str, dict[str, int]]]:
    try:
        dump = subprocess.run([cuobjdump, "--dump-resource-usage", str(library)], capture_output=True, text=True)
    except FileNotFoundError:
        raise SystemExit(f"kernel_budget: {cuobjdump} was not found; tools/install_cuda.sh installs it, --cuobjdump names another.") from None
    if dump.returncode:
        raise SystemExit(f"kernel_budget: cuobjdump cannot read {library}: {(dump.stderr or dump.stdout).strip()}")
    return parse(subprocess.run(["c++filt"], input=dump.stdout, capture_output=True, text=True, check=True).stdout)


def compare(architecture: str, kernels: dict, budget: dict) -> list[str]:
    """Sentences, one for every kernel that is out of its budget."""
    problems = []
    for name, used in sorted(kernels.items()):
        if name not in budget:
            problems.append(f"{architecture}: {name} has no budget; run this tool with --update and look at the difference")
            continue
        for field in FIELDS:
            if used[field] > budget[name][field]:
                spills = " (spilled registers or a local array)" if field == "stack" else ""
                problems.append(f"{architecture}: {name} needs {used[field]} of {field}{spills}, its budget is {budget[name][field]}")
    gone = sorted(budget.keys() - kernels.keys())
    return problems + [f"{architecture}: {name} has a budget and is not in the library; run this tool with --update" for name in gone]


def renewed(kernels: dict, old: dict) -> str:
    """The file of budgets of what is there now. A stack that was excused by hand stays excused, at most as large as it was."""
    stacks = {name: min(used["stack"], old.get(name, {}).get("stack", 0)) for name, used in kernels.items()}
    lines = [f" {json.dumps(name)}: {json.dumps({**used, 'stack': stacks[name]})}" for name, used in sorted(kernels.items())]
    return "{\n" + ",\n".join(lines) + "\n}\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    installed = ROOT / ".venv/cuda/toolkit/bin/cuobjdump"
    parser.add_argument("library", type=Path, nargs="?", default=ROOT / "build/cuda/libsnack_ops_cuda.so")
    parser.add_argument("--cuobjdump", default=str(installed) if installed.is_file() else "cuobjdump")
    parser.add_argument("--budget", type=Path, default=ROOT / "tests/budget")
    parser.add_argument("--update", action="store_true", help="write the budgets of what is there now")
    arguments = parser.parse_args()

    found = read_library(arguments.library, arguments.cuobjdump)
    if not any(found.values()):
        print(f"kernel_budget: {arguments.library} has no kernels of ours")
        return 1
    if arguments.update:
        arguments.budget.mkdir(parents=True, exist_ok=True)
        for architecture, kernels in found.items():
            path = arguments.budget / f"{architecture}.json"
            path.write_text(renewed(kernels, json.loads(path.read_text()) if path.is_file() else {}))
    problems = []
    for architecture, kernels in found.items():
        path = arguments.budget / f"{architecture}.json"
        if path.is_file():
            problems += compare(architecture, kernels, json.loads(path.read_text()))
        else:
            problems.append(f"{architecture}: {path} does not exist; run this tool with --update")
    print("\n".join(problems) if problems else f"kernel budgets: {sum(map(len, found.values()))} kernels on {', '.join(found)} are within theirs")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
