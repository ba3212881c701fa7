"""Problems that are drawn keep the contract, every kind is drawn, and the first that fails is the last."""

from __future__ import annotations

import numpy as np
import pytest

from contrastile.backends.registry import load
from contrastile.verify.comparison import NOTHING, wrong
from contrastile.verify.rounding import round_to
from contrastile.verify.selection import DTYPES
from contrastile.verify.strategies import problem, searched
from contrastile.verify.trial import Subject
from contrastile.verify.truth import masks, truth

TORCH = Subject("torch", load("torch"), "float32", examples=8)


@pytest.mark.parametrize("dtype", DTYPES)
def test_drawn_problems_keep_the_contract(dtype: str) -> None:
    for number in range(100):
        made = problem(3, number, dtype).problem
        admitted, positive = masks(made)
        assert all(np.array_equal(x, round_to(x, dtype)) for x in (made.rows, *made.columns))
        assert max(admitted.shape) <= 3 + number
        assert (made.row_weight[~admitted.any(axis=1)] == 0).all()
        assert (made.row_target[~positive.any(axis=1)] == 0).all()
        assert (made.column_weight is None) >= (made.kind == "sigmoid")
        assert np.isfinite(truth(made).outcome.loss)


def test_every_kind_of_problem_is_drawn() -> None:
    seen, names = set(), ("positives", "excluded", "row_ids", "bias", "column_weight")
    for number in range(200):
        each = problem(0, number, "float32")
        made = each.problem
        seen |= {(made.kind, each.itself), len(made.columns), made.match}
        seen |= {(name, getattr(made, name) is not None) for name in names}
        seen |= {("tile", each.options.tile is None), ("negative", bool((made.row_weight < 0).any()))}
    both = {(name, x) for name in (*names, "tile", "negative") for x in (True, False)}
    kinds = {("softmax", False), ("softmax", True), ("sigmoid", False)}
    assert {*both, *kinds, 1, 2, 3, "drop", "target"} <= seen


def test_the_first_problem_that_fails_is_the_last() -> None:
    verdicts = iter([NOTHING, NOTHING, wrong("it is wrong")])
    assert [label for label, _ in searched(TORCH, "drawn", lambda each: next(verdicts))] == ["drawn:2"]
    found = list(searched(TORCH, "drawn:17", lambda each: 1 / 0))
    assert [label for label, _ in found] == ["drawn:17"]
    assert "ZeroDivisionError" in str(found[0][1])
