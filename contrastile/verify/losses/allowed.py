"""Error bounds of a loss whose arithmetic nobody has stated: those of a plain computation in the state it claims.

The bounds of ``verify.bounds`` with the positives inside of the log-sum-exps, and beside them what a plain computation
rounds that a backend does not, u being the state's unit roundoff:

* the weights (1 / b, a half) come of divisions: at most four roundings of the loss and of every entry of G;
* sums to one number are taken in the state dtype (16 bits: in float32), row by row and then over the rows: m + n
  additions of the loss's terms and of the scale gradient's ``G_ij <q_i, k_j>``;
* an upstream gradient costs two roundings more of every gradient;
* with r ranks, r partial results of every gradient are added and divided, in the features' dtype;
* a loss that normalises: its features have the error of a norm and of a division, and the gradient goes back through
  ``dx = (g - <g, y> y) / |x|``, y = x / |x|.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache

import numpy as np

from contrastile.backends.contract import Accuracy, state_dtype
from contrastile.oracle.arrays import FloatArray, float64
from contrastile.schedules.problem import Problem
from contrastile.verify.arithmetic import Spread, gamma
from contrastile.verify.bounds import bounds
from contrastile.verify.comparison import GRADIENT
from contrastile.verify.facts import plain_accuracy
from contrastile.verify.losses.arguments import SELF, of_arguments
from contrastile.verify.losses.cases import LossCase
from contrastile.verify.rearrange import scaled
from contrastile.verify.rounding import UNDERFLOW, UNIT
from contrastile.verify.truth import Outcome, column_blocks, truth

_shared = lru_cache(maxsize=512)
"""Many interfaces of a loss are called with the same arguments, for which the same is right."""


@_shared
def expected(case: LossCase, upstream: float = 1.0) -> Outcome:
    """The exact value and the exact gradients of the arguments; the value is not multiplied by ``upstream``."""
    exact = _exact(case, upstream)
    return _through_norms(case, exact, exact) if case.claims.normalises else exact


def _exact(case: LossCase, upstream: float) -> Outcome:
    """``expected`` of features that are normalised already."""
    return scaled(of_arguments(case.oracle.outcome, case.claims.objective), upstream, GRADIENT)


@_shared
def allowed(case: LossCase, upstream: float = 1.0, spread: Spread | None = None) -> Outcome:
    """Absolute error bounds of ``expected``, of one process or of ranks that share the batch.

    Of a backend, whose facts the case has, they are those of ``verify.bounds``; else a plain computation's.
    """
    exact, claims, dtype = _exact(case, upstream), case.claims, case.dtype
    if case.facts is None:
        found = scaled(_plain(case, upstream != 1.0, spread), abs(upstream), GRADIENT)
    else:
        # weights, scale and loss have the caller's precision, whatever the backend's state
        facts = replace(case.facts, unit=max(case.facts.unit, UNIT[state_dtype(dtype)]))
        t = case.oracle if upstream == 1.0 else truth(case.problem, upstream)
        found = bounds(case.problem, t, facts, dtype, upstream, spread=spread)
    found = of_arguments(found, claims.objective)
    if claims.objective in SELF:
        # the gradients of both sides are added in the features' dtype
        rows, *columns = (
            error + UNIT[dtype] * (np.abs(np.nan_to_num(value)) + error) + UNDERFLOW[dtype]
            for error, value in zip(_features(found), _features(exact), strict=True)
        )
        found = replace(found, rows=rows, columns=tuple(columns))
    if claims.normalises:
        found = _through_norms(case, found, exact, gamma((2 * case.oracle.q.shape[1] + 8) * UNIT[case.state]))
    return found


def _features(x: Outcome) -> tuple[FloatArray, ...]:
    return x.rows, *x.columns


def _plain(case: LossCase, multiplied: bool, spread: Spread | None) -> Outcome:
    """The bounds of a plain computation, whose gradients may be ``multiplied`` by one from above."""
    claims, t, dtype = case.claims, case.oracle, case.dtype
    u, ranks = UNIT[case.state], 1 if spread is None else len(spread.rows)
    accuracy = plain_accuracy(
        dtype, case.state, claims.precision, _largest_weight(case.problem), max(t.x.shape), t.bias
    )
    if claims.normalises:
        rounding = accuracy.input_rounding + gamma((t.q.shape[1] / 2 + 4) * u)
        accuracy = replace(accuracy, input_rounding=rounding)
    if t.late is not None:
        _, q, _, per_text = t.late.products.shape
        # so often a sum of maxima is rounded
        more, own = math.ceil(q * u / accuracy.unit), accuracy.depth
        accuracy = replace(accuracy, depth=lambda k: own(k) + more)
        of = spread or Spread((), ())
        spread = spread and Spread(tuple(q * x for x in of.rows), tuple(per_text * x for x in of.blocks))
    found = bounds(case.problem, t, accuracy, dtype, spread=spread, separate_positives=False)
    # elementwise results, and sums of so many terms
    weights = gamma((4 + 2 * ranks) * u + 2 * multiplied * max(u, UNIT[dtype]))
    chain = gamma((4 + 2 * ranks) * u + 2 * multiplied * max(u, UNIT[dtype]) + sum(t.x.shape) * accuracy.unit)
    G = np.where(np.isfinite(t.G), np.abs(t.G), 0.0)
    q, k, s = np.abs(np.nan_to_num(t.q)), np.abs(np.nan_to_num(t.k)), abs(t.scale)

    def features(bound: FloatArray, magnitude: FloatArray) -> FloatArray:
        moved = bound * (1 + weights) + weights * s * magnitude
        # partial results of the ranks, and of both directions, are rounded to the features' dtype
        return moved + UNIT[dtype] * (2 * ranks) * (s * magnitude + moved) + (2 * ranks + multiplied) * UNDERFLOW[dtype]

    def number(bound: FloatArray, magnitude: FloatArray) -> FloatArray:
        return float64(bound * (1 + chain) + chain * magnitude)

    return replace(
        found,
        loss=number(found.loss, np.abs(np.nan_to_num(t.outcome.loss))),
        rows=features(found.rows, G @ k),
        columns=tuple(map(features, found.columns, column_blocks(case.problem, G.T @ q))),
        scale=number(found.scale, (G * (q @ k.T)).sum()),
        bias=None if found.bias is None else number(found.bias, G.sum()),
    )


def rounded_once(case: LossCase) -> Accuracy:
    """The facts of a computation that rounds each result once to the state it claims."""
    state = case.state
    facts = plain_accuracy(case.dtype, state, case.claims.precision, _largest_weight(case.problem))
    narrow = state in ("float16", "bfloat16")
    return Accuracy(
        unit=UNIT[state],
        accumulate_unit=UNIT[state],
        input_rounding=facts.input_rounding,
        gradient_rounding=UNIT[state] if narrow else facts.gradient_rounding,
        gradient_underflow=facts.gradient_underflow,
    )


def _largest_weight(problem: Problem) -> float:
    sides = [problem.row_weight, *(() if problem.column_weight is None else (problem.column_weight,))]
    # where every weight is 0 so is G, which then has no rounding
    return float(max(np.abs(x).max(initial=0.0) for x in sides)) or 1.0


def _through_norms(case: LossCase, x: Outcome, exact: Outcome, rounding: float | None = None) -> Outcome:
    """Gradients of normalised features as those of the features; with ``rounding``, errors of them likewise."""

    def back(features: FloatArray, g: FloatArray, value: FloatArray) -> FloatArray:
        length = np.linalg.norm(features, axis=1, keepdims=True)
        y = features / length
        if rounding is None:
            return float64((g - (g * y).sum(axis=1, keepdims=True) * y) / length)
        size = g + rounding * (np.abs(np.nan_to_num(value)) + g)
        return float64((size + np.abs(y) * (size * np.abs(y)).sum(axis=1, keepdims=True)) / length)

    given = (x.reshape(-1, x.shape[-1]) for x in (*case.arguments.features, *case.arguments.negatives))
    rows, *columns = map(back, given, _features(x), _features(exact))
    return replace(x, rows=rows, columns=tuple(columns))
