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
        backend: its name, or a loss's; and the names of the property and of the case.
        dtype: of the features, and how they are multiplied.
        compare: makes the comparisons; None for what a loss does not claim, and then ``reason`` says what that is.
        given: the options that select it; None for those left out.
        launch: the words that start the program on a world of so many ranks.
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
        """Backend, case, property and dtype in one."""
        words = [self.backend, self.case, self.property, self.dtype.replace("/", "-")]
        return "/".join([*words, *([f"{self.world}-ranks"] if self.world > 1 else [])])

    def command(self, case: str) -> str:
        """The command that makes it again, on a case."""
        of_a_case = {} if case == "all" else {"case": case}
        return shlex.join([*self.launch, "verify", *words({**self.given, **of_a_case})])

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
        return row, Failure(row, wrong(reason), "", self.command(self.case))

    def run(self, printed: Callable[[], str] = str) -> tuple[Row, Failure | None]:
        """Make the comparisons, and take the worst of them.

        A backend that prints meanwhile, which ``printed`` returns, or changes the process's modes, has failed; so has
        one that raises. If the property skips after some comparisons, they decide; if the backend refuses a problem
        after some comparisons, only a failure among them does.
        """
        if self.compare is None:
            return self.row(UNCLAIMED, reason=self.reason), None
        before, points = process.modes(), list[Point]()
        status, said, label, worst, excess = "untested", "the property compared nothing", "", NOTHING, 0.0
        try:
            # a backend may warn, and the oracle warns of NaN
            with warnings.catch_warnings(), np.errstate(all="ignore"):
                warnings.simplefilter("ignore", RuntimeWarning)
                for name, found in self.compare():
                    points += [] if found.point is None else [found.point]
                    ratio = math.inf if math.isnan(found.ratio) else found.ratio
                    excess = max(excess, ratio if math.isnan(found.excess) else found.excess)
                    if status == "untested" or ratio > worst.ratio:
                        status, said, label, worst = "pass" if ratio < 1 else "fail", "", name, found
        except SkipError as reason:
            if status == "untested":
                status, said = "skip", str(reason)
        except UnsupportedProblemError as reason:
            if status != "fail":
                status, said = "refused", str(reason)
        except FactsError as error:
            status, label, worst = "fail", "", wrong(str(error))
        except (Exception, SystemExit) as error:
            status, label, worst = "fail", "", wrong(f"raised {one_line(error)}")
        changed, text = process.changed(before, process.modes()), printed()
        wrongs = ([] if changed is None else [changed]) + ([f"printed to stdout: {text!r}"] if text else [])
        if wrongs and status != "fail":
            status, label, worst = "fail", "", wrong(wrongs[0])
        if status == "fail":
            # a problem that was drawn is a case of its own
            drawn = label.startswith(f"{self.case.partition(':')[0]}:")
            words = ": ".join(filter(None, (label, str(worst))))
            row = self.row("fail", worst.ratio, words, max(excess, worst.excess))
            return row, Failure(row, worst, label, self.command(label if drawn else self.case))
        row = self.row(status, worst.ratio, "", excess) if status == "pass" else self.row(status, reason=said)
        if points and status == "pass":
            row["points"] = points
        return row, None


def words(given: Mapping[str, Any]) -> list[str]:
    """Options as a command line has them; those that are None or False are left out."""
    found = []
    for name, value in given.items():
        if value is not None and value is not False:
            values = value if isinstance(value, list) else [value] * (value is not True)
            found += [f"--{name.replace('_', '-')}", *map(str, values)]
    return found


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
