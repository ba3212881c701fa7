"""Bars of an objective, and the forms in which backends take them, over any ``arrays.ArrayLibrary``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from contrastile.backends.contract import Array, Bars, SideWeights
from contrastile.backends.objectives import STATISTICS, Objective, Terms, terms


def _weighted_bars(arrays: Any, objective: Objective, n: Array, p: Array, weight: Array) -> Sequence[Array]:
    """The bars of ``sum_i w_i value_i``, from the lowered N; 0 where the weight is 0."""
    weight = arrays.cast(weight, "float64")
    return tuple([arrays.where(weight == 0, 0.0, weight * bar) for bar in objective.derivatives(arrays, n, p)])


def side_weights(terms: Terms, arrays: Any, lses: Sequence[Array], weight: Array, target: Array) -> SideWeights:
    """What ``gradients`` needs to know of one side, from its N and P (``lses``)."""
    n, p = lses
    if terms.kind == STATISTICS:
        bars = Bars(*(arrays.contiguous(weight[:, i]) for i in range(3)))
        return SideWeights(n, p, bars.negative, target, bars)
    return SideWeights(n, p, weight, target, None if terms.fused else _objective_bars(terms, arrays, n, p, weight))


def bars_of(arrays: Any, side: SideWeights) -> Bars:
    """The bars of a side, formed from its weights where it has none."""
    if side.bars is not None:
        return side.bars
    return _objective_bars(terms("softmax"), arrays, *side[:3])


def _objective_bars(terms: Terms, arrays: Any, n: Array, p: Array, weight: Array) -> Bars:
    return Bars(*arrays.in_one_kernel(_weighted_bars, (terms.objective,), terms.lowered(arrays, n), p, weight))


FAR = 1000.0
"""Nats below which an exponential is 0, also in float64."""


def normalised(arrays: Any, side: SideWeights, dtype: str) -> tuple[SideWeights, Array]:
    """A side with bars, for kernels that take L, w and t; and the share r of negatives, float64. L replaces N.

    ``G = w exp(x - L)`` on pairs that are not positive and ``w ((q - t) - q r)`` on positives. For "softmax" w, L, t
    and r are u, L, t and sigmoid(N - P). No bar is larger than w, so that no logit is above L; w and t are rounded to
    ``dtype``, and L and r correct for their rounding.
    """
    assert side.bars is not None
    vectors = side.negative_lse, side.positive_lse, side.target, *side.bars
    lse, weight, target, share = arrays.in_one_kernel(_normalised_vectors, (dtype,), *vectors)
    return SideWeights(lse, side.positive_lse, weight, target), share


def _normalised_vectors(
    arrays: Any, dtype: str, n: Array, p: Array, target: Array, negative: Array, positive: Array, spread: Array
) -> Sequence[Array]:
    """L, w, t and r."""
    xp = arrays.module
    largest = xp.maximum(xp.maximum(xp.abs(negative), xp.abs(positive)), xp.abs(spread))
    weight = arrays.cast(xp.copysign(largest, negative), dtype)
    divisor = arrays.cast(weight, "float64")
    # a silent row divides by 1
    divisor = arrays.where(divisor == 0, 1.0, divisor)
    t = arrays.cast(target, "float64")
    rounded = arrays.cast(t * (spread / divisor), dtype)
    # the bar by D that the rounded target represents, divided by w
    ratio = arrays.where(t == 0, spread / divisor, arrays.cast(rounded, "float64") / arrays.where(t == 0, 1.0, t))
    log_ratio = xp.log(negative / divisor)
    lse = n - arrays.where(log_ratio < -FAR, -FAR, log_ratio)
    # where there are no negatives, any finite L is right
    return arrays.where(n == -math.inf, p, lse), weight, rounded, (1.0 - ratio) - positive / divisor
