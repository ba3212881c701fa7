"""Running a problem and comparing its outcome."""

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


def changed(field, index, value):
    x = getattr(ONES, field).copy()
    x[index] = value
    return replace(ONES, **{field: x})


def test_worst_element_is_located():
    worst = compare(changed("rows", (2, 1), 1.5), ONES, BOUND)
    assert (worst.field, worst.index, worst.error, worst.bound, worst.ratio) == ("rows", (2, 1), 0.5, 1.0, 0.5)
    assert str(worst) == "rows[2, 1]: error 0.5, bound 1"


@pytest.mark.parametrize(("got", "excess"), [(1.0 + 2**-9, 0.0), (1.0 + 2**-9 + 2**-12, 0.25), (1.25, 1.0)])
def test_the_rounding_of_a_stored_result_is_left_out_of_the_excess(got, excess):
    # half a spacing of 2^-8 at 1, and 2^-10 for the arithmetic
    bound = replace(BOUND, rows=np.full((3, 2), 2**-9 + 2**-10), rounding=(2.0**-9, 0.0))
    worst = compare(changed("rows", (2, 1), got), ONES, bound)
    assert worst.ratio == (got - 1.0) / (2**-9 + 2**-10)
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
    ("got", "true", "ratio"),
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
def test_what_is_not_finite_must_be_the_same_and_what_is_the_same_has_ratio_0(got, true, ratio, bound):
    bounds = replace(BOUND, rows=np.full((3, 2), bound))
    assert compare(changed("rows", (1, 0), got), changed("rows", (1, 0), true), bounds).ratio == ratio


def test_an_error_above_bound_0_or_nan_a_missing_field_and_a_wrong_shape_are_hopeless():
    for bound in (0.0, np.nan):
        worst = compare(changed("rows", (1, 0), 1.25), ONES, replace(BOUND, rows=np.full((3, 2), bound)))
        assert (worst.ratio, worst.index, worst.error) == (np.inf, (1, 0), 0.25)
    assert compare(replace(ONES, rows=None), ONES, BOUND).ratio == np.inf
    assert compare(replace(ONES, rows=np.ones((4, 2))), ONES, BOUND).ratio == np.inf
    assert compare(replace(ONES, columns=ONES.columns[:2]), ONES, BOUND).ratio == np.inf


def test_only_the_named_fields_are_compared():
    assert compare(changed("rows", (0, 0), 9.0), ONES, BOUND, ("loss", "scale")).ratio == 0.0


def test_a_backend_cannot_reach_the_problem():
    problem = cases.build("ragged", "float64")
    native = materialise(problem, load("numpy"), "float64")
    native.rows[...] = 0.0
    native.columns[0][...] = 0.0
    assert problem.rows.any()
    assert problem.columns[0].any()


def test_what_is_missing_the_second_time_is_not_the_same():
    assert identical(ONES, ONES).ratio == 0.0
    assert "rows is missing" in str(identical(replace(ONES, rows=None), ONES))
