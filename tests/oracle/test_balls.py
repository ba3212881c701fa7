"""Balls contain the true value, and are so small that defects are outside."""

import mpmath
import numpy as np
from balls import Ball, U, general
from oracle_problems import random_problem

P = random_problem(7, 9, 14, 5, "ids", True, False, 14.0, True).moved(u=np.ones(9), v=np.ones(14))


def encloses(ball, truth):
    """Whether the ball contains the true value of every entry."""
    entries = zip(ball.mid, ball.rad, truth, strict=True)
    return all(abs(mpmath.mpf(float(mid)) - exact) <= mpmath.mpf(float(rad)) for mid, rad, exact in entries)


@mpmath.workdps(50)
def test_balls_of_library_functions_contain_the_true_value():
    x = np.array([0.3, 1.0, 2.5])
    ball = Ball(x, U * x)
    for function, exact in ((np.tanh, mpmath.tanh), (np.sqrt, mpmath.sqrt), (np.log, mpmath.log), (np.exp, mpmath.exp)):
        result = function(ball)
        for sign in (-1, 0, 1):
            assert encloses(result, [exact(mpmath.mpf(float(v)) * (1 + sign * mpmath.mpf(U))) for v in x])
    merged = np.logaddexp(ball, Ball(2 * x))
    assert encloses(merged, [mpmath.log(mpmath.exp(float(v)) + mpmath.exp(2 * float(v))) for v in x])


def test_a_relative_error_of_two_to_the_minus_36_is_outside_of_every_ball():
    """Of the loss and of the largest entry of each gradient; a dropped column or a wrong sign is a larger error."""
    for ball in general(P).all:
        assert np.max(2 * ball.rad) * 2**36 < max(np.abs(ball.mid).max(), 1.0)
