"""What a property is given: one backend, dtype and case, with the truth and the bounds at hand."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from contrastile.backends.contract import Accuracy, Backend, Options
from contrastile.schedules.problem import Problem
from contrastile.verify import facts
from contrastile.verify.arithmetic import Spread
from contrastile.verify.bounds import bounds
from contrastile.verify.cases import Case
from contrastile.verify.run import GRADIENT, VALUE, Want, Worst, compare, every_gradient, outcome
from contrastile.verify.truth import Outcome, Truth, truth
from contrastile.verify.worlds import World

_SMALL = 1 << 20


class SkipError(Exception):
    """A property does not fit a case; the message says why."""


@dataclass(frozen=True, slots=True)
class Subject:
    """The backend under test.

    Attributes:
        name: what ``--backend`` calls it.
        backend: its record.
        dtype: the features' dtype.
        device: kind of device.
        seed: of everything drawn at random.
        examples: how many problems the ``drawn`` property draws.
        precision: of the products, for features in float32.
        workspace: see ``contract.Options``.
        keep: see ``contract.Options``.
        world: the ranks of the distributed properties; None for a process alone.
    """

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
        if self.world is None:
            raise SkipError("is for several ranks: name a --world")
        return self.world

    @property
    def label(self) -> str:
        """The dtype, with the precision where it is not the plain one: "float32/tf32"."""
        return self.dtype if self.precision == "ieee" else f"{self.dtype}/{self.precision}"

    @property
    def options(self) -> Options:
        """How it computes, for a backend."""
        return Options(**self.settings)

    @property
    def settings(self) -> dict[str, Any]:
        """How it computes, for the front door."""
        return {"precision": self.precision, "workspace": self.workspace, "keep": self.keep}

    @property
    def accuracy(self) -> Accuracy:
        """The facts its bounds are derived from.

        Raises:
            FactsError: they are looser than those of a plain computation.
        """
        has_choices = len(self.backend.precisions) > 1 or self.backend.keeping is not None
        how = (self.options,) if has_choices and self.options != Options() else ()
        found = self.backend.accuracy(self.dtype, self.device, *how)
        return facts.checked(found, self.backend, self.dtype, self.precision)

    def run(
        self,
        problem: Problem,
        options: Options,
        *,
        backend: Backend | None = None,
        upstream: float = 1.0,
        want: Want = every_gradient,
    ) -> Outcome:
        """``run.outcome`` on this subject in its precision, or on a wrapping of its backend."""
        options = replace(options, **self.settings)
        return outcome(problem, backend or self.backend, self.dtype, self.device, options, upstream, want)


@dataclass(frozen=True)
class Trial:
    """A subject and a case. What several properties need is computed once.

    Attributes:
        subject: the backend under test.
        case: the problem.
        oracle: the truth of the problem.
        ran: what properties keep for each other.
    """

    subject: Subject
    case: Case
    oracle: Truth = field(repr=False)
    ran: dict[Any, Any] = field(default_factory=dict, repr=False)

    @property
    def problem(self) -> Problem:
        """The case's problem."""
        return self.case.problem

    @cached_property
    def bound(self) -> Outcome:
        """The bounds of the problem."""
        return self.bounds(self.problem, self.oracle)

    @cached_property
    def outcome(self) -> Outcome:
        """What the backend makes of the problem."""
        return self.run(self.problem)

    def random(self) -> np.random.Generator:
        """A generator that depends on the seed and the case alone."""
        return np.random.default_rng([self.subject.seed, zlib.crc32(self.case.name.encode())])

    def run(
        self,
        problem: Problem,
        backend: Backend | None = None,
        options: Options | None = None,
        upstream: float = 1.0,
        want: Want = every_gradient,
    ) -> Outcome:
        """``Subject.run`` on another problem."""
        return self.subject.run(problem, options or Options(), backend=backend, upstream=upstream, want=want)

    def bounds(
        self,
        problem: Problem,
        oracle: Truth,
        upstream: float = 1.0,
        options: Options | None = None,
        spread: Spread | None = None,
    ) -> Outcome:
        """The bounds of another problem, or of this one computed with other options or by several ranks."""
        return bounds(problem, oracle, self.subject.accuracy, self.subject.dtype, upstream, options, spread)

    def hold(
        self,
        problem: Problem,
        fields: Sequence[str] = VALUE + GRADIENT,
        *,
        backend: Backend | None = None,
        options: Options | None = None,
        upstream: float = 1.0,
    ) -> Worst:
        """The backend's outcome on another problem against that problem's own truth and bounds."""
        oracle = truth(problem, upstream)
        got = self.run(problem, backend, options, upstream)
        return compare(got, oracle.outcome, self.bounds(problem, oracle, upstream, options), fields)

    @property
    def small(self) -> bool:
        """Whether repeated runs of the case take next to no time."""
        m, d = self.problem.rows.shape
        return bool(m * sum(len(x) for x in self.problem.columns) * d <= _SMALL)

    def only_small(self) -> None:
        """Skip a case on which repeated runs would take long."""
        if not self.small:
            raise SkipError("repeats runs: small cases only")

    def only_finite(self) -> None:
        """Skip a case whose truth is not finite: NaN hides what a difference would show."""
        if not np.isfinite(self.oracle.outcome.loss):
            raise SkipError("needs a finite loss")
