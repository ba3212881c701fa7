"""The general contrastive loss on a full logits matrix, in its most literal form.

    L_i  = log sum_{j in A(i)} exp x_ij          M_j = log sum_{i in A(j)} exp x_ij
    loss = sum_i u_i (L_i - sum_j y_ij x_ij) + sum_j v_j (M_j - sum_i y'_ij x_ij)

The targets stay out of the sum over the other pairs. With N the log-sum-exp of pairs without a target, P that of pairs
with one, and the excess e = L - P = log1p(exp(N - P)), a row that is certain of its positive has a loss of e and a
gradient of expm1(-e) = -sigma(N - P) there: float64 holds both to full relative accuracy, however small, whereas
L - x and exp(x - L) - 1 cancel.

A weight of exactly 0 removes its term, whatever the term's value: a row that admits nothing has L_i = -inf,
and 0 * -inf would otherwise turn the whole loss into NaN.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from contrastile.oracle.arrays import BoolArray, FloatArray, float64
from contrastile.oracle.sigmoid import sigma, softplus


class Gradients(NamedTuple):
    """Gradients with respect to the rows, the columns, the scale and the bias.

    d_rows: (m, d); d_columns: (n, d); d_scale: the scale's own shape, () or (m,); d_bias: a number.
    """

    d_rows: FloatArray
    d_columns: FloatArray
    d_scale: FloatArray
    d_bias: float


@np.errstate(all="ignore")
def logits(q: npt.ArrayLike, k: npt.ArrayLike, scale: npt.ArrayLike, bias: float = 0.0) -> FloatArray:
    """``x_ij = s <q_i, k_j> + beta``.

    q: (m, d); k: (n, d); scale: a number, or (m,) with one scale per row. Returns (m, n).
    """
    return _down_the_rows(scale) * (float64(q) @ float64(k).T) + bias


def row_lse(x: FloatArray, A: BoolArray) -> FloatArray:
    """L_i = log sum_{j in A(i)} exp x_ij; -inf where A(i) is empty, NaN where an admitted logit is NaN.

    x: (m, n); A: (m, n) bool. Returns (m,).
    """
    return lse(np.where(A, x, -np.inf), axis=1)


@np.errstate(all="ignore")
def merge(a: npt.ArrayLike, b: npt.ArrayLike) -> FloatArray:
    """The merge log(exp a + exp b): associative, commutative, with -inf as its identity (Inf-CL Eq. 4, corrected).

    a, b: LSEs of disjoint sets, of shapes that broadcast. (-inf, -inf) gives -inf, +inf with any number gives
    +inf, NaN with anything gives NaN.
    """
    high, low = np.maximum(a, b), np.minimum(a, b)
    # Only a finite maximum may be subtracted: inf - inf is NaN.
    return float64(np.where(np.isfinite(high), high + np.log1p(np.exp(low - high)), high))


@np.errstate(all="ignore")
def loss(
    x: FloatArray,
    A: BoolArray,
    u: FloatArray,
    v: FloatArray | None,
    y: FloatArray,
    y_c: FloatArray | None,
    A_c: BoolArray | None = None,
) -> float:
    """The loss: sum_i u_i (L_i - sum_j y_ij x_ij) + sum_j v_j (M_j - sum_i y'_ij x_ij).

    x, A, y, y_c: (m, n); u: (m,); v: (n,). v and y_c are None together: no column direction.
    A_c: (m, n), what the columns admit where that is not A.
    """
    total = weighted_sum(u, negative_log_likelihood(x, *split_lse(x, A, y, axis=1), y, axis=1))
    if v is not None and y_c is not None:
        seen = A if A_c is None else A_c
        total += weighted_sum(v, negative_log_likelihood(x, *split_lse(x, seen, y_c, axis=0), y_c, axis=0))
    return total


@np.errstate(all="ignore")
def gradient_of_logits(
    x: FloatArray,
    A: BoolArray,
    u: FloatArray,
    v: FloatArray | None,
    y: FloatArray,
    y_c: FloatArray | None,
    A_c: BoolArray | None = None,
) -> FloatArray:
    """G_ij = [ij in A] (u_i exp(x_ij - L_i) + v_j exp(x_ij - M_j)) - u_i y_ij - v_j y'_ij.

    The arguments are those of `loss`. Returns (m, n).
    """
    G = one_direction(x, A, u, *split_lse(x, A, y, axis=1), y, axis=1)
    if v is not None and y_c is not None:
        seen = A if A_c is None else A_c
        G = G + one_direction(x, seen, v, *split_lse(x, seen, y_c, axis=0), y_c, axis=0)
    return G


def split_lse(x: FloatArray, A: BoolArray, y: FloatArray, axis: int) -> tuple[FloatArray, FloatArray]:
    """N and P: the log-sum-exps of admitted pairs without a target and of those with one; -inf where there is none.

    x, A, y: (m, n). Returns (m,) twice for axis 1 and (n,) twice for axis 0. The LSE of one pair is its logit exactly.
    """
    wanted = y != 0
    return lse(np.where(A & ~wanted, x, -np.inf), axis), lse(np.where(A & wanted, x, -np.inf), axis)


@np.errstate(all="ignore")
def negative_log_likelihood(x: FloatArray, N: FloatArray, P: FloatArray, y: FloatArray, axis: int) -> FloatArray:
    """L - sum_j y_ij x_ij = log1p(exp(N - P)) + (P - sum_j y_ij x_ij), and N where there is no target.

    x, y: (m, n); N, P: (m,) for axis 1, (n,) for axis 0, of the whole problem. Returns the same.
    """
    return np.where((y != 0).any(axis), softplus(N - P) + (P - expected_logit(x, y, axis)), N)


@np.errstate(all="ignore")
def one_direction(
    x: FloatArray, A: BoolArray, weight: FloatArray, N: FloatArray, P: FloatArray, y: FloatArray, axis: int
) -> FloatArray:
    """One direction's part of G: w ([ij in A] exp(x_ij - L) - y_ij), and 0 where w is 0.

    With a target it is w ((q - y) - q sigma(N - P)), q = exp(x - P), which cancels nowhere.

    x, A, y: (m, n); weight, N, P: (m,) for axis 1, (n,) for axis 0.
    """
    w, N, P = (np.expand_dims(each, axis) for each in (weight, N, P))
    p = np.where(A, np.exp(x - merge(N, P)), 0.0)
    q = np.exp(x - P)
    return np.where(w == 0, 0.0, w * np.where(A & (y != 0), (q - y) - q * sigma(N - P), p))


@np.errstate(all="ignore")
def gradients(q: npt.ArrayLike, k: npt.ArrayLike, scale: npt.ArrayLike, G: FloatArray) -> Gradients:
    """``dQ = s G K``, ``dK = G^T (s Q)``, ``ds = sum_i <q_i, (G K)_i>``, ``dbeta = sum_ij G_ij``.

    q: (m, d); k: (n, d); scale: a number or (m,), and then ds is one number per row; G: (m, n).
    """
    q, k, s = float64(q), float64(k), _down_the_rows(scale)
    R = G @ k
    d_scale = (q * R).sum(axis=1)
    return Gradients(
        d_rows=s * R,
        d_columns=G.T @ (s * q),
        d_scale=d_scale if np.ndim(scale) else float64(d_scale.sum()),
        d_bias=float(G.sum()),
    )


def expected_logit(x: FloatArray, y: FloatArray, axis: int) -> FloatArray:
    """sum_j y_ij x_ij along an axis; a target of weight 0 contributes 0, whatever its logit.

    x, y: (m, n). Returns (m,) for axis 1 and (n,) for axis 0.
    """
    return float64(np.where(y == 0, 0.0, y * x).sum(axis=axis))


def weighted_sum(w: FloatArray, terms: FloatArray) -> float:
    """sum_i w_i terms_i; a weight of 0 removes its term, whatever its value.

    w, terms: (m,).
    """
    return float(np.where(w == 0, 0.0, w * terms).sum())


def _down_the_rows(scale: npt.ArrayLike) -> FloatArray:
    """The scale in the shape that multiplies an (m, anything) matrix row by row."""
    s = float64(scale)
    return s[:, None] if s.ndim else s


@np.errstate(all="ignore")
def lse(x: FloatArray, axis: int) -> FloatArray:
    """Log-sum-exp along an axis, shifted by the maximum where that is finite; -inf of nothing.

    x: (m, n). Returns (m,) for axis 1 and (n,) for axis 0.
    """
    m = x.max(axis=axis, keepdims=True, initial=-np.inf)
    # -inf (empty) and +inf cannot be subtracted; shifting by 0 gives log 0 = -inf, log inf = inf and NaN for NaN.
    shift = np.where(np.isfinite(m), m, 0.0)
    return float64(shift.squeeze(axis) + np.log(np.exp(x - shift).sum(axis=axis)))
