"""Losses that no backend knows: a value and bars over N, P and D, on every schedule."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from in_process_worlds import group

from contrastile.backends.contract import Bars
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
