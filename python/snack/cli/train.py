"""``snack train``: one network on real data, dense, dense with a mask, and SNACK, with one method or several; table, picture and record."""

from __future__ import annotations

import argparse
import importlib.util
import math
import time
from dataclasses import replace
from pathlib import Path

from snack.cli import train_report
from snack.cli.common import Interruptible, check_writable, rich_console, say, write_json
from snack.cli.figure import label
from snack.errors import SnackError

DESCRIPTION = """Trains the same multilayer perceptron three ways in one run, from the same numbers on the same batches: dense (every
connection), dense + mask (plain PyTorch: every connection is stored and most are multiplied by zero), and SNACK (only the live
connections exist). With --compare it does so for several methods. Ends with a table and a picture. Ctrl-C keeps what there is."""


def add_parser(subparsers) -> None:
    """Registers the command and its options. Options left out come from the data set's recipe in ``snack.bench.training``."""
    parser = subparsers.add_parser("train", help="train a network dense, dense+mask and sparse, side by side", description=DESCRIPTION)
    parser.set_defaults(run=run)
    task = parser.add_argument_group("the task")
    task.add_argument(
        "--data", metavar="NAME|FILE.npz", help="digits (default), mnist, fashion-mnist, cifar10, madelon, or arrays x and y in a file"
    )
    task.add_argument(
        "--recipe",
        metavar="NAME",
        help="a whole protocol: lenet-300-100, fashion-mlp, fashion-mlp-mse or cifar10-mlp; what else is said here goes first",
    )
    task.add_argument("--hidden", type=_widths, metavar="300,100", help="widths of the hidden layers")
    task.add_argument("--device", default="cpu", help="cpu (default) or cuda")
    task.add_argument("--graph", action="store_true", help="on a card: replay captured steps, with the data on the card, contenders side by side")
    task.add_argument(
        "--contenders", type=_names, metavar="A,B", help="of dense, dense_mask and snack, those to train (default: all; snack always)"
    )
    task.add_argument("--seed", type=int, default=0, metavar="N", help="of the first numbers, the topology and the batches (default 0)")
    task.add_argument("--seeds", type=_count, default=1, metavar="N", help="repeat with N seeds, from --seed on (default 1)")
    sparse = parser.add_argument_group("sparsity")
    sparse.add_argument("--sparsity", type=float, metavar="S", help="fraction of the connections left out (default 0.95)")
    sparse.add_argument(
        "--method", metavar="M", help="how connections move: set (default), set-magnitude, rigl, snfs, gmp, mest, itop, srigl or static"
    )
    sparse.add_argument("--compare", type=_names, metavar="M,M", help="several methods in one run, for example static,set,rigl,gmp")
    sparse.add_argument("--distribution", choices=("uniform", "er", "erk"), help="of the sparsity over the layers (default uniform)")
    sparse.add_argument("--every", type=_count, metavar="STEPS", help="steps between topology updates (default: once an epoch)")
    sparse.add_argument("--drop-fraction", type=float, metavar="F", help="fraction of the connections an update moves (default 0.3)")
    sparse.add_argument(
        "--sparse-output", action="store_true", default=None, help="make the output layer sparse too (by default it stays dense, as in SET)"
    )
    learning = parser.add_argument_group("learning")
    learning.add_argument("--epochs", type=_count, metavar="N", help="passes over the training rows")
    learning.add_argument("--batch-size", type=_count, metavar="N", help="rows a step")
    learning.add_argument("--optimizer", choices=("sgd", "adam"), help="sgd with momentum 0.9 (default) or adam")
    learning.add_argument("--lr", type=float, metavar="LR", help="learning rate at the start; it falls to 0 along a cosine (recipes differ)")
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


def _names(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(","))


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
            train_report.report({**document, "records": train_report.complete(document["records"])}, runs)
            _leave_behind(arguments, document, runs, figure_path)
    if runs[-1].interrupted:
        say("Stopped by Ctrl-C: the figures are those of the steps that were done.")
        return 130
    diverged = sorted({r["contender"] for r in document["records"] if len(r["loss_curve"]) < len(r["accuracy_curve"])})
    if diverged:
        say(f"The loss of {', '.join(diverged)} is not a number: training diverged, so choose a smaller --lr.")
        return 1
    return 0


_SAID = (
    "hidden", "epochs", "batch_size", "lr", "weight_decay", "sparsity", "method", "compare", "contenders", "distribution", "every", "drop_fraction",
    "sparse_output", "optimizer",
)  # fmt: skip


def _config(arguments, training):
    """The Config: the data set's recipe or the protocol, overridden by what was said. Wrong figures are found here. Sets ``arguments.data``."""
    protocol = {}
    if arguments.recipe is not None:
        if arguments.recipe not in training.PROTOCOLS:
            raise SnackError(f"--recipe {arguments.recipe}: unknown recipe; expected one of {', '.join(training.PROTOCOLS)}")
        protocol = dict(training.PROTOCOLS[arguments.recipe])
    data = protocol.pop("data", None)
    arguments.data = arguments.data or data or "digits"
    said = {k: getattr(arguments, k) for k in _SAID if getattr(arguments, k) is not None}
    recipe = protocol or dict(training.RECIPES.get(arguments.data, {}))
    if said.get("optimizer") == "adam":
        recipe |= {"lr": 1e-3, "weight_decay": 0.0}
    if "contenders" in said and "snack" not in said["contenders"]:
        said["contenders"] += ("snack",)
    if arguments.graph and arguments.device == "cpu":
        raise SnackError("--graph replays captured steps of a card; add --device cuda, or leave it out")
    config = training.Config(**{**recipe, **said, "seed": arguments.seed, "device": arguments.device, "graph": arguments.graph})
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

    path = None if arguments.no_figure else Path(arguments.figure or f"snack-train-{arguments.recipe or Path(arguments.data).stem}.png")
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
    import torch

    from snack.bench import records

    suite = f"train-{arguments.recipe or runs[0].dataset.name}"
    return {
        "schema": records.SCHEMA,
        "suite": suite,
        "provenance": {**records.provenance(torch.device(runs[0].config.device)), "command": arguments.command_line},
        "records": (found := [record for run in runs for record in training.records(run)]),
        "summary": train_report.summary(train_report.complete(found)),
    }


def _leave_behind(arguments, document: dict, runs, figure_path) -> None:
    """The record, the picture and the model, and a line that says where they are."""
    from snack.cli import figure

    if arguments.json:
        write_json(arguments.json, document)
        say(f"record: {arguments.json}")
    if arguments.save:
        from snack.nn import persistence

        first = runs[0]
        about = {"data": first.dataset.name, "method": first.of("snack").method, "seed": first.config.seed, "epochs": first.config.epochs}
        about["test_accuracy"] = first.of("snack").accuracy
        persistence.save(first.of("snack").model, arguments.save, metadata={k: str(v) for k, v in about.items()})
        say(f"model: {arguments.save}")
    if figure_path is not None:
        figure.draw({**document, "records": train_report.complete(document["records"])}, figure_path)
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
    accuracies = "  ".join(
        f"{label(c.name, short=True)} {'–' if c.accuracy is None else f'{100 * c.accuracy:.1f}'}" for c in moment.contenders
    )
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
        name = label(moment.current.name)
        self.progress.update(self.task, description=f"{seed}epoch {moment.epoch + 1}/{self.epochs} {name:<12}", completed=moment.done)
        s = _state(moment)
        facts = f"loss {s['loss']}  [bold]{s['accuracies']} %[/bold]  nnz {s['nnz']}  updates {s['updates']}"
        self.live.update(Group(self.progress, facts), refresh=True)
        self.drawn = now
