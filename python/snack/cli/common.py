"""What the commands share: words for numbers, tables for people and for pipes, files that must be writable, and a polite Ctrl-C."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import threading
from pathlib import Path

from snack.errors import SnackError


def human_bytes(count: float) -> str:
    """``1234567`` → ``"1.18 MiB"``; three significant digits, binary units."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024 or unit == "GiB":
            break
        count /= 1024
    return f"{count:.0f} {unit}" if unit == "B" or abs(count) >= 99.95 else f"{count:.{1 if abs(count) >= 9.995 else 2}f} {unit}"


def human_time(us: float) -> str:
    """Microseconds → ``"87.3 µs"``, ``"1.24 ms"`` or ``"2.50 s"``; three significant digits."""
    for unit in ("µs", "ms", "s"):
        if abs(us) < 999.5 or unit == "s":
            break
        us /= 1000
    return f"{us:.{0 if abs(us) >= 99.95 else 1 if abs(us) >= 9.995 else 2}f} {unit}"


def human_ratio(ratio: float) -> str:
    """``2.345`` → ``"2.3×"``, ``0.0456`` → ``"0.046×"``, ``47.1`` → ``"47×"``: two significant digits."""
    digits = 0 if ratio >= 9.95 else 1 if ratio >= 0.995 else 2 if ratio >= 0.0995 else 3
    return f"{ratio:.{digits}f}×"


def is_terminal() -> bool:
    """Whether somebody is watching stdout, so that colours, boxes and moving bars make sense."""
    return sys.stdout.isatty() and os.environ.get("TERM") != "dumb"


def rich_console():
    """A rich Console on stdout, or None where output is piped or rich is not installed (then the same words come as plain text)."""
    if not is_terminal():
        return None
    try:
        from rich.console import Console
    except ImportError:
        return None
    return Console(highlight=False)


def say(text: str = "") -> None:
    """One line of plain text on stdout, at once."""
    print(text, flush=True)


def print_table(title: str, columns: list[str], rows: list[list[str]], strong: int | None = None) -> None:
    """A table, the first column left-aligned, the others right-aligned; column number ``strong`` stands out. Boxes only on a terminal."""
    console = rich_console()
    if console is None:
        say(title)
        widths = [max(len(line[i]) for line in [columns, *rows]) for i in range(len(columns))]
        for line in [columns, ["-" * w for w in widths], *rows]:
            say("  ".join(c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(line, widths))).rstrip())
        return
    from rich.table import Table

    table = Table(title=title, title_justify="left", title_style="bold")
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number == 0 else "right", style="bold cyan" if number == strong else "")
    for row in rows:
        table.add_row(*row)
    console.print(table)


def check_writable(path, option: str) -> None:
    """Raises SnackError where ``path`` could not be written, before any work is done. Leaves the file system as it was."""
    if path is None:
        return
    path = Path(path)
    existed = path.exists()
    try:
        with open(path, "ab"):
            pass
    except OSError as error:
        raise SnackError(
            f"{option} {path} cannot be written ({error.strerror}): give a file in a folder that exists and that you may write to"
        ) from error
    if not existed:
        path.unlink(missing_ok=True)


def write_json(path, document: dict) -> None:
    """Writes ``document`` as indented JSON, a list of numbers on one line, through a temporary file, so that a reader never sees half of
    it. Raises ValueError on NaN: what was not measured must be absent."""
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        text = json.dumps(document, indent=1, allow_nan=False, ensure_ascii=False)
        text = re.sub(r"\[\s+([-+.0-9eE,\s]+?)\s+\]", lambda match: "[" + " ".join(match[1].split()) + "]", text)
        temporary.write_text(text + "\n", encoding="utf-8")
        os.replace(temporary, path)
    except OSError as error:
        raise SnackError(f"{path} cannot be written ({error.strerror}): is the disk full?") from error
    finally:
        temporary.unlink(missing_ok=True)


class Interruptible:
    """``with Interruptible() as stop``: the first Ctrl-C only makes ``stop()`` true, the second one raises KeyboardInterrupt as usual."""

    def __init__(self):
        self.asked = False
        self._previous = None

    def __call__(self) -> bool:
        return self.asked

    def __enter__(self):
        if threading.current_thread() is threading.main_thread():
            self._previous = signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, *exception):
        if self._previous is not None:
            signal.signal(signal.SIGINT, self._previous)
        return False

    def _note(self, number, frame):
        self.asked = True
        signal.signal(signal.SIGINT, signal.default_int_handler)
