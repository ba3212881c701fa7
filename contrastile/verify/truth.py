"""The truth of a problem: loss, log-sum-exps and gradients from the dense float64 oracle."""

from __future__ import annotations

import pickle
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any

import numpy as np

from contrastile.oracle.arrays import BoolArray, FloatArray, float64
from contrastile.oracle.general import Direction, gradient_of_logits, gradients, logits, loss, weighted_sum
from contrastile.oracle.named import within
from contrastile.oracle.pairs import Pairs
from contrastile.oracle.sigmoid import gradient_of_sigmoid_logits, sigmoid_terms
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
            value = float64(weighted_sum(pairs, sigmoid_terms(x, positive, admitted)))
            G = gradient_of_sigmoid_logits(x, positive, 1.0, admitted)
            G = np.where(pairs == 0, 0.0, upstream * pairs * G)
        else:
            bars = np.split(float64(upstream), [len(q)], axis=1) if problem.kind == "statistics" else (None, None)
            compared, how = similarities(problem, x), (problem.kind == "inside", problem.smoothing or 0.0)
            given = float64(problem.row_weight), float64(problem.row_target), *how, bars[0]
            sides = [Direction(x, within(admitted, positive, compared, problem.row_limits), positive, *given)]
            if problem.column_weight is not None and problem.column_target is not None:
                theirs = within(admitted.T, positive.T, compared.T, problem.column_limits)
                given = float64(problem.column_weight), float64(problem.column_target), *how, bars[1]
                sides.append(Direction(x.T, theirs, positive.T, *given))
            G = gradient_of_logits(sides, upstream)
            statistics = np.concatenate([[s.negative_lse, s.positive_lse, s.spread] for s in sides], axis=1)
            value = statistics if problem.kind == "statistics" else float64(loss(sides))
        found = gradients(q, k, scale, G)
        if problem.margin is not None:
            found = found._replace(d_scale=float64((G * products).sum()))
        outcome = Outcome(
            loss=value,
            statistics=statistics,
            rows=found.d_rows,
            columns=column_blocks(problem, found.d_columns),
            scale=found.d_scale,
            bias=float64(found.d_bias) if problem.kind == "sigmoid" else None,
        )
        sums = G @ k, G.T @ q
        return Truth(outcome, q, k, scale, bias, products, x, admitted, positive, G, *sums, sides)


# the next property has the same, and the next backend; large matrices of the latest alone are held
_of_few, _of_many = lru_cache(maxsize=320)(_found), lru_cache(maxsize=2)(_found)


def column_blocks(problem: Problem, joined: FloatArray) -> tuple[FloatArray, ...]:
    """An (n, ...) array over the joined columns, cut into the problem's column blocks."""
    ends = np.cumsum([len(block) for block in problem.columns])
    return tuple(np.split(joined, ends[:-1]))
