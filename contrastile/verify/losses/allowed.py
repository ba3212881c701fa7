"""Error bounds of a loss whose arithmetic nobody has stated: those of a plain computation in the state it claims.

The bounds of ``verify.bounds`` with the positives inside of the log-sum-exps, and beside them what a plain computation
rounds that a backend does not, u being the state's unit roundoff:

* the weights (1 / b, a half) come of divisions: at most four roundings of the loss and of every entry of G;
* sums to one number are taken in the state dtype (16 bits: in float32), row by row and then over the rows: m + n
  additions of the loss's terms and of the scale gradient's ``G_ij <q_i, k_j>``;
* with r ranks, r partial results of every gradient are added and divided, in the features' dtype;
* a loss that normalises: its features have the error of a norm and of a division, and the gradient goes back through
  ``dx = (g - <g, y> y) / |x|``, y = x / |x|.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

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
from contrastile.verify.truth import Outcome, Truth, truth


def expected(case: LossCase, upstream: float = 1.0) -> Outcome:
    """The exact value and the exact gradients of the arguments; the value is not multiplied by ``upstream``."""
    found = scaled(of_arguments(case.oracle.outcome, case.claims.objective), upstream, GRADIENT)
    return _through_norms(case, found) if case.claims.normalises else found


def allowed(case: LossCase, upstream: float = 1.0, spread: Spread | None = None) -> Outcome:
    """Absolute error bounds of ``expected``, of one process or of ranks that share the batch.

    Of a backend, whose facts the case has, they are those of ``verify.bounds``; else a plain computation's.
    """
    allowed = _plain(case, spread) if case.facts is None else _stated(case, case.facts, upstream, spread)
    if case.claims.objective in SELF:
        # the gradients of both sides are added in the features' dtype
        exact = scaled(
            of_arguments(case.oracle.outcome, case.claims.objective), upstream if case.facts else 1.0, GRADIENT
        )
        more = [_rounded(*both, case.dtype) for both in zip(_sides(exact), _sides(allowed), strict=True)]
        rows, *columns = (x + y for x, y in zip(_sides(allowed), more, strict=True))
        allowed = replace(allowed, rows=rows, columns=tuple(columns))
    if case.claims.normalises:
        allowed = _through_norms(case, allowed, gamma((2 * case.oracle.q.shape[1] + 8) * UNIT[case.state]))
    if case.facts is None and upstream != 1.0:
        allowed = _with_upstream(case, allowed, upstream, UNIT[case.state])
    return allowed


def _stated(case: LossCase, facts: Accuracy, upstream: float, spread: Spread | None) -> Outcome:
    # weights, scale and loss have the caller's precision, whatever the backend's state
    facts = replace(facts, unit=max(facts.unit, UNIT[state_dtype(case.dtype)]))
    t = case.oracle if upstream == 1.0 else truth(case.problem, upstream)
    return of_arguments(bounds(case.problem, t, facts, case.dtype, upstream, spread=spread), case.claims.objective)


def _plain(case: LossCase, spread: Spread | None) -> Outcome:
    claims, t, dtype = case.claims, case.oracle, case.dtype
    u = UNIT[case.state]
    accuracy = plain_accuracy(
        dtype, case.state, claims.precision, _largest_weight(case.problem), max(t.x.shape), t.bias
    )
    if claims.normalises:
        rounding = accuracy.input_rounding + gamma((t.q.shape[1] / 2 + 4) * u)
        accuracy = replace(accuracy, input_rounding=rounding)
    found = bounds(case.problem, t, accuracy, dtype, spread=spread, separate_positives=False)
    found = _with_plain_sums(found, t, u, accuracy.unit, dtype, 1 if spread is None else len(spread.rows))
    return of_arguments(found, claims.objective)


def _sides(x: Outcome) -> tuple[FloatArray, ...]:
    return x.rows, *x.columns


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


def _with_plain_sums(found: Outcome, t: Truth, u: float, addition: float, dtype: str, ranks: int) -> Outcome:
    """``u`` is the unit roundoff of an elementwise result, ``addition`` that of a sum's term."""
    m, n = t.x.shape
    weights, chain = gamma((4 + 2 * ranks) * u), gamma((4 + 2 * ranks) * u + (m + n) * addition)
    G = np.where(np.isfinite(t.G), np.abs(t.G), 0.0)
    q, k, s = np.abs(np.nan_to_num(t.q)), np.abs(np.nan_to_num(t.k)), abs(t.scale)

    def features(bound: FloatArray, magnitude: FloatArray) -> FloatArray:
        moved = bound * (1 + weights) + weights * s * magnitude
        # partial results of the ranks, and of both directions, are rounded to the features' dtype
        return moved + UNIT[dtype] * (2 * ranks) * (s * magnitude + moved) + 2 * ranks * UNDERFLOW[dtype]

    columns, start = [], 0
    for each in found.columns:
        columns.append(features(each, G[:, start : start + len(each)].T @ q))
        start += len(each)
    products = q @ k.T
    return replace(
        found,
        loss=float64(found.loss * (1 + chain) + chain * abs(np.nan_to_num(t.outcome.loss))),
        rows=features(found.rows, G @ k),
        columns=tuple(columns),
        scale=float64(found.scale * (1 + chain) + chain * (G * products).sum()),
        bias=None if found.bias is None else float64(found.bias * (1 + chain) + chain * G.sum()),
    )


def _rounded(exact: FloatArray, error: FloatArray, dtype: str) -> FloatArray:
    return UNIT[dtype] * (np.abs(np.nan_to_num(exact)) + error) + UNDERFLOW[dtype]


def _with_upstream(case: LossCase, bound: Outcome, upstream: float, u: float) -> Outcome:
    """Bounds of gradients times an upstream gradient, with two roundings more."""
    exact, more = expected(case), gamma(2 * max(u, UNIT[case.dtype]))

    def moved(error: Any, value: Any) -> Any:
        return float64(error + more * (np.abs(np.nan_to_num(value)) + error) + UNDERFLOW[case.dtype])

    wider = replace(
        bound,
        rows=moved(bound.rows, exact.rows),
        columns=tuple(map(moved, bound.columns, exact.columns)),
        scale=moved(bound.scale, exact.scale),
        bias=None if bound.bias is None else moved(bound.bias, exact.bias),
    )
    return scaled(wider, abs(upstream), GRADIENT)


def _through_norms(case: LossCase, x: Outcome, rounding: float | None = None) -> Outcome:
    """Gradients of normalised features as those of the features; with ``rounding``, errors of them likewise."""
    sides = _sides(x)
    exact = _sides(of_arguments(case.oracle.outcome, case.claims.objective))

    def back(features: FloatArray, g: FloatArray, value: FloatArray) -> FloatArray:
        length = np.linalg.norm(features, axis=1, keepdims=True)
        y = features / length
        if rounding is None:
            return float64((g - (g * y).sum(axis=1, keepdims=True) * y) / length)
        size = g + rounding * (np.abs(np.nan_to_num(value)) + g)
        return float64((size + np.abs(y) * (size * np.abs(y)).sum(axis=1, keepdims=True)) / length)

    rows, *columns = map(back, (*case.arguments.features, *case.arguments.negatives), sides, exact)
    return replace(x, rows=rows, columns=tuple(columns))
