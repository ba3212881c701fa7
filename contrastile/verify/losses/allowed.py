"""Error bounds of a loss of unknown arithmetic: the bounds of a plain computation in the state dtype that it claims.

They are the bounds of ``verify.bounds`` with the positives inside of the log-sum-exps, plus the roundings of a plain
computation that a backend does not have. Let u be the unit roundoff of the state:

* the weights (1 / b, a half) come from divisions: at most four roundings of the loss and of every entry of G;
* sums to one number are taken in the state dtype (16 bits: in float32), row by row and then over the rows: m + n
  additions of the loss's terms and of the scale gradient's ``G_ij <q_i, k_j>``;
* an upstream gradient costs two more roundings of every gradient;
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

_cached = lru_cache(maxsize=512)
"""Many interfaces of a loss are called with the same arguments, and share their expected results and bounds."""


@_cached
def expected(case: LossCase, upstream: float = 1.0) -> Outcome:
    """The exact value and the exact gradients of the arguments; the value is not multiplied by ``upstream``."""
    exact = _exact(case, upstream)
    return _through_norms(case, exact, exact) if case.claims.normalises else exact


def _exact(case: LossCase, upstream: float) -> Outcome:
    """``expected``, in terms of the normalised features if the loss normalises."""
    return scaled(of_arguments(case.oracle.outcome, case.claims.objective), upstream, GRADIENT)


@_cached
def allowed(case: LossCase, upstream: float = 1.0, spread: Spread | None = None) -> Outcome:
    """Absolute error bounds of ``expected``, for one process or for ranks that share the batch.

    A case with a backend's facts has the bounds of ``verify.bounds``; any other those of a plain computation.
    """
    exact, claims, dtype = _exact(case, upstream), case.claims, case.dtype
    if case.facts is None:
        errors = scaled(_plain(case, upstream != 1.0, spread), abs(upstream), GRADIENT)
    else:
        # Weights, scale and loss have the caller's precision, which may be coarser than the backend's state.
        facts = replace(case.facts, unit=max(case.facts.unit, UNIT[state_dtype(dtype)]))
        t = case.oracle if upstream == 1.0 else truth(case.problem, upstream)
        errors = bounds(case.problem, t, facts, dtype, upstream, spread=spread)
    errors = of_arguments(errors, claims.objective)
    if claims.objective in SELF:
        # The gradients of both sides are added in the features' dtype.
        rows, *columns = (
            error + UNIT[dtype] * (np.abs(np.nan_to_num(value)) + error) + UNDERFLOW[dtype]
            for error, value in zip(_features(errors), _features(exact), strict=True)
        )
        errors = replace(errors, rows=rows, columns=tuple(columns))
    if claims.normalises:
        errors = _through_norms(case, errors, exact, gamma((2 * case.oracle.q.shape[1] + 8) * UNIT[case.state]))
    return errors


def _features(outcome: Outcome) -> tuple[FloatArray, ...]:
    return outcome.rows, *outcome.columns


def _plain(case: LossCase, is_scaled: bool, spread: Spread | None) -> Outcome:
    """The bounds of a plain computation; ``is_scaled``: whether an upstream gradient multiplies its gradients."""
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
        # A score is a sum of q maxima, which takes q more roundings.
        sum_depth, depth = math.ceil(q * u / accuracy.unit), accuracy.depth
        accuracy = replace(accuracy, depth=lambda k: depth(k) + sum_depth)
        texts = spread or Spread((), ())
        spread = spread and Spread(tuple(q * x for x in texts.rows), tuple(per_text * x for x in texts.blocks))
    errors = bounds(case.problem, t, accuracy, dtype, spread=spread, separate_positives=False)
    # Relative errors of elementwise results, and of sums over all logits.
    weights = gamma((4 + 2 * ranks) * u + 2 * is_scaled * max(u, UNIT[dtype]))
    chain = gamma((4 + 2 * ranks) * u + 2 * is_scaled * max(u, UNIT[dtype]) + sum(t.x.shape) * accuracy.unit)
    G = np.where(np.isfinite(t.G), np.abs(t.G), 0.0)
    q, k, s = np.abs(np.nan_to_num(t.q)), np.abs(np.nan_to_num(t.k)), abs(t.scale)

    def features(bound: FloatArray, magnitude: FloatArray) -> FloatArray:
        error = bound * (1 + weights) + weights * s * magnitude
        # Partial results of the ranks, and of both directions, are rounded to the features' dtype.
        return error + UNIT[dtype] * (2 * ranks) * (s * magnitude + error) + (2 * ranks + is_scaled) * UNDERFLOW[dtype]

    def number(bound: FloatArray, magnitude: FloatArray) -> FloatArray:
        return float64(bound * (1 + chain) + chain * magnitude)

    return replace(
        errors,
        loss=number(errors.loss, np.abs(np.nan_to_num(t.outcome.loss))),
        rows=features(errors.rows, G @ k),
        columns=tuple(map(features, errors.columns, column_blocks(case.problem, G.T @ q))),
        scale=number(errors.scale, (G * (q @ k.T)).sum()),
        bias=None if errors.bias is None else number(errors.bias, G.sum()),
    )


def rounded_once(case: LossCase) -> Accuracy:
    """The facts of a computation that rounds each result once to the state it claims."""
    state = case.state
    facts = plain_accuracy(case.dtype, state, case.claims.precision, _largest_weight(case.problem))
    is_narrow = state in ("float16", "bfloat16")
    return Accuracy(
        unit=UNIT[state],
        accumulate_unit=UNIT[state],
        input_rounding=facts.input_rounding,
        gradient_rounding=UNIT[state] if is_narrow else facts.gradient_rounding,
        gradient_underflow=facts.gradient_underflow,
        # In 16 bits an exponential is that of float32, rounded once.
        exp_ulps=1.0 if is_narrow else 4.0,
    )


def _largest_weight(problem: Problem) -> float:
    sides = [problem.row_weight, *(() if problem.column_weight is None else (problem.column_weight,))]
    # If every weight is 0, G is 0 too, and has no rounding error.
    return float(max(np.abs(x).max(initial=0.0) for x in sides)) or 1.0


def _through_norms(case: LossCase, outcome: Outcome, exact: Outcome, rounding: float | None = None) -> Outcome:
    """Turn gradients of normalised features, or with ``rounding`` their errors, into those of the features."""

    def vjp(features: FloatArray, g: FloatArray, value: FloatArray) -> FloatArray:
        length = np.linalg.norm(features, axis=1, keepdims=True)
        y = features / length
        if rounding is None:
            return float64((g - (g * y).sum(axis=1, keepdims=True) * y) / length)
        size = g + rounding * (np.abs(np.nan_to_num(value)) + g)
        return float64((size + np.abs(y) * (size * np.abs(y)).sum(axis=1, keepdims=True)) / length)

    features = (x.reshape(-1, x.shape[-1]) for x in (*case.arguments.features, *case.arguments.negatives))
    rows, *columns = map(vjp, features, _features(outcome), _features(exact))
    return replace(outcome, rows=rows, columns=tuple(columns))
