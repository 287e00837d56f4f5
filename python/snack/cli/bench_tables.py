"""The records of ``snack bench`` as tables on the screen: one a routine."""

from __future__ import annotations

from snack.cli.common import human_bytes, human_ratio, human_time, print_table, say


def print_tables(records: list[dict]) -> None:
    """How many times as long as SNACK everybody takes, or as much memory; below 1 they are better. Energy in a table of its own."""
    by_routine: dict[str, list[dict]] = {}
    for record in records:
        by_routine.setdefault(record["routine"], []).append(record)
    for routine, found in by_routine.items():
        if routine == "memory":
            _table(found, "memory in training", "peak_bytes" if any("peak_bytes" in r for r in found) else "kept_bytes", human_bytes)
        else:
            _table(found, routine, "time_us", human_time)
        if any("energy_mj" in r for r in found):
            _table([r for r in found if "energy_mj" in r], f"{routine}, energy a call", "energy_mj", human_energy)


def human_energy(millijoules: float) -> str:
    """``0.0123`` → ``"12.3 µJ"``; three significant digits."""
    unit, value = ("µJ", millijoules * 1000) if millijoules < 1 else ("mJ", millijoules) if millijoules < 1000 else ("J", millijoules / 1000)
    return f"{value:.3g} {unit}"


def _table(records: list[dict], what: str, key: str, human) -> None:
    peers = list(dict.fromkeys(name for record in records for name, side in record["peers"].items() if key in side))
    silent = {name: side["not_run"] for record in records for name, side in record["peers"].items() if "not_run" in side and name not in peers}
    axes = {"shape": lambda r: f"{r['out']}×{r['in']}", "dtype": lambda r: r["dtype"], "L2": lambda r: r["l2"],
            "cap": lambda r: f"{r['params']['cap_gib']:g} GiB" if "cap_gib" in r.get("params", {}) else "", "regime": lambda r: r.get("regime", "")}
    shared = {name: {text(r) for r in records} for name, text in axes.items()}
    varying = [name for name, texts in shared.items() if len(texts) > 1]
    common = ", ".join(next(iter(texts)) for name, texts in shared.items() if name not in varying and next(iter(texts)))
    rows = []
    for r in sorted(records, key=lambda r: (r["out"], r["in"], r["dtype"], r["sparsity"], r["batch"])):
        cells = [f"{100 * r['sparsity']:g} %", str(r["batch"]), *(axes[name](r) for name in varying), human(r[key]) if key in r else "not run"]
        for peer in peers:
            value = r["peers"].get(peer, {}).get(key)
            ratio = f" ({human_ratio(value / r[key])})" if value is not None and key in r else ""
            cells.append("not run" if value is None else human(value) + ratio)
        rows.append(cells)
    print_table(f"{what}, {common} (in brackets: of SNACK's)", ["sparsity", "batch", *varying, "SNACK", *peers], rows)
    for name, why in silent.items():
        say(f"  {name} did not run: {why}")
