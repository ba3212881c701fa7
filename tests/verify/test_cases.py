"""Every case has the property of its name, is reproducible, and is exact in its dtype."""

from __future__ import annotations

import math
from dataclasses import fields

import numpy as np
import pytest

from contrastile.schedules.problem import Problem
from contrastile.verify.cases import ABOUT, CASES, build
from contrastile.verify.rounding import UNIT, round_to
from contrastile.verify.truth import Truth, truth

DTYPES = list(UNIT)


def arrays(problem: Problem) -> dict[str, np.ndarray]:
    values = {f.name: getattr(problem, f.name) for f in fields(Problem)}
    values |= {f"columns[{c}]": block for c, block in enumerate(values.pop("columns"))}
    return {name: np.asarray(x) for name, x in values.items() if x is not None and not isinstance(x, str)}


def problem_and_truth(name: str, dtype: str = "float32") -> tuple[Problem, Truth]:
    problem = build(name, dtype)
    return problem, truth(problem)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CASES)
def test_a_case_is_exact_in_its_dtype_and_reproducible(name: str, dtype: str) -> None:
    case, rebuilt = build(name, dtype), build(name, dtype)
    assert ABOUT[name]
    for field, x in arrays(case).items():
        stored_dtype = dtype if field == "rows" or field.startswith("columns[") else "float32"
        if x.dtype == np.int64:
            continue
        assert x.dtype == np.float64
        if field.endswith("_target"):
            assert all(target == 0 or target == 1 / round(1 / target) for target in x)
            continue
        assert np.array_equal(round_to(x, stored_dtype), x, equal_nan=True)
        assert np.array_equal(x, arrays(rebuilt)[field], equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", [name for name in CASES if name not in ("nan", "inf")])
def test_gradients_fit_the_dtype(name: str, dtype: str) -> None:
    """If a gradient overflowed its dtype, results would be compared with inf."""
    _, exact = problem_and_truth(name, dtype)
    for gradient in (exact.outcome.rows, *exact.outcome.columns):
        assert np.isfinite(round_to(gradient, dtype)).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_logits_have_the_properties_of_the_names(dtype: str) -> None:
    assert problem_and_truth("all-negative", dtype)[1].x.max() < -75
    assert np.all(np.diff(problem_and_truth("staircase", dtype)[1].x, axis=1).mean(axis=0) < 0)
    assert np.all(np.diff(problem_and_truth("staircase@up", dtype)[1].x, axis=1).mean(axis=0) > 0)
    assert problem_and_truth("large-logits", dtype)[1].x.max() > math.log(np.finfo(np.float32).max)
    assert not problem_and_truth("wide-scale", dtype)[1].x.any()
    hot = problem_and_truth("hot", dtype)[1]
    # probabilities range from lost to certain, as they do for a model in training
    assert np.diag(hot.sides[0].p).min() < 0.1 < 0.999 < np.diag(hot.sides[0].p).max()


def test_masks_remove_pairs() -> None:
    for name in ("ids-drop", "sigmoid-ids", "signed-zero-weights", "wordnet@100", "labels", "self-excluded"):
        _, exact = problem_and_truth(name)
        assert not exact.admitted.all()
    labels = problem_and_truth("labels")[1].positive.sum(axis=1)
    assert labels.min() == 0
    assert labels.max() > 1
    _, weighted = problem_and_truth("signed-zero-weights")
    assert (~weighted.admitted.any(axis=1)).sum() > 1
