"""Runs backends x dtypes x cases x properties and yields one row for each."""

from __future__ import annotations

import math
import shlex
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypedDict

import numpy as np

from contrastile.backends.arrays import FLOATS
from contrastile.backends.contract import PRECISIONS, Backend, UnsupportedProblemError
from contrastile.verify import cases, sharded, strategies
from contrastile.verify.distributed import DISTRIBUTED
from contrastile.verify.memory import one_thread
from contrastile.verify.properties import PROPERTIES, Checks, Property
from contrastile.verify.run import Worst
from contrastile.verify.trial import SkipError, Subject, Trial
from contrastile.verify.truth import truth
from contrastile.verify.worlds import World

DTYPES = ("float32", *(dtype for dtype in FLOATS if dtype != "float32"))


class Row(TypedDict):
    """One line of the report. ``ratio`` is max error / bound; None for a skip, inf where no bound could hold."""

    backend: str
    property: str
    case: str
    dtype: str
    world: int
    ratio: float | None
    status: str
    reason: str


@dataclass(frozen=True, slots=True)
class Failure:
    """A row that failed, what it saw and the command that reruns it."""

    row: Row
    worst: Worst
    label: str
    command: str


@dataclass(frozen=True, slots=True)
class Selection:
    """What to run.

    Attributes:
        backends: by the names they are called.
        cases: names, "drawn" and "drawn:..." among them; None for all.
        properties: names; None for all.
        dtypes: those of them run that a backend takes.
        precisions: for float32, those that a backend does not name are skipped; None for all that it names.
        device: kind of device.
        examples: problems to draw for each backend and dtype.
        seed: of everything random.
        world: the ranks of the distributed properties, which are then the ones that run; None for a process alone.
    """

    backends: dict[str, Backend]
    cases: Sequence[str] | None = None
    properties: Sequence[str] | None = None
    dtypes: Sequence[str] = DTYPES
    device: str = "cpu"
    examples: int = 100
    seed: int = 0
    precisions: Sequence[str] | None = None
    world: World | None = None

    def subjects(self, dtype: str) -> list[Subject]:
        """Each backend with this dtype, in each precision of its products where there are several."""
        found = []
        for name, backend in self.backends.items():
            has = [x for x in PRECISIONS if x in backend.precisions]
            ways = (has if self.precisions is None else self.precisions) if dtype == "float32" else ["ieee"]
            about = self.device, self.seed, self.examples
            found += [Subject(name, backend, dtype, *about, way, self.world) for way in ways]
        return found

    def chosen(self) -> list[Property]:
        """The selected properties, in the order of the registry."""
        known = PROPERTIES if self.world is None else DISTRIBUTED
        return [each for name, each in known.items() if self.properties is None or name in self.properties]

    def case_names(self) -> list[str]:
        """The selected named cases."""
        return [name for name in cases.names() if self.cases is None or name in self.cases]

    def own_cases(self, each: Property) -> list[str]:
        """The selected cases of a property that has its own."""
        if each.case is None:
            return []
        if self.cases is None:
            return [each.case]
        return [name for name in self.cases if name.partition(":")[0] == each.case]

    def command(self, subject: Subject, each: Property, case: str) -> str:
        """The command line that runs one row again."""
        words = [*(["contrastile"] if self.world is None else self.world.launch), "verify"]
        words += [] if self.world is None else ["--world", self.world.name]
        words += ["--backend", subject.name, "--dtype", subject.dtype]
        if subject.dtype == "float32" and len(subject.backend.precisions) > 1:
            words += ["--precision", subject.precision]
        words += ["--property", each.name, "--case", case, "--seed", str(self.seed)]
        if case in (strategies.CASE, sharded.CASE):
            words += ["--examples", str(self.examples)]
        if self.device != "cpu":
            words += ["--device", self.device]
        return shlex.join(words)


@dataclass(slots=True)
class Run:
    """A run in progress: iterate over ``rows`` once; ``failures`` fills as it goes.

    Attributes:
        selection: what to run.
        progress: called with (rows done, rows in all, what comes next).
        failures: what failed so far.
    """

    selection: Selection
    progress: Callable[[int, int, str], None] = lambda done, total, what: None
    failures: list[Failure] = field(default_factory=list)

    def rows(self) -> Iterator[Row]:
        """One row for each backend, dtype, case and property, as each is done."""
        s = self.selection
        chosen = s.chosen()
        every, alone = [p for p in chosen if p.case is None], [p for p in chosen if p.case is not None]
        a_dtype = len(s.case_names()) * len(every) + sum(len(s.own_cases(p)) for p in alone)
        subjects = {dtype: s.subjects(dtype) for dtype in s.dtypes}
        total, done = a_dtype * sum(map(len, subjects.values())), 0
        for dtype in s.dtypes:
            for row in self._dtype(subjects[dtype], every, alone, dtype):
                done += 1
                self.progress(done, total, f"{row['backend']} {dtype} {row['case']} {row['property']}")
                yield row

    def _dtype(
        self, subjects: list[Subject], every: list[Property], alone: list[Property], dtype: str
    ) -> Iterator[Row]:
        for name in self.selection.case_names() if every else ():
            case = cases.build(name, dtype)
            oracle = truth(case.problem)
            for subject in subjects:
                trial = Trial(subject, case, oracle)
                with one_thread(subject.backend.arrays, trial.small):
                    for each in every:
                        yield self._row(subject, each, name, partial(each.check, trial))
        for subject in subjects:
            with one_thread(subject.backend.arrays, True):
                for each in alone:
                    for name in self.selection.own_cases(each):
                        yield self._row(subject, each, name, partial(each.check, subject, name))

    def _row(self, subject: Subject, each: Property, case: str, check: Callable[[], Checks]) -> Row:
        def row(ratio: float | None, status: str, reason: str) -> Row:
            return Row(
                backend=subject.name,
                property=each.name,
                case=case,
                dtype=subject.label,
                world=1 if subject.world is None else subject.world.size,
                ratio=ratio,
                status=status,
                reason=reason,
            )

        refusal = _refusal(subject)
        if refusal is not None:
            return row(None, "skip", refusal)
        if subject.world is not None:
            subject.world.begin()
        label, worst, skipped = _worst(check)
        if skipped is not None:
            return row(None, "skip", skipped)
        if worst.ratio < 1:
            return row(worst.ratio, "pass", "")
        failed = row(worst.ratio, "fail", ": ".join(filter(None, (label, str(worst)))))
        exact = label if each.case is not None and label.startswith(f"{each.case}:") else case
        command = self.selection.command(subject, each, exact)
        self.failures.append(Failure(failed, worst, label, command))
        return failed


def _worst(check: Callable[[], Checks]) -> tuple[str, Worst, str | None]:
    """The worst of a property's comparisons; a reason where it ended in a skip before anything failed.

    A backend that raises has failed, and a row that was skipped halfway keeps what it found.
    """
    label, worst, compared = "", Worst(0.0, "nothing", (), 0.0, 0.0), False
    try:
        # the backend's own warnings are no verdict, and oracles of NaN warn of it
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore", RuntimeWarning)
            for name, found in check():
                compared = True
                ratio = math.inf if math.isnan(found.ratio) else found.ratio
                if ratio > worst.ratio or worst.field == "nothing":
                    label, worst = name, found
    except (SkipError, UnsupportedProblemError) as reason:
        if not compared:
            return "", worst, str(reason)
    except Exception as error:
        text = " ".join(str(error).split())
        return "", Worst(math.inf, f"raised {type(error).__name__}: {text}", (), math.inf, 0.0), None
    return label, worst, None


def _refusal(subject: Subject) -> str | None:
    """Why the backend does not run at this dtype or device at all."""
    if subject.dtype not in subject.backend.dtypes:
        return f"takes {', '.join(sorted(subject.backend.dtypes))} only"
    if subject.device not in subject.backend.devices:
        return f"runs on {', '.join(sorted(subject.backend.devices))} only"
    if subject.precision not in subject.backend.precisions:
        return f"computes float32 in {', '.join(sorted(subject.backend.precisions))} only"
    return None
