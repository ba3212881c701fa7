"""The sigmoid loss against its definition, pair by pair."""

from __future__ import annotations

import mpmath
import numpy as np
import pytest
from balls import Ball, U, agrees
from balls import sigmoid as sigmoid_of
from hypothesis import given, settings
from oracle_problems import Problem, problems
from second_opinions import by_autograd

from contrastile.oracle.general import gradients
from contrastile.oracle.sigmoid import gradient_of_sigmoid_logits, sigma, sigmoid_loss, softplus

B = 7.0


def by_the_oracle(p: Problem) -> list:
    G = gradient_of_sigmoid_logits(p.x, p.P, B, p.A)
    return [sigmoid_loss(p.x, p.P, B, p.A), *gradients(p.q, p.k, p.scale, G)]


@settings(max_examples=30)
@given(p=problems(largest=5))
def test_autograd_of_the_definition_agrees(p: Problem) -> None:
    for ours, theirs, ball in zip(by_the_oracle(p), by_autograd(p, B), sigmoid_of(p, B).all, strict=True):
        assert agrees(ours, ball)
        assert agrees(theirs, ball)


@pytest.mark.parametrize("t", [0.0, 1e-3, 40.0, -40.0, 800.0, -700.0])
def test_far_tails_keep_their_digits(t: float) -> None:
    with mpmath.workdps(400):
        exact = mpmath.log(1 + mpmath.exp(t)), 1 / (1 + mpmath.exp(-t))
        for ours, value in zip((softplus(np.array(t)), sigma(np.array(t))), exact, strict=True):
            assert agrees(ours, Ball(float(value), 4 * U * float(value)))


def test_nan_and_infinity_follow_ieee() -> None:
    t = np.array([np.inf, -np.inf, np.nan])
    np.testing.assert_array_equal(softplus(t), [np.inf, 0.0, np.nan])
    np.testing.assert_array_equal(sigma(t), [1.0, 0.0, np.nan])
    x, P = np.array([[np.nan, 1.0]]), np.array([[True, False]])
    assert np.isnan(sigmoid_loss(x, P, 1.0, np.ones((1, 2), dtype=np.bool_)))
    assert sigmoid_loss(x, P, 1.0, np.zeros((1, 2), dtype=np.bool_)) == 0.0
