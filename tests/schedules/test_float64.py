"""Float64 gradients where logits are large: no schedule loses more than a plain computation does.

A row that is certain of a column that is not its positive has a gradient of nearly its whole weight. Its logits' own
roundings move that by nothing, and the rounding of a log-sum-exp by 2^-53 times its size: more than the gate allows.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from contrastile.backends.pairs import merged_pairs, pair
from contrastile.backends.registry import load
from contrastile.comm.inprocess import InProcess, InProcessGroup
from contrastile.schedules import triangle
from contrastile.schedules.placement import Placement
from contrastile.schedules.problem import Blocking, Problem
from contrastile.verify import cases, rearrange
from contrastile.verify.plain import as_it_is, compare_with_plain
from contrastile.verify.shards import Cut
from contrastile.verify.trial import Subject
from contrastile.verify.truth import Outcome, truth

TORCH = Subject("torch", load("torch"), "float64")
# products are exact: a schedule may form them in other shapes going back, which BLAS rounds in other ways
WRONG, VIEWS = (cases.build(name, "bfloat16") for name in ("certain@wrong", "certain-views"))
# each other's, and not the views that they are certain of
VIEWS = replace(VIEWS, positives=np.arange(34) ^ 1)
THEMSELVES = replace(VIEWS, columns=(), column_weight=None, column_target=None)


def ratio(problem: Problem, got: Outcome, view: Any = as_it_is) -> float:
    return compare_with_plain(problem, truth(problem), got, TORCH.accuracy, "float64", view=view).ratio


def test_of_rows_against_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triangle, "CPU_ROWS", 9)
    assert ratio(VIEWS, TORCH.run(THEMSELVES), rearrange.folded) < 1


@pytest.mark.parametrize("problem", [WRONG, THEMSELVES], ids=["columns", "themselves"])
def test_of_blocks(problem: Problem) -> None:
    whole, view = (problem, as_it_is) if problem is WRONG else (VIEWS, rearrange.folded)
    assert ratio(whole, TORCH.run(replace(problem, blocking=Blocking(13, torch.device("cpu")))), view) < 1


@pytest.mark.parametrize("exchange", ["ring", "gather"])
@pytest.mark.parametrize("itself", [False, True])
def test_over_ranks(exchange: str, itself: bool) -> None:
    weights = (1, 2, 3)
    parts = Cut.of_itself(VIEWS, weights) if itself else Cut.of(WRONG, weights, weights)

    def program(comm: InProcess) -> Outcome:
        place = Placement(comm, exchange, "mean", parts.shards)  # type: ignore[arg-type]
        return TORCH.run(parts.part(comm.rank, place))

    joined = parts.joined(InProcessGroup[Outcome](len(weights)).run(program), float(len(weights)))
    assert ratio(parts.problem, joined, rearrange.folded if itself else as_it_is) < 1


@np.errstate(invalid="ignore")
def test_pairs_merge_as_their_sums_do_and_infinities_stay() -> None:
    x, y = np.array([1e6, -3.0, -np.inf, -np.inf, 5.0, np.nan]), np.array([1e6 + 1, 700.0, 2.0, -np.inf, np.inf, 1.0])
    rest = np.ldexp(np.array([1.0, -1.0, 0.0, 0.0, 0.0, 0.0]), -60)
    found = merged_pairs(np, pair(np, x, rest), pair(np, y, np.zeros(6)))
    expected = np.logaddexp(np.longdouble(x) + rest, np.longdouble(y))
    assert np.array_equal(found[:, 0], np.float64(expected), equal_nan=True)
    # an exponential and a logarithm of numbers up to 1
    assert (abs(found[:2].sum(1, dtype=np.longdouble) - expected[:2]) <= 2.0**-51).all()
    assert not found[2:, 1].any()
