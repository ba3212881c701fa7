"""Losses of one side as functions of its statistics, with their bars, over any ``arrays.ArrayLibrary``.

An ``Objective`` is a value and its derivatives, each O(m) in float64. Backends return statistics, take bars, and know
no loss. Another loss of this kind is one more ``Objective``. Only the cross entropy also has a fused form:
``ArrayLibrary.loss``, and kernels that form its bars where they need them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

from contrastile.backends.pairs import difference, head

Array = Any


@dataclass(frozen=True, slots=True)
class Objective:
    """A loss of one row, or column, from ``N``, ``P`` and ``D``: see ``contract.Bars``.

    The loss must be linear in D: then no bar depends on D, and D need not be saved. N and P may be ``pairs``.

    Attributes:
        value: ``value(arrays, n, p, d)``, (m,).
        unpaired: ``unpaired(arrays, n, p)``, the value of a row without a positive, or with a target of 0.
        bars: ``bars(arrays, n, p)``, the derivatives of ``value``, (m,) each; each may also be a number.
        counts: whether the logarithm of the number of positives is added to ``value``.
        share: see ``Terms.smoothing``.
    """

    value: Callable[[Any, Array, Array, Array], Array]
    unpaired: Callable[[Any, Array, Array], Array]
    bars: Callable[[Any, Array, Array], Sequence[Any]]
    counts: bool = False
    share: float = 0.0

    def derivatives(self, arrays: Any, n: Array, p: Array) -> Sequence[Any]:
        """``bars``, with the smoothing's share added."""
        by_n, by_p, by_d = self.bars(arrays, n, p)
        return by_n, by_p + self.share, by_d - self.share


def _weighted_value(arrays: Any, objective: Objective, single: bool, lowered: Array, *side: Array) -> Array:
    """``w_i value_i`` in float64, (m,): see ``Terms.total``. ``single``: whether S is P, as of single positives."""
    n, p, positive_sum, weight, target = side
    s, weight = head(arrays.cast(positive_sum, "float64")), arrays.cast(weight, "float64")
    # a single positive has a target of 1, and P - t S is 0
    target = arrays.cast(target, "float64") if single else reciprocal_of_count(arrays, target)
    # a log-sum-exp is never below a mean of its own terms: rounding may put it there, so it is clamped
    spread = arrays.maximum(head(p) - target * s, 0.0)
    # S tells a missing positive (0) from a positive whose logit is -inf
    missing = (target == 0) | ((head(p) == -math.inf) & (s == 0))
    # 0 x target keeps NaN: where values cannot be read, a target of NaN stands for an invalid positive
    paired = objective.value(arrays, lowered, p, spread)
    if objective.share:
        paired = paired + objective.share * (head(p) - spread)
    if objective.counts:
        paired = paired - arrays.module.log(target)
    value = arrays.where(missing, objective.unpaired(arrays, n, p) + 0.0 * target, paired)
    # a weight of 0 silences a row that admits nothing, whose log-sum-exp is -inf
    return arrays.where(weight == 0, 0.0, weight * value)


def _softmax_bars(arrays: Any, n: Array, p: Array) -> Sequence[Any]:
    # the probability of all negatives, to full relative accuracy
    negatives = arrays.module.exp(-arrays.softplus(difference(p, n)))
    return negatives, -negatives, 1.0


SOFTMAX = Objective(
    value=lambda arrays, n, p, d: arrays.softplus(difference(n, p)) + d,
    unpaired=lambda arrays, n, p: head(arrays.merge(n, p)),
    bars=_softmax_bars,
)
"""The cross entropy ``L - t S`` from N, P and S: accurate to all digits in a row that is certain of its positive."""

INSIDE = Objective(
    value=lambda arrays, n, p, d: arrays.softplus(difference(n, p)),
    unpaired=SOFTMAX.unpaired,
    bars=lambda arrays, n, p: (*_softmax_bars(arrays, n, p)[:2], 0.0),
    counts=True,
)
"""SupCon's L_in: minus the logarithm of the mean probability of the positives."""

OBJECTIVES = {"softmax": SOFTMAX, "inside": INSIDE}
"""The losses, by ``Problem.kind``."""

STATISTICS = "statistics"
"""The kind of a problem whose value is N, P and D themselves, and whose weights are the bars of these, (l, 3)."""

TEACHER = "teacher"
"""The kind of a problem that is linear in the logits: see ``schedules.teacher``."""

KEEPS_SUMS = frozenset(("sigmoid", TEACHER))
"""The kinds of problems whose state is the sums from which their gradients follow."""


@dataclass(frozen=True, slots=True)
class Terms:
    """A loss of the statistics, with its options.

    Attributes:
        kind: see ``Problem.kind``.
        margin: the amount by which the positives' logits are lowered, 0-d float64; None for 0.
        smoothing: the share of the target that is spread over all columns. It adds to the loss a part that is linear in
            all logits, which ``schedules.beside`` computes, and a part that is computed here.
        fused: whether this is the plain cross entropy, whose bars kernels form where they need them.
    """

    kind: str
    margin: Array | None = None
    smoothing: float | None = None
    fused: bool = field(init=False)

    def __post_init__(self) -> None:
        # read several times in a step
        object.__setattr__(self, "fused", self.kind == "softmax" and self.margin is self.smoothing is None)

    @property
    def objective(self) -> Objective:
        """The loss of one side, of the lowered N."""
        objective = OBJECTIVES[self.kind]
        return replace(objective, share=self.smoothing) if self.smoothing else objective

    def lowered(self, arrays: Any, n: Array) -> Array:
        """``N + s m``: N relative to positives that are lowered by the margin."""
        if self.margin is None or n.ndim == 1:
            return n if self.margin is None else n + self.margin
        return arrays.module.stack((n[:, 0] + self.margin, n[:, 1]), -1)

    def total(self, arrays: Any, n: Array, p: Array, positive_sum: Array, weight: Array, target: Array) -> Array:
        """``sum_i w_i value_i`` in float64, 0-d: N, P and S of ``contract.SideStatistics``, with ``D = P - t S``."""
        options = self.objective, p is positive_sum
        statistics = self.lowered(arrays, n), n, p, positive_sum, weight, target
        return arrays.total(arrays.in_one_kernel(_weighted_value, options, *statistics))


terms = lru_cache(maxsize=None)(Terms)
"""``Terms``, cached: the terms of a kind without options are always the same object."""


def loss(terms: Terms, arrays: Any, dtype: str, sides: Sequence[Sequence[Array]]) -> Array:
    """The loss of one or two sides, each N, P, S, weights and targets; 0-d, rounded once to ``dtype``.

    For ``STATISTICS`` the result is N, P and D of all sides, one after the other, in (3, m + n) float64.
    """
    if terms.fused:
        return arrays.loss(dtype, *sides)
    if terms.kind == STATISTICS:
        statistics = [arrays.module.stack([head(n), head(p), spread(arrays, p, s, t)]).T for n, p, s, _, t in sides]
        return arrays.concat(statistics).T
    return added(arrays, [terms.total(arrays, *side) for side in sides], dtype)


def spread(arrays: Any, positive_lse: Array, positive_sum: Array, target: Array) -> Array:
    """``D = P - t S``, 0 where there is no positive: then P is -inf and S is 0."""
    p, s = head(positive_lse), head(arrays.cast(positive_sum, "float64"))
    # clamped as in ``_weighted_value``
    return arrays.maximum(p - reciprocal_of_count(arrays, target) * s, 0.0)


def added(arrays: Any, losses: Sequence[Array], dtype: str) -> Array:
    """The sum of one or two losses in float64, rounded once to ``dtype``."""
    if len(losses) == 1:
        return arrays.cast(losses[0], dtype)
    out = arrays.empty((), dtype, losses[0])
    arrays.add(*losses, out)
    return out


def reciprocal_of_count(arrays: Any, target: Array) -> Array:
    """Targets 1 / n in float64, without the rounding of the state dtype; 0 stays 0, and NaN stays NaN.

    ``P - t S`` is small beside P where positives have large logits, so that the rounding of t would dominate it.
    """
    return 1.0 / arrays.module.floor(1.0 / arrays.cast(target, "float64") + 0.5)
