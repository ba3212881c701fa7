"""Losses that no backend knows: a value and bars over N, P and D, on every schedule."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from in_process_worlds import group

from contrastile.backends.arrays import ArrayLibrary
from contrastile.backends.bars import normalised
from contrastile.backends.contract import Bars, SideWeights
from contrastile.backends.objectives import OBJECTIVES, Objective
from contrastile.backends.registry import load
from contrastile.comm.inprocess import InProcess
from contrastile.schedules import triangle
from contrastile.schedules.placement import Placement
from contrastile.verify import cases, rearrange
from contrastile.verify.bars import bound_of_bars, truth_of_bars
from contrastile.verify.bounds import bounds
from contrastile.verify.comparison import GRADIENT, compare
from contrastile.verify.shards import FIELDS, Cut
from contrastile.verify.trial import Subject
from contrastile.verify.truth import Truth, truth

NAMES = ("decoupled", "entropy")


@pytest.fixture(autouse=True)
def others() -> Iterator[None]:
    """The decoupled loss (DCL), and the cross entropy as one of those whose bars are passed."""
    OBJECTIVES["decoupled"] = Objective(
        value=lambda arrays, n, p, d: n - p,
        unpaired=lambda arrays, n, p: n,
        bars=lambda arrays, n, p: (1.0, -1.0, 0.0),
    )
    OBJECTIVES["entropy"] = replace(OBJECTIVES["softmax"])
    yield
    for name in NAMES:
        del OBJECTIVES[name]


def expected(problem: Any, kind: str, subject: Subject, spread: Any = None) -> tuple[Any, Any, tuple[str, ...]]:
    """The oracle's outcome, its bounds, and what is compared."""
    exact, how = truth(problem), (subject.accuracy, subject.dtype)
    if kind == "entropy":
        return exact.outcome, bounds(problem, exact, *how, spread=spread), FIELDS
    known = truth_of_bars(exact, drawn := bars(exact))
    return known.outcome, bound_of_bars(problem, known, drawn, *how, spread=spread), GRADIENT[:3]


def bars(exact: Truth) -> list[Bars | None]:
    """Those of the decoupled loss."""
    return [
        None if side is None else Bars(side.weight, -side.weight, 0 * side.weight) for side in (exact.row, exact.column)
    ]


@pytest.mark.parametrize("kind", NAMES)
@pytest.mark.parametrize("backend", ["numpy", "torch"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("case", ["smoke", "ragged", "certain", "ids-drop", "labels", "blocks"])
def test_a_loss_of_the_statistics_needs_nothing_below(case: str, dtype: str, backend: str, kind: str) -> None:
    subject, problem = Subject(backend, load(backend), dtype), cases.build(case, dtype).problem
    exact, bound, fields = expected(problem, kind, subject)
    assert compare(subject.run(replace(problem, kind=kind)), exact, bound, fields).ratio < 1


@pytest.mark.parametrize("kind", NAMES)
@pytest.mark.parametrize("case", ["views", "self-excluded"])
@pytest.mark.parametrize("most", [512, 9])
def test_rows_against_themselves(case: str, kind: str, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triangle, "CPU_ROWS", most)
    subject, problem = Subject("torch", load("torch"), "float64"), cases.build(case, "float64").problem
    exact, bound, fields = expected(problem, kind, subject)
    got = subject.run(replace(problem, kind=kind, columns=(), column_weight=None, column_target=None))
    kept = [name for name in fields if not name.startswith("column")]
    assert compare(got, rearrange.folded(exact), rearrange.folded(bound), kept).ratio < 1


@pytest.mark.parametrize("kind", NAMES)
@pytest.mark.parametrize("exchange", ["ring", "gather"])
@pytest.mark.parametrize("case", ["ragged", "labels", "blocks"])
@pytest.mark.parametrize("n", [1, 3])
def test_over_ranks(n: int, case: str, exchange: str, kind: str) -> None:
    subject, problem = Subject("numpy", load("numpy"), "float64"), cases.build(case, "float64").problem
    parts = Cut.of(replace(problem, kind=kind), range(2, n + 2), range(n + 1, 1, -1))

    def program(comm: InProcess) -> Any:
        place = Placement(comm, exchange, "mean", parts.shards)  # type: ignore[arg-type]
        return subject.run(parts.part(comm.rank, place))

    found: list[Any] = group(n).run(program)
    exact, bound, fields = expected(problem, kind, subject, parts.spread(exchange))
    assert compare(parts.joined(found, float(n)), exact, bound, fields).ratio < 1


def test_the_bars_are_the_derivatives_of_the_value() -> None:
    """By complex steps, which lose nothing to cancellation: the value is analytic but for a maximum of real parts."""
    arrays = ArrayLibrary(np)
    n, p = np.linspace(-40.0, 40.0, 17), np.linspace(30.0, -35.0, 17)

    class Complex(ArrayLibrary):
        def softplus(self, x: Any) -> Any:
            shift = np.where(x.real > 0, x, 0.0)
            return shift + np.log1p(np.exp(x - 2 * shift))

    step, unit = 1e-30, 2.0**-53
    value = OBJECTIVES["softmax"].value
    by_n, by_p, by_d = OBJECTIVES["softmax"].bars(arrays, n, p)
    for bar, (x, y, z) in ((by_n, (1j, 0, 0)), (by_p, (0, 1j, 0)), (by_d, (0, 0, 1j))):
        found = value(Complex(np), n + step * x, p + step * y, step * z + 0 * n).imag / step
        # an exponential of an argument up to 80, and a quotient
        assert (abs(found - bar) <= 256 * unit * abs(found)).all()


def test_a_side_normalised_has_the_bars_that_it_was_made_of() -> None:
    random = np.random.default_rng(0)
    arrays, unit, size = ArrayLibrary(np), 2.0**-24, 200
    n, p = random.standard_normal((2, size)) * 20
    given = Bars(*(random.standard_normal((3, size)) * 10.0 ** random.uniform(-6, 6, (3, size))))
    target = np.float32(1 / random.integers(1, 4, size))
    side, share = normalised(arrays, SideWeights(n, p, None, target, given), "float32")
    w, t = np.float64(side.weight), np.float64(side.target)
    largest = np.max(np.abs(given), axis=0)
    assert (abs(w) <= largest * (1 + unit)).all()
    # nothing overflows, and by N all digits of a float64 are left beside those of the logarithm
    assert (side.negative_lse >= n - unit).all()
    ratio = np.log(abs(w) / abs(given.negative))
    assert (
        abs(w * np.exp(n - side.negative_lse) - given.negative) <= 2.0**-50 * (50 + abs(ratio)) * abs(given.negative)
    ).all()
    # of q = 1 and t = 1 that is Pbar
    alone = target == 1
    found = w * ((1 - t) - share)
    assert (abs(found - given.positive)[alone] <= 2.0**-50 * largest[alone]).all()
    assert (abs(w * t - given.spread * target) <= unit * 2 * abs(given.spread)).all()
