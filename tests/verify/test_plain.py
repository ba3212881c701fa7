"""The plain computation is about as exact as its dtype, and no more."""

from __future__ import annotations

import numpy as np
import pytest

from contrastile.backends.contract import Accuracy
from contrastile.verify.bounds import ORACLE, bounds
from contrastile.verify.cases import build, names
from contrastile.verify.plain import plain_error
from contrastile.verify.rounding import UNIT
from contrastile.verify.run import parts
from contrastile.verify.truth import truth

SMALL = [name for name in names() if not name.startswith("wordnet")]


@pytest.mark.parametrize("name", SMALL)
def test_in_float64_it_is_another_oracle(name: str) -> None:
    problem = build(name, "float64").problem
    exact = truth(problem, 1.5)
    limit = dict(parts(bounds(problem, exact, ORACLE, "float64", 1.5)))
    for field, error in parts(plain_error(problem, exact, "float64", 1.5)):
        if error is not None:
            assert error.shape == limit[field].shape
            assert np.all(error <= limit[field])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("name", ["ragged", "sigmoid", "ids-drop", "blocks", "labels"])
def test_it_rounds_as_its_dtype_does(name: str, dtype: str) -> None:
    """It is within the bounds of a kernel whose every operation rounds to the dtype, and not far within."""
    problem = build(name, dtype).problem
    exact = truth(problem)
    unit = UNIT[dtype]
    # G and p are stored unscaled: what underflows is a larger share of a small weight
    underflow = 2.0**-24 / np.abs(problem.row_weight).max() if dtype == "float16" else 0.0
    facts = Accuracy(unit, 2.0**-24, gradient_rounding=unit, gradient_underflow=underflow + 2.0**-24)
    error, limit = plain_error(problem, exact, dtype).rows, bounds(problem, exact, facts, dtype).rows
    assert np.all(error <= limit)
    assert error.max() > unit * np.abs(exact.outcome.rows).max() / 64
