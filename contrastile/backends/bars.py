"""Bars of an objective, and the forms in which backends take them, over any ``arrays.ArrayLibrary``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from contrastile.backends.contract import Array, Bars, SideWeights
from contrastile.backends.objectives import STATISTICS, Objective, Terms, terms


def _weighted(arrays: Any, objective: Objective, n: Array, p: Array, weight: Array) -> Sequence[Array]:
    """The bars of ``sum_i w_i value_i``, of the lowered N; 0 where the weight is."""
    weight = arrays.cast(weight, "float64")
    return tuple([arrays.where(weight == 0, 0.0, weight * bar) for bar in objective.derivatives(arrays, n, p)])


def side_weights(terms: Terms, arrays: Any, lses: Sequence[Array], weight: Array, target: Array) -> SideWeights:
    """What ``gradients`` is to know of one side, of which these are N and P."""
    n, p = lses
    if terms.kind == STATISTICS:
        given = Bars(*(arrays.contiguous(weight[:, i]) for i in range(3)))
        return SideWeights(n, p, given.negative, target, given)
    return SideWeights(n, p, weight, target, None if terms.fused else _bars(terms, arrays, n, p, weight))


def bars_of(arrays: Any, side: SideWeights) -> Bars:
    """The bars of a side, formed of its weights where it has none."""
    if side.bars is not None:
        return side.bars
    return _bars(terms("softmax"), arrays, *side[:3])


def _bars(terms: Terms, arrays: Any, n: Array, p: Array, weight: Array) -> Bars:
    return Bars(*arrays.in_one_kernel(_weighted, (terms.objective,), terms.lowered(arrays, n), p, weight))


FAR = 1000.0
"""Nats below which nothing is left of an exponential, also in float64."""


def normalised(arrays: Any, side: SideWeights, dtype: str) -> tuple[SideWeights, Array]:
    """A side with bars in the form of kernels that take L, w and t, and the share r of negatives, float64.

    ``G = w exp(x - L)`` on pairs that are not positive and ``w ((q - t) - q r)`` on positives; L comes instead of N.
    Of "softmax" these are u, L, t and sigmoid(N - P). No bar is larger than w, so that no logit is above L; w and t are
    what ``dtype`` holds, and L and r make good what rounding takes from them.
    """
    assert side.bars is not None
    given = side.negative_lse, side.positive_lse, side.target, *side.bars
    lse, weight, target, share = arrays.in_one_kernel(_normalised, (dtype,), *given)
    return SideWeights(lse, side.positive_lse, weight, target), share


def _normalised(
    arrays: Any, dtype: str, n: Array, p: Array, target: Array, negative: Array, positive: Array, spread: Array
) -> Sequence[Array]:
    """L, w, t and r."""
    xp = arrays.module
    size = xp.maximum(xp.maximum(xp.abs(negative), xp.abs(positive)), xp.abs(spread))
    weight = arrays.cast(xp.copysign(size, negative), dtype)
    w = arrays.cast(weight, "float64")
    # a silent row divides by 1
    w = arrays.where(w == 0, 1.0, w)
    t = arrays.cast(target, "float64")
    rounded = arrays.cast(t * (spread / w), dtype)
    # the bar by D that the rounded target stands for
    whole = arrays.where(t == 0, spread / w, arrays.cast(rounded, "float64") / arrays.where(t == 0, 1.0, t))
    below = xp.log(negative / w)
    lse = n - arrays.where(below < -FAR, -FAR, below)
    # where there are no negatives, any L is right that is no infinity
    return arrays.where(n == -math.inf, p, lse), weight, rounded, (1.0 - whole) - positive / w
