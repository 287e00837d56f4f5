"""``snack bench``: measurements of a suite as JSON, and a table of them."""

from __future__ import annotations

from pathlib import Path

from snack.cli.common import Interruptible, check_writable, human_bytes, human_ratio, human_time, print_table, rich_console, say, write_json

DESCRIPTION = """Measures a suite on this machine and writes the records as JSON. `cpu`: products, a training step and the memory of one layer,
beside nn.Linear, torch.sparse CSR and SparseLab (if installed), all in one run."""


def add_parser(subparsers) -> None:
    """Registers the command and its options."""
    parser = subparsers.add_parser("bench", help="measure a suite, write JSON and print a table", description=DESCRIPTION)
    parser.add_argument("suite", choices=["cpu"], help="what to measure")
    parser.add_argument("--size", type=int, default=2048, metavar="N", help="rows and columns of the layer (default 2048)")
    parser.add_argument("--batch", default="1,16,64,256", metavar="B,B", help="batch sizes of the products (default 1,16,64,256)")
    parser.add_argument("--sparsity", default="0.5,0.8,0.9,0.95,0.99", metavar="S,S", help="sparsities (default 0.5,0.8,0.9,0.95,0.99)")
    parser.add_argument("--samples", type=int, default=25, metavar="N", help="samples a number; the median counts (default 25)")
    parser.add_argument("--json", metavar="FILE", help="where to write the records (default benchmarks/results/<device>/<suite>.json)")
    parser.set_defaults(run=run)


def _numbers(text: str, option: str, kind: type) -> tuple:
    from snack.errors import SnackError

    try:
        return tuple(kind(part) for part in text.split(","))
    except ValueError:
        raise SnackError(f"{option} {text!r} is not a list of numbers separated by commas.") from None


def run(arguments) -> int:
    """Measures, writes, prints. Ctrl-C keeps the records made so far."""
    from snack.bench import cpu, records
    from snack.errors import require
    from snack.formats.pattern import check_sparsity

    grid = cpu.Grid(
        size=arguments.size,
        batches=_numbers(arguments.batch, "--batch", int),
        sparsities=tuple(check_sparsity(s, "snack bench") for s in _numbers(arguments.sparsity, "--sparsity", float)),
        samples=arguments.samples,
    )
    require(grid.size > 0 and min(grid.batches) > 0, "snack bench: --size and --batch must be positive.")
    require(grid.samples >= 2, "snack bench: --samples must be at least 2, to have a spread.")
    provenance = records.provenance()
    path = Path(arguments.json or f"benchmarks/results/{provenance['device']}/{arguments.suite}.json")
    if arguments.json is None:
        path.parent.mkdir(parents=True, exist_ok=True)
    check_writable(path, "--json")
    document = {"schema": records.SCHEMA, "suite": arguments.suite, "provenance": provenance, "records": []}
    with Interruptible() as stop:
        _measure(cpu, grid, document, stop)
    write_json(path, document)
    print_tables(document)
    say(f"records: {path}")
    return 130 if stop.asked else 0


def _measure(cpu, grid, document: dict, stop) -> None:
    console = rich_console()
    status = console.status("measuring") if console else None
    if status:
        status.start()
    try:
        for record in cpu.run(grid, status.update if status else lambda text: None):
            document["records"].append(record)
            if stop():
                break
    finally:
        if status:
            status.stop()


def print_tables(document: dict) -> None:
    """One table a routine, with how many times faster than each peer; below 1 it is slower."""
    by_routine: dict[str, list[dict]] = {}
    for record in document["records"]:
        by_routine.setdefault(record["routine"], []).append(record)
    for routine, found in by_routine.items():
        peers = list(dict.fromkeys(name for record in found for name in record["peers"]))
        if routine == "memory":
            rows = [[f"{100 * r['sparsity']:g} %", human_bytes(r["kept_bytes"]), human_bytes(r["peers"]["dense"]["kept_bytes"]),
                     f"{100 * r['kept_bytes'] / r['peers']['dense']['kept_bytes']:.1f} %"] for r in found]
            print_table(f"memory of a {found[0]['out']}² layer in training with Adam", ["sparsity", "SNACK", "dense", "of dense"], rows)
            continue
        rows = []
        for r in found:
            cells = [f"{100 * r['sparsity']:g} %", str(r["batch"]), r.get("regime", ""), human_time(r["time_us"])]
            for peer in peers:
                them = r["peers"].get(peer, {"not_run": ""})
                cells.append("not run" if "not_run" in them else f"{human_time(them['time_us'])} ({human_ratio(them['time_us'] / r['time_us'])})")
            rows.append(cells)
        print_table(f"{routine}, {found[0]['out']}², fp32 (how many times as long as SNACK)", ["sparsity", "batch", "regime", "SNACK", *peers], rows)
