"""The report of a run: a table of backends and dtypes, the failures by cause, the verdict, and a JSON record."""

from __future__ import annotations

import math
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from contrastile.environment import environment
from contrastile.reporting import colored, show_table, wrapped
from contrastile.verify.runner import Failure, Row
from contrastile.verify.strategies import REFUSED_SHARE

K = TypeVar("K")
T = TypeVar("T")


def verdict(rows: Sequence[Row]) -> str:
    """Return "fail" if any row failed, else "incomplete" if too much was left untested, else "pass"."""
    if any(row["status"] == "fail" for row in rows):
        return "fail"
    return "incomplete" if gaps(rows) else "pass"


def loose(rows: Sequence[Row]) -> bool:
    """Whether only ``plain`` fails: errors are within all derived bounds, but noisier than a plain computation."""
    failed = [row for row in rows if row["status"] == "fail"]
    return bool(failed) and all(row["property"] == "plain" and math.isfinite(row["ratio"] or 0.0) for row in failed)


def gaps(rows: Sequence[Row]) -> list[str]:
    """The reasons why rows without a failure do not pass, one line each."""
    untested = Counter((row["backend"], row["reason"]) for row in rows if row["status"] == "untested")
    lines = [f"{backend}: {count} not tested: {reason}" for (backend, reason), count in untested.items()]
    tested = (row for row in rows if row["status"] not in ("skip", "unclaimed"))
    claimed = grouped(tested, lambda row: (row["backend"], row["dtype"]))
    for (backend, dtype), group in claimed.items():
        refused = [row["reason"] for row in group if row["status"] == "refused"]
        if len(refused) > REFUSED_SHARE * len(group):
            lines.append(f"{backend}: refused {len(refused)} of {len(group)} in {dtype}: {refused[0]}")
    return lines


def grouped(items: Iterable[T], key: Callable[[T], K]) -> dict[K, list[T]]:
    """The items by key; keys are in order of first appearance."""
    groups: dict[K, list[T]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def as_json(rows: Sequence[Row], **facts: Any) -> dict[str, Any]:
    """``{"verdict", "loose", **facts, "environment", "rows"}``. Infinite ratios become null, for JSON."""
    json_rows = [{**row, "ratio": _number(row["ratio"]), "excess": _number(row["excess"])} for row in rows]
    return {"verdict": verdict(rows), "loose": loose(rows), **facts, "environment": environment(), "rows": json_rows}


def _number(ratio: float | None) -> float | None:
    return ratio if ratio is not None and math.isfinite(ratio) else None


_WORDS = {
    "pass": "passed",
    "fail": "failed",
    "refused": "refused",
    "untested": "not tested",
    "skip": "skipped",
    "unclaimed": "not claimed",
}
_ALWAYS = ("pass", "fail", "skip")
_OWN_COLUMN = ("value", "gradients", "plain", "drawn", "ring", "gather", "sharded", "memory")
"""Kinds of checks with a column of their own; the other kinds share a column, which names the worst."""

_MEMORY = ("saved-bytes", "peak-memory")


def worst(rows: Iterable[Row]) -> str:
    """The largest excess, rounded down: below 1 it never reads as 1. "-" where nothing was compared."""
    largest_excess = max((row["excess"] for row in rows if row["excess"] is not None), default=None)
    if largest_excess is None:
        return "-"
    return f"{math.floor(1000 * largest_excess) / 1000:g}" if 0.1 < largest_excess < 1 else f"{largest_excess:.2g}"


def _cell(rows: Sequence[Row]) -> str:
    # the failure itself reports the error
    return "FAIL" if any(row["status"] == "fail" for row in rows) else worst(rows)


def table(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """Columns and cells: for each backend and dtype the largest error / bound, and the number of passed checks."""
    compared = [row for row in rows if row["property"] != "all"]
    own_columns = [name for name in _OWN_COLUMN if any(_kind(row) == name for row in compared)]
    has_failures = any(row["status"] == "fail" for row in compared)
    columns, cells = ["backend", "dtype", *own_columns, "others", "passed", *["failed"] * has_failures], []
    # rows are ordered by dtype: order them by backend
    by_backend = [row for group in grouped(compared, lambda row: row["backend"]).values() for row in group]
    for (backend, device, dtype), group in grouped(
        by_backend, lambda row: (row["backend"], row["device"], row["dtype"])
    ).items():
        by_kind = grouped(group, _kind)
        others = [row for row in group if _kind(row) not in own_columns and row["excess"] is not None]
        worst_other = max(others, key=lambda row: row["excess"] or 0.0, default=None)
        counts = Counter(row["status"] for row in group)
        cells.append(
            [
                backend if device == "cpu" else f"{backend} on {device}",
                dtype,
                *(_cell(by_kind.get(name, ())) for name in own_columns),
                "-" if worst_other is None else f"{_cell([worst_other])} {worst_other['property']}",
                str(counts["pass"]),
                *[str(counts["fail"])] * has_failures,
            ]
        )
    return columns, cells


def _kind(row: Row) -> str:
    return "memory" if row["property"] in _MEMORY else row["property"]


def skips(rows: Sequence[Row]) -> list[str]:
    """Skipped and refused checks, one line for each reason, without the backends that did not run at all."""
    absent = {name for name, _ in not_run(rows)}
    lines = []
    skipped = [row for row in rows if row["status"] in ("skip", "refused") and row["backend"] not in absent]
    for reason, group in grouped(skipped, lambda row: row["reason"]).items():
        properties = _few((row["property"] for row in group if row["property"] != "all"), "properties")
        if not properties:
            # every row is of property "all": the backend does not run in this dtype
            dtypes = (
                f"{backend} {dtype}" for backend, dtype in dict.fromkeys((r["backend"], r["dtype"]) for r in group)
            )
            lines.append(f"{', '.join(dtypes)}: {reason}")
        else:
            refused = "refused " if group[0]["status"] == "refused" else ""
            lines.append(f"{refused}{len(group)} of {properties}: {reason}")
    return lines


def unclaimed(rows: Sequence[Row]) -> list[str]:
    """The checks that losses do not claim, one line per loss and claim."""
    lines = []
    for row in rows:
        if row["status"] == "unclaimed":
            where = f" on {row['world']} ranks" if row["world"] > 1 else ""
            lines.append(f"{row['backend']}: {row['reason']}{where}")
    return list(dict.fromkeys(lines))


def _few(names: Iterable[str], of: str) -> str:
    """The distinct names, or their number if there are more than three."""
    distinct = list(dict.fromkeys(names))
    return ", ".join(distinct) if len(distinct) <= 3 else f"{len(distinct)} {of}"


def not_run(rows: Sequence[Row]) -> list[tuple[str, str]]:
    """The backends that did not run at all, each with the reason."""
    backends = []
    for backend, group in grouped(rows, lambda row: row["backend"]).items():
        if all(row["property"] == "all" and row["status"] == "skip" for row in group):
            backends.append((backend, group[0]["reason"].partition(" is not available: ")[2] or group[0]["reason"]))
    return backends


def summary(rows: Sequence[Row], seconds: float | None = None, left_out: Sequence[str] = ()) -> str:
    """The verdict in one line: counts, duration, the largest error, and what was not tested and why."""
    by_status = Counter(row["status"] for row in rows if row["status"] != "skip" or row["property"] != "all")
    words = {status: word for status, word in _WORDS.items() if by_status[status] or status in _ALWAYS}
    counts = ", ".join(f"{by_status[status]} {word}" for status, word in words.items())
    duration = "" if seconds is None else f" in {seconds:.2g} s" if seconds < 10 else f" in {seconds:.0f} s"
    errors = [row for row in rows if row["property"] not in _MEMORY]
    explanation = " (loose, not wrong: within every bound, and noisier than a plain computation)" if loose(rows) else ""
    line = f"{verdict(rows).upper()}: {counts}{explanation}{duration}; largest error {worst(errors)} of its bound"
    missing = [*left_out, *(f"{name} ({reason})" for name, reason in not_run(rows))]
    return f"{line}; not tested: {', '.join(missing)}" if missing else line


def causes(failures: Sequence[Failure]) -> list[list[Failure]]:
    """The failures, grouped by likely cause.

    Later failures of a case, backend and dtype count as consequences of the first. Two first failures have the same
    cause if their backends and properties are equal, and their messages differ only in numbers.
    """
    first: dict[tuple[str, ...], tuple[str, ...]] = {}

    def cause(failure: Failure) -> tuple[str, ...]:
        row = failure.row
        message = row["backend"], row["property"], re.sub(r"[-\d.e+]*\d", "#", failure.worst.field)
        return first.setdefault((row["backend"], row["dtype"], row["case"]), message)

    return list(grouped(failures, cause).values())


def show(
    rows: Sequence[Row],
    failures: Sequence[Failure],
    *,
    quiet: bool,
    seconds: float | None = None,
    left_out: Sequence[str] = (),
) -> None:
    """Print the table and the skips, the failures, and the verdict; ``quiet`` leaves out the first two."""
    if not quiet:
        _show_table(rows)
    for group in causes(failures):
        _show_failures(group)
    result = verdict(rows)
    if result != "pass":
        print(*gaps(rows), sep="\n", end="\n" if gaps(rows) else "")
    color = {"pass": "green", "fail": "red", "incomplete": "yellow"}[result]
    word, _, rest = wrapped(summary(rows, seconds, left_out)).partition(":")
    print(f"{colored(word, color)}:{rest}")
    sys.stdout.flush()


def _show_failures(group: Sequence[Failure]) -> None:
    """Print the first failure of a cause, and the number of others."""
    failure, *others = group
    row = failure.row
    print(f"\n{colored('FAILED', 'red')} {row['backend']} {row['property']} {row['case']} {row['dtype']}")
    print(f"  {row['reason']}")
    print(f"  error / bound = {failure.worst.ratio:.3g}")
    print(f"  rerun: {failure.command}")
    if others:
        rows = [other.row for other in others]
        nouns = ("property", "properties"), ("case", "cases"), ("dtype", "dtypes")
        details = "; ".join(_few((str(row[field]) for row in rows), plural) for field, plural in nouns)  # type: ignore[literal-required]
        print(f"  and {len(others)} more, likely of the same cause: {details}")


def _show_table(rows: Sequence[Row]) -> None:
    # some rows of a loss are for one process, and others for several
    ranks = min((row["world"] for row in rows), default=1)
    columns, cells = table(rows)
    show_table(
        "largest error / bound, below 1 passes" + (f"; {ranks} ranks" if ranks > 1 else ""),
        columns,
        cells,
        right=range(2, len(columns)),
        caption="without the unavoidable rounding of a result to its own dtype",
        color=lambda text: "red" if text.startswith("FAIL") else "",
    )
    for title, lines in (("skipped", skips(rows)), ("not claimed, not tested", unclaimed(rows))):
        if lines:
            print(title, *(wrapped(f"  {line}", "    ") for line in lines), sep="\n")
