"""Runs backends x dtypes x cases x properties and yields one row for each."""

from __future__ import annotations

import math
import shlex
import warnings
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import NotRequired, Protocol, TypedDict

import numpy as np

from contrastile.backends.arrays import FLOATS, ArrayLibrary
from contrastile.backends.contract import PRECISIONS, Backend, UnsupportedProblemError
from contrastile.reporting import ProgressCallback, one_line
from contrastile.verify import cases, sharded, strategies
from contrastile.verify.cases import Case
from contrastile.verify.comparison import NOTHING, Checks, Point, Worst, wrong
from contrastile.verify.distributed import DISTRIBUTED
from contrastile.verify.facts import FactsError
from contrastile.verify.properties import PROPERTIES, Property
from contrastile.verify.trial import SkipError, Subject, Trial
from contrastile.verify.truth import Truth, truth
from contrastile.verify.worlds import World

DTYPES = ("float32", *(dtype for dtype in FLOATS if dtype != "float32"))


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
    compare: Callable[[], Checks] | None
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


class Checked(Protocol):
    """What a run takes its checks from."""

    def checks(self) -> Iterator[Check]:
        """All checks, in a fixed order."""
        ...


@dataclass(frozen=True, slots=True)
class Selection:
    """What to run.

    Attributes:
        backends: by name.
        cases: names, also "drawn" and "drawn:..."; None for all.
        properties: names; None for all.
        dtypes: of the features; those that a backend does not take are skipped.
        device: kind of device; "auto" is a GPU for the backends that run on one, if there is a GPU, else the host.
        gpu: whether there is one; "auto" asks.
        workspace: see ``contract.Options``.
        keep: see ``contract.Options``.
        examples: problems to draw for each backend and dtype.
        seed: of everything random.
        precisions: of float32 products; those that a backend does not have are skipped. None for all that it has.
        world: the ranks, on which the distributed properties run and no others; None for a single process.
    """

    backends: dict[str, Backend]
    cases: Sequence[str] | None = None
    properties: Sequence[str] | None = None
    dtypes: Sequence[str] = DTYPES
    device: str = "auto"
    gpu: bool = False
    examples: int = 100
    seed: int = 0
    precisions: Sequence[str] | None = None
    workspace: int | None = None
    keep: int | None = None
    world: World | None = None

    def subjects(self, dtype: str) -> list[Subject]:
        """Each backend with this dtype, and with each precision of its float32 products."""
        found = []
        for name, backend in self.backends.items():
            available = [x for x in PRECISIONS if x in backend.precisions]
            precisions = (available if self.precisions is None else self.precisions) if dtype == "float32" else ["ieee"]
            how = self.place(backend), self.seed, self.examples
            sizes = self.workspace, self.keep
            found += [Subject(name, backend, dtype, *how, precision, *sizes, self.world) for precision in precisions]
        return found

    def place(self, backend: Backend) -> str:
        """The kind of device on which a backend runs."""
        if self.device != "auto":
            return self.device
        return "cuda" if self.gpu and "cuda" in backend.devices else "cpu"

    def chosen(self) -> list[Property]:
        """The selected properties, in the registry's order."""
        known = PROPERTIES if self.world is None else DISTRIBUTED
        return [each for name, each in known.items() if self.properties is None or name in self.properties]

    def case_names(self) -> list[str]:
        return [name for name in cases.names() if self.cases is None or name in self.cases]

    def own_cases(self, each: Property) -> list[str]:
        if each.case is None:
            return []
        if self.cases is None:
            return [each.case]
        return [name for name in self.cases if name.partition(":")[0] == each.case]

    def command(self, subject: Subject, each: Property, case: str) -> str:
        words = [*(["contrastile"] if self.world is None else self.world.launch), "verify"]
        words += [] if self.world is None else ["--world", self.world.name]
        words += ["--backend", subject.name, "--dtype", subject.dtype]
        if subject.dtype == "float32" and len(subject.backend.precisions) > 1:
            words += ["--precision", subject.precision]
        for name in ("workspace", "keep"):
            mib = getattr(self, name)
            words += [] if mib is None else [f"--{name}", str(mib)]
        words += ["--property", each.name, "--case", case, "--seed", str(self.seed)]
        if case in (strategies.CASE, sharded.CASE):
            words += ["--examples", str(self.examples)]
        if self.device != "auto":
            words += ["--device", self.device]
        return shlex.join(words)

    def checks(self) -> Iterator[Check]:
        """All checks, in a fixed order; a case's truth is held only from its first check to its last."""
        every_case, own_case = [p for p in self.chosen() if p.case is None], [p for p in self.chosen() if p.case]
        if not (every_case and self.case_names()) and not any(map(self.own_cases, own_case)):
            return
        for dtype in self.dtypes:
            subjects = []
            for subject in self.subjects(dtype):
                refusal = _refusal(subject)
                if refusal is None:
                    subjects.append(subject)
                else:
                    yield self._check(subject, _WHOLE, "all", partial(_skipped, refusal))
            for name in self.case_names() if every_case else ():
                case = cache(partial(cases.build, name, dtype))
                oracle = cache(partial(_truth, case))
                for subject in subjects:
                    trial = cache(partial(_trial, subject, case, oracle))
                    for each in every_case:
                        yield self._check(subject, each, name, partial(_of_a_trial, each, trial))
            for subject in subjects:
                for each in own_case:
                    for name in self.own_cases(each):
                        yield self._check(subject, each, name, partial(_of_a_subject, each, subject, name))

    def _check(self, subject: Subject, each: Property, case: str, compare: Callable[[], Checks]) -> Check:
        return Check(
            backend=subject.name,
            property=each.name,
            case=case,
            dtype=subject.label,
            compare=compare,
            rerun=partial(self.command, subject, each),
            device=subject.device,
            world=1 if subject.world is None else subject.world.size,
            together=(subject.dtype, case, each.name if each.case is not None else ""),
        )


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

    selection: Checked
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


def _truth(case: Callable[[], Case]) -> Truth:
    return truth(case().problem)


def _trial(subject: Subject, case: Callable[[], Case], oracle: Callable[[], Truth]) -> Trial:
    return Trial(subject, case(), oracle)


def _of_a_trial(each: Property, trial: Callable[[], Trial]) -> Checks:
    given = trial()
    _begin(given.subject)
    with one_thread(given.subject.backend.arrays, given.small):
        yield from each.check(given)


def _of_a_subject(each: Property, subject: Subject, case: str) -> Checks:
    _begin(subject)
    with one_thread(subject.backend.arrays, True):
        yield from each.check(subject, case)


@contextmanager
def one_thread(arrays: ArrayLibrary, wanted: bool) -> Iterator[None]:
    """In this context, and if ``wanted``, torch uses one thread: tiny products gain nothing from several.

    On busy cores, waiting for other threads would make them many times slower.
    """
    if arrays.name != "torch" or not wanted:
        yield
        return
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _begin(subject: Subject) -> None:
    if subject.world is not None:
        subject.world.begin()


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


def _skipped(reason: str) -> Checks:
    raise SkipError(reason)
    yield


_WHOLE = Property("all", _skipped)
"""Stands for every property of a backend that does not run with this dtype, device or precision."""


def _failed(reason: str) -> CheckResult:
    return CheckResult("fail", worst=wrong(reason), excess=math.inf)


def worst_of(check: Callable[[], Checks]) -> CheckResult:
    """The worst of a property's comparisons.

    A backend that raises has failed. If the property skips after some comparisons, they decide; if the backend refuses
    a problem after some comparisons, only a failure among them does.
    """
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


def silent_worst_of(check: Callable[[], Checks], printed: Callable[[], str]) -> CheckResult:
    """The worst of a property's comparisons; whoever prints to stdout meanwhile has failed."""
    found = worst_of(check)
    said = printed()
    if said and found.status != "fail":
        return _failed(f"printed to stdout: {said!r}")
    return found


def _refusal(subject: Subject) -> str | None:
    """Why the backend cannot run with this dtype, device or precision at all."""
    if subject.dtype not in subject.backend.dtypes:
        return f"takes {', '.join(sorted(subject.backend.dtypes))} only"
    if subject.device not in subject.backend.devices:
        return f"runs on {', '.join(sorted(subject.backend.devices))} only"
    if subject.dtype == "float32" and subject.precision not in subject.backend.precisions:
        return f"computes float32 in {', '.join(sorted(subject.backend.precisions))} only"
    return None
