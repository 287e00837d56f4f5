"""Writes the tables of README.md from committed results; --check fails when they are stale.

Usage: python tools/readme_tables.py [--check]
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

from snack.bench.records import source_hash

ROOT = Path(__file__).parent.parent


def ratio(record: dict, peer: str) -> str:
    """Time of the peer over ours, with a mark where we lose."""
    found = record["peers"].get(peer, {})
    if "time_us" not in found:
        return "not run"
    value = found["time_us"] / record["time_us"]
    text = f"{value:.1f}×" if value >= 0.95 else f"{value:.2f}×"
    return text if value >= 1 else f"**{text}**"


def time(us: float) -> str:
    return f"{us:.0f} µs" if us < 1000 else f"{us / 1000:.2f} ms"


def product_table(records: list[dict]) -> list[str]:
    """Rows: sparsity; columns: batch; cells: our time, then dense and torch CSR."""
    spmm = [r for r in records if r["routine"] == "spmm"]
    batches = sorted({r["batch"] for r in spmm})
    size = spmm[0]["out"]
    lines = [
        f"Forward product `spmm`, {size} × {size}: our time · × `nn.Linear` · × torch.sparse CSR (its fastest form)", "",
        "| sparsity | " + " | ".join(f"batch {b}" for b in batches) + " |", "|---" * (len(batches) + 1) + "|",
    ]
    for sparsity in sorted({r["sparsity"] for r in spmm}):
        row = {r["batch"]: r for r in spmm if r["sparsity"] == sparsity}
        cells = [f"{time(row[b]['time_us'])} · {ratio(row[b], 'dense')} · {ratio(row[b], 'torch_csr')}" for b in batches]
        lines.append(f"| {100 * sparsity:g} % | " + " | ".join(cells) + " |")
    return lines


def step_table(records: list[dict]) -> list[str]:
    """Rows: sparsity; a whole training step and the memory of the layer."""
    steps = {r["sparsity"]: r for r in records if r["routine"] == "layer_step"}
    memory = {r["sparsity"]: r for r in records if r["routine"] == "memory"}
    first = next(iter(steps.values()))
    lines = [
        f"A whole training step of the layer (forward, backward, SGD with momentum), batch {first['batch']}, and its memory with Adam "
        "(weights, indices, gradients, optimiser state)", "",
        "| sparsity | step | × dense | × dense + mask | × SparseLab 0.2.2 | memory, of dense |", "|---" * 6 + "|",
    ]
    for sparsity, r in sorted(steps.items()):
        kept = memory[sparsity]
        share = 100 * kept["kept_bytes"] / kept["peers"]["dense"]["kept_bytes"]
        cells = [time(r["time_us"]), *(ratio(r, peer) for peer in ("dense", "dense_mask", "sparselab")), f"{share:.1f} %"]
        lines.append(f"| {100 * sparsity:g} % | " + " | ".join(cells) + " |")
    return lines


def cpu_tables() -> str:
    path = ROOT / "benchmarks/results/cpu-avx512/cpu.json"
    document = json.loads(path.read_text())
    facts = document["provenance"]
    name = path.relative_to(ROOT)
    is_stale = facts["source_hash"] != source_hash(ROOT)
    stale = " **Stale: the sources have changed since; run `make bench-cpu`.**" if is_stale else ""
    source = f"Source: [{name}]({name}); {facts['cpu']}, {facts['threads']} threads, PyTorch {facts['torch']}, {facts['date']}.{stale}"
    return "\n".join([*product_table(document["records"]), "", *step_table(document["records"]), "", source])


def main() -> int:
    readme = ROOT / "README.md"
    old = readme.read_text()
    new = re.sub(r"(<!-- table:cpu -->\n).*?(<!-- /table:cpu -->)", lambda m: m[1] + cpu_tables() + "\n" + m[2], old, flags=re.DOTALL)
    if "--check" in sys.argv:
        if new != old:
            print("README.md: its tables are not those of benchmarks/results; run python tools/readme_tables.py")
            return 1
        return 0
    readme.write_text(new)
    return 0


if __name__ == "__main__":
    sys.exit(main())
