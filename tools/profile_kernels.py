"""Where the time of a product goes on a card, by Nsight Compute -> profile.json: bytes, pipes, stalls of every kernel that it launches.

One record a case, with the kernels of the second of two calls (L2 as the first left it, the clock as it is). Nsight Compute runs each kernel
alone and several times, so its times are longer than those of a graph: the shares count. Exits with 3 where ncu cannot be used.

Usage: python tools/profile_kernels.py --json FILE
"""

from __future__ import annotations

import argparse
import csv
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

# routine, (out, in), sparsity, batch, dtype
CASES = [
    ("spmm", (10000, 10000), 0.95, 1, "float32"), ("spmm", (10000, 10000), 0.95, 1, "bfloat16"), ("spmm", (10000, 10000), 0.99, 1, "float32"),
    ("spmm", (500, 500), 0.9, 1, "float32"), ("spmm", (10000, 10000), 0.9, 4, "float32"), ("spmm", (10000, 10000), 0.95, 16, "bfloat16"),
    ("spmm", (10000, 10000), 0.95, 64, "bfloat16"), ("spmm", (10000, 10000), 0.99, 256, "bfloat16"),
    ("spmm_t", (10000, 10000), 0.9, 1, "float32"), ("spmm_t", (10000, 10000), 0.99, 1, "float32"), ("spmm_t", (10000, 10000), 0.9, 4, "float32"),
    ("spmm_t", (500, 500), 0.9, 1, "float32"), ("spmm_t", (4096, 4096), 0.95, 1, "bfloat16"), ("spmm_t", (10000, 10000), 0.9, 16, "bfloat16"),
    ("sddmm", (10000, 10000), 0.95, 1, "float32"), ("sddmm", (10000, 10000), 0.9, 4, "float32"),
]
STALLS = {  # why warps wait, in the words of Nsight Compute, and in ours
    "long_scoreboard": "global memory", "short_scoreboard": "shared memory", "barrier": "the block's other warps", "wait": "the instruction before",
    "mio_throttle": "room for shared memory's requests", "lg_throttle": "room for global memory's requests", "not_selected": "another warp's turn",
    "math_pipe_throttle": "an arithmetic unit", "no_instruction": "instructions", "branch_resolve": "a branch", "dispatch_stall": "dispatch",
    "membar": "a fence", "drain": "its last stores", "imc_miss": "constants", "tex_throttle": "room for requests", "sleeping": "sleep",
    "misc": "something else",
}
# name in the record: (metric, what to multiply it with)
METRICS = {
    "time_us": ("gpu__time_duration.sum", 1e-3), "cycles": ("sm__cycles_elapsed.max", 1), "active_cycles": ("sm__cycles_active.avg", 1),
    "instructions": ("smsp__inst_executed.sum", 1), "issue_pct": ("smsp__issue_active.avg.pct_of_peak_sustained_elapsed", 1),
    "warps_active_pct": ("sm__warps_active.avg.pct_of_peak_sustained_active", 1),
    "dram_bytes": ("dram__bytes.sum", 1), "l2_bytes": ("lts__t_bytes.sum", 1),
    "l2_pct": ("lts__throughput.avg.pct_of_peak_sustained_elapsed", 1),
    "lsu_pct": ("l1tex__data_pipe_lsu_wavefronts.avg.pct_of_peak_sustained_elapsed", 1),
    "l1_pct": ("l1tex__throughput.avg.pct_of_peak_sustained_elapsed", 1),
    "blocks": ("launch__grid_size", 1), "threads": ("launch__block_size", 1), "registers": ("launch__registers_per_thread", 1),
    **{name: (f"smsp__average_warps_issue_stalled_{name}_per_issue_active.ratio", 1) for name in STALLS},
}
BEFORE, AFTER = ("transpose_lines",), ("finish_kernel",)  # kernels around the one that a plan names


def drive() -> None:
    """Runs under ncu: every case twice; prints its facts."""
    import torch

    import snack
    from snack import ops
    from snack.bench import tune

    patterns: dict[tuple, snack.Pattern] = {}
    for routine, shape, sparsity, batch, dtype in CASES:
        nnz = round((1 - sparsity) * shape[0] * shape[1])
        if (shape, nnz) not in patterns:
            patterns[shape, nnz] = snack.Pattern.random(shape, nnz, 1).to("cuda")
        pattern, kind = patterns[shape, nnz], getattr(torch, dtype)
        values, x, dy = (torch.randn(*size, device="cuda").to(kind) for size in ((nnz,), (batch, shape[1]), (batch, shape[0])))
        operands = {"spmm": (values, x), "spmm_t": (values, dy), "sddmm": (dy, x)}[routine]
        for _ in range(2):
            getattr(ops, routine)(pattern, *operands)
        plan = tune.candidates(routine, shape, nnz, batch, kind, torch.ops.snack.cuda_capability(0))[0]
        print("case", json.dumps({"routine": routine, "out": shape[0], "in": shape[1], "sparsity": sparsity, "batch": batch, "dtype": dtype,
                                  "nnz": nnz, "kernel": plan["kernel"], "predicted_us": plan["predicted_us"]}), flush=True)
    torch.cuda.synchronize()


def number(text: str) -> float:
    return float(text.replace(",", ""))


def launches(text: str) -> list[dict]:
    """Rows of ncu's raw page, in the order of launch."""
    lines = text.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith('"ID"'))
    rows = csv.DictReader(lines[start:])
    units = next(rows)
    scale = {"nsecond": 1, "ns": 1, "usecond": 1e3, "us": 1e3, "msecond": 1e6, "ms": 1e6, "byte": 1, "Kbyte": 1e3, "Mbyte": 1e6, "Gbyte": 1e9}
    found = []
    for row in rows:
        kernel = {"name": re.sub(r"^.*?(\w+)[<(].*$", r"\1", row["Kernel Name"])}
        for name, (metric, factor) in METRICS.items():
            if row.get(metric):
                kernel[name] = round(number(row[metric]) * scale.get(units[metric], 1) * factor, 3)
        found.append(kernel)
    return found


def of_cases(cases: list[dict], kernels: list[dict]) -> list[dict]:
    """Every case with the kernels of its second call."""
    records, at = [], 0
    for case in cases:
        calls = []
        for _ in range(2):
            end = at
            while kernels[end]["name"] in BEFORE:
                end += 1
            assert kernels[end]["name"] == case["kernel"], f"{case}: {kernels[end]['name']} was launched"
            end += 1
            while end < len(kernels) and kernels[end]["name"] in AFTER:
                end += 1
            calls.append(kernels[at:end])
            at = end
        records.append({**case, "kernels": calls[1]})
    assert at == len(kernels), f"{len(kernels) - at} launches belong to no case"
    return records


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--drive", action="store_true", help="what runs under ncu")
    arguments = parser.parse_args()
    if arguments.drive:
        drive()
        return 0
    ncu = shutil.which("ncu") or shutil.which("ncu", path="/usr/local/cuda/bin")
    if ncu is None:
        print("profile: ncu (Nsight Compute) is not installed", file=sys.stderr)
        return 3
    metrics = ",".join(metric for metric, _ in METRICS.values())
    options = ["--clock-control", "none", "--cache-control", "none", "--kernel-name-base", "function", "--metrics", metrics]
    ours = ["--kernel-name", "regex:^(spmm|sddmm|finish_kernel|transpose_lines)"]
    command = [ncu, "--csv", "--page", "raw", *options, *ours, sys.executable, __file__, "--drive"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode or '"ID"' not in done.stdout:
        refused = "ERR_NVGPUCTRPERM" in done.stdout + done.stderr
        print((done.stdout + done.stderr)[-3000:], file=sys.stderr)
        return 3 if refused else 1
    cases = [json.loads(line[5:]) for line in done.stdout.splitlines() if line.startswith("case ")]
    rows = "\n".join(line for line in done.stdout.splitlines() if line.startswith('"'))

    import torch

    from snack.bench import records

    facts = records.provenance(torch.device("cuda", 0)) | {"command": "python tools/profile_kernels.py"}
    document = {"schema": records.SCHEMA, "suite": "profile", "provenance": facts, "records": of_cases(cases, launches(rows))}
    text = json.dumps(document, indent=1, ensure_ascii=False) + "\n"
    if arguments.json:
        arguments.json.write_text(text)
    else:
        print(text, end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
