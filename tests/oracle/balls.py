"""Balls: a float64 value and a bound on its rounding error, carried through every operation.

The radius of a result has two parts: the effect of the radii of the operands, and the rounding of the operation itself.
That is u = 2^-53 for one operation, gamma_n = n u / (1 - n u) for a sum of n terms in any order, and `ULPS` roundings
for a library function. Two float64 computations of one formula, whatever their order of summation, are within twice the
radius of each other.
"""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin

U = 2.0**-53
TINY = 2.0**-1074  # one underflow
ULPS = 4  # of exp, log and tanh in any library in use


def gamma(k):
    return k * U / (1 - k * U)


class Ball(NDArrayOperatorsMixin):
    """`mid` +- `rad`, elementwise."""

    def __init__(self, mid, rad=0.0, depth=0):
        self.mid = np.asarray(mid, dtype=np.float64)
        # The radius is itself computed in float64, with at most depth + 16 roundings of positive terms.
        self.rad = np.broadcast_to(np.asarray(rad) * (1 + gamma(depth + 16)), self.mid.shape)

    def __array_ufunc__(self, ufunc, method, *inputs):
        assert method == "__call__", method
        return OPERATIONS[ufunc](*[x if isinstance(x, Ball) else Ball(x) for x in inputs])

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
    return Ball(mid, mid * np.expm1(a.rad) + ULPS * (U * mid + TINY))


def _log(a):
    mid = np.log(a.mid)
    assert np.all(a.rad < a.mid)
    return Ball(mid, np.log1p(a.rad / (a.mid - a.rad)) + ULPS * U * np.abs(mid))


def _tanh(a):
    mid = np.tanh(a.mid)
    return Ball(mid, a.rad + ULPS * U * np.abs(mid))  # its slope is at most 1


def _logaddexp(a, b):
    mid = np.logaddexp(a.mid, b.mid)  # its slope is at most 1
    size = np.where(np.isfinite(mid), np.abs(mid), 0.0)
    return Ball(mid, np.maximum(a.rad, b.rad) + (ULPS + 4) * U * (size + 2))


def _sqrt(a):
    mid = np.sqrt(a.mid)
    assert np.all(a.rad < a.mid)
    return Ball(mid, a.rad / (2 * np.sqrt(a.mid - a.rad)) + U * mid)


OPERATIONS = {
    np.add: _add,
    np.subtract: lambda a, b: _add(a, -b),
    np.negative: lambda a: Ball(-a.mid, a.rad),
    np.multiply: _multiply,
    np.divide: _divide,
    np.matmul: _matmul,
    np.exp: _exp,
    np.log: _log,
    np.logaddexp: _logaddexp,
    np.tanh: _tanh,
    np.sqrt: _sqrt,
}


def concatenate(balls):
    return Ball(np.concatenate([x.mid for x in balls]), np.concatenate([x.rad for x in balls]))


def lse(x, admitted):
    """Log-sum-exp of each row's admitted entries, merged one by one."""
    result = Ball(np.full(len(x), -np.inf))
    for j in range(x.shape[1]):
        result = np.logaddexp(result, Ball(np.where(admitted[:, j], x.mid[:, j], -np.inf), x.rad[:, j]))
    return result


def _from_logits(p, gradient_and_loss):
    """A loss and all its gradients, from a function of the logits that returns G and the loss."""
    scale, q = (x if isinstance(x, Ball) else Ball(x) for x in (p.scale, p.q))
    per_row = scale.shape != ()
    scale = scale[:, None] if per_row else scale
    G, result = gradient_and_loss(scale * (q @ p.k.T) + p.bias)
    R = G @ p.k
    result.G = G
    result.gradients = [
        scale * R,
        (scale * G).T @ q,
        (R * q).sum(axis=1 if per_row else None),
        G.sum(axis=1).sum(),
    ]
    result.d_rows, result.d_columns, result.d_scale, result.d_bias = result.gradients
    result.all = [result.loss, *result.gradients]
    return result


def general(p):
    """The general loss of a problem."""

    def gradient_and_loss(x):
        result, G = SimpleNamespace(loss=Ball(0.0)), 0.0
        result.row_lse, result.column_lse = lse(x, p.A), lse(x.T, p.A.T)
        for L, w, y, is_transposed in ((result.row_lse, p.u, p.y, False), (result.column_lse, p.v, p.y_c, True)):
            (logits, admitted, y) = (x.T, p.A.T, y.T) if is_transposed else (x, p.A, y)
            is_finite = np.isfinite(L.mid)
            L = Ball(np.where(is_finite, L.mid, 0.0), np.where(is_finite, L.rad, 0.0))
            w = np.where(is_finite, w, 0.0)
            result.loss = result.loss + (w * (L - (y * logits).sum(axis=1))).sum()
            weighted = w[:, None] * (admitted * np.exp(admitted * (logits - L[:, None])) - y)
            G = G + (weighted.T if is_transposed else weighted)
        return G, result

    return _from_logits(p, gradient_and_loss)


def contrastive(X, Y, r, scale, B):
    """1/B sum_i (log sum_j exp(scale <x_i, y_j>) - scale <x_i, y_{r_i}>): loss, dX, dY, dscale and p, as balls."""
    y = one_hot(r, len(Y))
    weights = {"A": np.ones(y.shape, np.bool_), "y": y, "y_c": y, "u": np.ones(len(y)), "v": np.zeros(len(Y))}
    result = general(SimpleNamespace(q=X, k=Y, scale=scale, bias=0.0, **weights))
    return *(x / float(B) for x in result.all[:4]), result.G + y


def sigmoid(p, b):
    """The sigmoid loss of a problem, over b."""

    def gradient_and_loss(x):
        t = np.where(p.P, -1.0, 1.0) * x
        terms = p.A * np.logaddexp(0.0, t)
        # exp(t) / (1 + exp(t))
        probability = np.exp(t - np.logaddexp(0.0, t))
        return np.where(p.P, -1.0, 1.0) * (p.A * probability) / b, SimpleNamespace(loss=terms.sum() / b)

    return _from_logits(p, gradient_and_loss)


def one_hot(r, n):
    return (np.asarray(r)[:, None] == np.arange(n)).astype(np.float64)


def agrees(actual, ball):
    """Whether a float64 result is within twice the radius, as two computations of one formula are."""
    actual = np.asarray(actual, dtype=np.float64)
    assert actual.shape == ball.mid.shape
    with np.errstate(invalid="ignore"):
        error = np.where(actual == ball.mid, 0.0, np.abs(actual - ball.mid))
    assert np.isfinite(error).all()
    return bool(np.all((error == 0) | (error <= 2 * ball.rad)))
