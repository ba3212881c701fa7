"""Running a problem and comparing its outcome with the truth."""

from dataclasses import replace

import numpy as np
import pytest

from contrastile.backends.registry import load
from contrastile.verify import cases
from contrastile.verify.comparison import compare, identical
from contrastile.verify.execution import materialise
from contrastile.verify.truth import Outcome

ONES = Outcome(
    loss=np.asarray(1.0),
    rows=np.ones((3, 2)),
    columns=(np.ones((2, 2)), np.ones((0, 2)), np.ones((4, 2))),
    scale=np.asarray(1.0),
)
BOUND = replace(ONES, loss=np.asarray(0.5))


def with_element(field, index, value):
    x = getattr(ONES, field).copy()
    x[index] = value
    return replace(ONES, **{field: x})


def test_worst_element_is_located():
    worst = compare(with_element("rows", (2, 1), 1.5), ONES, BOUND)
    assert (worst.field, worst.index, worst.error, worst.bound, worst.ratio) == ("rows", (2, 1), 0.5, 1.0, 0.5)
    assert str(worst) == "rows[2, 1]: error 0.5, bound 1"


@pytest.mark.parametrize(("value", "excess"), [(1.0 + 2**-9, 0.0), (1.0 + 2**-9 + 2**-12, 0.25), (1.25, 1.0)])
def test_the_excess_omits_the_rounding_of_a_stored_result(value, excess):
    # the bound is half a spacing of 2^-8 at 1, plus 2^-10 for the arithmetic
    bound = replace(BOUND, rows=np.full((3, 2), 2**-9 + 2**-10), rounding=(2.0**-9, 0.0))
    worst = compare(with_element("rows", (2, 1), value), ONES, bound)
    assert worst.ratio == (value - 1.0) / (2**-9 + 2**-10)
    assert worst.excess == (excess if worst.ratio < 1 else worst.ratio)


def test_only_gradients_of_features_are_rounded_to_their_dtype():
    bound = replace(BOUND, rounding=(2.0**-9, 0.0))
    worst = compare(replace(ONES, loss=np.asarray(1.125)), ONES, bound)
    assert (worst.ratio, worst.excess) == (0.25, 0.25)


def test_column_blocks_are_told_apart():
    blocks = (*ONES.columns[:2], np.full((4, 2), 4.0))
    worst = compare(replace(ONES, columns=blocks), ONES, BOUND)
    assert (worst.field, worst.ratio) == ("columns[2]", 3.0)


@pytest.mark.parametrize(
    ("value", "expected", "ratio"),
    [
        (1.0, 1.0, 0.0),
        (np.nan, np.nan, 0.0),
        (np.inf, np.inf, 0.0),
        (-np.inf, -np.inf, 0.0),
        (np.inf, -np.inf, np.inf),
        (np.nan, np.inf, np.inf),
        (np.inf, np.nan, np.inf),
        (1.0, np.nan, np.inf),
        (1.0, np.inf, np.inf),
        (np.nan, 1.0, np.inf),
        (-np.inf, 1.0, np.inf),
    ],
)
@pytest.mark.parametrize("bound", [0.0, 1.0, np.inf])
def test_equal_values_have_ratio_0_and_other_nonfinite_values_an_infinite_one(value, expected, ratio, bound):
    bounds = replace(BOUND, rows=np.full((3, 2), bound))
    assert compare(with_element("rows", (1, 0), value), with_element("rows", (1, 0), expected), bounds).ratio == ratio


def test_a_bound_of_0_or_nan_a_missing_field_and_a_wrong_shape_give_an_infinite_ratio():
    for bound in (0.0, np.nan):
        worst = compare(with_element("rows", (1, 0), 1.25), ONES, replace(BOUND, rows=np.full((3, 2), bound)))
        assert (worst.ratio, worst.index, worst.error) == (np.inf, (1, 0), 0.25)
    assert compare(replace(ONES, rows=None), ONES, BOUND).ratio == np.inf
    assert compare(replace(ONES, rows=np.ones((4, 2))), ONES, BOUND).ratio == np.inf
    assert compare(replace(ONES, columns=ONES.columns[:2]), ONES, BOUND).ratio == np.inf


def test_only_the_named_fields_are_compared():
    assert compare(with_element("rows", (0, 0), 9.0), ONES, BOUND, ("loss", "scale")).ratio == 0.0


def test_a_backend_cannot_reach_the_problem():
    problem = cases.build("ragged", "float64")
    native = materialise(problem, load("numpy"), "float64")
    native.rows[...] = 0.0
    native.columns[0][...] = 0.0
    assert problem.rows.any()
    assert problem.columns[0].any()


def test_a_missing_field_is_not_identical():
    assert identical(ONES, ONES).ratio == 0.0
    assert "rows is missing" in str(identical(replace(ONES, rows=None), ONES))
