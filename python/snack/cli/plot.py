"""``snack plot FILE``: the picture of a results file."""

from __future__ import annotations

from pathlib import Path

from snack.cli.common import say

DESCRIPTION = """Draws a results file again, without measuring anything: a training run of `snack train --json`, or a suite of `snack bench`."""


def add_parser(subparsers) -> None:
    """Registers the command and its options."""
    parser = subparsers.add_parser("plot", help="draw a results file", description=DESCRIPTION)
    parser.add_argument("file", metavar="FILE.json", help="what `snack train --json` or `snack bench` wrote")
    parser.add_argument("--figure", metavar="FILE.png", help="the picture (default: FILE.png beside where you are)")
    parser.set_defaults(run=run)


def run(arguments) -> int:
    """Draws the file and says where the picture is."""
    from snack.bench import records
    from snack.cli import bench_figure, figure, paper_figure

    document = records.read(arguments.file)
    path = arguments.figure or f"{Path(arguments.file).stem}.png"
    is_training = any("contender" in record for record in document["records"])
    painter = figure if is_training else paper_figure if document.get("suite") in paper_figure.SUITES else bench_figure
    say(f"picture: {painter.draw(document, path)}")
    return 0
