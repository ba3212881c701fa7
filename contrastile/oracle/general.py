"""The general contrastive loss on a full logits matrix, in its most literal form.

    L_i  = log sum_{j in A(i)} exp x_ij          M_j = log sum_{i in A(j)} exp x_ij
    loss = sum_i u_i (L_i - sum_j y_ij x_ij) + sum_j v_j (M_j - sum_i y'_ij x_ij)
    G_ij = [ij in A] (u_i exp(x_ij - L_i) + v_j exp(x_ij - M_j)) - u_i y_ij - v_j y'_ij

The targets stay out of the sum over the other pairs: y_ij is t_i at the positives of row i, and 0 elsewhere. With N the
log-sum-exp of the negatives, P that of the positives, and the excess e = L - P = log1p(exp(N - P)), a row that is
certain of its positive has a loss of e and a gradient of expm1(-e) = -sigma(N - P) at the positive. Float64 holds both
to full relative accuracy, however small they are, whereas L - x and exp(x - L) - 1 cancel.

A weight of exactly 0 removes its term, whatever the term's value. A row that admits no pair has L_i = -inf, and
0 * -inf would otherwise turn the whole loss into NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

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
    return _as_column(scale) * (float64(q) @ float64(k).T) + bias


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


def _quantity(formula: Callable[[Any], FloatArray]) -> cached_property[FloatArray]:
    return cached_property(np.errstate(all="ignore")(formula))


@dataclass(frozen=True)
class Direction:
    """One direction of the loss: rows to columns or, of the transposed arrays, columns to rows.

    x: (m, n) logits; admitted, positive: (m, n) bool; weight: (m,) u or v; target: (m,) t.
    inside: whether the sum over the positives is inside of the logarithm: the term is then L - P - log t.
    smoothing: e, the share of the weight that moves from the positives to all columns, which must all be admitted.
    bars: (3, m) derivatives of the loss by N, P and D, from which the gradient follows; None if the weights define it.
    """

    x: FloatArray
    admitted: BoolArray
    positive: BoolArray
    weight: FloatArray
    target: FloatArray
    inside: bool = False
    smoothing: float = 0.0
    bars: FloatArray | None = None

    @_quantity
    def negative_lse(self) -> FloatArray:
        """N, (m,); -inf where there is no negative."""
        return row_lse(self.x, self.admitted & ~self.positive)

    @_quantity
    def positive_lse(self) -> FloatArray:
        """P, (m,); -inf where there is no positive. The LSE of one pair is its logit exactly."""
        return row_lse(self.x, self.admitted & self.positive)

    @property
    def lse(self) -> FloatArray:
        """L, (m,)."""
        return merge(self.negative_lse, self.positive_lse)

    @_quantity
    def positive_sum(self) -> FloatArray:
        """S, (m,), the sum of the positives' logits."""
        return float64(np.where(self.positive, self.x, 0.0).sum(axis=1))

    @_quantity
    def spread(self) -> FloatArray:
        """D = P - t S, (m,); 0 where there is no positive."""
        return np.where(self.positive.any(axis=1), self.positive_lse - self.target * self.positive_sum, 0.0)

    @_quantity
    def y(self) -> FloatArray:
        """The targets without smoothing, (m, n)."""
        return np.where(self.positive, self.target[:, None], 0.0)

    @property
    def smoothed(self) -> FloatArray:
        """The weight that smoothing moves, e w, (m,)."""
        return self.smoothing * self.weight

    @_quantity
    def nll(self) -> FloatArray:
        """L - sum_j y_ij x_ij = log1p(exp(N - P)) + D, (m,), and L where the target is 0."""
        excess = softplus(self.negative_lse - self.positive_lse)
        terms = excess - np.log(self.target) if self.inside else excess + self.spread
        if self.smoothing:
            terms = terms + self.smoothing * ((self.y - 1 / self.x.shape[1]) * self.x).sum(axis=1)
        return np.where(self.target == 0, self.lse, terms)

    @_quantity
    def p(self) -> FloatArray:
        """exp(x - L) on admitted pairs and 0 elsewhere, (m, n)."""
        return np.where(self.admitted, np.exp(self.x - self.lse[:, None]), 0.0)

    @_quantity
    def q(self) -> FloatArray:
        """exp(x - P) on positive pairs and 0 elsewhere, (m, n)."""
        return np.where(self.positive, np.exp(self.x - self.positive_lse[:, None]), 0.0)

    @_quantity
    def negative_mass(self) -> FloatArray:
        """sigma(N - P), (m,), the probability of all negatives; 1 where there is no positive."""
        return np.where(self.positive.any(axis=1), sigma(self.negative_lse - self.positive_lse), 1.0)

    @np.errstate(all="ignore")
    def gradient(self, upstream: float | FloatArray = 1.0) -> FloatArray:
        """The direction's part of G, (m, n): w p at a negative, and w ((q - y) - q sigma(N - P)) at a positive.

        No term cancels, and G is 0 where w is 0. With bars it is Nbar exp(x - N) and Pbar q + Dbar (q - y).
        """
        if self.bars is not None:
            d_N, d_P, d_D = self.bars[:, :, None]
            negative = np.where(d_N == 0, 0.0, d_N * np.exp(self.x - self.negative_lse[:, None]))
            positive = d_P * self.q + d_D * (self.q - self.y)
            return np.where(self.positive, positive, np.where(self.admitted, negative, 0.0))
        target_term = 0.0 if self.inside else self.q - self.y
        G = np.where(self.positive, target_term - self.q * self.negative_mass[:, None], self.p)
        w, smoothed = ((upstream * x)[:, None] for x in (self.weight, self.smoothed))
        return np.where(self.admitted & (w != 0), w * G + smoothed * (self.y - 1 / max(G.shape[1], 1)), 0.0)


@np.errstate(all="ignore")
def loss(sides: Sequence[Direction]) -> float:
    """The loss: sum_i u_i (L_i - sum_j y_ij x_ij) + sum_j v_j (M_j - sum_i y'_ij x_ij), of one direction or of both."""
    return sum(weighted_sum(side.weight, side.nll) for side in sides)


def gradient_of_logits(sides: Sequence[Direction], upstream: float | FloatArray = 1.0) -> FloatArray:
    """G (m, n) times an upstream gradient: the rows' part plus, if there is one, the columns' part."""
    G, *others = (side.gradient(upstream) for side in sides)
    return G if not others else G + others[0].T


@np.errstate(all="ignore")
def gradients(q: npt.ArrayLike, k: npt.ArrayLike, scale: npt.ArrayLike, G: FloatArray) -> Gradients:
    """``dQ = s G K``, ``dK = G^T (s Q)``, ``ds = sum_i <q_i, (G K)_i>``, ``dbeta = sum_ij G_ij``.

    q: (m, d); k: (n, d); scale: a number or (m,), and then ds is one number per row; G: (m, n).
    """
    q, k, s = float64(q), float64(k), _as_column(scale)
    R = G @ k
    d_scale = (q * R).sum(axis=1)
    return Gradients(
        d_rows=s * R,
        d_columns=G.T @ (s * q),
        d_scale=d_scale if np.ndim(scale) else float64(d_scale.sum()),
        d_bias=float(G.sum()),
    )


def weighted_sum(w: FloatArray, terms: FloatArray) -> float:
    """sum_i w_i terms_i; a weight of 0 removes its term, whatever the term's value.

    w, terms: (m,).
    """
    return float(np.where(w == 0, 0.0, w * terms).sum())


def _as_column(scale: npt.ArrayLike) -> FloatArray:
    """The scale in the shape that multiplies an (m, anything) matrix row by row."""
    s = float64(scale)
    return s[:, None] if s.ndim else s


@np.errstate(all="ignore")
def lse(x: FloatArray, axis: int) -> FloatArray:
    """Log-sum-exp along an axis, shifted by the maximum where the maximum is finite; -inf of an empty set.

    x: (m, n). Returns (m,) for axis 1 and (n,) for axis 0.
    """
    m = x.max(axis=axis, keepdims=True, initial=-np.inf)
    # -inf (empty) and +inf cannot be subtracted. A shift by 0 gives log 0 = -inf, log inf = inf and NaN for NaN.
    shift = np.where(np.isfinite(m), m, 0.0)
    return float64(shift.squeeze(axis) + np.log(np.exp(x - shift).sum(axis=axis)))
