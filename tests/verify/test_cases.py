"""Every case is what its name says, the same each time, and exact in its dtype."""

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
    found = {f.name: getattr(problem, f.name) for f in fields(Problem)}
    found |= {f"columns[{c}]": block for c, block in enumerate(found.pop("columns"))}
    return {name: np.asarray(x) for name, x in found.items() if x is not None and not isinstance(x, str)}


def of(name: str, dtype: str = "float32") -> tuple[Problem, Truth]:
    problem = build(name, dtype)
    return problem, truth(problem)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CASES)
def test_a_case_is_exact_in_its_dtype_and_the_same_each_time(name: str, dtype: str) -> None:
    case, again = build(name, dtype), build(name, dtype)
    assert ABOUT[name]
    for field, x in arrays(case).items():
        kept = dtype if field == "rows" or field.startswith("columns[") else "float32"
        if x.dtype == np.int64:
            continue
        assert x.dtype == np.float64
        if field.endswith("_target"):
            assert all(t == 0 or t == 1 / round(1 / t) for t in x)
            continue
        assert np.array_equal(round_to(x, kept), x, equal_nan=True)
        assert np.array_equal(x, arrays(again)[field], equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", [name for name in CASES if name not in ("nan", "inf")])
def test_gradients_fit_the_dtype(name: str, dtype: str) -> None:
    """A gradient that overflows its dtype would be compared with inf."""
    _, exact = of(name, dtype)
    for gradient in (exact.outcome.rows, *exact.outcome.columns):
        assert np.isfinite(round_to(gradient, dtype)).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_logits_are_where_the_names_say(dtype: str) -> None:
    assert of("all-negative", dtype)[1].x.max() < -75
    assert np.all(np.diff(of("staircase", dtype)[1].x, axis=1).mean(axis=0) < 0)
    assert np.all(np.diff(of("staircase@up", dtype)[1].x, axis=1).mean(axis=0) > 0)
    assert of("large-logits", dtype)[1].x.max() > math.log(np.finfo(np.float32).max)
    assert not of("wide-scale", dtype)[1].x.any()
    hot = of("hot", dtype)[1]
    # from lost to certain: the whole range of a model in training
    assert np.diag(hot.sides[0].p).min() < 0.1 < 0.999 < np.diag(hot.sides[0].p).max()


def test_masks_do_something() -> None:
    for name in ("ids-drop", "sigmoid-ids", "signed-zero-weights", "wordnet@100", "labels", "self-excluded"):
        _, exact = of(name)
        assert not exact.admitted.all()
    labels = of("labels")[1].positive.sum(axis=1)
    assert labels.min() == 0
    assert labels.max() > 1
    _, silent = of("signed-zero-weights")
    assert (~silent.admitted.any(axis=1)).sum() > 1
