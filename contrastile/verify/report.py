"""The report of a run: a table of backends and dtypes, the failures by cause, the verdict, and all of it as JSON."""

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
    """Returns "fail" if any row failed, else "incomplete" if too much was left untested, else "pass"."""
    if any(row["status"] == "fail" for row in rows):
        return "fail"
    return "incomplete" if gaps(rows) else "pass"


def loose(rows: Sequence[Row]) -> bool:
    """Whether it fails by its noise alone: within every derived bound, and above that of a plain computation."""
    failed = [row for row in rows if row["status"] == "fail"]
    return bool(failed) and all(row["property"] == "plain" and math.isfinite(row["ratio"] or 0.0) for row in failed)


def gaps(rows: Sequence[Row]) -> list[str]:
    """Why rows without a failure are no pass: one line per reason."""
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
    """The items by their keys, in the order in which the keys are first met."""
    found: dict[K, list[T]] = {}
    for item in items:
        found.setdefault(key(item), []).append(item)
    return found


def as_json(rows: Sequence[Row], **facts: Any) -> dict[str, Any]:
    """``{"verdict", "loose", **facts, "environment", "rows"}``. Infinite ratios become null, for JSON."""
    plain = [{**row, "ratio": _number(row["ratio"]), "excess": _number(row["excess"])} for row in rows]
    return {"verdict": verdict(rows), "loose": loose(rows), **facts, "environment": environment(), "rows": plain}


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
"""Columns of one kind of check; the others share one, and the worst of them is named."""

_MEMORY = ("saved-bytes", "peak-memory")


def worst(rows: Iterable[Row]) -> str:
    """The largest excess, rounded down: below 1 it never reads as 1. "-" where nothing was compared."""
    most = max((row["excess"] for row in rows if row["excess"] is not None), default=None)
    if most is None:
        return "-"
    return f"{math.floor(1000 * most) / 1000:g}" if 0.1 < most < 1 else f"{most:.2g}"


def _cell(rows: Sequence[Row]) -> str:
    # how far off it is stands with the failure
    return "FAIL" if any(row["status"] == "fail" for row in rows) else worst(rows)


def table(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """Columns and cells: for each backend and dtype the largest error over its bound, and how many checks passed."""
    compared = [row for row in rows if row["property"] != "all"]
    own = [name for name in _OWN_COLUMN if any(_kind(row) == name for row in compared)]
    some_failed = any(row["status"] == "fail" for row in compared)
    columns, cells = ["backend", "dtype", *own, "others", "passed", *["failed"] * some_failed], []
    # the rows come dtype by dtype
    by_backend = [row for rows_of_one in grouped(compared, lambda row: row["backend"]).values() for row in rows_of_one]
    for (backend, device, dtype), group in grouped(
        by_backend, lambda row: (row["backend"], row["device"], row["dtype"])
    ).items():
        by_kind = grouped(group, _kind)
        others = [row for row in group if _kind(row) not in own and row["excess"] is not None]
        top = max(others, key=lambda row: row["excess"] or 0.0, default=None)
        count = Counter(row["status"] for row in group)
        cells.append(
            [
                backend if device == "cpu" else f"{backend} on {device}",
                dtype,
                *(_cell(by_kind.get(name, ())) for name in own),
                "-" if top is None else f"{_cell([top])} {top['property']}",
                str(count["pass"]),
                *[str(count["fail"])] * some_failed,
            ]
        )
    return columns, cells


def _kind(row: Row) -> str:
    return "memory" if row["property"] in _MEMORY else row["property"]


def skips(rows: Sequence[Row]) -> list[str]:
    """What was skipped or refused and why, one line for each reason; backends that did not run at all left out."""
    absent = {name for name, _ in not_run(rows)}
    lines = []
    own = [row for row in rows if row["status"] in ("skip", "refused") and row["backend"] not in absent]
    for reason, group in grouped(own, lambda row: row["reason"]).items():
        properties = _few((row["property"] for row in group if row["property"] != "all"), "properties")
        if not properties:
            # the backend does not run in this dtype
            where = (
                f"{backend} {dtype}" for backend, dtype in dict.fromkeys((r["backend"], r["dtype"]) for r in group)
            )
            lines.append(f"{', '.join(where)}: {reason}")
        else:
            refused = "refused " if group[0]["status"] == "refused" else ""
            lines.append(f"{refused}{len(group)} of {properties}: {reason}")
    return lines


def unclaimed(rows: Sequence[Row]) -> list[str]:
    """What a loss does not claim: one line per loss and claim."""
    lines = []
    for row in rows:
        if row["status"] == "unclaimed":
            where = f" on {row['world']} ranks" if row["world"] > 1 else ""
            lines.append(f"{row['backend']}: {row['reason']}{where}")
    return list(dict.fromkeys(lines))


def _few(names: Iterable[str], of: str) -> str:
    """The distinct names, or their number where they are more than three."""
    found = list(dict.fromkeys(names))
    return ", ".join(found) if len(found) <= 3 else f"{len(found)} {of}"


def not_run(rows: Sequence[Row]) -> list[tuple[str, str]]:
    """The backends that did not run at all, each with the reason."""
    found = []
    for backend, group in grouped(rows, lambda row: row["backend"]).items():
        if all(row["property"] == "all" and row["status"] == "skip" for row in group):
            found.append((backend, group[0]["reason"].partition(" is not available: ")[2] or group[0]["reason"]))
    return found


def summary(rows: Sequence[Row], seconds: float | None = None, left_out: Sequence[str] = ()) -> str:
    """The verdict in one line: counts, duration, the largest error, and what was not tested and why."""
    count = Counter(row["status"] for row in rows if row["status"] != "skip" or row["property"] != "all")
    shown = {status: word for status, word in _WORDS.items() if count[status] or status in _ALWAYS}
    counts = ", ".join(f"{count[status]} {word}" for status, word in shown.items())
    took = "" if seconds is None else f" in {seconds:.2g} s" if seconds < 10 else f" in {seconds:.0f} s"
    errors = [row for row in rows if row["property"] not in _MEMORY]
    how = " (loose, not wrong: within every bound, and noisier than a plain computation)" if loose(rows) else ""
    line = f"{verdict(rows).upper()}: {counts}{how}{took}; largest error {worst(errors)} of its bound"
    missing = [*left_out, *(f"{name} ({reason})" for name, reason in not_run(rows))]
    return f"{line}; not tested: {', '.join(missing)}" if missing else line


def causes(failures: Sequence[Failure]) -> list[list[Failure]]:
    """The failures, those of one cause together.

    What fails after the first failure of a case of one backend and dtype counts as its consequence. Two such first
    failures have one cause where they are of one backend and property and say the same but for numbers.
    """
    first: dict[tuple[str, ...], tuple[str, ...]] = {}

    def cause(failure: Failure) -> tuple[str, ...]:
        row = failure.row
        said = row["backend"], row["property"], re.sub(r"[-\d.e+]*\d", "#", failure.worst.field)
        return first.setdefault((row["backend"], row["dtype"], row["case"]), said)

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
    found = verdict(rows)
    if found != "pass":
        print(*gaps(rows), sep="\n", end="\n" if gaps(rows) else "")
    color = {"pass": "green", "fail": "red", "incomplete": "yellow"}[found]
    word, _, rest = wrapped(summary(rows, seconds, left_out)).partition(":")
    print(f"{colored(word, color)}:{rest}")
    sys.stdout.flush()


def _show_failures(group: Sequence[Failure]) -> None:
    """The first failure of a cause, and how many others there are."""
    failure, *others = group
    row = failure.row
    print(f"\n{colored('FAILED', 'red')} {row['backend']} {row['property']} {row['case']} {row['dtype']}")
    print(f"  {row['reason']}")
    print(f"  error / bound = {failure.worst.ratio:.3g}")
    print(f"  rerun: {failure.command}")
    if others:
        found = [each.row for each in others]
        words = ("property", "properties"), ("case", "cases"), ("dtype", "dtypes")
        where = "; ".join(_few((str(each[one]) for each in found), several) for one, several in words)  # type: ignore[literal-required]
        print(f"  and {len(others)} more, likely of the same cause: {where}")


def _show_table(rows: Sequence[Row]) -> None:
    # of a loss, some rows are about one process and some about several
    ranks = min((row["world"] for row in rows), default=1)
    columns, cells = table(rows)
    show_table(
        "largest error / bound, below 1 passes" + (f"; {ranks} ranks" if ranks > 1 else ""),
        columns,
        cells,
        right=range(2, len(columns)),
        caption="without the unavoidable rounding of a result to its own dtype",
        style=lambda text: "red" if text.startswith("FAIL") else "",
    )
    for title, lines in (("skipped", skips(rows)), ("not claimed, not tested", unclaimed(rows))):
        if lines:
            print(title, *(wrapped(f"  {line}", "    ") for line in lines), sep="\n")
