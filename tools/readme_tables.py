"""Writes the tables of README.md and the pages docs/results from committed results; --check fails when they are stale.

Usage: python tools/readme_tables.py [--check]
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

from snack.bench.records import source_hash

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tools"))

from result_pages import pages  # noqa: E402


def ratio(record: dict, peer: str) -> str:
    """Time of the peer over ours, with a mark where we lose."""
    found = record["peers"].get(peer, {})
    if "time_us" not in found:
        return "not run"
    value = found["time_us"] / record["time_us"]
    text = f"{value:.1f}×" if value >= 1 else f"{value:.2f}×"
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
    machine = f"{facts['cpu']}, {facts['threads']} threads, PyTorch {facts['torch']}"
    return "\n".join([*product_table(document["records"]), "", *step_table(document["records"]), "", source(path, facts, machine, "make bench-cpu")])


def source(path: Path, facts: dict, machine: str, command: str, up: str = "") -> str:
    """Where the numbers come from; says so when the sources are others now."""
    name = path.relative_to(ROOT)
    is_stale = facts["source_hash"] != source_hash(ROOT)
    stale = f" **Stale: the sources have changed since; run `{command}`.**" if is_stale else ""
    return f"Source: [{name}]({up}{name}); {machine}, {facts['date']}.{stale}"


def card(facts: dict) -> str:
    return f"{facts['card']}, CUDA {facts['cuda']}, PyTorch {facts['torch']}" if "card" in facts else f"{facts['cpu']}, PyTorch {facts['torch']}"


CUSPARSE = ("torch_csr", "torch_coo", "cupy_csr", "cupy_coo")


def card_cell(record: dict) -> str:
    """Our time and those of dense, dense + mask and the fastest path through cuSPARSE over it."""
    sparse = [record["peers"][name] for name in CUSPARSE if "time_us" in record["peers"].get(name, {})]
    best = {"peers": {"best": min(sparse, key=lambda peer: peer["time_us"])} if sparse else {}, "time_us": record["time_us"]}
    ratios = (ratio(record, "dense"), ratio(record, "dense_mask"), ratio(best, "best"))
    return " · ".join((f"{record['time_us']:.1f} µs" if record["time_us"] < 99.5 else time(record["time_us"]), *ratios))


def card_products(records: list[dict], routine: str) -> list[str]:
    """Rows: dtype and sparsity; columns: batch; the largest size, warm weights."""
    size = max(r["out"] for r in records)
    found = [r for r in records if r["routine"] == routine and r["out"] == size and r["l2"] == "warm"]
    batches = sorted({r["batch"] for r in found} & {1, 4, 16})
    lines = [
        f"`{routine}`, {size:,} × {size:,}: our time · × dense · × dense + mask · × cuSPARSE (the fastest way through PyTorch or CuPy)", "",
        "| dtype | sparsity | " + " | ".join(f"batch {b}" for b in batches) + " |", "|---" * (len(batches) + 2) + "|",
    ]
    for dtype in sorted({r["dtype"] for r in found}, reverse=True):
        for sparsity in sorted({r["sparsity"] for r in found}):
            row = {r["batch"]: r for r in found if r["sparsity"] == sparsity and r["dtype"] == dtype}
            cells = [card_cell(row[b]) if b in row else "" for b in batches]
            lines.append(f"| {dtype} | {100 * sparsity:g} % | " + " | ".join(cells) + " |")
    return lines


def card_steps(records: list[dict]) -> list[str]:
    """One row a training step."""
    lines = [
        "A whole training step of the layer (forward, backward, SGD) as a replayed graph, eagerly, and the memory it needs at a time", "",
        "| layer | sparsity | batch | step | × dense | × dense + mask | eager | × dense, eager | memory, of dense |", "|---" * 9 + "|",
    ]
    for r in records:
        if r["routine"] != "layer_step" or "time_us" not in r:
            continue
        dense = r["peers"]["dense"]
        eager = {"time_us": r["eager_us"], "peers": {"dense": {"time_us": dense["eager_us"]}}}
        cells = [
            f"{r['out']:,} × {r['in']:,}, {r['dtype']}", f"{100 * r['sparsity']:g} %", str(r["batch"]), time(r["time_us"]), ratio(r, "dense"),
            ratio(r, "dense_mask"), time(r["eager_us"]), ratio(eager, "dense"), f"{100 * r['peak_bytes'] / dense['peak_bytes']:.1f} %",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def cuda_tables() -> str:
    path = ROOT / "benchmarks/results/h200/cuda.json"
    if not path.is_file():
        return "No measurement on a card is committed yet: `make gpu-suite` makes one."
    document = json.loads(path.read_text())
    records, facts = document["records"], document["provenance"]
    products = [card_products(records, routine) for routine in ("spmm", "spmm_t", "sddmm")]
    parts = [*products, card_steps(records), [source(path, facts, card(facts), "make bench-cuda")]]
    return "\n\n".join("\n".join(part) for part in parts)


TABLES = {"cpu": cpu_tables, "cuda": cuda_tables}


BATCH1 = ("snack bench run --routine spmm --batch 1 --dtype float32,bfloat16 --peers dense --shape 1024x1024,2048x2048,4096x4096,5000x5000,"
          "10000x10000,20000x20000 --sparsity 0.5,0.6,0.7,0.8,0.9,0.95,0.98,0.99 --json benchmarks/results/h200/spmm-batch1.json")
COMMANDS = {"profile": "python tools/gpu_suite.py --only profile", "spmm-batch1": BATCH1}


def page_source(path: Path, facts: dict) -> str:
    command = facts["command"] if path.stem.startswith("train-") else COMMANDS.get(path.stem, f"snack bench {path.stem}")
    return source(path, facts, card(facts), command, "../../")


def expected() -> dict[Path, str]:
    """Every generated text by its path."""
    text = (ROOT / "README.md").read_text()
    for name, make in TABLES.items():
        marks = rf"(<!-- table:{name} -->\n).*?(<!-- /table:{name} -->)"
        text = re.sub(marks, lambda m, make=make: m[1] + make() + "\n" + m[2], text, flags=re.DOTALL)
    return {ROOT / "README.md": text, **pages(ROOT, page_source)}


def main() -> int:
    wanted = expected()
    left_over = [path for path in (ROOT / "docs/results").glob("*.md") if path not in wanted]
    stale = [path for path, text in wanted.items() if not path.is_file() or path.read_text() != text]
    if "--check" in sys.argv:
        for path in (*stale, *left_over):
            print(f"{path.relative_to(ROOT)} is not what benchmarks/results says; run python tools/readme_tables.py")
        return 1 if stale or left_over else 0
    for path in left_over:
        path.unlink()
    for path in stale:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(wanted[path])
    return 0


if __name__ == "__main__":
    sys.exit(main())
