"""The balls that the oracle's tests rely on hold the truth, and are small enough that defects fall outside."""

import mpmath
import numpy as np
from balls import Ball, U, general
from oracle_problems import random_problem

P = random_problem(7, 9, 14, 5, "ids", True, False, 14.0, True).moved(u=np.ones(9), v=np.ones(14))


def encloses(ball, truth):
    """Whether the ball holds the truth, entry for entry."""
    flat = zip(ball.mid, ball.rad, truth, strict=True)
    return all(abs(mpmath.mpf(float(mid)) - value) <= mpmath.mpf(float(rad)) for mid, rad, value in flat)


@mpmath.workdps(50)
def test_library_functions_hold_the_truth():
    x = np.array([0.3, 1.0, 2.5])
    near = Ball(x, U * x)
    for function, true in ((np.tanh, mpmath.tanh), (np.sqrt, mpmath.sqrt), (np.log, mpmath.log), (np.exp, mpmath.exp)):
        result = function(near)
        for sign in (-1, 0, 1):
            assert encloses(result, [true(mpmath.mpf(float(v)) * (1 + sign * mpmath.mpf(U))) for v in x])
    both = np.logaddexp(near, Ball(2 * x))
    assert encloses(both, [mpmath.log(mpmath.exp(float(v)) + mpmath.exp(2 * float(v))) for v in x])


def test_a_relative_error_of_two_to_the_minus_36_is_seen_everywhere():
    """In the loss, in each gradient's largest entry, and so in anything bigger: a dropped column, a wrong sign."""
    for ball in general(P).all:
        assert np.max(2 * ball.rad) * 2**36 < max(np.abs(ball.mid).max(), 1.0)
