"""Runs checks, of backends or of losses, and yields one row for each."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import NotRequired, Protocol, TypedDict

import numpy as np

from contrastile.backends.contract import UnsupportedProblemError
from contrastile.reporting import ProgressCallback, one_line
from contrastile.verify import process
from contrastile.verify.comparison import NOTHING, Comparisons, Point, Worst, wrong
from contrastile.verify.facts import FactsError
from contrastile.verify.trial import SkipError

UNCLAIMED = "unclaimed"
"""The status of what is not tested because a loss does not claim it."""


class Row(TypedDict):
    """One line of the report.

    ``status`` is "pass", "fail", "skip" (the property does not apply to this case, or the backend does not claim this
    dtype or device: then one row, of property and case "all"), "refused" (the backend refused a problem of a dtype and
    device that it claims), "untested", or of a loss ``UNCLAIMED``. ``ratio`` is max error / bound; inf where it is
    wrong by any bound, None where nothing was compared; ``excess`` the same without the rounding of the stored result:
    see ``comparison.Worst.beyond``. ``points`` are the measurements of "growth".
    """

    backend: str
    property: str
    case: str
    dtype: str
    device: str
    world: int
    ratio: float | None
    excess: float | None
    status: str
    reason: str
    points: NotRequired[list[Point]]


@dataclass(frozen=True, slots=True)
class Failure:
    """A row that failed, its worst element, and the command that reruns it."""

    row: Row
    worst: Worst
    label: str
    command: str


@dataclass(frozen=True, slots=True)
class Check:
    """One check, which yields one row.

    Attributes:
        backend: its name, or a loss's.
        property: its name.
        case: its name.
        dtype: of the features, and how they are multiplied.
        compare: makes the comparisons; None for what a loss does not claim.
        rerun: the command that makes it again, on a case.
        reason: what is not claimed.
        device: kind of device.
        world: the number of ranks.
        together: equal for checks that share what one of them computes.
    """

    backend: str
    property: str
    case: str
    dtype: str
    compare: Callable[[], Comparisons] | None
    rerun: Callable[[str], str]
    reason: str = ""
    device: str = "cpu"
    world: int = 1
    together: Hashable = None

    def row(self, status: str, ratio: float | None = None, reason: str = "", excess: float | None = None) -> Row:
        return Row(
            backend=self.backend,
            property=self.property,
            case=self.case,
            dtype=self.dtype,
            device=self.device,
            world=self.world,
            ratio=ratio,
            excess=excess,
            status=status,
            reason=reason,
        )


class CheckSource(Protocol):
    """What a run takes its checks from."""

    def checks(self) -> Iterator[Check]:
        """All checks, in a fixed order."""
        ...


@dataclass(slots=True)
class Run:
    """A run in progress: iterate over ``rows`` once; ``failures`` fills as it goes.

    Attributes:
        selection: what to run.
        progress: called with (rows done, rows in all, what was done).
        failures: the failures so far.
        begin: called before a check with (number, rows in all, row, command); the row is the one to report if the check
            never returns.
        printed: returns what the backend has printed since the last call.
        start: the number of the first row.
        share: (k, n) runs every n-th case from the k-th on.
        excluded: backends that are not run any more, and why.
        total: rows in all, known from the first on.
    """

    selection: CheckSource
    progress: ProgressCallback = lambda done, total, what: None
    failures: list[Failure] = field(default_factory=list)
    begin: Callable[[int, int, Row, str], None] = lambda number, total, row, command: None
    printed: Callable[[], str] = str
    start: int = 0
    share: tuple[int, int] = (0, 1)
    excluded: Mapping[str, str] = field(default_factory=dict)
    total: int = 0

    def rows(self) -> Iterator[Row]:
        for _, row in self.numbered():
            yield row

    def numbered(self) -> Iterator[tuple[int, Row]]:
        """The rows of this share, each with its number among all."""
        self.total = sum(1 for _ in self.selection.checks())
        before, place = None, -1
        for number, check in enumerate(self.selection.checks()):
            place += number == 0 or check.together != before
            before = check.together
            if number < self.start or place % self.share[1] != self.share[0]:
                continue
            row = self._row(number, check)
            self.progress(number + 1, self.total, f"{row['backend']} {row['dtype']} {row['case']} {row['property']}")
            yield number, row

    def _row(self, number: int, check: Check) -> Row:
        if check.compare is None:
            return check.row(UNCLAIMED, reason=check.reason)
        if check.backend in self.excluded:
            return check.row("untested", reason=self.excluded[check.backend])
        command = check.rerun(check.case)
        self.begin(number, self.total, check.row("untested", reason="the check did not return"), command)
        found = silent_worst_of(check.compare, self.printed)
        if found.status == "fail":
            if found.label.startswith(f"{check.case.partition(':')[0]}:"):
                # a problem that was drawn is a case of its own
                command = check.rerun(found.label)
            failed = check.row("fail", found.worst.ratio, found.said, found.excess)
            self.failures.append(Failure(failed, found.worst, found.label, command))
            return failed
        ratio, excess = (found.worst.ratio, found.excess) if found.status == "pass" else (None, None)
        row = check.row(found.status, ratio, found.reason, excess)
        if found.points:
            row["points"] = list(found.points)
        return row


@dataclass(frozen=True, slots=True)
class CheckResult:
    """The result of a check: its status, its worst comparison with a label, or why there is none."""

    status: str
    reason: str = ""
    label: str = ""
    worst: Worst = NOTHING
    excess: float = 0.0
    points: tuple[Point, ...] = ()

    @property
    def said(self) -> str:
        """The label and the worst comparison, in words."""
        return ": ".join(filter(None, (self.label, str(self.worst))))


def _failed(reason: str) -> CheckResult:
    return CheckResult("fail", worst=wrong(reason), excess=math.inf)


def worst_of(check: Callable[[], Comparisons]) -> CheckResult:
    """The worst of a property's comparisons; whoever changes the process's modes meanwhile has failed.

    A backend that raises has failed. If the property skips after some comparisons, they decide; if the backend refuses
    a problem after some comparisons, only a failure among them does.
    """
    before = process.modes()
    found = _worst_of(check)
    changed = process.changed(before, process.modes())
    return found if changed is None or found.status == "fail" else _failed(changed)


def _worst_of(check: Callable[[], Comparisons]) -> CheckResult:
    found = CheckResult("untested", "the property compared nothing")
    try:
        # a backend may warn, and the oracle warns of NaN
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore", RuntimeWarning)
            points: list[Point] = []
            for label, worst in check():
                if worst.point is not None:
                    points.append(worst.point)
                ratio = math.inf if math.isnan(worst.ratio) else worst.ratio
                excess = max(found.excess, ratio if math.isnan(worst.excess) else worst.excess)
                if found.status == "untested" or ratio > found.worst.ratio:
                    found = CheckResult("pass" if ratio < 1 else "fail", "", label, worst, excess)
                else:
                    found = replace(found, excess=excess)
            found = replace(found, points=tuple(points))
    except SkipError as reason:
        return CheckResult("skip", str(reason)) if found.status == "untested" else found
    except UnsupportedProblemError as reason:
        return found if found.status == "fail" else CheckResult("refused", str(reason))
    except FactsError as error:
        return _failed(str(error))
    except (Exception, SystemExit) as error:
        return _failed(f"raised {one_line(error)}")
    return found


def silent_worst_of(check: Callable[[], Comparisons], printed: Callable[[], str]) -> CheckResult:
    """The worst of a property's comparisons; whoever prints to stdout meanwhile has failed."""
    found = worst_of(check)
    said = printed()
    if said and found.status != "fail":
        return _failed(f"printed to stdout: {said!r}")
    return found
