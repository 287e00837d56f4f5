"""``snack plot FILE``: the picture of a results file, or of the topology of a saved model."""

from __future__ import annotations

import argparse
from pathlib import Path

from snack.cli.common import check_writable, say
from snack.errors import SnackError

DESCRIPTION = """Draws a results file again, without measuring anything: a training run of `snack train --json`, or a suite of `snack bench`.
Of a model file it draws the topology of a sparse layer, without the model's code."""
KINDS = ("connectivity", "degrees", "density")


def add_parser(subparsers) -> None:
    """Registers the command and its options."""
    parser = subparsers.add_parser("plot", help="draw a results file or a saved model", description=DESCRIPTION)
    parser.add_argument(
        "file", metavar="FILE", help="what `snack train --json` or `snack bench` wrote, or a .safetensors file of `snack train --save` or snack.save"
    )
    parser.add_argument("--figure", metavar="FILE.png", help="the picture (default: FILE.png, of a model FILE-KIND.png, beside where you are)")
    model = parser.add_argument_group("of a model file")
    model.add_argument("--kind", choices=KINDS, help="where its connections are (default), how many each neuron has, or how dense the layers are")
    model.add_argument("--layer", metavar="NAME", help="which sparse layer (default: the first); `snack inspect` lists them")
    model.add_argument(
        "--image", metavar="28x28", type=_extents, help="height x width [x channels] of the input: the connections of every pixel"
    )
    parser.set_defaults(run=run)


def _extents(text: str) -> tuple[int, ...]:
    parts = text.lower().split("x")
    if len(parts) not in (2, 3) or not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r} given, expected height x width of the input, such as 28x28, or 32x32x3")
    return tuple(int(part) for part in parts)


def run(arguments) -> int:
    """Draws the file and says where the picture is."""
    if Path(arguments.file).suffix == ".safetensors":
        return _model(arguments)
    for option in ("kind", "layer", "image"):
        if getattr(arguments, option) is not None:
            raise SnackError(f"--{option} is for a model file, whose name ends with .safetensors; {arguments.file} is read as a results file")
    return _results(arguments)


def _results(arguments) -> int:
    from snack.bench import records
    from snack.cli import bench_figure, figure, paper_figure

    document = records.read(arguments.file)
    path = arguments.figure or f"{Path(arguments.file).stem}.png"
    is_training = any("contender" in record for record in document["records"])
    painter = figure if is_training else paper_figure if document.get("suite") in paper_figure.SUITES else bench_figure
    say(f"picture: {painter.draw(document, path)}")
    return 0


def _model(arguments) -> int:
    from snack import plot
    from snack.nn import read_patterns
    from snack.plot import look

    kind = arguments.kind or "connectivity"
    if arguments.image is not None and kind != "connectivity":
        raise SnackError(f"--image is for --kind connectivity; {kind} has no use for it")
    if arguments.layer is not None and kind == "density":
        raise SnackError("--layer is for --kind connectivity or degrees; density draws all layers")
    path = arguments.figure or f"{Path(arguments.file).stem}-{kind}.png"
    look.require_picture(path)
    check_writable(path, "--figure")
    patterns = read_patterns(arguments.file)
    if not patterns:
        raise SnackError(f"{arguments.file} holds no sparse layer: there is nothing to draw")
    names = ", ".join([*patterns][:12]) + (f" and {len(patterns) - 12} more" if len(patterns) > 12 else "")
    name = arguments.layer if arguments.layer is not None else next(iter(patterns))
    if name not in patterns:
        raise SnackError(f"--layer {name}: {arguments.file} has no such sparse layer; its sparse layers are {names}")
    if kind == "density":
        drawn = plot.density(patterns)
    elif kind == "degrees":
        drawn = plot.degrees(patterns[name], name=f"layer {name}")[0]
    else:
        drawn = plot.connectivity(patterns[name], arguments.image, name=f"layer {name}")
    which = "" if kind == "density" else f" (layer {name}{f' of {names}' if len(patterns) > 1 else ''})"
    say(f"picture: {look.save(drawn.figure, path)}{which}")
    return 0
