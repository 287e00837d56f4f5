"""``snack train``: one network on real data three ways, dense, dense with a mask, and SNACK; a table, a picture and a record at the end."""

from __future__ import annotations

import argparse
import importlib.util
import math
import statistics
import time
from dataclasses import replace
from pathlib import Path

from snack.cli.common import Interruptible, check_writable, human_bytes, human_ratio, human_time, print_table, rich_console, say, write_json
from snack.cli.figure import LABELS, METHODS
from snack.errors import SnackError

DESCRIPTION = """Trains the same multilayer perceptron three ways in one run, from the same numbers on the same batches: dense (every
connection), dense + mask (plain PyTorch: every connection is stored and most are multiplied by zero), and SNACK (only the live
connections exist). Ends with a table and a picture. Ctrl-C keeps what there is."""


def add_parser(subparsers) -> None:
    """Registers the command and its options. Options left out come from the data set's recipe in ``snack.bench.training``."""
    parser = subparsers.add_parser("train", help="train a network dense, dense+mask and sparse, side by side", description=DESCRIPTION)
    parser.set_defaults(run=run)
    task = parser.add_argument_group("the task")
    task.add_argument(
        "--data",
        default="digits",
        metavar="NAME|FILE.npz",
        help="digits (default), mnist, fashion-mnist, cifar10, madelon, or arrays x and y in a file",
    )
    task.add_argument("--hidden", type=_widths, metavar="300,100", help="widths of the hidden layers")
    task.add_argument("--device", default="cpu", help="cpu (default) or cuda")
    task.add_argument("--seed", type=int, default=0, metavar="N", help="of the first numbers, the topology and the batches (default 0)")
    task.add_argument("--seeds", type=_count, default=1, metavar="N", help="repeat with N seeds, from --seed on (default 1)")
    sparse = parser.add_argument_group("sparsity")
    sparse.add_argument("--sparsity", type=float, default=0.95, metavar="S", help="fraction of the connections left out (default 0.95)")
    sparse.add_argument("--method", default="set", metavar="M", help="set (default), rigl or static: how connections move while it trains")
    sparse.add_argument(
        "--distribution", default="uniform", choices=("uniform", "er", "erk"), help="of the sparsity over the layers (default uniform)"
    )
    sparse.add_argument("--every", type=_count, metavar="STEPS", help="steps between topology updates (default: once an epoch)")
    sparse.add_argument(
        "--drop-fraction", type=float, default=0.3, metavar="F", help="fraction of the connections an update moves (default 0.3)"
    )
    sparse.add_argument(
        "--sparse-output", action="store_true", help="make the output layer sparse too (by default it stays dense, as in SET)"
    )
    learning = parser.add_argument_group("learning")
    learning.add_argument("--epochs", type=_count, metavar="N", help="passes over the training rows")
    learning.add_argument("--batch-size", type=_count, metavar="N", help="rows a step")
    learning.add_argument("--optimizer", default="sgd", choices=("sgd", "adam"), help="sgd with momentum 0.9 (default) or adam")
    learning.add_argument("--lr", type=float, metavar="LR", help="learning rate at the start; it falls to 0 along a cosine")
    learning.add_argument(
        "--weight-decay", type=float, metavar="WD", help="what draws weights to 0, and so decides which connections SET gives up"
    )
    output = parser.add_argument_group("what is left behind")
    output.add_argument("--json", metavar="FILE", help="write the record of the run")
    output.add_argument("--figure", metavar="FILE.png", help="the picture (default snack-train-<data>.png)")
    output.add_argument("--no-figure", action="store_true", help="draw nothing")
    output.add_argument("--save", metavar="FILE.safetensors", help="write SNACK's trained network (of the first seed)")
    output.add_argument("--quiet", action="store_true", help="no progress, only the table")


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} given, expected a whole number above 0")
    return int(text)


def _widths(text: str) -> tuple[int, ...]:
    parts = text.split(",")
    if not all(part.strip().isdecimal() and int(part) > 0 for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r} given, expected the widths of the hidden layers, such as 300,100")
    return tuple(int(part) for part in parts)


# ---- the command -----------------------------------------------------------------------------------------------------------------------


def run(arguments) -> int:
    """Does everything that can fail early first: figures, device, output paths, data. Returns the exit status."""
    from snack.bench import training

    config = _config(arguments, training)
    _check_device(config.device)
    figure_path = _output_paths(arguments)
    dataset = _load(arguments)
    if not arguments.quiet:
        say(
            f"{dataset.name}: {len(dataset.x_train):,} training and {len(dataset.x_test):,} test rows, "
            f"{dataset.features} features, {dataset.classes} classes"
        )
    runs = []
    with Interruptible() as stop:
        view = _Quiet() if arguments.quiet else _progress(config.epochs, arguments.seeds)
        with view:
            for seed in range(config.seed, config.seed + arguments.seeds):
                runs.append(training.train(replace(config, seed=seed), dataset, view.watch, stop))
                if runs[-1].interrupted:
                    break
        document = _document(arguments, runs, training)
        if document["records"]:
            _report(_complete(document), runs)
            _leave_behind(arguments, document, runs, figure_path)
    if runs[-1].interrupted:
        say("Stopped by Ctrl-C: the figures are those of the steps that were done.")
        return 130
    diverged = sorted({r["contender"] for r in document["records"] if len(r["loss_curve"]) < len(r["accuracy_curve"])})
    if diverged:
        say(f"The loss of {', '.join(diverged)} is not a number: training diverged, so choose a smaller --lr.")
        return 1
    return 0


def _config(arguments, training):
    """The Config: the recipe of the data set, overridden by what was said. Wrong figures are found here."""
    said = {k: getattr(arguments, k) for k in ("hidden", "epochs", "batch_size", "lr", "weight_decay") if getattr(arguments, k) is not None}
    taken = ("sparsity", "method", "distribution", "every", "drop_fraction", "sparse_output", "optimizer", "seed", "device")
    recipe = dict(training.RECIPES.get(arguments.data, {}))
    if arguments.optimizer == "adam":
        recipe |= {"lr": 1e-3, "weight_decay": 0.0}
    config = training.Config(**{**recipe, **{k: getattr(arguments, k) for k in taken}, **said})
    training.check(config)
    return config


def _check_device(name: str) -> None:
    import torch

    from snack import _lib

    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise SnackError(f"--device {name}: unknown device; expected cpu or cuda") from error
    if device.type not in ("cpu", "cuda"):
        raise SnackError(f"--device {name}: SNACK computes on cpu and cuda; choose one of them")
    problem = _lib.cuda_problem(device) if device.type == "cuda" else ""
    if problem:
        raise SnackError(f"--device {name}: {problem}; or use --device cpu, and see `snack doctor`")


def _output_paths(arguments) -> Path | None:
    """Checks every file that will be written; returns the picture's path, None where none is wanted."""
    from snack.plot.look import require_picture

    path = None if arguments.no_figure else Path(arguments.figure or f"snack-train-{Path(arguments.data).stem}.png")
    targets = {"--json": arguments.json, "--figure": path, "--save": arguments.save}
    targets = {option: Path(target) for option, target in targets.items() if target is not None}
    if arguments.save and not arguments.save.endswith(".safetensors"):
        raise SnackError(f"--save {arguments.save}: expected a name that ends with .safetensors")
    if arguments.save and importlib.util.find_spec("safetensors") is None:
        raise SnackError(f"--save {arguments.save} needs safetensors, which is not installed: pip install safetensors")
    if len(set(targets.values())) < len(targets):
        raise SnackError(f"{' and '.join(targets)} must be different files: one would overwrite the other")
    if path is not None:
        require_picture(path, otherwise=", or pass --no-figure")
    for option, target in targets.items():
        check_writable(target, option)
    return path


def _load(arguments):
    from snack import data

    console = None if arguments.quiet else rich_console()
    if console is None:
        return data.load(arguments.data)
    with console.status(f"loading {arguments.data}") as status:
        return data.load(arguments.data, progress=lambda done, total, what: status.update(f"{what}: {done:,} of {total:,}"))


# ---- the end ---------------------------------------------------------------------------------------------------------------------------


def _document(arguments, runs, training) -> dict:
    """What ``--json`` writes: design of the benchmark records, one record a seed and contender."""
    from snack.bench import records

    return {
        "schema": records.SCHEMA,
        "suite": f"train-{runs[0].dataset.name}",
        "provenance": {**records.provenance(), "command": arguments.command_line},
        "records": [record for run in runs for record in training.records(run)],
    }


def _complete(document: dict) -> dict:
    """The document without the seed that Ctrl-C cut short, if there is another one: means are over complete runs."""
    whole = [r for r in document["records"] if not r["interrupted"]]
    return {**document, "records": whole or document["records"]}


def _report(document: dict, runs) -> None:
    """Prints the table: one column a contender, and how SNACK compares with dense."""
    groups = {name: [r for r in document["records"] if r["contender"] == name] for name in LABELS}
    groups = {name: records for name, records in groups.items() if records}
    columns = ["", *(LABELS[n] for n in groups), *(["SNACK / dense"] if {"dense", "snack"} <= groups.keys() else [])]
    rows = []

    def row(title, value, words, ratio=True):
        values = {n: value(records) for n, records in groups.items()}
        cells = [words(v) if v is not None else "not measured" for v in values.values()]
        if len(columns) > len(groups) + 1:
            both = values["dense"] and values["snack"]
            cells.append(human_ratio(values["snack"] / values["dense"]) if ratio and both else "")
        rows.append([title, *cells])

    row("test accuracy", lambda rs: [100 * r["accuracy"] for r in rs], _mean_and_deviation, ratio=False)
    row("connections that count", lambda rs: rs[0]["nnz"], "{:,}".format)
    row("parameters stored", lambda rs: rs[0]["params"], "{:,}".format)
    for part, title in (
        ("weights", "weights"),
        ("indices", "indices or masks"),
        ("gradients", "gradients"),
        ("optimizer", "optimiser state"),
    ):
        row(title, lambda rs, part=part: rs[0]["bytes"][part], human_bytes)
    row("memory, all of these", lambda rs: sum(rs[0]["bytes"].values()), human_bytes)
    row("time a training step", lambda rs: _median(rs, "step_time_us"), human_time)
    row("inference, one sample", lambda rs: _median(rs, "infer_time_us"), human_time)
    row("topology updates", lambda rs: rs[0]["updates"], "{:,}".format, ratio=False)
    first = runs[0]
    seeds = len(groups[next(iter(groups))])
    seeds = f"mean of {seeds} seeds" if seeds > 1 else f"seed {first.config.seed}"
    say()
    config, network = first.config, document["records"][0]["network"]
    title = f"{first.dataset.name}, {network}, {100 * config.sparsity:g} % sparse, {METHODS[config.method]}, batch {config.batch_size}, "
    print_table(f"{title}{config.epochs} epoch{'s' if config.epochs > 1 else ''}, {seeds}", columns, rows, strong=len(groups))
    if max(r["step_time_iqr_us"] / r["step_time_us"] for r in document["records"]) > 0.5:
        say("The times of single steps vary by more than half: other work ran on this machine, so repeat the run on an idle one.")


def _mean_and_deviation(values: list[float]) -> str:
    return f"{statistics.fmean(values):.2f} %" + (f" ± {statistics.stdev(values):.2f}" if len(values) > 1 else "")


def _median(records, key):
    values = [r[key] for r in records if key in r]
    return statistics.median(values) if values else None


def _leave_behind(arguments, document: dict, runs, figure_path) -> None:
    """The record, the picture and the model, and a line that says where they are."""
    from snack.cli import figure

    if arguments.json:
        write_json(arguments.json, document)
        say(f"record: {arguments.json}")
    if arguments.save:
        from snack.nn import persistence

        first = runs[0]
        about = {"data": first.dataset.name, "method": first.config.method, "seed": first.config.seed, "epochs": first.config.epochs}
        about["test_accuracy"] = first.of("snack").accuracy
        persistence.save(first.of("snack").model, arguments.save, metadata={k: str(v) for k, v in about.items()})
        say(f"model: {arguments.save}")
    if figure_path is not None:
        figure.draw(_complete(document), figure_path)
        say(f"picture: {figure_path}")


# ---- progress --------------------------------------------------------------------------------------------------------------------------


class _Quiet:
    """Shows nothing."""

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        return False

    def watch(self, moment) -> None:
        pass


def _progress(epochs: int, seeds: int):
    console = rich_console()
    return _Plain(epochs, seeds) if console is None else _Bar(console, epochs, seeds)


def _state(moment) -> dict[str, str]:
    """Loss, accuracies, nnz and updates as words."""
    snack = moment.contenders[-1]
    short = {"dense": "dense", "dense_mask": "mask", "snack": "SNACK"}
    accuracies = "  ".join(f"{short[c.name]} {'–' if c.accuracy is None else f'{100 * c.accuracy:.1f}'}" for c in moment.contenders)
    loss = moment.current.loss
    return {
        "loss": "–" if math.isnan(loss) else f"{loss:.3f}",
        "accuracies": accuracies,
        "nnz": f"{_nnz(snack.model):,}",
        "updates": str(snack.updates),
    }


def _nnz(model) -> int:
    from snack.bench import training

    return training.connections(model)


class _Plain(_Quiet):
    """About ten lines a seed, for pipes and logs."""

    def __init__(self, epochs: int, seeds: int):
        self.epochs, self.seeds, self.every = epochs, seeds, max(1, epochs // 10)

    def watch(self, moment) -> None:
        number = moment.epoch + 1
        if moment.epoch_end and (number % self.every == 0 or number == self.epochs):
            s = _state(moment)
            seed = f"seed {moment.seed}  " if self.seeds > 1 else ""
            say(f"{seed}epoch {number:3}/{self.epochs}  loss {s['loss']}  {s['accuracies']} %  nnz {s['nnz']}  updates {s['updates']}")


class _Bar(_Quiet):
    """A moving bar on a terminal and a line of facts below it, redrawn ten times a second at most."""

    def __init__(self, console, epochs: int, seeds: int):
        from rich.live import Live
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

        words = TextColumn("{task.description}"), BarColumn(bar_width=32), TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn()
        self.progress = Progress(*words, console=console)
        self.live = Live(console=console, auto_refresh=False)
        self.epochs, self.seeds = epochs, seeds
        self.task, self.seed, self.drawn = None, None, 0.0

    def __enter__(self):
        self.live.start()
        return self

    def __exit__(self, *exception):
        self.live.stop()
        return False

    def watch(self, moment) -> None:
        now = time.monotonic()
        if now - self.drawn < 0.1 and not moment.epoch_end:
            return
        from rich.console import Group

        if self.seed != moment.seed:
            self.seed = moment.seed
            self.task = self.progress.add_task("", total=moment.total)
        seed = f"seed {moment.seed}, " if self.seeds > 1 else ""
        name = LABELS[moment.current.name]
        self.progress.update(self.task, description=f"{seed}epoch {moment.epoch + 1}/{self.epochs} {name:<12}", completed=moment.done)
        s = _state(moment)
        facts = f"loss {s['loss']}  [bold]{s['accuracies']} %[/bold]  nnz {s['nnz']}  updates {s['updates']}"
        self.live.update(Group(self.progress, facts), refresh=True)
        self.drawn = now
