"""Tables and progress: rich where it is installed, plain text where it is not."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

Row = Sequence[str]
Advance = Callable[[str, int], None]


def has_rich() -> bool:
    """Whether rich is installed."""
    return importlib.util.find_spec("rich") is not None


def show_table(title: str, columns: Sequence[str], rows: Sequence[Row], *, right: Sequence[int] = ()) -> None:
    """Prints a table to standard output.

    Args:
        title: printed above it.
        columns: headings.
        rows: cells, as many in each row as there are columns.
        right: columns to align to the right.
    """
    if not has_rich():
        print(plain_table(title, columns, rows, right=right))
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title)
    for i, column in enumerate(columns):
        table.add_column(column, justify="right" if i in right else "left", overflow="fold")
    for row in rows:
        # cells hold messages and names of other people's: never read as markup
        table.add_row(*(Text(cell) for cell in row))
    console = Console()
    if not console.is_terminal:
        # a file has no edge to wrap at
        console = Console(width=max(80, len(plain_table("", columns, rows).splitlines()[1]) + 3 * len(columns)))
    console.print(table)


def plain_table(title: str, columns: Sequence[str], rows: Sequence[Row], *, right: Sequence[int] = ()) -> str:
    """The table as text, one line a row."""
    lines = [list(columns), *(list(row) for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(columns))]

    def text(line: Sequence[str]) -> str:
        cells = (
            cell.rjust(w) if i in right else cell.ljust(w) for i, (cell, w) in enumerate(zip(line, widths, strict=True))
        )
        return "  ".join(cells).rstrip()

    body = [text(line) for line in lines]
    return "\n".join([title, body[0], "-" * (sum(widths) + 2 * (len(widths) - 1)), *body[1:]])


@contextmanager
def progress(total: int, *, quiet: bool = False) -> Iterator[Advance]:
    """A progress bar on standard error; gives ``advance(what, steps)``. Without a terminal, a line each tenth."""
    if quiet or not has_rich() or not sys.stderr.isatty():
        done = 0

        def report(what: str, steps: int) -> None:
            nonlocal done
            before, done = done, done + steps
            if not quiet and done * 10 // max(1, total) > before * 10 // max(1, total):
                print(f"{done} of {total}: {what}", file=sys.stderr, flush=True)

        yield report
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    bar = Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=Console(stderr=True),
    )
    with bar:
        task = bar.add_task("", total=total)

        def advance(what: str, steps: int) -> None:
            bar.update(task, description=what, advance=steps)

        yield advance
