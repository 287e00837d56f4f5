"""``snack bench``: measurements of a suite as JSON, and a table of them."""

from __future__ import annotations

import time
from pathlib import Path

from snack.cli.common import Interruptible, check_writable, rich_console, say, write_json

DESCRIPTION = """Measures a suite on this machine, beside others who do the same job, and adds the records to a JSON file. What the file holds
already, from the same sources, is not measured again: a suite that was stopped goes on where it was. All contenders of a record are
measured in one run, in turn."""
EPILOG = """The options of the grid (--routine, --shape, --sparsity, --batch, --dtype, --l2) choose among the cases of a named suite; with
`run` they are the grid. Example: snack bench run --routine spmm,layer_step --shape 10000x10000,500x500 --sparsity 0.9,0.95 --batch 1,4"""
DEFAULTS = {"routine": "spmm", "shape": "10000x10000", "sparsity": "0.9", "batch": "1", "dtype": "float32", "l2": "warm"}


def add_parser(subparsers) -> None:
    """Registers the command and its options."""
    parser = subparsers.add_parser("bench", help="measure a suite, write JSON and print a table", description=DESCRIPTION, epilog=EPILOG)
    what = "cpu, cuda, paper-kernels, paper-layer, paper-memory; tune, for the cost table of your card; or `run`, for a grid of your own"
    parser.add_argument("suite", help=what)
    parser.add_argument("--routine", metavar="R,R", help="of spmm, spmm_t, sddmm, layer_infer, layer_step, memory, update")
    parser.add_argument("--shape", metavar="OUTxIN,...", help="shapes of the layer, for example 10000x10000,500x784")
    parser.add_argument("--sparsity", metavar="S,S", help="for example 0.9,0.95")
    parser.add_argument("--batch", metavar="B,B", help="for example 1,4")
    parser.add_argument("--dtype", metavar="D,D", help="of float32, bfloat16, float16")
    parser.add_argument("--l2", metavar="L,L", help="warm: the same weights in every call; cold: copies that are not in the L2 cache")
    parser.add_argument("--mode", metavar="M", help="run: graph (replays of a CUDA graph, the default on a card) or eager")
    parser.add_argument("--peers", metavar="P,P", help="who is measured beside SNACK (default: all that know the routine; none: nobody)")
    parser.add_argument("--device", metavar="D", help="cpu or cuda (default: the suite's own; run: cuda where there is a card)")
    parser.add_argument("--energy", action="store_true", help="run: the energy of everybody, too, over windows of seconds")
    parser.add_argument("--energy-seconds", type=float, default=5.0, metavar="S", help="length of an energy window (default 5)")
    parser.add_argument("--co2", type=float, metavar="G", help="grams of CO2 a kWh (default 473: Ember, the world's mean of 2024)")
    parser.add_argument("--memory-cap", type=float, metavar="GIB", help="run: memory may use no more of the card than this")
    parser.add_argument("--samples", type=int, metavar="N", help="samples a number; the median counts (cpu: 25; cuda: 9)")
    parser.add_argument("--quick", action="store_true", help="cuda: the numbers that matter most")
    parser.add_argument("--limit", type=float, metavar="SECONDS", help="start no further record after so long, and say how many remain")
    parser.add_argument("--fresh", action="store_true", help="measure all again, and forget what the file holds")
    parser.add_argument("--json", metavar="FILE", help="where the records go (default benchmarks/results/<device>/<suite>.json)")
    parser.set_defaults(run=run)


def run(arguments) -> int:
    """Measures what the file lacks, writes every few seconds, prints. Ctrl-C keeps the records made so far, and so does a failure."""
    from snack.bench import records
    from snack.bench.results import Results
    from snack.errors import SnackError, require

    device = _device(arguments)
    cases = _cases(arguments, device)
    samples = (9 if device == "cuda" else 25) if arguments.samples is None else arguments.samples
    require(samples >= 2, "snack bench: --samples must be at least 2, to have a spread.")
    require(arguments.limit is None or arguments.limit > 0, "snack bench: --limit must be a positive number of seconds.")
    problem = _card_problem() if device == "cuda" else ""
    require(not problem, f"snack bench {arguments.suite}: no card can be measured: {problem}.")
    provenance = records.provenance(_torch_device(device))
    path = Path(arguments.json or f"benchmarks/results/{provenance['device']}/{arguments.suite}.json")
    if arguments.json is None:
        path.parent.mkdir(parents=True, exist_ok=True)
    check_writable(path, "--json")
    before = records.read(path) if path.is_file() and path.stat().st_size and not arguments.fresh else None
    results = Results(arguments.suite, provenance, before, path)
    if results.stale:
        say(f"{len(results.stale)} records of {path} are stale (other sources or versions); those that are asked for are measured again")
    energy = None
    if any(case.energy for case in cases):
        try:
            energy = _energy(arguments, device)
            provenance["energy"] = energy.facts()
        except SnackError as error:
            say(f"without energy: {error}")
    missing = results.missing(cases, energy is not None)
    with Interruptible() as stop:
        if missing:
            _measure(missing, _bench(device, samples, energy, provenance), results, path, stop, arguments.limit)
    return _finish(results, cases, energy is not None, path, stop.asked)


def _finish(results, cases, has_energy: bool, path: Path, interrupted: bool) -> int:
    from snack.cli.bench_tables import print_tables

    asked = {str(case) for case in cases}
    if results.suite != "tune":
        print_tables([record for name, record in results.records.items() if name in asked])
    remaining = len(results.missing(cases, has_energy))
    if remaining:
        say(f"{remaining} of {len(cases)} records remain; the same command goes on with them")
    elif results.suite == "tune":
        _write_costs(results)
    say(f"records: {path}")
    return 130 if interrupted else 0


def _write_costs(results) -> None:
    """The table goes where the library finds it, once the whole grid has been measured."""
    from snack import _costs
    from snack.bench import tune
    from snack.bench.suites import suite_cases

    remaining = len(results.missing(suite_cases("tune", "cuda")))
    if remaining:
        say(f"no cost table: {remaining} records of the whole suite are missing")
        return
    good, total = tune.held_out(list(results.records.values()))
    say(f"{good} of {total} times are predicted within 25 % by a fit without their shape and sparsity")
    path = _costs.path_for(results.provenance["device"])
    tune.write_table(results.document(), path)
    say(f"cost table: {path}; it is used from the next start on, and `snack doctor` says so")


def _measure(cases, bench, results, path: Path, stop, limit: float | None) -> None:
    """Adds the records one by one; the file has what there is, whatever ends the run."""
    console = rich_console()
    status = console.status("measuring") if console else None
    if status:
        status.start()
    begin, written = time.monotonic(), 0.0
    try:
        for number, case in enumerate(cases):
            now = time.monotonic() - begin
            if stop() or (limit is not None and now >= limit):
                break
            if now - written > 2:  # writing a long file takes longer than measuring a kernel
                write_json(path, results.document())
                written = now
            if status:
                status.update(f"{number + 1} of {len(cases)}: {case}")
            results.add(bench.measure(case))
    finally:
        write_json(path, results.document())
        if status:
            status.stop()
    if bench.energy_problem:
        say(f"without energy from there on: {bench.energy_problem}")


# ---- what the options say ----------------------------------------------------------------------------------------------------------------


def _device(arguments) -> str:
    from snack.bench.case import check_names
    from snack.bench.suites import SUITES

    check_names("suite", [arguments.suite], (*SUITES, "run"))
    if arguments.device is not None:
        return check_names("device", [arguments.device], ("cpu", "cuda"))[0]
    if arguments.suite in SUITES:
        return SUITES[arguments.suite].device
    return "cpu" if _card_problem() else "cuda"


def _card_problem() -> str:
    from snack import _lib

    return _lib.cuda_problem()


def _torch_device(device: str):
    import torch

    return torch.device("cuda", torch.cuda.current_device()) if device == "cuda" else torch.device("cpu")


def _axes(arguments) -> dict[str, tuple]:
    """The options of the grid that were given, checked."""
    from snack.bench.case import DTYPES, ROUTINES, check_names
    from snack.errors import require
    from snack.formats.pattern import check_shape, check_sparsity

    kinds = {
        "routine": lambda names: check_names("routine", names, ROUTINES),
        "shape": lambda words: tuple(check_shape(_numbers(word.split("x"), "--shape", int)) for word in words),
        "sparsity": lambda words: tuple(check_sparsity(s, "snack bench") for s in _numbers(words, "--sparsity", float)),
        "batch": lambda words: _numbers(words, "--batch", int),
        "dtype": lambda names: check_names("dtype", names, DTYPES),
        "l2": lambda names: check_names("state of the L2 cache", names, ("warm", "cold")),
    }
    given = {name: getattr(arguments, name) or (DEFAULTS[name] if arguments.suite == "run" else None) for name in kinds}
    found = {name: kinds[name](text.split(",")) for name, text in given.items() if text is not None}
    require(min(found.get("batch", (1,))) > 0, "snack bench: --batch must be positive.")
    require(all(min(shape) > 0 for shape in found.get("shape", ())), "snack bench: --shape must be positive.")
    return found


def _numbers(words: list[str], option: str, kind: type) -> tuple:
    from snack.errors import SnackError

    try:
        return tuple(kind(word) for word in words)
    except ValueError:
        what = "OUTxIN, such as 500x784" if option == "--shape" else "a list of numbers separated by commas"
        raise SnackError(f"snack bench: {option} {'x'.join(words) if option == '--shape' else ','.join(words)!r} is not {what}.") from None


def _cases(arguments, device: str) -> list:
    """The cases of the suite that the options leave, or of the grid that they are."""
    from snack.bench.case import PEERS_OF, check_names
    from snack.bench.case import cases as grid
    from snack.bench.suites import quick, suite_cases
    from snack.errors import require

    axes = _axes(arguments)
    known = dict.fromkeys(peer for peers in PEERS_OF.values() for peer in peers)
    names = None if arguments.peers is None else [] if arguments.peers == "none" else arguments.peers.split(",")
    peers = None if names is None else check_names("peer", names, known)
    require(not arguments.quick or arguments.suite == "cuda", "snack bench: --quick belongs to the suite cuda.")
    own = [o for o in ("mode", "energy", "memory_cap") if getattr(arguments, o)]
    require(arguments.suite == "run" or not own, f"snack bench: --{(own or [''])[0].replace('_', '-')} belongs to `run`; the suites have their own.")
    if arguments.suite == "run":
        mode = "eager" if device == "cpu" else check_names("mode", [arguments.mode or "graph"], ("graph", "eager"))[0]
        energy = ("snack", *(known if peers is None else peers)) if arguments.energy else ()
        found = list(grid(*(axes[a] for a in ("routine", "shape", "sparsity", "batch", "dtype")), l2=axes["l2"], mode=mode,
                          caps=(arguments.memory_cap,), peers=peers, energy=energy))
        require(bool(found), "snack bench run: cold weights belong to spmm, spmm_t, sddmm and layer_infer.")
        return list(dict.fromkeys(found))
    found = suite_cases(arguments.suite, device)
    found = quick(found) if arguments.quick else found
    found = [case for case in found if all(getattr(case, axis) in values for axis, values in axes.items())]
    require(bool(found), f"snack bench {arguments.suite}: no case of the suite is left by these options; `run` takes any grid.")
    return found if peers is None else [case.with_peers(peers) for case in found]


def _energy(arguments, device: str):
    from snack.bench.energy import GRAMS_PER_KWH, SOURCE, EnergyMeter
    from snack.errors import require

    require(device == "cuda", "energy is measured on cards alone, by NVML.")
    own = arguments.co2 is not None
    factor, source = (arguments.co2, "given with --co2") if own else (GRAMS_PER_KWH, SOURCE)
    return EnergyMeter(_torch_device(device), seconds=arguments.energy_seconds, grams_per_kwh=factor, source=source)


def _bench(device: str, samples: int, energy, provenance: dict):
    from snack.bench.cuda_timing import CudaMeter
    from snack.bench.measure import Bench
    from snack.bench.timing import Meter

    meter = CudaMeter(_torch_device(device), samples) if device == "cuda" else Meter(samples)
    facts = meter.facts()
    meter.tidy()
    provenance.update(facts)
    return Bench(meter, facts, energy)
