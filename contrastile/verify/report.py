"""The report: a progress bar, a table of backends and properties, the failures, the verdict, and all of it as JSON."""

from __future__ import annotations

import importlib.metadata
import json
import math
import os
import platform
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from contrastile.verify.runner import Failure, Row
from contrastile.verify.strategies import REFUSED_SHARE


@contextmanager
def progress(*, shown: bool) -> Iterator[Callable[[int, int, str], None]]:
    """A progress bar on stderr, gone when done; the callback takes (done, total, what)."""
    if not shown:
        yield lambda done, total, what: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}", markup=False)
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("")
        yield lambda done, total, what: bar.update(task, completed=done, total=total, description=what)


def verdict(rows: Sequence[Row]) -> str:
    """Fail if any row did; else incomplete where too much was not tested to say more; else pass."""
    if any(row["status"] == "fail" for row in rows):
        return "fail"
    return "incomplete" if lacking(rows) else "pass"


def lacking(rows: Sequence[Row]) -> list[str]:
    """What keeps rows without a failure from being a pass, one line for each reason."""
    untested = Counter((row["backend"], row["reason"]) for row in rows if row["status"] == "untested")
    lines = [f"{backend}: {count} not tested: {reason}" for (backend, reason), count in untested.items()]
    claimed = [row for row in rows if row["status"] != "skip"]
    grouped: dict[tuple[str, str], list[Row]] = {}
    for row in claimed:
        grouped.setdefault((row["backend"], row["dtype"]), []).append(row)
    for (backend, dtype), of_these in grouped.items():
        refused = [row["reason"] for row in of_these if row["status"] == "refused"]
        if len(refused) > REFUSED_SHARE * len(of_these):
            lines.append(f"{backend}: refused {len(refused)} of {len(of_these)} in {dtype}: {refused[0]}")
    return lines


def environment() -> dict[str, Any]:
    """What the numbers were measured with; None for what is not installed."""
    return {
        "contrastile": _version("contrastile"),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "torch": _version("torch"),
        "platform": f"{platform.system()} {platform.machine()}",
        "cpu": _cpu(),
        "cores": os.cpu_count(),
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cpu() -> str:
    """The processor's name as the system gives it, else its architecture."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        text = ""
    named = [line.partition(":")[2].strip() for line in text.splitlines() if line.startswith("model name")]
    return named[0] if named else platform.processor() or platform.machine()


def as_json(rows: Sequence[Row]) -> dict[str, Any]:
    """``{"verdict", "environment", "rows"}``. A ratio of inf, which JSON lacks, becomes null beside its "fail"."""
    plain = [{**row, "ratio": _number(row["ratio"])} for row in rows]
    return {"verdict": verdict(rows), "environment": environment(), "rows": plain}


def _number(ratio: float | None) -> float | None:
    return ratio if ratio is not None and math.isfinite(ratio) else None


def write_json(path: Path, rows: Sequence[Row]) -> None:
    """Write ``as_json`` to a file.

    Raises:
        OSError: it cannot be written.
    """
    path.write_text(json.dumps(as_json(rows), indent=1, allow_nan=False) + "\n", encoding="utf-8")


_WORDS = {"fail": "failed", "pass": "passed", "refused": "refused", "untested": "not tested", "skip": "skipped"}
_ALWAYS = ("pass", "fail", "skip")


def cell(rows: Sequence[Row]) -> str:
    """One backend and property in short: the worst ratio, and how many passed, failed and were skipped."""
    count = Counter(row["status"] for row in rows)
    worst = _worst(rows)
    return f"{worst} ({', '.join(f'{count[status]} {word}' for status, word in _WORDS.items() if count[status])})"


def _worst(rows: Sequence[Row]) -> str:
    """The largest ratio, rounded down: what is below 1 never reads as 1."""
    ratios = [row["ratio"] for row in rows if row["ratio"] is not None]
    if not ratios:
        return "-"
    worst = max(ratios)
    return f"{math.floor(1000 * worst) / 1000:g}" if 0.1 < worst < 1 else f"{worst:.3g}"


def skips(rows: Sequence[Row]) -> list[str]:
    """What was skipped or refused and why, one line for each backend, property and reason."""
    grouped: dict[tuple[str, str], dict[str, list[Row]]] = {}
    for row in rows:
        if row["status"] in ("skip", "refused"):
            grouped.setdefault((row["backend"], row["reason"]), {}).setdefault(row["property"], []).append(row)
    lines = []
    for (backend, reason), properties in grouped.items():
        count = sum(map(len, properties.values()))
        which = ", ".join(properties) if len(properties) <= 3 else f"{len(properties)} properties"
        dtypes = ", ".join(dict.fromkeys(row["dtype"] for each in properties.values() for row in each))
        lines.append(f"{backend}: {which} ({count}; {dtypes}): {reason}")
    return lines


def summary(rows: Sequence[Row]) -> str:
    """The verdict in one line."""
    count = Counter(row["status"] for row in rows)
    shown = [status for status in ("pass", "fail", "refused", "untested", "skip") if count[status] or status in _ALWAYS]
    counts = ", ".join(f"{count[status]} {_WORDS[status]}" for status in shown)
    return f"{verdict(rows).upper()}: {counts}; largest error {_worst(rows)} of its bound"


def show(rows: Sequence[Row], failures: Sequence[Failure], *, quiet: bool) -> None:
    """Print the table and the skips, the failures, and the verdict; ``quiet`` leaves out the first two."""
    if not quiet:
        _table(rows)
    alike = Counter((failure.row["backend"], failure.row["reason"]) for failure in failures)
    for failure in failures:
        row = failure.row
        times = alike.pop((row["backend"], row["reason"]), 0)
        if not times:
            continue
        print(f"\nFAILED {row['backend']} {row['property']} {row['case']} {row['dtype']}")
        print(f"  {row['reason']}")
        if times > 1:
            print(f"  and {times - 1} more that end in these words")
        print(f"  error / bound = {failure.worst.ratio:.3g}")
        print(f"  rerun: {failure.command}")
    if verdict(rows) != "pass":
        for line in lacking(rows):
            print(line)
    print(summary(rows))
    sys.stdout.flush()


def _table(rows: Sequence[Row]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    grouped: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        grouped.setdefault((row["backend"], row["property"]), []).append(row)
    backends = list(dict.fromkeys(backend for backend, name in grouped if name != "all"))
    ranks = max((row["world"] for row in rows), default=1)
    title = "largest error / bound" + (f", as {ranks} ranks" if ranks > 1 else "")
    table = Table(title=title, caption="below 1 passes", caption_justify="left", title_justify="left")
    for heading in ("property", *backends):
        table.add_column(Text(heading))
    for name in dict.fromkeys(name for _, name in grouped if name != "all"):
        cells = [grouped.get((backend, name), []) for backend in backends]
        texts = (Text(cell(each), style="red" if verdict(each) == "fail" else "") for each in cells)
        table.add_row(Text(name), *texts)
    console.print(table)
    if skips(rows):
        console.print(Text("skipped"))
    for line in skips(rows):
        console.print(Text(f"  {line}", style="dim"))
