"""The pages docs/results/<suite>-<device>.md: every number of the suites on a card as tables, from the JSON records alone.

`pages()` gives {path: text}; tools/readme_tables.py writes them and checks them. A suite without records has no page.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path

from profile_kernels import STALLS
from training_page import recipe_of, training_page

from snack.bench.results import Results
from snack.bench.suites import SUITES, suite_cases
from snack.cli.bench_tables import human_energy
from snack.cli.common import human_bytes, human_ratio, human_time

LABELS = {
    "snack_fused": "SNACK, fused", "snack_rigl": "SNACK, RigL",
    "dense": "dense", "dense_tf32": "dense, TF32", "dense_bf16": "dense, bf16", "dense_mask": "dense + mask", "dense_mask_bool": "mask of bytes",
    "coo_atomics": "COO, atomics", "torch_csr": "torch CSR", "torch_coo": "torch COO", "torch_bsr": "torch BSR", "cupy_csr": "CuPy CSR",
    "cupy_coo": "CuPy COO", "jax_bsr": "JAX", "sparselab": "SparseLab", "sputnik": "Sputnik", "flashsparse": "FlashSparse",
}
Axis = tuple[str, Callable[[dict], object]]
SHAPE: Axis = ("out × in", lambda r: f"{r['out']:,} × {r['in']:,}")
SPARSITY: Axis = ("sparsity", lambda r: f"{100 * r['sparsity']:g} %")
BATCH: Axis = ("batch", lambda r: r["batch"])
OPTIMIZER: Axis = ("optimiser", lambda r: r["params"]["optimizer"])
STEP = "A training step (forward, backward, SGD)"
PARAMETERS: Axis = ("parameters", lambda r: f"{r['parameters']:,}" if "parameters" in r else "")


def table(title: str, records: Iterable[dict], axes: list[Axis], key: str, human: Callable[[float], str]) -> list[str]:
    """One row a record, one column a contender; in brackets how many times SNACK's. Nothing where no record has the key."""
    records = sorted((r for r in records if key in r or "not_run" in r), key=lambda r: (r["out"], r["in"], r["sparsity"], r["batch"]))
    if not any(key in r for r in records):
        return []
    peers = [p for p in LABELS if any(key in side or "not_run" in side for side in (r["peers"].get(p, {}) for r in records))]
    head = [*(name for name, _ in axes), "SNACK", *(LABELS[p] for p in peers)]
    lines = [f"## {title}", "", f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for r in records:
        cells = [str(value(r)) for _, value in axes] + [_cell(r, None, key, human)]
        lines.append(f"| {' | '.join(cells + [_cell(r['peers'].get(p, {}), r, key, human) for p in peers])} |")
    return [*lines, ""]


def _cell(side: dict, ours: dict | None, key: str, human: Callable[[float], str]) -> str:
    if key not in side:
        return "out of memory" if "out of memory" in side.get("not_run", "") else "not run" if "not_run" in side else "–"
    if ours is None or key not in ours:
        return human(side[key])
    ratio = side[key] / ours[key]
    words = f"{human(side[key])} ({human_ratio(ratio)})"
    return words if ratio >= 1 else f"**{words}**"


def _kernels(records: list[dict]) -> Iterable[list[str]]:
    for routine, words in (("spmm", "y = x Wᵀ"), ("spmm_t", "dx = dy W"), ("sddmm", "dW = dyᵀ x where W has connections")):
        for dtype in ("float32", "bfloat16"):
            found = [r for r in records if r["routine"] == routine and r["dtype"] == dtype and r["sparsity"] == 0.95]
            yield table(f"{routine}, 95 %, {dtype}: {words}", found, [SHAPE, BATCH], "time_us", human_time)
    sweep = [r for r in records if r["routine"] == "spmm" and r["dtype"] == "float32" and r["out"] == 5000 and r["batch"] <= 2]
    yield table("spmm by sparsity, float32", sweep, [SHAPE, SPARSITY, BATCH], "time_us", human_time)


QUANTITIES: tuple[tuple[str, Callable[[float], str], str], ...] = (
    ("time_us", human_time, "time"), ("peak_bytes", human_bytes, "the most memory"), ("energy_mj", human_energy, "energy a call"),
    ("power_w", lambda w: f"{w:.0f} W", "mean power"), ("co2_ug", lambda ug: f"{ug:.3g} µg", "CO₂ a call"),
)


def _layer(records: list[dict]) -> Iterable[list[str]]:
    steps = [r for r in records if r["routine"] == "layer_step"]
    yield table("Parameters", [r for r in steps if r["batch"] == 4], [SHAPE, SPARSITY], "parameters", lambda n: f"{n:,}")
    for found, words in ((steps, STEP), ([r for r in records if r["routine"] == "layer_infer"], "Inference")):
        for key, human, what in QUANTITIES:
            yield table(f"{words}: {what}", found, [SHAPE, SPARSITY, BATCH], key, human)


def _memory(records: list[dict]) -> Iterable[list[str]]:
    for cap in sorted({r.get("params", {}).get("cap_gib", 0) for r in records}):
        found = [r for r in records if r.get("params", {}).get("cap_gib", 0) == cap]
        where = f"where the process may have {cap:g} GiB" if cap else "freely"
        yield table(f"The most in a training step with Adam, {where}", found, [SHAPE, SPARSITY, PARAMETERS], "peak_bytes", human_bytes)
        yield table(f"The most in inference, {where}", found, [SHAPE, SPARSITY], "infer_peak_bytes", human_bytes)


def _card(records: list[dict]) -> Iterable[list[str]]:
    for routine in ("spmm", "spmm_t", "sddmm"):
        for dtype in ("float32", "bfloat16"):
            for l2 in ("warm", "cold"):
                found = [r for r in records if (r["routine"], r["dtype"], r["l2"]) == (routine, dtype, l2)]
                yield table(f"{routine}, {dtype}, weights {l2}", found, [SHAPE, SPARSITY, BATCH], "time_us", human_time)
    quantities = (("time_us", human_time, "time"), ("eager_us", human_time, "time, eager"), ("peak_bytes", human_bytes, "the most memory"))
    for routine, words in (("layer_step", STEP), ("layer_infer", "Inference")):
        for key, human, what in quantities:
            yield table(f"{words}: {what}", [r for r in records if r["routine"] == routine], [SHAPE, SPARSITY, BATCH], key, human)
    updates = [r for r in records if r["routine"] == "update"]
    quantities = (("gpu_us", human_time, "time of the card"), ("time_us", human_time, "time"), ("extra_bytes", human_bytes, "more memory"))
    for key, human, what in quantities:
        yield table(f"An update of SET and RigL (30 % of the connections move): {what}", updates, [SHAPE, SPARSITY, BATCH, OPTIMIZER], key, human)


PAGES: dict[str, Callable[[list[dict]], Iterable[list[str]]]] = {
    "cuda": _card, "paper-kernels": _kernels, "paper-layer": _layer, "paper-memory": _memory,
}


def _printed(suite: str, root: Path) -> list[str]:
    """What the paper says."""
    paper = json.loads((root / "benchmarks/paper.json").read_text())
    rows = [f"| {n['where']} | {n['what']} | {n['printed']} | {n['read']} |" for n in paper["numbers"] if n["suite"] == suite]
    if not rows:
        return []
    return ["## What the paper printed", "", paper["note"], "", "| where | what | as printed | as we read it |", "|---|---|---|---|", *rows, ""]


def _silent(records: list[dict]) -> list[str]:
    """Who did not run, and why; memory that does not suffice stands in the tables."""
    why = {(peer, side["not_run"]) for r in records for peer, side in r["peers"].items() if "not_run" in side and "memory" not in side["not_run"]}
    return ["## Not run", "", *(f"* {LABELS[peer]}: {reason}" for peer, reason in sorted(why)), ""] if why else []


def _unfinished(document: dict) -> list[str]:
    """A sentence where `snack bench` would go on."""
    suite, provenance = document["suite"], document["provenance"]
    cases = suite_cases(suite, "cuda")
    missing = len(Results(suite, provenance, document).missing(cases, "energy" in provenance))
    sentence = f"**Not finished: {missing} of the suite's {len(cases)} cases are not measured yet; the same command goes on with them.**"
    return [sentence, ""] if missing else []


def page(document: dict, source: str, root: Path) -> str:
    """The text of one suite's page. `source`: where the numbers come from, and whether they are stale."""
    suite, records = document["suite"], document["records"]
    energy = document["provenance"].get("energy")
    how = [f"Energy: NVML's counter over {energy['rounds']} windows of {energy['window_s']:g} s each, in turn, gross; CO₂ by "
           f"{energy['g_per_kwh']:g} g/kWh ({energy['source']}).", ""] if energy else []
    picture = f"figures/{suite}-{document['provenance']['device']}.png"
    shown = [f"![{SUITES[suite].what}](../{picture})", ""] if (root / "docs" / picture).is_file() else []
    parts = [
        [f"# {suite}: {SUITES[suite].what}", "", *shown, source, "", f"Rerun: `snack bench {suite}`. In brackets: how many times SNACK's; bold where "
         "SNACK is worse. Times are replays of CUDA graphs where a library can be captured, weights warm in the L2 cache where they fit.", "",
         *_unfinished(document), *how],
        _printed(suite, root), *PAGES[suite](records), _silent(records),
    ]
    return "\n".join(line for part in parts for line in part).rstrip() + "\n"


def profile_page(document: dict, source: str) -> str:
    """Where the time goes: every kernel of tools/profile_kernels.py."""
    lines = [
        "# profile: where the time of a product goes", "", source, "",
        "Nsight Compute runs every kernel alone and several times: times are longer than in a graph, and the shares count. Memory: bytes between "
        "L2 and memory, and their rate. L2: bytes that move through it, between its parts, too. Load/store: how busy the unit is that serves "
        "global and shared memory. Instructions: the turns to issue one that are used. Waits: what most of the waiting warps wait for, of the "
        "reasons in the record.", "",
        "| product | kernel | time | memory | L2 | load/store | instructions | waits |", "|---" * 8 + "|",
    ]
    for r in document["records"]:
        product = f"{r['routine']} {r['out']:,} × {r['in']:,}, {100 * r['sparsity']:g} %, batch {r['batch']}, {r['dtype']}"
        for kernel in r["kernels"]:
            waits = sorted(((kernel.get(stall, 0), words) for stall, words in STALLS.items()), reverse=True)
            all_waits = sum(number for number, _ in waits)
            memory = f"{human_bytes(kernel['dram_bytes'])}, {kernel['dram_bytes'] / kernel['time_us'] / 1e6:.1f} TB/s"
            cells = [
                product, f"`{kernel['name']}`", human_time(kernel["time_us"]), memory, human_bytes(kernel["l2_bytes"]), f"{kernel['lsu_pct']:.0f} %",
                f"{kernel['issue_pct']:.0f} %", ", ".join(f"{words} {100 * number / all_waits:.0f} %" for number, words in waits[:3]),
            ]
            lines.append(f"| {' | '.join(cells)} |")
            product = ""
    return "\n".join(lines) + "\n"


def limit_us(record: dict, copy_tb_s: float) -> float:
    """What a product with one sample may take: 2.5 µs, and its bytes at 0.85 of the bandwidth at which the card copies."""
    return 2.5 + record["bytes"] / (0.85 * copy_tb_s * 1e6)


def batch1_page(document: dict, source: str) -> str:
    """Forward with one sample, by size and sparsity, against the limit that the bytes set."""
    records, facts = document["records"], document["provenance"]
    held = sum(r["time_us"] <= limit_us(r, facts["copy_tb_s"]) for r in records)
    lines = [
        "# spmm-batch1: the forward product of one sample, by size and sparsity", "", source, "",
        f"Limit: 2.5 µs + bytes / (0.85 × {facts['copy_tb_s']:.2f} TB/s, at which the card copies); bytes: values and 2-byte indices. {held} of "
        f"{len(records)} products keep it; bold where it is exceeded. In brackets: how many times SNACK's; bold where SNACK is worse.", "",
        "| out × in | sparsity | dtype | SNACK | limit | time / limit | dense |", "|---" * 7 + "|",
    ]
    for r in sorted(records, key=lambda r: (r["out"], r["sparsity"], r["dtype"])):
        limit = limit_us(r, facts["copy_tb_s"])
        share = f"{r['time_us'] / limit:.2f}"
        cells = [
            SHAPE[1](r), SPARSITY[1](r), r["dtype"], human_time(r["time_us"]), human_time(limit), share if r["time_us"] <= limit else f"**{share}**",
            _cell(r["peers"].get("dense", {}), r, "time_us", human_time),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


OTHER_PAGES: dict[str, Callable[[dict, str], str]] = {"profile": profile_page, "spmm-batch1": batch1_page}


def pages(root: Path, source: Callable[[Path, dict], str]) -> dict[Path, str]:
    """Of every committed record of a suite in PAGES, of those with a page of their own, and of the trainings on each device."""
    found: dict[Path, str] = {}
    trainings: dict[str, dict[Path, dict]] = {}
    for path in sorted((root / "benchmarks/results").glob("*/*.json")):
        document = json.loads(path.read_text())
        if recipe_of(document):
            trainings.setdefault(path.parent.name, {})[path] = document
        if path.stem in (*PAGES, *OTHER_PAGES):
            where = source(path, document["provenance"])
            text = OTHER_PAGES[path.stem](document, where) if path.stem in OTHER_PAGES else page(document, where, root)
            found[root / f"docs/results/{path.stem}-{path.parent.name}.md"] = text
    return found | {root / f"docs/results/training-{device}.md": training_page(documents, source) for device, documents in trainings.items()}
