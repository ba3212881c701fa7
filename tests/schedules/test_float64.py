"""Float64 gradients where logits are large: no schedule loses more digits than a plain computation does.

A row that is certain of a wrong column has a gradient of nearly its whole weight. The rounding of its logits does not
move it. The rounding of its log-sum-exp moves it by 2^-53 times the log-sum-exp, which exceeds the bound.
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
# products of bfloat16 are exact, so that their shapes, which may differ going back, do not change how BLAS rounds
WRONG, VIEWS = (cases.build(name, "bfloat16") for name in ("certain@wrong", "certain-views"))
# the positive of each view is its neighbour, and not the view that it is certain of
VIEWS = replace(VIEWS, positives=np.arange(34) ^ 1)
THEMSELVES = replace(VIEWS, columns=(), column_weight=None, column_target=None)


def ratio(problem: Problem, outcome: Outcome, view: Any = as_it_is) -> float:
    return compare_with_plain(problem, truth(problem), outcome, TORCH.accuracy, "float64", view=view).ratio


def test_rows_against_themselves_keep_the_digits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triangle, "CPU_ROWS", 9)
    assert ratio(VIEWS, TORCH.run(THEMSELVES), rearrange.folded) < 1


@pytest.mark.parametrize("problem", [WRONG, THEMSELVES], ids=["columns", "themselves"])
def test_blocks_keep_the_digits(problem: Problem) -> None:
    whole, view = (problem, as_it_is) if problem is WRONG else (VIEWS, rearrange.folded)
    assert ratio(whole, TORCH.run(replace(problem, blocking=Blocking(13, torch.device("cpu")))), view) < 1


@pytest.mark.parametrize("exchange", ["ring", "gather"])
@pytest.mark.parametrize("is_symmetric", [False, True])
def test_ranks_keep_the_digits(exchange: str, is_symmetric: bool) -> None:
    weights = (1, 2, 3)
    cut = Cut.of_itself(VIEWS, weights) if is_symmetric else Cut.of(WRONG, weights, weights)

    def program(comm: InProcess) -> Outcome:
        placement = Placement(comm, exchange, "mean", cut.shards)  # type: ignore[arg-type]
        return TORCH.run(cut.part(comm.rank, placement))

    joined = cut.joined(InProcessGroup[Outcome](len(weights)).run(program), float(len(weights)))
    assert ratio(cut.problem, joined, rearrange.folded if is_symmetric else as_it_is) < 1


@np.errstate(invalid="ignore")
def test_merged_pairs_are_the_log_sum_exp_and_keep_infinities() -> None:
    x, y = np.array([1e6, -3.0, -np.inf, -np.inf, 5.0, np.nan]), np.array([1e6 + 1, 700.0, 2.0, -np.inf, np.inf, 1.0])
    remainder = np.ldexp(np.array([1.0, -1.0, 0.0, 0.0, 0.0, 0.0]), -60)
    merged = merged_pairs(np, pair(np, x, remainder), pair(np, y, np.zeros(6)))
    expected = np.logaddexp(np.longdouble(x) + remainder, np.longdouble(y))
    assert np.array_equal(merged[:, 0], np.float64(expected), equal_nan=True)
    # the error of one exponential and one logarithm of numbers up to 1
    assert (abs(merged[:2].sum(1, dtype=np.longdouble) - expected[:2]) <= 2.0**-51).all()
    assert not merged[2:, 1].any()
