"""``snack``: picks the command, and turns every failure into one sentence and an exit status.

Status 0: done. 1: the command itself found something wrong. 2: bad input (one sentence on stderr, nothing half-done). 130: Ctrl-C.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys

from snack.errors import SnackError


class _Parser(argparse.ArgumentParser):
    """Wrong arguments are a sentence like every other failure."""

    def error(self, message):
        raise SnackError(f"{message}; see `{self.prog} --help`")


def build_parser() -> argparse.ArgumentParser:
    """The parser with all commands. Importing a command's module must be cheap: what is heavy is imported when it runs."""
    from snack.cli import bench, convert, doctor, inspect, plot, prune, train

    parser = _Parser(
        prog="snack",
        description="Truly sparse neural networks: a zero is neither stored nor multiplied.",
        epilog="`snack COMMAND --help` explains a command. Start with `snack train`: a sparse network learns next to its dense twins.",
    )
    parser.add_argument("--version", action="store_true", help="print the version and leave")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=_Parser)
    for command in (train, bench, plot, doctor, inspect, convert, prune):
        command.add_parser(subparsers)
    return parser


def main(argv: list[str] | None = None) -> int:
    """Runs one command; ``argv`` without the program's name, default ``sys.argv[1:]``. Returns the exit status, prints no traceback of a
    failure that has a sentence."""
    try:
        parser = build_parser()
        arguments = parser.parse_args(argv)
        if arguments.version:
            import snack

            print(f"snack {snack.__version__}")
            return 0
        if arguments.command is None:
            parser.print_help()
            return 0
        # Absolute paths are of the machine, not of the run: their last part says enough.
        words = (word.rsplit("/", 1)[-1] if word.startswith("/") else word for word in (sys.argv[1:] if argv is None else argv))
        arguments.command_line = shlex.join(["snack", *words])
        return arguments.run(arguments)
    except SnackError as error:
        print(f"snack: {error}", file=sys.stderr)
        return 2
    except ImportError as error:  # the compiled operators, or an optional package; `snack doctor` says more
        print(f"snack: {str(error).removeprefix('snack: ')}", file=sys.stderr)
        return 2
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and not any(word in str(error) for word in ("can't allocate", "out of memory")):
            raise
        print("snack: there is not enough memory for what was asked; choose smaller layers, a smaller batch or a higher sparsity", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("snack: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of our output has left (`snack … | head`): that is no failure
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except SystemExit as leave:  # argparse, after --help
        return int(leave.code or 0)

