"""The report of a mutation run: a table of the components, what was missed, the verdict, and all of it as JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from contrastile.environment import environment
from contrastile.mutate.registry import COMPONENTS
from contrastile.mutate.run import Result, Status
from contrastile.reporting import show_table

STATUSES: tuple[Status, ...] = ("caught", "missed", "equivalent", "broken", "not run")


def passed(results: Sequence[Result]) -> bool:
    """Whether at least one mutant was caught, and every other that ran was caught or is equivalent."""
    count = Counter(result.status for result in results)
    return count["caught"] > 0 and not count["missed"] and not count["broken"]


def verdict(results: Sequence[Result], *, complete: bool = True) -> str:
    """What "pass" would hide: a run that was interrupted has not caught the others."""
    return "fail" if not passed(results) else "pass" if complete else "interrupted"


def as_json(results: Sequence[Result], *, complete: bool = True) -> dict[str, Any]:
    """``{"verdict", "environment", "counts", "mutants"}``."""
    count = Counter(result.status for result in results)
    return {
        "verdict": verdict(results, complete=complete),
        "environment": environment(),
        "counts": {status: count[status] for status in STATUSES},
        "mutants": list(map(asdict, results)),
    }


def summary(results: Sequence[Result], *, complete: bool = True) -> str:
    count = Counter(result.status for result in results)
    words = [f"{count['caught']} of {count['caught'] + count['missed']} mutants caught"]
    words += [f"{count[status]} {status}" for status in STATUSES[2:] if count[status]]
    return f"{verdict(results, complete=complete).upper()}: {', '.join(words)}"


def show(results: Sequence[Result], *, quiet: bool, complete: bool = True) -> None:
    """Print the table of the components, every mutant that was missed or does not fit, and the verdict."""
    if not quiet:
        _table(results)
    reasons = Counter((result.backend, result.reason) for result in results if result.status == "not run")
    for (backend, reason), number in reasons.items():
        print(f"not run: {number} of {backend}: {reason}")
    for result in results:
        if result.status in ("missed", "broken"):
            print(f"{result.status.upper()} {result.name} ({result.backend})")
            print(f"  {result.about}: {result.reason}")
    print(summary(results, complete=complete), flush=True)


def _table(results: Sequence[Result]) -> None:
    rows = []
    for component in COMPONENTS:
        here = [result for result in results if result.name.partition(":")[0] == component]
        if not here:
            continue
        count = Counter(result.status for result in here)
        caught = [result for result in here if result.status == "caught"]
        problems = max((result.problems for result in caught), default=0)
        seconds = max((result.seconds for result in caught), default=0.0)
        rows.append([component, *(str(count[status]) for status in STATUSES), str(problems), f"{seconds:.1f}"])
    headings = ["component", *STATUSES, "cases", "s"]
    caption = "cases and s: the most until one mutant was caught"
    show_table("mutants", headings, rows, right=range(1, len(headings)), caption=caption)
