"""The bounds that the papers' tests rely on: they hold the truth, and they are small enough to mean something."""

import mpmath
import numpy as np
from paper_bounds import Ball, U, agrees, contrastive, encloses, exact


def exact_contrastive(X, Y, r, scale, B):
    """Loss, dX (row-major) and p at 50 digits."""
    X, Y = exact(X), exact(Y)
    x = mpmath.mpf(scale) * (X * Y.T)
    total = [mpmath.fsum(mpmath.exp(x[i, j]) for j in range(Y.rows)) for i in range(X.rows)]
    p = [[mpmath.exp(x[i, j]) / total[i] for j in range(Y.rows)] for i in range(X.rows)]
    loss = mpmath.fsum(mpmath.log(total[i]) - x[i, int(r[i])] for i in range(X.rows)) / B
    dX = [
        mpmath.mpf(scale) * mpmath.fsum((p[i][j] - (j == r[i])) * Y[j, k] for j in range(Y.rows)) / B
        for i in range(X.rows)
        for k in range(X.cols)
    ]
    return loss, dX, [value for row in p for value in row]


def test_the_ball_holds_the_truth_at_fifty_digits():
    rng = np.random.default_rng(0)
    for scale in (1.0, 20.0, 200.0):
        X, Y, r = rng.standard_normal((5, 3)), rng.standard_normal((7, 3)), rng.integers(0, 7, 5)
        loss, dX, _, _, p = contrastive(X, Y, r, scale, 9)
        true_loss, true_dX, true_p = exact_contrastive(X, Y, r, scale, 9)
        assert encloses(loss, [true_loss])
        assert encloses(dX, true_dX)
        assert encloses(p, true_p)


def test_the_ball_is_small_and_a_wrong_value_falls_outside():
    rng = np.random.default_rng(1)
    X, Y, r = rng.standard_normal((5, 3)), rng.standard_normal((7, 3)), rng.integers(0, 7, 5)
    dX = contrastive(X, Y, r, 1.0, 5)[1]
    magnitude = np.abs(Y).sum() / 5
    depth = 3 + 7 + 3 + 30  # two products, one sum, and the functions between
    assert np.all(dX.rad <= 8 * depth * U * magnitude)
    assert agrees(dX.mid, dX)
    assert not agrees(dX.mid + 3 * dX.rad, dX)


def test_library_functions_hold_the_truth():
    x = np.array([0.3, 1.0, 2.5])
    near = Ball(x, U * x)
    for function, true in ((np.tanh, mpmath.tanh), (np.sqrt, mpmath.sqrt), (np.log, mpmath.log)):
        result = function(near)
        for sign in (-1, 0, 1):
            assert encloses(result, [true(mpmath.mpf(float(v)) * (1 + sign * mpmath.mpf(U))) for v in x])
