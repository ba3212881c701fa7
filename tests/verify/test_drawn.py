"""Random problems keep the contract, every kind is drawn, and the search stops at the first failure."""

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
        drawn = problem(3, number, dtype).problem
        admitted, positive = masks(drawn)
        assert all(np.array_equal(x, round_to(x, dtype)) for x in (drawn.rows, *drawn.columns))
        assert max(admitted.shape) <= 3 + number
        assert (drawn.row_weight[~admitted.any(axis=1)] == 0).all()
        assert (drawn.row_target[~positive.any(axis=1)] == 0).all()
        assert (drawn.column_weight is None) >= (drawn.kind == "sigmoid")
        assert np.isfinite(truth(drawn).outcome.loss)


def test_every_kind_of_problem_is_drawn() -> None:
    features, names = set(), ("positives", "excluded", "row_ids", "bias", "column_weight")
    for number in range(200):
        sample = problem(0, number, "float32")
        drawn = sample.problem
        features |= {(drawn.kind, sample.itself), len(drawn.columns), drawn.match}
        features |= {(name, getattr(drawn, name) is not None) for name in names}
        features |= {("tile", sample.options.tile is None), ("negative", bool((drawn.row_weight < 0).any()))}
    flags = {(name, x) for name in (*names, "tile", "negative") for x in (True, False)}
    kinds = {("softmax", False), ("softmax", True), ("sigmoid", False)}
    assert {*flags, *kinds, 1, 2, 3, "drop", "target"} <= features


def test_the_search_stops_at_the_first_failure() -> None:
    verdicts = iter([NOTHING, NOTHING, wrong("it is wrong")])
    assert [label for label, _ in searched(TORCH, "drawn", lambda _: next(verdicts))] == ["drawn:2"]
    failures = list(searched(TORCH, "drawn:17", lambda _: 1 / 0))
    assert [label for label, _ in failures] == ["drawn:17"]
    assert "ZeroDivisionError" in str(failures[0][1])
