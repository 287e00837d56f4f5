"""``snack bench``: measurements of a suite as JSON, and a table of them."""

from __future__ import annotations

from pathlib import Path

from snack.cli.common import Interruptible, check_writable, human_bytes, human_ratio, human_time, print_table, rich_console, say, write_json

DESCRIPTION = """Measures a suite on this machine and writes the records as JSON. `cpu`: products, a training step and the memory of one layer,
beside nn.Linear, torch.sparse CSR and SparseLab (if installed). `cuda`: products and a training step on a card, as replays of CUDA graphs,
beside dense, dense + mask, cuSPARSE and a kernel with atomics. All contenders of a record are measured in one run."""


def add_parser(subparsers) -> None:
    """Registers the command and its options."""
    parser = subparsers.add_parser("bench", help="measure a suite, write JSON and print a table", description=DESCRIPTION)
    parser.add_argument("suite", choices=["cpu", "cuda"], help="what to measure")
    parser.add_argument("--size", type=int, metavar="N", help="rows and columns of the layer (cpu: 2048; cuda: the suite's own)")
    parser.add_argument("--batch", metavar="B,B", help="batch sizes of the products (cpu: 1,16,64,256; cuda, with --size: 1,4,16)")
    parser.add_argument("--sparsity", metavar="S,S", help="sparsities (cpu: 0.5,0.8,0.9,0.95,0.99; cuda, with --size: 0.9,0.95,0.99)")
    parser.add_argument("--samples", type=int, metavar="N", help="samples a number; the median counts (cpu: 25; cuda: 9)")
    parser.add_argument("--quick", action="store_true", help="cuda: the numbers that matter most, in under a minute")
    parser.add_argument("--json", metavar="FILE", help="where to write the records (default benchmarks/results/<device>/<suite>.json)")
    parser.set_defaults(run=run)


def _numbers(text: str, option: str, kind: type) -> tuple:
    from snack.errors import SnackError

    try:
        return tuple(kind(part) for part in text.split(","))
    except ValueError:
        raise SnackError(f"{option} {text!r} is not a list of numbers separated by commas.") from None


def run(arguments) -> int:
    """Measures, writes after every record, prints. Ctrl-C keeps the records made so far, and so does a failure."""
    from snack.bench import records
    from snack.errors import require

    samples = (9 if arguments.suite == "cuda" else 25) if arguments.samples is None else arguments.samples
    require(samples >= 2, "snack bench: --samples must be at least 2, to have a spread.")
    require(arguments.suite == "cuda" or not arguments.quick, "snack bench: --quick belongs to the suite cuda.")
    device, measure = (_cuda if arguments.suite == "cuda" else _cpu)(arguments, samples)
    provenance = records.provenance(device)
    path = Path(arguments.json or f"benchmarks/results/{provenance['device']}/{arguments.suite}.json")
    if arguments.json is None:
        path.parent.mkdir(parents=True, exist_ok=True)
    check_writable(path, "--json")
    document = {"schema": records.SCHEMA, "suite": arguments.suite, "provenance": provenance, "records": []}
    with Interruptible() as stop:
        _measure(measure, document, path, stop)
    write_json(path, document)
    print_tables(document)
    say(f"records: {path}")
    return 130 if stop.asked else 0


def _cpu(arguments, samples: int):
    """(None, a function of (progress, provenance) that makes records)."""
    from snack.bench import cpu

    size, batches, sparsities = _shape(arguments, 2048, "1,16,64,256", "0.5,0.8,0.9,0.95,0.99")
    grid = cpu.Grid(size=size, batches=batches, sparsities=sparsities, samples=samples)
    return None, lambda progress, provenance: cpu.run(grid, progress)


def _cuda(arguments, samples: int):
    """(device, a function of (progress, provenance) that makes records and adds what it finds of the card to the provenance)."""
    import torch

    from snack import _lib
    from snack.bench import cuda
    from snack.errors import require

    given = [option for option in ("size", "batch", "sparsity") if getattr(arguments, option) is not None]
    require(not (arguments.quick and given), "snack bench: --quick has sizes of its own; leave it out to choose them.")
    require(arguments.size is not None or not given, "snack bench cuda: --batch and --sparsity belong to --size.")
    grid = cuda.QUICK if arguments.quick else cuda.Grid()
    if given:
        size, batches, sparsities = _shape(arguments, arguments.size, "1,4,16", "0.9,0.95,0.99")
        steps = tuple((size, sparsity, batch) for sparsity in sparsities for batch in batches)
        grid = cuda.Grid(shapes=(cuda.Shape(size, sparsities, batches),), steps=steps)
    problem = _lib.cuda_problem()
    require(not problem, f"snack bench cuda: no card can be measured: {problem}.")
    device = torch.device("cuda", torch.cuda.current_device())

    def measure(progress, provenance: dict):
        from snack.bench.cuda_timing import CudaMeter

        meter = CudaMeter(device, samples)
        facts = meter.facts()
        provenance.update(facts)
        meter.tidy()
        yield from cuda.run(grid, meter, facts, progress)

    return device, measure


def _shape(arguments, size: int, batches: str, sparsities: str) -> tuple:
    """(size, batches, sparsities) of the options, checked."""
    from snack.errors import require
    from snack.formats.pattern import check_sparsity

    size = size if arguments.size is None else arguments.size
    found = _numbers(arguments.batch or batches, "--batch", int)
    require(size > 0 and min(found) > 0, "snack bench: --size and --batch must be positive.")
    chosen = _numbers(arguments.sparsity or sparsities, "--sparsity", float)
    return size, found, tuple(check_sparsity(s, "snack bench") for s in chosen)


def _measure(measure, document: dict, path: Path, stop) -> None:
    """Adds the records to the document one by one; the file has what there is, whatever ends the run."""
    console = rich_console()
    status = console.status("measuring") if console else None
    if status:
        status.start()
    try:
        for record in measure(status.update if status else lambda text: None, document["provenance"]):
            document["records"].append(record)
            write_json(path, document)
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
        rows, all_alike = [], len({(r["out"], r["dtype"], r["l2"]) for r in found}) == 1
        for r in found:
            kind = [] if all_alike else [str(r["out"]), r["dtype"], r["l2"]]
            cells = [f"{100 * r['sparsity']:g} %", str(r["batch"]), *kind, r.get("regime", ""), human_time(r["time_us"])]
            for peer in peers:
                them = r["peers"].get(peer, {"not_run": ""})
                cells.append("not run" if "time_us" not in them else f"{human_time(them['time_us'])} ({human_ratio(them['time_us'] / r['time_us'])})")
            rows.append(cells)
        what = f"{routine}, {found[0]['out']}², {found[0]['dtype']}" if all_alike else routine
        kind = [] if all_alike else ["size", "dtype", "L2"]
        print_table(f"{what} (how many times as long as SNACK)", ["sparsity", "batch", *kind, "regime", "SNACK", *peers], rows)
