"""Shared by all commands: tables, progress, written files, and the line that says why a command could not run."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import shutil
import signal
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

COULD_NOT_RUN = 2
"""Exit code of a command that could not run, or could not finish."""

INTERRUPTED = 130
"""Exit code of a command that Ctrl-C has stopped: 128 plus the number of the signal, as in shells."""

ProgressCallback = Callable[[int, int, str], None]
"""A progress callback: the steps done, the total, and a description."""


class CannotRunError(Exception):
    """A command cannot run; the message is the one line to print."""


class StoppedError(CannotRunError):
    """Ctrl-C has stopped a command; the message says how far the command had come."""


def one_line(error: BaseException) -> str:
    """An error's type and message, in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def cannot_run(command: str, reason: object) -> int:
    """Print why a command could not run, as one line on stderr, and return its exit code."""
    sys.stdout.flush()
    print(f"contrastile {command}: {reason}", file=sys.stderr, flush=True)
    return INTERRUPTED if isinstance(reason, StoppedError) else COULD_NOT_RUN


def within(option: str, value: float, least: float, most: float = math.inf) -> None:
    """Raise CannotRunError unless an option is finite and between its smallest and its largest value."""

    def text(x: float) -> str:
        # not ``:g`` for an int, which may be too large for a float
        return f"{x:g}" if isinstance(x, float) else str(x)

    if isinstance(value, float) and not math.isfinite(value):
        raise CannotRunError(f"--{option} must be finite, got {value:g}")
    if value < least:
        raise CannotRunError(f"--{option} must be at least {least}, got {text(value)}")
    if value > most:
        raise CannotRunError(f"--{option} must be at most {text(most)}, got {text(value)}")


def ending(code: int) -> str:
    """How a process ended, by the exit code that ``subprocess`` gives it."""
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"died of {signal.Signals(-code).name}"
    except ValueError:
        return f"died of signal {-code}"


def require_packages(*names: str) -> None:
    """Raise CannotRunError if a package of the ``verify`` extra is missing."""
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    if missing:
        raise CannotRunError(f"{' and '.join(missing)} cannot be imported; run: pip install 'contrastile[verify]'")


def why_not_writable(*paths: Path | None) -> str | None:
    """Why one of the files that a command will write cannot be written, or None if all can.

    A command calls it before the work begins. It does not change any file. A path of None stands for no file.
    """
    for path in paths:
        if path is None:
            continue
        try:
            exists = path.exists()
            if exists and not path.is_file() and not path.is_dir():
                # do not open and close a pipe: its reader would see the end of the data
                continue
            with path.open("ab"):
                pass
            if not exists:
                path.unlink()
        except OSError as error:
            return f"cannot write {path}: {error.strerror}"
    return None


def write_json(path: Path, data: Any) -> None:
    """Write strict JSON: NaN and infinity are refused.

    Raises:
        CannotRunError: the file cannot be written.
    """
    write_text(path, json.dumps(data, indent=1, allow_nan=False) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write a file.

    Raises:
        CannotRunError: the file cannot be written.
    """
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise CannotRunError(f"cannot write {path}: {error.strerror}") from error


_ANSI = {"red": "31", "green": "32", "yellow": "33"}


def colored(text: str, color: str) -> str:
    """The text in bold and a colour if stdout is a terminal and NO_COLOR is not set, else the plain text."""
    if not color or not sys.stdout.isatty() or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return text
    return f"\033[1;{_ANSI[color]}m{text}\033[0m"


def wrapped(line: str, indent: str = "  ") -> str:
    """A line wrapped at words if stdout is a terminal, with all lines but the first indented, else the line."""
    if not sys.stdout.isatty():
        return line
    width = shutil.get_terminal_size().columns
    return textwrap.fill(line, width, subsequent_indent=indent, break_on_hyphens=False)


def show_table(
    title: str,
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    right: Sequence[int] = (),
    caption: str = "",
    color: Callable[[str], str] = lambda cell: "",
) -> None:
    """Print a table to stdout, and an empty line: see ``plain_table``; ``color`` maps a cell's text to its colour."""
    print(plain_table(title, columns, rows, right=right, color=color), *[caption] * bool(caption), "", sep="\n")


def plain_table(
    title: str,
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    right: Sequence[int] = (),
    color: Callable[[str], str] = lambda cell: "",
) -> str:
    """The table as text, one line per row; the columns of ``right`` are aligned to the right."""
    lines = [list(columns), *(list(row) for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(columns))]

    def text(line: Sequence[str]) -> str:
        cells = [
            cell.rjust(w) if i in right else cell.ljust(w) for i, (cell, w) in enumerate(zip(line, widths, strict=True))
        ]
        cells[-1] = cells[-1].rstrip()
        return "  ".join(colored(cell, color(cell.strip())) for cell in cells).rstrip()

    body = [text(line) for line in lines]
    return "\n".join([title, body[0], "-" * (sum(widths) + 2 * (len(widths) - 1)), *body[1:]])


@contextmanager
def progress(*, shown: bool = True, lines: bool = False) -> Iterator[ProgressCallback]:
    """A progress bar on stderr that disappears at the end; without a terminal or rich, ``lines`` prints each tenth."""
    # stderr is None in a process without a console
    if not shown or sys.stderr is None:
        yield lambda done, total, what: None
        return
    if importlib.util.find_spec("rich") is None or not sys.stderr.isatty():
        yield _report_tenths() if lines else lambda done, total, what: None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        Progress,
        TaskProgressColumn,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    texts = TextColumn("left"), TextColumn("{task.description}", markup=False)
    columns = BarColumn(bar_width=16), TaskProgressColumn(), TimeElapsedColumn(), TimeRemainingColumn(), *texts
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("")
        yield lambda done, total, what: bar.update(task, completed=done, total=total, description=what)


def _report_tenths() -> ProgressCallback:
    tenths = 0

    def report(done: int, total: int, what: str) -> None:
        nonlocal tenths
        if done * 10 // max(1, total) > tenths:
            tenths = done * 10 // max(1, total)
            print(f"{done} of {total}: {what}", file=sys.stderr, flush=True)

    return report
