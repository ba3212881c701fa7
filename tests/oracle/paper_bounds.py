"""Bounds for float64 comparisons: a value and how far rounding can move it, carried through every operation.

The radius of a result is first what the radii of its operands can move it by, then its own rounding: u = 2^-53 for
one operation, gamma_n = n u / (1 - n u) for a sum of n terms in any order, `ULPS` roundings for a library function.
Two float64 computations of one formula, whatever their order of summation, are then within twice the radius of each
other.
"""

from __future__ import annotations

import mpmath
import numpy as np
from float64_bound import ULPS, gamma
from float64_bound import UNIT_ROUNDOFF as U

TINY = 2.0**-1074  # one underflow
DIGITS = 50


class Ball:
    """`mid` +- `rad`, elementwise."""

    def __init__(self, mid, rad=0.0, depth=0):
        self.mid = np.asarray(mid, dtype=np.float64)
        # The radius is itself computed in float64, with at most depth + 16 roundings of positive terms.
        self.rad = np.broadcast_to(np.asarray(rad) * (1 + gamma(depth + 16)), self.mid.shape)

    def __array_ufunc__(self, ufunc, method, *inputs):
        assert method == "__call__", method
        return OPERATIONS[ufunc](*[x if isinstance(x, Ball) else Ball(x) for x in inputs])

    def __add__(self, other):
        return np.add(self, other)

    def __radd__(self, other):
        return np.add(other, self)

    def __sub__(self, other):
        return np.subtract(self, other)

    def __rsub__(self, other):
        return np.subtract(other, self)

    def __mul__(self, other):
        return np.multiply(self, other)

    def __rmul__(self, other):
        return np.multiply(other, self)

    def __truediv__(self, other):
        return np.divide(self, other)

    def __rtruediv__(self, other):
        return np.divide(other, self)

    def __matmul__(self, other):
        return np.matmul(self, other)

    def __rmatmul__(self, other):
        return np.matmul(other, self)

    def __neg__(self):
        return Ball(-self.mid, self.rad)

    def __getitem__(self, key):
        return Ball(self.mid[key], self.rad[key])

    def __len__(self):
        return len(self.mid)

    @property
    def T(self):  # noqa: N802
        return Ball(self.mid.T, self.rad.T)

    @property
    def shape(self):
        return self.mid.shape

    def sum(self, axis=None, keepdims=False):
        mid = self.mid.sum(axis=axis, keepdims=keepdims)
        n = self.mid.size if axis is None else self.mid.shape[axis]
        rad = self.rad.sum(axis=axis, keepdims=keepdims)
        return Ball(mid, rad + gamma(n) * np.abs(self.mid).sum(axis=axis, keepdims=keepdims), n)


def _add(a, b):
    mid = a.mid + b.mid
    return Ball(mid, a.rad + b.rad + U * np.abs(mid))


def _multiply(a, b):
    mid = a.mid * b.mid
    rad = np.abs(a.mid) * b.rad + a.rad * np.abs(b.mid) + a.rad * b.rad
    return Ball(mid, rad + U * np.abs(mid) + TINY)


def _divide(a, b):
    mid = a.mid / b.mid
    assert np.all(b.rad < np.abs(b.mid))
    rad = (a.rad + np.abs(mid) * b.rad) / (np.abs(b.mid) - b.rad)
    return Ball(mid, rad + U * np.abs(mid) + TINY)


def _matmul(a, b):
    n = a.mid.shape[-1]
    A, B = np.abs(a.mid), np.abs(b.mid)
    return Ball(a.mid @ b.mid, (gamma(n) * A + a.rad) @ B + (A + a.rad) @ b.rad + n * TINY, n)


def _exp(a):
    mid = np.exp(a.mid)
    return Ball(mid, mid * np.expm1(a.rad) + ULPS * U * mid + TINY)


def _log(a):
    mid = np.log(a.mid)
    assert np.all(a.rad < a.mid)
    return Ball(mid, np.log1p(a.rad / (a.mid - a.rad)) + ULPS * U * np.abs(mid))


def _tanh(a):
    mid = np.tanh(a.mid)
    return Ball(mid, a.rad + ULPS * U * np.abs(mid))  # its slope is at most 1


def _sqrt(a):
    mid = np.sqrt(a.mid)
    assert np.all(a.rad < a.mid)
    return Ball(mid, a.rad / (2 * np.sqrt(a.mid - a.rad)) + U * mid)


OPERATIONS = {
    np.add: _add,
    np.subtract: lambda a, b: _add(a, -b),
    np.multiply: _multiply,
    np.divide: _divide,
    np.matmul: _matmul,
    np.exp: _exp,
    np.log: _log,
    np.tanh: _tanh,
    np.sqrt: _sqrt,
}


def concatenate(balls):
    return Ball(np.concatenate([x.mid for x in balls]), np.concatenate([x.rad for x in balls]))


def contrastive(X, Y, r, scale, B):
    """1/B sum_i (log sum_j exp(scale <x_i, y_j>) - scale <x_i, y_{r_i}>): loss, dX, dY, dscale and p, as balls."""
    X, Y = Ball(X) if not isinstance(X, Ball) else X, Ball(Y) if not isinstance(Y, Ball) else Y
    z = X @ Y.T
    x = scale * z
    m = x.mid.max(axis=1, keepdims=True)  # any constant will do: it is taken off and put back
    e = np.exp(x - m)
    total = e.sum(axis=1, keepdims=True)
    p = e / total
    H = (p - one_hot(r, len(Y))) / B
    rows = np.arange(len(r))
    loss = ((np.log(total)[:, 0] + m[:, 0]) - x[rows, r]).sum() / B
    return loss, scale * (H @ Y), scale * (H.T @ X), (H * z).sum(), p


def one_hot(r, n):
    return (np.asarray(r)[:, None] == np.arange(n)).astype(np.float64)


def excess(actual, ball):
    """Largest error over the bound of two computations, each within the ball's radius; more than 1 is a failure."""
    error = np.abs(np.asarray(actual, dtype=np.float64) - ball.mid)
    assert error.shape == ball.mid.shape
    assert np.isfinite(error).all()
    bound = 2 * ball.rad
    return float(np.max(np.where(error == 0, 0.0, error / np.where(bound > 0, bound, TINY)), initial=0.0))


def agrees(actual, ball):
    """Whether a float64 computation is within rounding of the ball's formula."""
    return excess(actual, ball) <= 1


def exact(x):
    """A float64 array as mpmath numbers of 50 digits."""
    mpmath.mp.dps = DIGITS
    return mpmath.matrix(np.asarray(x, dtype=np.float64).tolist())


def encloses(ball, truth):
    """Whether the ball holds the 50-digit truth, entry for entry."""
    flat = zip(np.ravel(ball.mid), np.ravel(ball.rad), truth, strict=True)
    return all(abs(mpmath.mpf(float(mid)) - value) <= mpmath.mpf(float(rad)) for mid, rad, value in flat)
