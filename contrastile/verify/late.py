"""The additional error bounds of a MaxSim loss, between the products of tokens and the scores of texts.

A computation may choose any token whose product is within rounding of the largest, and may split G among tied tokens.
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
        nearest: (m, q, n, t) bool, the one nearest token; all False for a query's token that does not count.
        G: (m, n) gradient of the logits.
    """

    products: FloatArray
    nearest: BoolArray
    G: FloatArray

    def of_tokens(self, x: FloatArray) -> FloatArray:
        """A matrix of tokens: the entry of the texts x at each nearest token, 0 elsewhere."""
        return self._flat(self.nearest * x[:, None, :, None])

    def score_error(self, e: FloatArray, a: Arithmetic) -> FloatArray:
        """Error (m, n) of ``S_ij = sum_a max_b p_iajb``, where e are the errors of the products of tokens.

        A maximum moves by at most the largest e of its candidates; the sum rounds q times, and the scale twice.
        """
        maximum_error = np.where(self._candidates(e), e.reshape(self.products.shape), 0.0).max(axis=3)
        size = np.where(self.nearest, np.abs(self.products), 0.0).sum(axis=3) + maximum_error
        return float64((maximum_error + gamma(a.accuracy.unit * (size.shape[1] + 2)) * size).sum(axis=1))

    def gradient_bounds(self, bound: Bound, dG: FloatArray, e: FloatArray, a: Arithmetic) -> dict[str, Any]:
        """Bounds of the gradients of tokens, from ``bounds.gradient_bounds``; dG is the error of G, of texts.

        A wrong choice of the nearest token moves a score by at most twice its error, and dscale is a sum of scores.
        """
        scale_error = 2 * (np.abs(self.G) * self.score_error(e, a)).sum()
        return bound(self._gradient_error(dG, e)) | {"scale": bound(self.of_tokens(dG))["scale"] + scale_error}

    def _gradient_error(self, dG: FloatArray, e: FloatArray) -> FloatArray:
        """Error, of tokens, of the products' gradient: ``G_ij`` at the nearest, 0 elsewhere; G has the error dG (m, n).

        Where several tokens may be the nearest, each may receive all of G or nothing.
        """
        may_be_nearest = self._candidates(e)
        is_tied = may_be_nearest & (may_be_nearest.sum(axis=3, keepdims=True) > 1)
        return self._flat(may_be_nearest * dG[:, None, :, None] + is_tied * np.abs(self.G)[:, None, :, None])

    def _candidates(self, e: FloatArray) -> BoolArray:
        """Whether each token may be the nearest, if products have errors e."""
        e = e.reshape(self.products.shape)
        upper = self.products + e
        is_candidate: BoolArray = np.isfinite(upper) & (upper >= (self.products - e).max(axis=3, keepdims=True))
        return is_candidate & self.nearest.any(axis=3, keepdims=True)

    def _flat(self, x: FloatArray) -> FloatArray:
        m, q, n, t = self.products.shape
        return float64(x.reshape(m * q, n * t))
