"""The bound is small enough to catch planted defects, and the comparison refuses NaN and wrong shapes."""

from __future__ import annotations

import numpy as np
import pytest
from float64_bound import SigmoidBound, SoftmaxBound, assert_within
from oracle_problems import Problem, random_problem

from contrastile.oracle.general import gradient_of_logits, gradients, loss
from contrastile.oracle.sigmoid import sigmoid_loss

P = random_problem(7, 9, 14, 5, "ids", True, False, 14.0, True).moved(u=np.ones(9), v=np.ones(14))


def test_a_relative_error_of_two_to_the_minus_36_is_seen_everywhere() -> None:
    """In the loss, in each gradient's largest entry, and so in anything bigger: a dropped column, a wrong sign."""
    bound = SoftmaxBound(P)
    found = gradients(P.q, P.k, P.scale, gradient_of_logits(*P.general()))
    for value, allowed in zip([loss(*P.general()), *found], [bound.loss, *bound.gradients], strict=True):
        largest = np.abs(value).max()
        assert np.max(allowed) * 2**36 < max(largest, 1.0)


def test_a_merge_that_starts_at_zero_and_a_dropped_column_are_caught() -> None:
    x, A, u, v, y, y_c = P.general()
    right, L = loss(*P.general()), np.logaddexp.reduce(np.where(A, x, -np.inf), axis=1)
    one_more = right + (u * (np.logaddexp(L, 0.0) - L)).sum()
    one_less = loss(x[:, :-1], A[:, :-1], u, v[:-1], y[:, :-1], y_c[:, :-1])
    for wrong in (one_more, one_less):
        with pytest.raises(AssertionError):
            assert_within(wrong, right, 2 * SoftmaxBound(P).loss)


def test_a_positive_left_in_and_a_scale_a_hair_off_are_caught_and_a_bias_is_not_felt() -> None:
    G, bound = gradient_of_logits(*P.general()), SoftmaxBound(P)
    right = gradients(P.q, P.k, P.scale, G).d_rows
    hotter, biased = P.moved(scale=P.scale * (1 + 2.0**-30)), P.moved(bias=P.bias + 2.0**-30)
    for scale, wrong in (
        (P.scale, G + P.u[:, None] * P.y),
        (hotter.scale, gradient_of_logits(*hotter.general())),
    ):
        with pytest.raises(AssertionError):
            assert_within(gradients(P.q, P.k, scale, wrong).d_rows, right, 2 * bound.d_rows)
    same = gradients(P.q, P.k, P.scale, gradient_of_logits(*biased.general())).d_rows
    assert_within(same, right, 2 * bound.d_rows)


def test_a_sigmoid_loss_does_feel_a_bias() -> None:
    broken = P.moved(bias=P.bias + 2.0**-30)
    with pytest.raises(AssertionError):
        assert_within(
            sigmoid_loss(broken.x, P.P, 9.0, P.A), sigmoid_loss(P.x, P.P, 9.0, P.A), 2 * SigmoidBound(P, 9.0).loss
        )


def test_the_comparison_refuses_nan_and_wrong_shapes() -> None:
    assert_within([np.inf, 1.0], [np.inf, 1.0], 0.0)
    for actual, expected in (([np.nan], [np.nan]), ([np.inf], [-np.inf]), ([1.0], 1.0), ([1.0], [2.0])):
        with pytest.raises(AssertionError):
            assert_within(actual, expected, 0.5)


def test_an_empty_problem_has_a_bound_of_zero() -> None:
    nothing = Problem(np.zeros((0, 2)), np.zeros((0, 2)), 1.0)
    assert SoftmaxBound(nothing).loss == 0.0
