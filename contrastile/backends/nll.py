"""The loss of one direction from its statistics, over any ``arrays.ArrayLibrary``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

Array = Any


def weighted_nll(
    arrays: Any, negative_lse: Array, positive_lse: Array, positive_sum: Array, weight: Array, target: Array
) -> Array:
    """``sum_i w_i nll_i`` from the library's elementwise operations, in float64, 0-d.

    ``nll = L - t S = softplus(N - P) + (P - t S)``, with N, P and S of ``contract.SideStatistics``; of a row without a
    target it is L. A row that is certain of its one positive has P = S, and the first term to full relative accuracy.
    """
    n, p = negative_lse, positive_lse
    s, weight = arrays.cast(positive_sum, "float64"), arrays.cast(weight, "float64")
    # of lone positives P - t S is nothing
    target = arrays.cast(target, "float64") if p is positive_sum else reciprocal_of_count(arrays, target)
    # a log-sum-exp is never below a mean of its own terms: rounding that says so is projected back
    spread = arrays.maximum(p - target * s, 0.0)
    # a positive whose logit is -inf is no missing one
    missing = (target == 0) | ((p == -math.inf) & (s == 0))
    # 0 x target: a target of NaN is how a bad positive comes through where values cannot be read
    nll = arrays.where(missing, arrays.merge(n, p) + 0.0 * target, arrays.softplus(n - p) + spread)
    # a weight of 0 silences a row that admits nothing, whose log-sum-exp is -inf
    return arrays.total(arrays.where(weight == 0, 0.0, weight * nll))


def added(arrays: Any, losses: Sequence[Array], dtype: str) -> Array:
    """The sum of one or two losses in float64, rounded once to ``dtype``."""
    if len(losses) == 1:
        return arrays.cast(losses[0], dtype)
    out = arrays.empty((), dtype, losses[0])
    arrays.add(*losses, out)
    return out


def reciprocal_of_count(arrays: Any, target: Array) -> Array:
    """Targets 1 / n as they were before they were rounded, in float64; 0 stays 0, and NaN stays NaN.

    ``P - t S`` is small beside P where positives have large logits: what t has lost there would be lost at P's size.
    """
    return 1.0 / (1.0 / arrays.cast(target, "float64")).round()
