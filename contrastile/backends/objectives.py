"""Losses of one side as functions of its statistics, with their bars, over any ``arrays.ArrayLibrary``.

An ``Objective`` is a value and its derivatives, each O(m) in float64; all below hands statistics up and bars down, and
knows no loss. Another loss of this kind is one more ``Objective``. The cross entropy alone has a fused form besides:
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

    D enters it linearly, as it does in every loss that is known: no bar depends on it, and it need not be saved. N and
    P may be ``pairs``.

    Attributes:
        value: ``value(arrays, n, p, d)``, (m,).
        unpaired: ``unpaired(arrays, n, p)``, the value of a row without a positive, or with a target of 0.
        bars: ``bars(arrays, n, p)``, its derivatives, (m,) each; one may be a number.
        counts: whether the logarithm of the number of positives is added to ``value``.
        share: see ``Terms.smoothing``.
    """

    value: Callable[[Any, Array, Array, Array], Array]
    unpaired: Callable[[Any, Array, Array], Array]
    bars: Callable[[Any, Array, Array], Sequence[Any]]
    counts: bool = False
    share: float = 0.0

    def derivatives(self, arrays: Any, n: Array, p: Array) -> Sequence[Any]:
        """``bars`` with the share."""
        by_n, by_p, by_d = self.bars(arrays, n, p)
        return by_n, by_p + self.share, by_d - self.share


def _weighted_value(arrays: Any, objective: Objective, lone: bool, lowered: Array, *side: Array) -> Array:
    """``w_i value_i`` in float64, (m,): see ``Terms.total``. ``lone``: whether S is P, of lone positives."""
    n, p, positive_sum, weight, target = side
    s, weight = head(arrays.cast(positive_sum, "float64")), arrays.cast(weight, "float64")
    # of lone positives P - t S is nothing
    target = arrays.cast(target, "float64") if lone else reciprocal_of_count(arrays, target)
    # a log-sum-exp is never below a mean of its own terms: rounding that says so is projected back
    spread = arrays.maximum(head(p) - target * s, 0.0)
    # a positive whose logit is -inf is no missing one
    missing = (target == 0) | ((head(p) == -math.inf) & (s == 0))
    # 0 x target: a target of NaN is how a bad positive comes through where values cannot be read
    paired = objective.value(arrays, lowered, p, spread)
    if objective.share:
        paired = paired + objective.share * (head(p) - spread)
    if objective.counts:
        paired = paired - arrays.module.log(target)
    value = arrays.where(missing, objective.unpaired(arrays, n, p) + 0.0 * target, paired)
    # a weight of 0 silences a row that admits nothing, whose log-sum-exp is -inf
    return arrays.where(weight == 0, 0.0, weight * value)


def _softmax_bars(arrays: Any, n: Array, p: Array) -> Sequence[Any]:
    # the probability of all negatives, with all its digits
    negatives = arrays.module.exp(-arrays.softplus(difference(p, n)))
    return negatives, -negatives, 1.0


SOFTMAX = Objective(
    value=lambda arrays, n, p, d: arrays.softplus(difference(n, p)) + d,
    unpaired=lambda arrays, n, p: head(arrays.merge(n, p)),
    bars=_softmax_bars,
)
"""The cross entropy ``L - t S``, with N, P and S: a row that is certain of its one positive has it to all digits."""

INSIDE = Objective(
    value=lambda arrays, n, p, d: arrays.softplus(difference(n, p)),
    unpaired=SOFTMAX.unpaired,
    bars=lambda arrays, n, p: (*_softmax_bars(arrays, n, p)[:2], 0.0),
    counts=True,
)
"""SupCon's L_in: less the logarithm of the mean probability of the positives."""

OBJECTIVES = {"softmax": SOFTMAX, "inside": INSIDE}
"""The losses by their names, which ``Problem.kind`` gives."""

STATISTICS = "statistics"
"""The kind of a problem whose value is N, P and D themselves, and whose weights are their bars, in (l, 3)."""


@dataclass(frozen=True, slots=True)
class Terms:
    """Which loss of the statistics it is.

    Attributes:
        kind: see ``Problem.kind``.
        margin: what the positives' logits are lowered by, 0-d float64; None for nothing.
        smoothing: the share of the target that is spread over all columns. Of what it adds to the loss, ``schedules.
            beside`` has the part that is linear in all logits.
        fused: whether it is the cross entropy, whose bars kernels form where they need them.
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
        plain = OBJECTIVES[self.kind]
        return replace(plain, share=self.smoothing) if self.smoothing else plain

    def lowered(self, arrays: Any, n: Array) -> Array:
        """``N + s m``: N beside positives that are lower by the margin."""
        if self.margin is None or n.ndim == 1:
            return n if self.margin is None else n + self.margin
        return arrays.module.stack((n[:, 0] + self.margin, n[:, 1]), -1)

    def total(self, arrays: Any, n: Array, p: Array, positive_sum: Array, weight: Array, target: Array) -> Array:
        """``sum_i w_i value_i`` in float64, 0-d: N, P and S of ``contract.SideStatistics``, with ``D = P - t S``."""
        which = self.objective, p is positive_sum
        given = self.lowered(arrays, n), n, p, positive_sum, weight, target
        return arrays.total(arrays.in_one_kernel(_weighted_value, which, *given))


terms = lru_cache(maxsize=None)(Terms)
"""Those of a kind without options, which are the same ones each time."""


def loss(terms: Terms, arrays: Any, dtype: str, sides: Sequence[Sequence[Array]]) -> Array:
    """The loss of one or two sides, each N, P, S, weights and targets; 0-d, rounded once to ``dtype``.

    Of ``STATISTICS`` it is N, P and D of all sides, one after the other, in (3, m + n) float64.
    """
    if terms.fused:
        return arrays.loss(dtype, *sides)
    if terms.kind == STATISTICS:
        found = [arrays.module.stack([head(n), head(p), spread(arrays, p, s, t)]).T for n, p, s, _, t in sides]
        return arrays.concat(found).T
    return added(arrays, [terms.total(arrays, *side) for side in sides], dtype)


def spread(arrays: Any, positive_lse: Array, positive_sum: Array, target: Array) -> Array:
    """``D = P - t S``, 0 where there is no positive: then P is -inf and S is 0."""
    p, s = head(positive_lse), head(arrays.cast(positive_sum, "float64"))
    # a log-sum-exp is never below a mean of its own terms: rounding that says so is projected back
    return arrays.maximum(p - reciprocal_of_count(arrays, target) * s, 0.0)


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
    return 1.0 / arrays.module.floor(1.0 / arrays.cast(target, "float64") + 0.5)
