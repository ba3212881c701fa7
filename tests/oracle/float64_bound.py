"""How far one float64 computation of the general or the sigmoid loss may be from its exact value.

u = 2^-53 is the unit roundoff and gamma(k) = k u / (1 - k u) bounds k roundings in a row. A logit is d products, d
sums, the scale and the bias: gamma(d + 3) of the sum of magnitudes. A log-sum-exp is 1-Lipschitz in the largest
logit error; summing, or merging one by one, commits at most n steps of (ULPS + 4) roundings of numbers no larger
than max |x| + log(n + 1) + 1. A softmax entry exp(x - L) carries the error of its argument in relative terms.
Everything after that is a sum of products of known magnitudes.

Each bound is for ONE side; two float64 computations may differ by twice as much.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt
    from oracle_problems import Problem

UNIT_ROUNDOFF = 2.0**-53
SMALLEST_NORMAL = 2.0**-1022  # below it exp and products err in absolute, not in relative terms
ULPS = 4  # of exp, log and log1p in any library in use


def gamma(k: float) -> float:
    return k * UNIT_ROUNDOFF / (1 - k * UNIT_ROUNDOFF)


def assert_within(actual: npt.ArrayLike, expected: npt.ArrayLike, bound: npt.ArrayLike) -> None:
    """|actual - expected| <= bound, entry by entry; equal infinities agree, NaN never does."""
    actual, expected = np.asarray(actual, dtype=np.float64), np.asarray(expected, dtype=np.float64)
    assert actual.shape == expected.shape
    with np.errstate(invalid="ignore"):
        error = np.where(actual == expected, 0.0, np.abs(actual - expected))
    assert np.all(error <= bound), f"error {error}\nbound {bound}"


class SoftmaxBound:
    """Bounds for the loss, its LSEs, its G and its gradients on one problem."""

    def __init__(self, p: Problem, row_lse: npt.NDArray[np.float64] | None = None) -> None:
        """row_lse: L where it is merged from more columns than the problem has."""
        m, n, d = *p.x.shape, p.q.shape[1]
        x, A = p.x, p.A
        s = np.abs(np.broadcast_to(np.asarray(p.scale, dtype=np.float64), (m,)))[:, None]
        self.depth = depth = (ULPS + 4) * (max(m, n) + 2) + d
        self.x = gamma(d + 3) * (s * (np.abs(p.q) @ np.abs(p.k).T) + abs(p.bias))
        admitted, worst = np.where(A, np.abs(x), 0.0), np.where(A, self.x, 0.0)
        G, dG, self.loss, self.row_lse, self.column_lse = 0.0 * x, 0.0 * x, 0.0, np.zeros(m), np.zeros(n)
        for axis, w, y in ((1, p.u, p.y), (0, p.v, p.y_c)):
            count = x.shape[axis]
            L = (
                row_lse
                if axis == 1 and row_lse is not None
                else np.logaddexp.reduce(np.where(A, x, -np.inf), axis=axis, initial=-np.inf)
            )
            E_L = worst.max(axis=axis, initial=0.0) + gamma(depth) * (
                admitted.max(axis=axis, initial=0.0) + np.log(count + 1) + 1
            )
            L, seen = np.where(np.isfinite(L), L, 0.0), np.isfinite(L)
            size, slip = np.abs(L) + (y * np.abs(x)).sum(axis), E_L + (y * self.x).sum(axis)
            weight = np.where(seen, np.abs(w), 0.0)
            self.loss += (weight * (slip + gamma(4 * (m + n) + 8) * size)).sum()
            L_x, E_x, w_x = (np.expand_dims(t, axis) for t in (L, E_L, weight))
            P = np.where(A, np.exp(np.where(A, x - L_x, 0.0)), 0.0)
            eta = np.expm1(self.x + E_x + UNIT_ROUNDOFF * (3 * np.abs(x) + 3 * np.abs(L_x) + ULPS))
            G = G + w_x * (P + y)
            dG = dG + w_x * (P * eta + 4 * UNIT_ROUNDOFF * (P + y)) + (w_x + 1) * SMALLEST_NORMAL
            if axis == 1:
                self.row_lse = E_L
            else:
                self.column_lse = E_L
        self._products(p, s, G, dG)

    def _products(
        self, p: Problem, s: npt.NDArray[np.float64], G: npt.NDArray[np.float64], dG: npt.NDArray[np.float64]
    ) -> None:
        """From |G| and its error to those of the gradients."""
        q, k, sums = np.abs(p.q), np.abs(p.k), gamma(2 * (len(p.q) + len(p.k)) + p.q.shape[1] + 8)
        self.G, self.G_size = dG, G
        self.row_sum = (dG + sums * G).sum(axis=1)
        self.R = (dG + sums * G) @ k
        self.C = (dG + sums * G).T @ q
        self.d_rows, self.d_columns = s * self.R, (dG + sums * G).T @ (s * q)
        per_row = (q * (self.R + sums * (G @ k))).sum(axis=1)
        self.d_scale = per_row if np.ndim(p.scale) else per_row.sum()
        self.d_bias = (dG + gamma(len(p.q) * len(p.k) + 4) * G).sum()

    @property
    def gradients(self) -> list[npt.ArrayLike]:
        return [self.d_rows, self.d_columns, self.d_scale, self.d_bias]


class SigmoidBound(SoftmaxBound):
    """The same for the sigmoid loss: softplus is 1-Lipschitz and sigma 1/4-Lipschitz in the logit."""

    def __init__(self, p: Problem, b: float) -> None:
        m, n = p.x.shape
        s = np.abs(np.broadcast_to(np.asarray(p.scale, dtype=np.float64), (m,)))[:, None]
        self.x = gamma(p.q.shape[1] + 3) * (s * (np.abs(p.q) @ np.abs(p.k).T) + abs(p.bias))
        softplus = np.abs(p.x) + 1  # no smaller than log(1 + exp |x|)
        terms = np.where(p.A, self.x + gamma(m * n + ULPS + 4) * softplus, 0.0) / b
        self.row_loss, self.loss = terms.sum(axis=1), terms.sum()
        sigma = np.where(p.A, 1.0, 0.0) / b
        self._products(p, s, sigma, sigma * (self.x / 4 + gamma(2 * ULPS + 4)))
