"""The checks of backends: backends x dtypes x cases x properties, as many of them as are selected."""

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
"""Cases that run before the properties that have a case of their own."""

STRUCTURE = (
    *("tiles", "options", "shift", "upstream", "frozen", "accumulation"),
    *("guard-bands", "strided", "poisoned-memory", "non-finite"),
    *("bars", "public-statistics", "symmetric", "determinism"),
    *("reduction", "delivery"),
)
"""The properties that say how a result comes about, whatever its dtype.

A whole run on a host tries them in float32 on every case, and in other dtypes on ``cases.FEW``; those of ranks in the
first dtype of the first backend.
"""


@dataclass(frozen=True, slots=True)
class Selection:
    """What to run, as ``options.OPTIONS`` says of each: iterating over it gives the checks.

    What a backend does not take is skipped; ``gpu`` is whether there is one. On a world the distributed properties run,
    and no others.
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
            auto = "cuda" if self.gpu and "cuda" in backend.devices else "cpu"
            how = auto if self.device == "auto" else self.device, self.seed, self.examples
            sizes = self.workspace, self.keep
            found += [Subject(name, backend, dtype, *how, precision, *sizes, self.world) for precision in precisions]
        return found

    def case_names(self) -> list[str]:
        return [name for name in cases.CASES if self.cases is None or name in self.cases]

    def own_cases(self, each: Property) -> list[str]:
        if each.case is None:
            return []
        if self.cases is None:
            return [each.case]
        return [name for name in self.cases if name.partition(":")[0] == each.case]

    def __iter__(self) -> Iterator[Check]:
        """All checks, in a fixed order; of cases, truths and trials the latest alone is held."""
        known = PROPERTIES if self.world is None else DISTRIBUTED
        chosen = [each for name, each in known.items() if self.properties is None or name in self.properties]
        every_case, own_case = [p for p in chosen if p.case is None], [p for p in chosen if p.case]
        if not (every_case and self.case_names()) and not any(map(self.own_cases, own_case)):
            return
        case = lru_cache(maxsize=1)(cases.build)

        def trial_of(subject: Subject) -> Callable[[str], Trial]:
            return lru_cache(maxsize=1)(lambda name: Trial(subject, name, case(name, subject.dtype)))

        for dtype in self.dtypes:
            subjects = []
            for subject in self.subjects(dtype):
                refusal = _refusal(subject)
                if refusal is None:
                    subjects.append((subject, trial_of(subject)))
                else:
                    yield self._check(subject, Property("all", skipped), "all", partial(skipped, refusal))
            names = self.case_names() if every_case else []
            # most wrong primitives fail in the first cases; the checks of the interfaces come next
            yield from self._of_cases(subjects, every_case, names[:_EARLY])
            for each in own_case:
                for subject, _ in subjects:
                    for name in self.own_cases(each):
                        yield self._check(subject, each, name, partial(_of_a_subject, each, subject, name))
            yield from self._of_cases(subjects, every_case, names[_EARLY:])

    def _of_cases(
        self,
        subjects: Sequence[tuple[Subject, Callable[[str], Trial]]],
        properties: Sequence[Property],
        names: Sequence[str],
    ) -> Iterator[Check]:
        for name in names:
            for subject, trial in subjects:
                for each in properties:
                    if not self._repeats(subject, each, name):
                        yield self._check(subject, each, name, partial(_of_a_trial, each, partial(trial, name)))

    def _repeats(self, subject: Subject, each: Property, case: str) -> bool:
        """Whether a check of a whole run says what that of another dtype has said."""
        chosen = any(x is not None for x in (self.cases, self.properties)) or subject.device != "cpu"
        first = subject.dtype == "float32" or "float32" not in {*self.dtypes} & subject.backend.dtypes
        first = first and (self.world is None or subject.name == next(iter(self.backends)))
        return not (chosen or first) and each.name in STRUCTURE and case not in cases.FEW

    def _check(self, subject: Subject, each: Property, case: str, compare: Callable[[], Comparisons]) -> Check:
        several = subject.dtype == "float32" and len(subject.backend.precisions) > 1
        given = {
            "world": None if self.world is None else self.world.name,
            "per_host": None if self.world is None else self.world.per_host,
            "backend": subject.name,
            "dtype": subject.dtype,
            "precision": subject.precision if several else None,
            "workspace": self.workspace,
            "keep": self.keep,
            "property": each.name,
            "seed": self.seed,
            "examples": self.examples if each.case in (strategies.CASE, SHARDED) else None,
            "device": None if self.device == "auto" else self.device,
        }
        ranks: dict[str, Any] = {} if self.world is None else {"world": self.world.size, "launch": self.world.launch}
        return Check(subject.name, each.name, case, subject.label, compare, given, device=subject.device, **ranks)


def _of_a_trial(each: Property, trial: Callable[[], Trial]) -> Comparisons:
    given = trial()
    with one_thread(given.subject.backend.arrays, given.small):
        yield from each.check(given)


def _of_a_subject(each: Property, subject: Subject, case: str) -> Comparisons:
    with one_thread(subject.backend.arrays, True):
        yield from each.check(subject, case)


def _refusal(subject: Subject) -> str | None:
    """Why the backend cannot run with this dtype, device or precision at all."""
    if subject.dtype not in subject.backend.dtypes:
        return f"takes {', '.join(sorted(subject.backend.dtypes))} only"
    if subject.device not in subject.backend.devices:
        return f"runs on {', '.join(sorted(subject.backend.devices))} only"
    if subject.dtype == "float32" and subject.precision not in subject.backend.precisions:
        return f"computes float32 in {', '.join(sorted(subject.backend.precisions))} only"
    return None
