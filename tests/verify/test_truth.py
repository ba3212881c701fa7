"""The truth's gradients are those of its loss, whose parts are the oracle's."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from contrastile.schedules.problem import Problem
from contrastile.verify.bounds import ORACLE, bounds
from contrastile.verify.cases import build, names
from contrastile.verify.truth import masks, truth

FINITE = [name for name in names() if not name.startswith("wordnet") and name not in ("nan", "inf")]


@pytest.mark.parametrize("name", FINITE)
def test_the_gradients_are_the_losss_differences(name: str) -> None:
    """Along a random direction h of all inputs at once: (f(+e) - f(-e)) / 2e = <gradient, h>, two orders in e.

    A direction is as long as what it moves.
    """
    problem = build(name, "float32")
    upstream = 1.75
    exact = truth(problem, upstream)
    draw = np.random.default_rng(3)
    size = min(1.0, np.abs(problem.rows).max(initial=0.0) or 1.0)
    rows = size * draw.standard_normal(problem.rows.shape)
    columns = tuple(size * draw.standard_normal(block.shape) for block in problem.columns)
    scale, bias = draw.standard_normal(2)
    bias = bias if problem.bias is not None else 0.0

    def along(step: float) -> float:
        moved = replace(
            problem,
            rows=problem.rows + step * rows,
            columns=tuple(block + step * h for block, h in zip(problem.columns, columns, strict=True)),
            scale=problem.scale + step * scale,
            bias=None if problem.bias is None else problem.bias + step * bias,
        )
        return upstream * float(truth(moved).outcome.loss)

    found = exact.outcome
    slope = (found.rows * rows).sum() + found.scale * scale + (0.0 if found.bias is None else found.bias * bias)
    slope += sum((g * h).sum() for g, h in zip(found.columns, columns, strict=True))
    step = 2.0**-12
    coarse, fine = ((along(e) - along(-e)) / (2 * e) for e in (step, step / 2))
    # Richardson: the coarse and the fine difference tell the truncation; rounding of two losses is divided by 2e
    noise = 2 * upstream * float(bounds(problem, exact, ORACLE, "float64").loss) / step
    assert abs(fine - slope) <= abs(coarse - fine) + noise


def test_an_excluded_pair_is_neither_positive_nor_admitted() -> None:
    """Whether an index or a label would have made it the positive."""
    one = np.ones((1, 1))
    zero = np.zeros(1, dtype=np.int64)
    bare = Problem(one, (one,), np.float64(1.0), np.ones(1), np.ones(1), excluded=zero)
    pointed = replace(bare, positives=zero)
    matched = replace(bare, row_ids=zero, column_ids=zero, match="target")
    for problem in (pointed, matched):
        assert [bool(mask.any()) for mask in masks(problem)] == [False, False]


def test_what_a_kind_of_loss_has() -> None:
    one_way, two_way, sigmoid = (truth(build(name, "float32")).outcome for name in ("labels", "hot", "sigmoid"))
    assert (one_way.statistics.shape, two_way.statistics.shape, sigmoid.statistics) == ((3, 29), (3, 82), None)
    assert [one_way.bias, two_way.bias] == [None] * 2
