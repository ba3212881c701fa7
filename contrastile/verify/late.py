"""Between the products of tokens and the scores of texts: what the bounds of a MaxSim loss have beside another's.

A computation may take any token whose product is within rounding of the largest, and of tied ones any share of each.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from contrastile.oracle.arrays import BoolArray, FloatArray, float64
from contrastile.verify.arithmetic import Arithmetic, gamma

Bound = Callable[[FloatArray], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Late:
    """The tokens of a MaxSim loss: matrices of tokens are (m q, n t), those of texts (m, n).

    Attributes:
        products: (m, q, n, t), -inf where a document's token does not count.
        nearest: (m, q, n, t) bool, the one nearest token; none to a query's token that does not count.
        G: (m, n) gradient of the logits.
    """

    products: FloatArray
    nearest: BoolArray
    G: FloatArray

    def of_tokens(self, x: FloatArray) -> FloatArray:
        """A matrix of texts at each of their tokens that is the nearest, 0 elsewhere."""
        return self._flat(self.nearest * x[:, None, :, None])

    def score_error(self, e: FloatArray, a: Arithmetic) -> FloatArray:
        """Error (m, n) of ``S_ij = sum_a max_b p_iajb`` where the products' are e, of tokens.

        A maximum moves by at most the largest e of those that may be it; the sum rounds q times, the scale twice.
        """
        moved = np.where(self._candidates(e), e.reshape(self.products.shape), 0.0).max(axis=3)
        size = np.where(self.nearest, np.abs(self.products), 0.0).sum(axis=3) + moved
        return float64((moved + gamma(a.accuracy.unit * (size.shape[1] + 2)) * size).sum(axis=1))

    def gradient_bounds(self, bound: Bound, dG: FloatArray, e: FloatArray, a: Arithmetic) -> dict[str, Any]:
        """Bounds of the gradients of tokens, by ``bounds.gradient_bounds`` of the error of G; dG is that of texts.

        Which of several tokens is the nearest moves a score by at most twice the error, and dscale is a sum of scores.
        """
        unsure = 2 * (np.abs(self.G) * self.score_error(e, a)).sum()
        return bound(self._gradient_error(dG, e)) | {"scale": bound(self.of_tokens(dG))["scale"] + unsure}

    def _gradient_error(self, dG: FloatArray, e: FloatArray) -> FloatArray:
        """Error, of tokens, of the products' gradient: ``G_ij`` at the nearest and 0 elsewhere, G known to dG (m, n).

        Where several tokens may be the nearest, each may have all of G or nothing.
        """
        may = self._candidates(e)
        unsure = may & (may.sum(axis=3, keepdims=True) > 1)
        return self._flat(may * dG[:, None, :, None] + unsure * np.abs(self.G)[:, None, :, None])

    def _candidates(self, e: FloatArray) -> BoolArray:
        """Which tokens may be the nearest where products have errors e."""
        e = e.reshape(self.products.shape)
        most = self.products + e
        near: BoolArray = np.isfinite(most) & (most >= (self.products - e).max(axis=3, keepdims=True))
        return near & self.nearest.any(axis=3, keepdims=True)

    def _flat(self, x: FloatArray) -> FloatArray:
        m, q, n, t = self.products.shape
        return float64(x.reshape(m * q, n * t))
