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
        loss: 0-d, not multiplied by the upstream gradient; for the kind "statistics" the statistics.
        rows: (m, d) dQ.
        columns: (n_c, d) dK for each column block.
        scale: 0-d dscale.
        bias: 0-d dbias of the sigmoid loss, None for softmax.
        statistics: N, P and D of the rows and then, if they have weights, of the columns, (3, m) or (3, m + n). Only
            the truth and bounds have them; None for the sigmoid loss.
        rounding: in bounds, the ``UNIT`` and ``UNDERFLOW`` of the dtype of ``rows`` and ``columns`` if it is coarser
            than the state's; else 0.
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
        sides: the row direction and, if there is one, the column direction; empty for the sigmoid loss.
        late: the tokens of a MaxSim loss: q, k, products, G and the sums are of tokens, the other fields of texts.
        bounds: cache of ``bounds.bounds``: the errors of each arithmetic, including the oracle's own.
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
        """(m, n) sum_k |q_ik| |k_jk|: the rounding errors of a logit are relative to it."""
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
    """A problem in which some columns count for one row alone.

    Attributes:
        owners: (n,) the owners of the oracle's ``Pairs``.
    """

    owners: Any = None


def masks(problem: Problem) -> tuple[BoolArray, BoolArray]:
    """The admitted and the positive pairs as (m, n) bool, by the rules of ``backends.contract.Pairs``."""
    m, n = len(problem.rows), sum(len(block) for block in problem.columns)
    owners = problem.owners if isinstance(problem, Owned) else None
    pairs = Pairs(problem.positives, problem.row_ids, problem.column_ids, problem.match, problem.excluded, owners)
    return pairs.admitted(m, n), pairs.positive(m, n)


def similarities(problem: Problem, x: FloatArray) -> FloatArray:
    """(m, n) the numbers that limits apply to: the guide's dot products, or the logits x if there is no guide."""
    row_guide, column_guide = problem.row_guide, problem.column_guide
    return x if row_guide is None or column_guide is None else logits(row_guide, column_guide, 1.0)


def truth(problem: Problem, upstream: float | FloatArray = 1.0) -> Truth:
    """The problem's truth by the dense equations, column blocks joined.

    Args:
        problem: NumPy arrays of any float dtype, converted to float64; (m, n) matrices are formed, so keep it small.
        upstream: gradient with respect to the loss, in its shape; a number is representable in the state dtype.
    """
    is_small = len(problem.rows) * sum(map(len, problem.columns)) <= _FEW_PAIRS
    return (_truth_of_small if is_small else _truth_of_large)(pickle.dumps((problem, upstream)))


def _compute(content: bytes) -> Truth:
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
            w = float64(problem.row_weight)
            pair_weights = w[:, None] if w.ndim == 1 else np.where(positive, w[:, :1], w.sum(axis=1, keepdims=True))
            value = float64(weighted_sum(pair_weights, sigmoid_terms(x, positive, admitted)))
            G = gradient_of_sigmoid_logits(x, positive, 1.0, admitted)
            G = np.where(pair_weights == 0, 0.0, upstream * pair_weights * G)
        else:
            bars = np.split(float64(upstream), [len(q)], axis=1) if problem.kind == "statistics" else (None, None)
            limited, options = similarities(problem, x), (problem.kind == "inside", problem.smoothing or 0.0)
            arguments = float64(problem.row_weight), float64(problem.row_target), *options, bars[0]
            sides = [Direction(x, within(admitted, positive, limited, problem.row_limits), positive, *arguments)]
            if problem.column_weight is not None and problem.column_target is not None:
                column_admitted = within(admitted.T, positive.T, limited.T, problem.column_limits)
                arguments = float64(problem.column_weight), float64(problem.column_target), *options, bars[1]
                sides.append(Direction(x.T, column_admitted, positive.T, *arguments))
            G = gradient_of_logits(sides, upstream)
            statistics = np.concatenate([[s.negative_lse, s.positive_lse, s.spread] for s in sides], axis=1)
            value = statistics if problem.kind == "statistics" else float64(loss(sides))
        derivatives = gradients(q, k, scale, G)
        if problem.margin is not None:
            derivatives = derivatives._replace(d_scale=float64((G * products).sum()))
        outcome = Outcome(
            loss=value,
            statistics=statistics,
            rows=derivatives.d_rows,
            columns=column_blocks(problem, derivatives.d_columns),
            scale=derivatives.d_scale,
            bias=float64(derivatives.d_bias) if problem.kind == "sigmoid" else None,
        )
        sums = G @ k, G.T @ q
        return Truth(outcome, q, k, scale, bias, products, x, admitted, positive, G, *sums, sides)


# later properties and backends reuse a truth; only the latest two large ones are held, to save memory
_truth_of_small, _truth_of_large = lru_cache(maxsize=320)(_compute), lru_cache(maxsize=2)(_compute)


def column_blocks(problem: Problem, joined: FloatArray) -> tuple[FloatArray, ...]:
    """An (n, ...) array over the joined columns, cut into the problem's column blocks."""
    ends = np.cumsum([len(block) for block in problem.columns])
    return tuple(np.split(joined, ends[:-1]))
