"""Runs checks, of backends or of losses, and yields one row for each."""

from __future__ import annotations

import math
import shlex
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NotRequired, TypedDict

import numpy as np

from contrastile.backends.contract import UnsupportedProblemError
from contrastile.reporting import ProgressCallback, one_line
from contrastile.verify import process
from contrastile.verify.comparison import NOTHING, Comparisons, Point, Worst, wrong
from contrastile.verify.facts import FactsError
from contrastile.verify.trial import SkipError

UNCLAIMED = "unclaimed"
"""The status of a check that is not run because the loss does not claim it."""


class Row(TypedDict):
    """One line of the report.

    ``status`` is "pass", "fail", "skip" (the property does not apply to this case, or the backend does not claim this
    dtype or device: then one row, of property and case "all"), "refused" (the backend refused a problem of a dtype and
    device that it claims), "untested", or, for a loss, ``UNCLAIMED``. ``ratio`` is max error / bound; inf where no
    bound allows the result, None where nothing was compared. ``excess`` is the ratio without the rounding of the stored
    result: see ``comparison.Worst.beyond``. ``points`` are the measurements of "growth".
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
        backend: name of the backend, or of the loss.
        dtype: of the features, with the precision of products: ``Subject.label``.
        compare: makes the comparisons; None if the loss does not claim the case: ``reason`` then names the claim.
        given: the options that select the check; None for an option that is left out.
        launch: the words that start the program on ``world`` ranks.
    """

    backend: str
    property: str
    case: str
    dtype: str
    compare: Callable[[], Comparisons] | None
    given: Mapping[str, Any]
    reason: str = ""
    device: str = "cpu"
    world: int = 1
    launch: Sequence[str] = ("contrastile",)

    def name(self) -> str:
        """The check's name: backend, case, property and dtype."""
        parts = [self.backend, self.case, self.property, self.dtype.replace("/", "-")]
        return "/".join([*parts, *([f"{self.world}-ranks"] if self.world > 1 else [])])

    def command(self, case: str) -> str:
        """The command that reruns the check on a case."""
        case_option = {} if case == "all" else {"case": case}
        return shlex.join([*self.launch, "verify", *words({**self.given, **case_option})])

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
        """The row and failure of a check that did not return."""
        row = self.row("fail", math.inf, reason, math.inf)
        return row, Failure(row, wrong(reason), "", self.command(self.case))

    def run(self, printed: Callable[[], str] = str) -> tuple[Row, Failure | None]:
        """Make the comparisons, and report the worst.

        The check fails if the backend raises, prints (``printed`` returns the text), or changes the process's modes.
        If the property skips after some comparisons, these decide; if the backend refuses a problem after some
        comparisons, the check is refused unless one of them failed.
        """
        if self.compare is None:
            return self.row(UNCLAIMED, reason=self.reason), None
        modes_before, points = process.modes(), list[Point]()
        status, reason, label, worst, excess = "untested", "the property compared nothing", "", NOTHING, 0.0
        try:
            # a backend may warn, and the oracle warns of NaN
            with warnings.catch_warnings(), np.errstate(all="ignore"):
                warnings.simplefilter("ignore", RuntimeWarning)
                for name, comparison in self.compare():
                    points += [] if comparison.point is None else [comparison.point]
                    ratio = math.inf if math.isnan(comparison.ratio) else comparison.ratio
                    excess = max(excess, ratio if math.isnan(comparison.excess) else comparison.excess)
                    if status == "untested" or ratio > worst.ratio:
                        status, reason, label, worst = "pass" if ratio < 1 else "fail", "", name, comparison
        except SkipError as error:
            if status == "untested":
                status, reason = "skip", str(error)
        except UnsupportedProblemError as error:
            if status != "fail":
                status, reason = "refused", str(error)
        except FactsError as error:
            status, label, worst = "fail", "", wrong(str(error))
        except (Exception, SystemExit) as error:
            status, label, worst = "fail", "", wrong(f"raised {one_line(error)}")
        changed, output = process.changed(modes_before, process.modes()), printed()
        faults = ([] if changed is None else [changed]) + ([f"printed to stdout: {output!r}"] if output else [])
        if faults and status != "fail":
            status, label, worst = "fail", "", wrong(faults[0])
        if status == "fail":
            # a drawn problem is a case of its own, which its label names
            is_drawn = label.startswith(f"{self.case.partition(':')[0]}:")
            message = ": ".join(filter(None, (label, str(worst))))
            row = self.row("fail", worst.ratio, message, max(excess, worst.excess))
            return row, Failure(row, worst, label, self.command(label if is_drawn else self.case))
        row = self.row(status, worst.ratio, "", excess) if status == "pass" else self.row(status, reason=reason)
        if points and status == "pass":
            row["points"] = points
        return row, None


def words(given: Mapping[str, Any]) -> list[str]:
    """Options as words of a command line; options that are None or False are left out."""
    arguments = []
    for name, value in given.items():
        if value is not None and value is not False:
            values = value if isinstance(value, list) else [value] * (value is not True)
            arguments += [f"--{name.replace('_', '-')}", *map(str, values)]
    return arguments


@dataclass(slots=True)
class Run:
    """Checks in this process, one after another: iterate over ``rows`` once; ``failures`` fills as it goes."""

    checks: Iterable[Check]
    progress: ProgressCallback = lambda done, total, what: None
    failures: list[Failure] = field(default_factory=list)
    fail_fast: bool = False

    def rows(self) -> Iterator[Row]:
        """One row for each check."""
        checks = list(self.checks)
        for number, check in enumerate(checks, 1):
            row, failure = check.run()
            self.failures += [] if failure is None else [failure]
            self.progress(number, len(checks), check.name())
            yield row
            if failure is not None and self.fail_fast:
                return
