"""The report of a run: what was missed, a table of the rooms, the verdict, and all of it as JSON."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from contrastile.mutate.registry import ROOMS
from contrastile.mutate.run import Result, Status
from contrastile.verify.report import environment

STATUSES: tuple[Status, ...] = ("caught", "missed", "equivalent", "broken", "not run")


def passed(results: Sequence[Result]) -> bool:
    """Whether every mutant that ran was caught, but for those that are equivalent; and some was."""
    count = Counter(result["status"] for result in results)
    return count["caught"] > 0 and not count["missed"] and not count["broken"]


def as_json(results: Sequence[Result]) -> dict[str, Any]:
    """``{"verdict", "environment", "counts", "mutants"}``."""
    count = Counter(result["status"] for result in results)
    return {
        "verdict": "pass" if passed(results) else "fail",
        "environment": environment(),
        "counts": {status: count[status] for status in STATUSES},
        "mutants": list(results),
    }


def write_json(path: Path, results: Sequence[Result]) -> None:
    """Write ``as_json`` to a file.

    Raises:
        OSError: it cannot be written.
    """
    path.write_text(json.dumps(as_json(results), indent=1, allow_nan=False) + "\n", encoding="utf-8")


def summary(results: Sequence[Result]) -> str:
    """The verdict in one line."""
    count = Counter(result["status"] for result in results)
    words = [f"{count['caught']} of {count['caught'] + count['missed']} mutants caught"]
    words += [f"{count[status]} {status}" for status in STATUSES[2:] if count[status]]
    return f"{'PASS' if passed(results) else 'FAIL'}: {', '.join(words)}"


def show(results: Sequence[Result], *, quiet: bool) -> None:
    """Print the table of the rooms, every mutant that was missed or does not fit, and the verdict."""
    if not quiet:
        _table(results)
    reasons = Counter((result["backend"], result["reason"]) for result in results if result["status"] == "not run")
    for (backend, reason), number in reasons.items():
        print(f"not run: {number} of {backend}: {reason}")
    for result in results:
        if result["status"] in ("missed", "broken"):
            print(f"{result['status'].upper()} {result['name']} ({result['backend']})")
            print(f"  {result['about']}: {result['reason']}")
    print(summary(results), flush=True)


def _table(results: Sequence[Result]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title="mutants", title_justify="left", caption="cases and s: the most that one took")
    for heading in ("room", *STATUSES, "cases", "s"):
        table.add_column(heading, justify="left" if heading == "room" else "right")
    for room in ROOMS:
        here = [result for result in results if result["name"].partition(":")[0] == room]
        if not here:
            continue
        count = Counter(result["status"] for result in here)
        caught = [result for result in here if result["status"] == "caught"]
        worst = max((result["problems"] for result in caught), default=0)
        seconds = max((result["seconds"] for result in caught), default=0.0)
        table.add_row(room, *(str(count[status]) for status in STATUSES), str(worst), f"{seconds:.1f}")
    Console().print(table)
