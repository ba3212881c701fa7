"""The report of a run: a table of backends and properties, the failures, the verdict, and all of it as JSON."""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Sequence
from typing import Any

from contrastile.environment import environment
from contrastile.reporting import show_table
from contrastile.verify.runner import Failure, Row
from contrastile.verify.strategies import REFUSED_SHARE


def verdict(rows: Sequence[Row]) -> str:
    """Returns "fail" if any row failed, else "incomplete" if too much was left untested, else "pass"."""
    if any(row["status"] == "fail" for row in rows):
        return "fail"
    return "incomplete" if gaps(rows) else "pass"


def gaps(rows: Sequence[Row]) -> list[str]:
    """Why rows without a failure are no pass: one line per reason."""
    untested = Counter((row["backend"], row["reason"]) for row in rows if row["status"] == "untested")
    lines = [f"{backend}: {count} not tested: {reason}" for (backend, reason), count in untested.items()]
    claimed: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        if row["status"] not in ("skip", "unclaimed"):
            claimed.setdefault((row["backend"], row["dtype"]), []).append(row)
    for (backend, dtype), group in claimed.items():
        refused = [row["reason"] for row in group if row["status"] == "refused"]
        if len(refused) > REFUSED_SHARE * len(group):
            lines.append(f"{backend}: refused {len(refused)} of {len(group)} in {dtype}: {refused[0]}")
    return lines


def as_json(rows: Sequence[Row]) -> dict[str, Any]:
    """``{"verdict", "environment", "rows"}``. A ratio of inf, which JSON lacks, becomes null beside its "fail"."""
    plain = [{**row, "ratio": _number(row["ratio"])} for row in rows]
    return {"verdict": verdict(rows), "environment": environment(), "rows": plain}


def _number(ratio: float | None) -> float | None:
    return ratio if ratio is not None and math.isfinite(ratio) else None


_WORDS = {
    "fail": "failed",
    "pass": "passed",
    "refused": "refused",
    "untested": "not tested",
    "skip": "skipped",
    "unclaimed": "not claimed",
}
_ALWAYS = ("pass", "fail", "skip")


def cell(rows: Sequence[Row]) -> str:
    """One backend and property in short: the worst ratio, and how many passed, failed and were skipped."""
    count = Counter(row["status"] for row in rows)
    counts = ", ".join(f"{count[status]} {word}" for status, word in _WORDS.items() if count[status])
    return f"{_worst(rows)} ({counts})"


def _worst(rows: Sequence[Row]) -> str:
    """The largest ratio, rounded down: below 1 it never reads as 1."""
    ratios = [row["ratio"] for row in rows if row["ratio"] is not None]
    if not ratios:
        return "-"
    worst = max(ratios)
    return f"{math.floor(1000 * worst) / 1000:g}" if 0.1 < worst < 1 else f"{worst:.3g}"


def skips(rows: Sequence[Row]) -> list[str]:
    """What was skipped or refused and why: one line per backend and reason."""
    grouped: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        if row["status"] in ("skip", "refused"):
            grouped.setdefault((row["backend"], row["reason"]), []).append(row)
    lines = []
    for (backend, reason), group in grouped.items():
        properties = list(dict.fromkeys(row["property"] for row in group))
        which = ", ".join(properties) if len(properties) <= 3 else f"{len(properties)} properties"
        dtypes = ", ".join(dict.fromkeys(row["dtype"] for row in group))
        lines.append(f"{backend}: {which} ({len(group)}; {dtypes}): {reason}")
    return lines


def unclaimed(rows: Sequence[Row]) -> list[str]:
    """What a loss does not claim: one line per loss and claim."""
    lines = []
    for row in rows:
        if row["status"] == "unclaimed":
            where = f" on {row['world']} ranks" if row["world"] > 1 else ""
            lines.append(f"{row['backend']}: {row['reason']}{where}")
    return list(dict.fromkeys(lines))


def summary(rows: Sequence[Row]) -> str:
    count = Counter(row["status"] for row in rows)
    shown = [
        status
        for status in ("pass", "fail", "refused", "untested", "skip", "unclaimed")
        if count[status] or status in _ALWAYS
    ]
    counts = ", ".join(f"{count[status]} {_WORDS[status]}" for status in shown)
    return f"{verdict(rows).upper()}: {counts}; largest error {_worst(rows)} of its bound"


def show(rows: Sequence[Row], failures: Sequence[Failure], *, quiet: bool) -> None:
    """Print the table and the skips, the failures, and the verdict; ``quiet`` leaves out the first two."""
    if not quiet:
        _table(rows)
    alike = Counter((failure.row["backend"], failure.row["reason"]) for failure in failures)
    for failure in failures:
        row = failure.row
        # popped at the first of its kind, so that the others are not printed again
        times = alike.pop((row["backend"], row["reason"]), 0)
        if not times:
            continue
        print(f"\nFAILED {row['backend']} {row['property']} {row['case']} {row['dtype']}")
        print(f"  {row['reason']}")
        if times > 1:
            print(f"  and {times - 1} more with the same reason")
        print(f"  error / bound = {failure.worst.ratio:.3g}")
        print(f"  rerun: {failure.command}")
    if verdict(rows) != "pass":
        print(*gaps(rows), sep="\n", end="\n" if gaps(rows) else "")
    print(summary(rows))
    sys.stdout.flush()


def _table(rows: Sequence[Row]) -> None:
    grouped: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        if row["property"] != "all":
            grouped.setdefault((row["property"], row["backend"]), []).append(row)
    properties, backends = (list(dict.fromkeys(key[i] for key in grouped)) for i in range(2))
    # of a loss, some rows are about one process and some about several
    ranks = min((row["world"] for row in rows), default=1)
    show_table(
        "largest error / bound" + (f", as {ranks} ranks" if ranks > 1 else ""),
        ["property", *backends],
        [[name, *(cell(grouped.get((name, backend), [])) for backend in backends)] for name in properties],
        caption="below 1 passes",
        style=lambda text: "red" if " failed" in text else "",
    )
    for title, lines in (("skipped", skips(rows)), ("not claimed, not tested", unclaimed(rows))):
        if lines:
            print(title, *lines, sep="\n  ")
