"""Runs checks, of backends or of losses, and yields one row for each."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
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

    def name(self) -> str:
        """Backend, case, property and dtype in one."""
        words = [self.backend, self.case, self.property, self.dtype.replace("/", "-")]
        return "/".join([*words, *([f"{self.world}-ranks"] if self.world > 1 else [])])

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

    def failed(self, reason: str) -> tuple[Row, Failure]:
        """What there is to report where the check did not return."""
        row = self.row("fail", math.inf, reason, math.inf)
        return row, Failure(row, wrong(reason), "", self.rerun(self.case))

    def run(self, printed: Callable[[], str] = str) -> tuple[Row, Failure | None]:
        """Make the comparisons; whoever prints meanwhile, which ``printed`` returns, has failed."""
        if self.compare is None:
            return self.row(UNCLAIMED, reason=self.reason), None
        found = worst_of(self.compare)
        said = printed()
        if said and found.status != "fail":
            found = _failed(f"printed to stdout: {said!r}")
        if found.status == "fail":
            # a problem that was drawn is a case of its own
            drawn = found.label.startswith(f"{self.case.partition(':')[0]}:")
            row = self.row("fail", found.worst.ratio, found.said, found.excess)
            return row, Failure(row, found.worst, found.label, self.rerun(found.label if drawn else self.case))
        ratio, excess = (found.worst.ratio, found.excess) if found.status == "pass" else (None, None)
        row = self.row(found.status, ratio, found.reason, excess)
        if found.points:
            row["points"] = list(found.points)
        return row, None


class CheckSource(Protocol):
    """What a run takes its checks from."""

    def checks(self) -> Iterator[Check]:
        """All checks, in a fixed order."""
        ...


@dataclass(slots=True)
class Run:
    """Checks in this process, one after another: iterate over ``rows`` once; ``failures`` fills as it goes.

    Attributes:
        selection: what to run.
        progress: called with (rows done, rows in all, what was done).
        failures: the failures so far.
    """

    selection: CheckSource
    progress: ProgressCallback = lambda done, total, what: None
    failures: list[Failure] = field(default_factory=list)

    def rows(self) -> Iterator[Row]:
        """One row for each check."""
        total = sum(1 for _ in self.selection.checks())
        for number, check in enumerate(self.selection.checks(), 1):
            row, failure = check.run()
            self.failures += [] if failure is None else [failure]
            self.progress(number, total, check.name())
            yield row


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
