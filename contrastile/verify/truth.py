"""The truth of a problem: loss, log-sum-exps and gradients from the dense float64 oracle."""

from __future__ import annotations

import pickle
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any

import numpy as np

from contrastile.oracle.arrays import BoolArray, FloatArray, float64
from contrastile.oracle.general import (
    expected_logit,
    gradients,
    logits,
    merge,
    negative_log_likelihood,
    split_lse,
    weighted_sum,
)
from contrastile.oracle.pairs import Pairs
from contrastile.oracle.sigmoid import gradient_of_sigmoid_logits, sigma, sigmoid_terms, softplus
from contrastile.schedules.problem import Problem
from contrastile.verify.late import Late

_FEW_PAIRS = 1 << 13


@dataclass(frozen=True)
class Outcome:
    """Loss, statistics and gradients of a problem: their values, or bounds on their errors. All float64.

    Attributes:
        loss: 0-d, not multiplied by the upstream gradient; of the kind "statistics" these.
        rows: (m, d) dQ.
        columns: (n_c, d) dK for each column block.
        scale: 0-d dscale.
        bias: 0-d dbias of the sigmoid loss, None for softmax.
        statistics: N, P and D of the rows and then, if they have weights, of the columns, (3, m) or (3, m + n): of the
            truth and of bounds alone, and None for the sigmoid loss.
        rounding: of bounds, the ``UNIT`` and ``UNDERFLOW`` with which ``rows`` and ``columns`` are rounded where
            they are stored in a dtype coarser than the state; else 0.
    """

    loss: FloatArray
    rows: FloatArray
    columns: tuple[FloatArray, ...]
    scale: FloatArray
    bias: FloatArray | None = None
    statistics: FloatArray | None = None
    rounding: tuple[float, float] = (0.0, 0.0)


@dataclass(frozen=True)
class Direction:
    """One direction of the softmax loss, seen from its own side: matrices are (own, other).

    Attributes:
        x: (own, other) logits.
        admitted: (own, other) bool.
        positive: (own, other) bool.
        weight: (own,) not multiplied by the upstream gradient.
        target: (own,).
        negative_lse: (own,) N.
        positive_lse: (own,) P.
        positive_sum: (own,).
        nll: (own,) ``L - t S``.
        p: (own, other) exp(x - L) on admitted pairs, 0 elsewhere.
        q: (own, other) exp(x - P) on positive pairs, 0 elsewhere.
        negative_mass: (own,) sigma(N - P), the probability of all negatives; 1 where there is no positive.
        smoothed: (own,) what label smoothing moves from the positives to all columns: ``e w``.
        bars: (3, own) derivatives by N, P and D of a loss that is known by these alone; None where the weights say it.
    """

    x: FloatArray
    admitted: BoolArray
    positive: BoolArray
    weight: FloatArray
    target: FloatArray
    negative_lse: FloatArray
    positive_lse: FloatArray
    positive_sum: FloatArray
    nll: FloatArray
    p: FloatArray
    q: FloatArray
    negative_mass: FloatArray
    smoothed: FloatArray
    bars: FloatArray | None = None

    @property
    def lse(self) -> FloatArray:
        """L, (own,)."""
        return merge(self.negative_lse, self.positive_lse)

    @property
    def spread(self) -> FloatArray:
        """D = P - t S, (own,); 0 where there is no positive."""
        return np.where(self.positive.any(axis=1), self.positive_lse - self.target * self.positive_sum, 0.0)


@dataclass(frozen=True)
class Truth:
    """The outcome, and the dense intermediates from which bounds are derived.

    Attributes:
        outcome: loss, log-sum-exps and gradients.
        q: (m, d) rows.
        k: (n, d) joined columns.
        scale: a number.
        bias: a number, 0 where the problem has none.
        products: (m, n) <q_i, k_j>, less the margin at positives: the logits' derivatives by the scale.
        x: (m, n) logits.
        admitted: (m, n) bool.
        positive: (m, n) bool.
        G: (m, n) gradient of the logits, upstream gradient included.
        row_sum: (m, d) G K.
        column_sum: (n, d) G^T Q.
        sides: the row direction and, if there is one, the column direction; none of the sigmoid loss.
        late: of a MaxSim loss its tokens: q, k, products, G and the sums are of tokens, and all else is of texts.
        bounds: cache of ``bounds.bounds``: the errors of each arithmetic, the oracle's own among them.
    """

    outcome: Outcome
    q: FloatArray
    k: FloatArray
    scale: float
    bias: float
    products: FloatArray
    x: FloatArray
    admitted: BoolArray
    positive: BoolArray
    G: FloatArray
    row_sum: FloatArray
    column_sum: FloatArray
    sides: list[Direction]
    late: Late | None = None
    bounds: dict[Any, Outcome] = field(default_factory=dict, repr=False, compare=False)

    @cached_property
    def magnitudes(self) -> FloatArray:
        """(m, n) sum_k |q_ik| |k_jk|, by which the roundings of a logit are measured."""
        return float64(np.abs(self.q) @ np.abs(self.k).T)

    @cached_property
    def row_magnitudes(self) -> FloatArray:
        """(m, d) |G| |K|."""
        return float64(np.abs(self.G) @ np.abs(self.k))

    @cached_property
    def column_magnitudes(self) -> FloatArray:
        """(n, d) |G|^T |Q|."""
        return float64(np.abs(self.G).T @ np.abs(self.q))


@dataclass(frozen=True, slots=True)
class Owned(Problem):
    """A problem of which some columns count for one row alone.

    Attributes:
        owners: (n,) as in the oracle's ``Pairs``.
    """

    owners: Any = None


def masks(problem: Problem) -> tuple[BoolArray, BoolArray]:
    """The admitted and the positive pairs as (m, n) bool, by the rules of ``backends.contract.Pairs``."""
    m, n = len(problem.rows), sum(len(block) for block in problem.columns)
    owners = problem.owners if isinstance(problem, Owned) else None
    pairs = Pairs(problem.positives, problem.row_ids, problem.column_ids, problem.match, problem.excluded, owners)
    return pairs.admitted(m, n), pairs.positive(m, n)


def similarities(problem: Problem, x: FloatArray) -> FloatArray:
    """What limits are compared with, (m, n): the guide's dot products, or the logits x where there is no guide."""
    row_guide, column_guide = problem.row_guide, problem.column_guide
    return x if row_guide is None or column_guide is None else logits(row_guide, column_guide, 1.0)


def within(admitted: BoolArray, positive: BoolArray, x: FloatArray, limits: FloatArray | None) -> BoolArray:
    """The admitted pairs without the negatives whose x is beyond their limit, (own, other), of (own,) limits."""
    return admitted if limits is None else admitted & (positive | ~(x > limits[:, None]))


def truth(problem: Problem, upstream: float | FloatArray = 1.0) -> Truth:
    """The problem's truth by the dense equations, column blocks joined.

    Args:
        problem: NumPy arrays of any float dtype, widened first; (m, n) matrices are formed, so keep it small.
        upstream: gradient with respect to the loss, in its shape; a number is representable in the state dtype.
    """
    few = len(problem.rows) * sum(map(len, problem.columns)) <= _FEW_PAIRS
    return (_of_few if few else _of_many)(pickle.dumps((problem, upstream)))


def _found(content: bytes) -> Truth:
    problem, upstream = pickle.loads(content)
    q, k = float64(problem.rows), np.concatenate([float64(block) for block in problem.columns])
    scale, bias = float(problem.scale), float(problem.bias) if problem.bias is not None else 0.0
    admitted, positive = masks(problem)
    sides: list[Direction] = []
    statistics = None
    with np.errstate(all="ignore"):
        products, x = q @ k.T, logits(q, k, scale, bias)
        if problem.margin is not None:
            lowered = np.where(positive, problem.margin, 0.0)
            products, x = products - lowered, x - scale * lowered
        if problem.kind == "sigmoid":
            u = float64(problem.row_weight)
            pairs = u[:, None] if u.ndim == 1 else np.where(positive, u[:, :1], u.sum(axis=1, keepdims=True))
            loss = float64(weighted_sum(pairs, sigmoid_terms(x, positive, admitted)))
            G = gradient_of_sigmoid_logits(x, positive, 1.0, admitted)
            G = np.where(pairs == 0, 0.0, upstream * pairs * G)
        else:
            bars = np.split(float64(upstream), [len(q)], axis=1) if problem.kind == "statistics" else (None, None)
            compared = similarities(problem, x)
            mine = within(admitted, positive, compared, problem.row_limits)
            sides = [_direction(problem, x, mine, positive, problem.row_weight, problem.row_target, bars[0])]
            G = _gradient(problem, sides[0], upstream)
            if problem.column_weight is not None and problem.column_target is not None:
                theirs = within(admitted.T, positive.T, compared.T, problem.column_limits)
                given = problem.column_weight, problem.column_target, bars[1]
                sides.append(_direction(problem, x.T, theirs, positive.T, *given))
                G = G + _gradient(problem, sides[1], upstream).T
            statistics = np.concatenate([[s.negative_lse, s.positive_lse, s.spread] for s in sides], axis=1)
            loss = statistics
            if problem.kind != "statistics":
                loss = float64(sum(weighted_sum(side.weight, side.nll) for side in sides))
        found = gradients(q, k, scale, G)
        if problem.margin is not None:
            found = found._replace(d_scale=float64((G * products).sum()))
        outcome = Outcome(
            loss=loss,
            statistics=statistics,
            rows=found.d_rows,
            columns=column_blocks(problem, found.d_columns),
            scale=found.d_scale,
            bias=float64(found.d_bias) if problem.kind == "sigmoid" else None,
        )
        sums = G @ k, G.T @ q
        return Truth(outcome, q, k, scale, bias, products, x, admitted, positive, G, *sums, sides)


# the next property has the same, and the next backend; large matrices of the latest alone are held
_of_few, _of_many = lru_cache(maxsize=48)(_found), lru_cache(maxsize=2)(_found)


def column_blocks(problem: Problem, joined: FloatArray) -> tuple[FloatArray, ...]:
    """An (n, ...) array over the joined columns, cut into the problem's column blocks."""
    ends = np.cumsum([len(block) for block in problem.columns])
    return tuple(np.split(joined, ends[:-1]))


def _direction(
    problem: Problem,
    x: FloatArray,
    admitted: BoolArray,
    positive: BoolArray,
    weight: FloatArray,
    target: FloatArray,
    bars: FloatArray | None,
) -> Direction:
    n, p = split_lse(x, admitted, positive.astype(np.float64), axis=1)
    target = float64(target)
    counted = np.where(positive, target[:, None], 0.0)
    nll = negative_log_likelihood(x, n, p, counted, axis=1)
    if problem.kind == "inside":
        nll = softplus(n - p) - np.log(target)
    smoothing = problem.smoothing or 0.0
    if smoothing:
        nll = nll + smoothing * ((counted - 1 / x.shape[1]) * x).sum(axis=1)
    return Direction(
        x=x,
        admitted=admitted,
        positive=positive,
        weight=float64(weight),
        target=target,
        negative_lse=n,
        positive_lse=p,
        positive_sum=expected_logit(x, positive.astype(np.float64), axis=1),
        # with a target of 0 the term is the whole log-sum-exp
        nll=np.where(target == 0, merge(n, p), nll),
        p=np.where(admitted, np.exp(x - merge(n, p)[:, None]), 0.0),
        q=np.where(positive, np.exp(x - p[:, None]), 0.0),
        negative_mass=np.where(positive.any(axis=1), sigma(n - p), 1.0),
        smoothed=smoothing * float64(weight),
        bars=bars,
    )


def _gradient(problem: Problem, side: Direction, upstream: Any) -> FloatArray:
    """One side's part of G."""
    positive, admitted = side.positive, side.admitted
    target = np.where(positive, side.target[:, None], 0.0)
    if side.bars is not None:
        by_n, by_p, by_d = side.bars[:, :, None]
        negative = np.where(by_n == 0, 0.0, by_n * np.exp(side.x - side.negative_lse[:, None]))
        at_positive = by_p * side.q + by_d * (side.q - target)
        return np.where(positive, at_positive, np.where(admitted, negative, 0.0))
    # a positive whose target is 0 has no other gradient than a negative, but its logit is in P
    beside = 0.0 if problem.kind == "inside" else side.q - target
    G = np.where(positive, beside - side.q * side.negative_mass[:, None], side.p)
    w, moved = ((upstream * each)[:, None] for each in (side.weight, side.smoothed))
    return np.where(side.admitted & (w != 0), w * G + moved * (target - 1 / max(G.shape[1], 1)), 0.0)
