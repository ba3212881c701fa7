"""A property, and the trial that it checks: one backend, dtype and case, with their truth and bounds."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from contrastile.backends.contract import Accuracy, Backend, Options
from contrastile.oracle.arrays import FloatArray
from contrastile.schedules.problem import Problem
from contrastile.verify import facts
from contrastile.verify.bounds import bounds
from contrastile.verify.comparison import Comparisons, Worst, compare
from contrastile.verify.execution import Want, outcome
from contrastile.verify.truth import Outcome, Truth, truth
from contrastile.verify.worlds import World

_SMALL = 1 << 20


@dataclass(frozen=True, slots=True)
class Property:
    """A named property.

    Attributes:
        name: the value of ``--property`` that selects it.
        check: takes a Trial; if ``case`` is given, takes a Subject and that case's full name.
        case: the property's own case, which runs once per backend and dtype; None for a property of every case.
        says: the description, where the check's docstring has none.
    """

    name: str
    check: Callable[..., Comparisons]
    case: str | None = None
    says: str = ""

    @property
    def about(self) -> str:
        return (self.says or self.check.__doc__ or "").strip().partition("\n")[0]


class SkipError(Exception):
    """A property does not apply to a case; the message says why."""


def skipped(reason: str) -> Comparisons:
    """Comparisons that skip at once."""
    raise SkipError(reason)


@dataclass(frozen=True, slots=True)
class Subject:
    """The backend under test, with the options that it computes with: see ``options.OPTIONS``."""

    name: str
    backend: Backend
    dtype: str
    device: str = "cpu"
    seed: int = 0
    examples: int = 100
    precision: str = "ieee"
    workspace: int | None = None
    keep: int | None = None
    world: World | None = None

    @property
    def ranks(self) -> World:
        """The world of a distributed property."""
        assert self.world is not None
        return self.world

    @property
    def label(self) -> str:
        """The dtype, and the precision unless it is "ieee": "float32/tf32"."""
        return self.dtype if self.precision == "ieee" else f"{self.dtype}/{self.precision}"

    @property
    def options(self) -> Options:
        """The options, as a backend takes them."""
        return Options(**self.settings)

    @property
    def settings(self) -> dict[str, Any]:
        """The options, as keywords of the public functions."""
        return {"precision": self.precision, "workspace": self.workspace, "keep": self.keep}

    @property
    def accuracy(self) -> Accuracy:
        """The backend's accuracy facts, from which the bounds are derived.

        Raises:
            FactsError: the facts are looser than those of a plain computation.
        """
        has_choices = len(self.backend.precisions) > 1 or self.backend.keeping is not None
        options = (self.options,) if has_choices and self.options != Options() else ()
        accuracy = self.backend.accuracy(self.dtype, self.device, *options)
        return facts.checked(accuracy, self.backend, self.dtype, self.precision)

    def run(
        self,
        problem: Problem,
        backend: Backend | None = None,
        options: Options | None = None,
        upstream: float | FloatArray = 1.0,
        want: Want = "every",
    ) -> Outcome:
        """``execution.outcome`` of this subject with its options, or of another backend that wraps it."""
        merged = replace(options or Options(), **self.settings)
        return outcome(problem, backend or self.backend, self.dtype, self.device, merged, upstream, want)

    def bounds(
        self, problem: Problem, oracle: Truth, upstream: float | FloatArray = 1.0, options: Options | None = None
    ) -> Outcome:
        """The bounds for a problem that is computed with ``options``."""
        return bounds(problem, oracle, self.accuracy, self.dtype, upstream, options)

    def compare(self, problem: Problem, *, backend: Backend | None = None, upstream: float | FloatArray = 1.0) -> Worst:
        """Compare the outcome of a problem with its truth, within its bounds."""
        oracle = truth(problem, upstream)
        result = self.run(problem, backend, upstream=upstream)
        return compare(result, oracle.outcome, self.bounds(problem, oracle, upstream))


def asked(case: str, label: str) -> bool:
    """Whether the case selects a comparison: "case" selects all labels, "case:prefix" those that begin with prefix."""
    return label.startswith(case.partition(":")[2])


@dataclass(frozen=True)
class Trial:
    """A subject and a case. Results that several properties need are computed once."""

    subject: Subject
    case: str
    problem: Problem

    @cached_property
    def oracle(self) -> Truth:
        """The truth of the case's problem. Lazy, because only the leader of a launcher's processes needs it."""
        return truth(self.problem)

    @cached_property
    def bound(self) -> Outcome:
        return self.subject.bounds(self.problem, self.oracle)

    @cached_property
    def outcome(self) -> Outcome:
        return self.subject.run(self.problem)

    def random(self) -> np.random.Generator:
        """A generator that depends on the seed and the case alone."""
        return np.random.default_rng([self.subject.seed, zlib.crc32(self.case.encode())])

    @property
    def keeps(self) -> bool:
        """Whether the backend may keep exponentials of the case between its passes."""
        problem, subject = self.problem, self.subject
        if problem.kind == "sigmoid" or subject.backend.keeps is None:
            return False
        m, n = len(problem.rows), sum(map(len, problem.columns or (problem.rows,)))
        return subject.backend.keeps(m, n, subject.dtype, subject.device, subject.options) > 0

    @property
    def products(self) -> int:
        """Multiplications of the matrix product."""
        m, d = self.problem.rows.shape
        return int(m * sum(len(x) for x in self.problem.columns) * d)

    @property
    def small(self) -> bool:
        """Whether the case is cheap enough to run repeatedly."""
        return self.products <= _SMALL

    def only_small(self) -> None:
        if not self.small:
            raise SkipError("repeats runs: small cases only")

    def only_finite(self) -> None:
        """Skip a case whose truth is not finite: NaN would hide a difference."""
        if not np.isfinite(self.oracle.outcome.loss):
            raise SkipError("needs a finite loss")
