"""The checks of backends: the selected backends x dtypes x cases x properties."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

from contrastile.backends.contract import PRECISIONS, Backend
from contrastile.verify import cases, strategies
from contrastile.verify.comparison import Comparisons
from contrastile.verify.distributed import DISTRIBUTED, SHARDED
from contrastile.verify.execution import DTYPES, one_thread
from contrastile.verify.properties import PROPERTIES
from contrastile.verify.runner import Check
from contrastile.verify.trial import Property, Subject, Trial, skipped
from contrastile.verify.worlds import World

_EARLY = 2
"""Number of cases that run before the properties with a case of their own."""

STRUCTURE = (
    *("tiles", "options", "shift", "upstream", "frozen", "accumulation"),
    *("guard-bands", "strided", "poisoned-memory", "non-finite"),
    *("bars", "public-statistics", "symmetric", "determinism"),
    *("reduction", "delivery"),
)
"""The properties of the structure of a computation, which does not depend on the dtype.

A whole run on a host tries them in float32 on every case, and in other dtypes on ``cases.FEW``. A run over ranks tries
them on every case only in the first dtype of the first backend.
"""


@dataclass(frozen=True, slots=True)
class Selection:
    """The values of the options of ``options.OPTIONS``; iteration yields the selected checks.

    Dtypes and devices that a backend does not take are skipped; ``gpu`` is whether there is a GPU. On a world only the
    distributed properties run.
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
        subjects = []
        for name, backend in self.backends.items():
            available = [x for x in PRECISIONS if x in backend.precisions]
            precisions = (available if self.precisions is None else self.precisions) if dtype == "float32" else ["ieee"]
            auto = "cuda" if self.gpu and "cuda" in backend.devices else "cpu"
            run = auto if self.device == "auto" else self.device, self.seed, self.examples
            sizes = self.workspace, self.keep
            subjects += [Subject(name, backend, dtype, *run, precision, *sizes, self.world) for precision in precisions]
        return subjects

    def case_names(self) -> list[str]:
        return [name for name in cases.CASES if self.cases is None or name in self.cases]

    def own_cases(self, prop: Property) -> list[str]:
        if prop.case is None:
            return []
        if self.cases is None:
            return [prop.case]
        return [name for name in self.cases if name.partition(":")[0] == prop.case]

    def __iter__(self) -> Iterator[Check]:
        """All checks, in a fixed order. Only the latest case, and the latest trial of each subject, are held."""
        known = PROPERTIES if self.world is None else DISTRIBUTED
        selected = [prop for name, prop in known.items() if self.properties is None or name in self.properties]
        every_case, own_case = [p for p in selected if p.case is None], [p for p in selected if p.case]
        if not (every_case and self.case_names()) and not any(map(self.own_cases, own_case)):
            return
        build_case = lru_cache(maxsize=1)(cases.build)

        def trial_of(subject: Subject) -> Callable[[str], Trial]:
            return lru_cache(maxsize=1)(lambda name: Trial(subject, name, build_case(name, subject.dtype)))

        for dtype in self.dtypes:
            subjects = []
            for subject in self.subjects(dtype):
                refusal = _refusal(subject)
                if refusal is None:
                    subjects.append((subject, trial_of(subject)))
                else:
                    yield self._check(subject, Property("all", skipped), "all", partial(skipped, refusal))
            names = self.case_names() if every_case else []
            # most wrong primitives fail in the first cases, so they come before the checks of the interfaces
            yield from self._checks_of_cases(subjects, every_case, names[:_EARLY])
            for prop in own_case:
                for subject, _ in subjects:
                    for name in self.own_cases(prop):
                        yield self._check(subject, prop, name, partial(_check_subject, prop, subject, name))
            yield from self._checks_of_cases(subjects, every_case, names[_EARLY:])

    def _checks_of_cases(
        self,
        subjects: Sequence[tuple[Subject, Callable[[str], Trial]]],
        properties: Sequence[Property],
        names: Sequence[str],
    ) -> Iterator[Check]:
        for name in names:
            for subject, trial_of in subjects:
                for prop in properties:
                    if not self._repeats(subject, prop, name):
                        yield self._check(subject, prop, name, partial(_check_trial, prop, partial(trial_of, name)))

    def _repeats(self, subject: Subject, prop: Property, case: str) -> bool:
        """Whether a check of a whole run repeats that of another dtype, or of another backend."""
        is_selected = any(x is not None for x in (self.cases, self.properties)) or subject.device != "cpu"
        is_first = subject.dtype == "float32" or "float32" not in {*self.dtypes} & subject.backend.dtypes
        is_first = is_first and (self.world is None or subject.name == next(iter(self.backends)))
        return not (is_selected or is_first) and prop.name in STRUCTURE and case not in cases.FEW

    def _check(self, subject: Subject, prop: Property, case: str, compare: Callable[[], Comparisons]) -> Check:
        has_precisions = subject.dtype == "float32" and len(subject.backend.precisions) > 1
        given = {
            "world": None if self.world is None else self.world.name,
            "per_host": None if self.world is None else self.world.per_host,
            "backend": subject.name,
            "dtype": subject.dtype,
            "precision": subject.precision if has_precisions else None,
            "workspace": self.workspace,
            "keep": self.keep,
            "property": prop.name,
            "seed": self.seed,
            "examples": self.examples if prop.case in (strategies.CASE, SHARDED) else None,
            "device": None if self.device == "auto" else self.device,
        }
        ranks: dict[str, Any] = {} if self.world is None else {"world": self.world.size, "launch": self.world.launch}
        return Check(subject.name, prop.name, case, subject.label, compare, given, device=subject.device, **ranks)


def _check_trial(prop: Property, make_trial: Callable[[], Trial]) -> Comparisons:
    trial = make_trial()
    with one_thread(trial.subject.backend.arrays, trial.small):
        yield from prop.check(trial)


def _check_subject(prop: Property, subject: Subject, case: str) -> Comparisons:
    with one_thread(subject.backend.arrays, True):
        yield from prop.check(subject, case)


def _refusal(subject: Subject) -> str | None:
    """The reason why the backend cannot run with this dtype, device or precision; None if it can."""
    if subject.dtype not in subject.backend.dtypes:
        return f"takes {', '.join(sorted(subject.backend.dtypes))} only"
    if subject.device not in subject.backend.devices:
        return f"runs on {', '.join(sorted(subject.backend.devices))} only"
    if subject.dtype == "float32" and subject.precision not in subject.backend.precisions:
        return f"computes float32 in {', '.join(sorted(subject.backend.precisions))} only"
    return None
