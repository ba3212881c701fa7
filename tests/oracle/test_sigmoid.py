"""The sigmoid loss against loops, mpmath, torch and central differences."""

from __future__ import annotations

import numpy as np
import pytest
from float64_bound import UNIT_ROUNDOFF, SigmoidBound, assert_within, twice
from hypothesis import given, settings
from oracle_problems import Problem, on_grid, problems
from second_opinions import in_mpmath, in_python, in_torch

from contrastile.oracle.general import gradients
from contrastile.oracle.sigmoid import gradient_of_sigmoid_logits, sigma, sigmoid_loss, softplus

B = 7.0


def by_the_oracle(p: Problem) -> list:
    G = gradient_of_sigmoid_logits(p.x, p.P, B, p.A)
    return [sigmoid_loss(p.x, p.P, B, p.A), *gradients(p.q, p.k, p.scale, G)]


def bounds_of(p: Problem) -> list:
    bound = SigmoidBound(p, B)
    return [bound.loss, *bound.gradients]


@settings(max_examples=50, deadline=None)
@given(p=problems(heats=(1.0, 14.0)))
def test_loops_over_the_definition_agree(p: Problem) -> None:
    for ours, theirs, bound in zip(by_the_oracle(p), in_python(p, B), twice(bounds_of(p)), strict=True):
        assert_within(ours, theirs, bound)


@settings(max_examples=30, deadline=None)
@given(p=problems(largest=5))
def test_fifty_digits_agree(p: Problem) -> None:
    for ours, exact, bound in zip(by_the_oracle(p), in_mpmath(p, B), bounds_of(p), strict=True):
        assert_within(ours, exact, bound)


@settings(max_examples=50, deadline=None)
@given(p=problems())
def test_autograd_agrees(p: Problem) -> None:
    for ours, theirs, bound in zip(by_the_oracle(p), in_torch(p, B), twice(bounds_of(p)), strict=True):
        assert_within(ours, theirs, bound)


@settings(max_examples=30, deadline=None)
@given(p=problems(smallest=1, heats=(1.0, 4.0)))
def test_central_differences_agree(p: Problem) -> None:
    """The third derivative of softplus is below 1/8, so that of the loss below sum |a|^3 / (8 b)."""
    h, rng = 2.0**-16, np.random.default_rng(4)
    found = dict(zip(("q", "k", "scale", "bias"), by_the_oracle(p)[1:], strict=True))
    for name, gradient in found.items():
        base = np.asarray(getattr(p, name), dtype=np.float64)
        delta = on_grid(rng.uniform(-1, 1, size=base.shape))
        forward, back = (p.moved(**{name: base + step * delta}) for step in (h, -h))
        values = [sigmoid_loss(t.x, t.P, B, t.A) for t in (forward, back)]
        slopes = np.abs(forward.x - back.x) / (2 * h)
        slack = (SigmoidBound(forward, B).loss + SigmoidBound(back, B).loss) / (2 * h)
        slack += (slopes**3).sum() / (8 * B) * h**2 / 6
        slack += (np.abs(delta) * dict(zip(found, SigmoidBound(p, B).gradients, strict=True))[name]).sum()
        assert_within((values[0] - values[1]) / (2 * h), np.sum(gradient * delta), slack)


@pytest.mark.parametrize("t", [0.0, 1e-3, 40.0, -40.0, 800.0, -700.0])
def test_far_tails_keep_their_digits(t: float) -> None:
    import mpmath

    with mpmath.workdps(400):
        exact = mpmath.log(1 + mpmath.exp(t)), 1 / (1 + mpmath.exp(-t))
        for ours, value in zip((softplus(np.array(t)), sigma(np.array(t))), exact, strict=True):
            assert_within(ours, float(value), 8 * UNIT_ROUNDOFF * float(value))


def test_nan_and_infinity_follow_ieee() -> None:
    t = np.array([np.inf, -np.inf, np.nan])
    np.testing.assert_array_equal(softplus(t), [np.inf, 0.0, np.nan])
    np.testing.assert_array_equal(sigma(t), [1.0, 0.0, np.nan])
    x, P = np.array([[np.nan, 1.0]]), np.array([[True, False]])
    assert np.isnan(sigmoid_loss(x, P, 1.0, np.ones((1, 2), dtype=np.bool_)))
    assert sigmoid_loss(x, P, 1.0, np.zeros((1, 2), dtype=np.bool_)) == 0.0
