"""The second gate: a backend's error is at most ``NOISIER`` times that of a plain computation in the same dtype.

The plain computation is that of ten lines of PyTorch: full logits in float32 (float64 for float64 features),
``log_softmax``, and the gradient from its exponential. Norms of errors are compared, above a floor: the error of one
rounding of every logit, of every entry of G and of the result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from contrastile.backends.contract import Accuracy, state_dtype
from contrastile.oracle.arrays import FloatArray, float64
from contrastile.oracle.general import Direction
from contrastile.schedules.problem import Problem
from contrastile.verify.comparison import GRADIENT, NOTHING, Worst, parts
from contrastile.verify.rounding import UNDERFLOW, UNIT, round_to
from contrastile.verify.truth import Outcome, Truth, column_blocks, truth

Matrix = npt.NDArray[Any]

NOISIER = {"cpu": 2.0, "cuda": 3.0}
"""Largest ratio of a backend's error to the plain computation's, or to the floor where that is larger, by device.

The plain computation runs on the host, but tensor cores truncate when they add. 2 has not been tried on a GPU.
"""


def as_it_is(outcome: Outcome) -> Outcome:
    return outcome


def compare_with_plain(
    problem: Problem,
    t: Truth,
    got: Outcome,
    accuracy: Accuracy,
    dtype: str,
    times: float = NOISIER["cpu"],
    view: Callable[[Outcome], Outcome] = as_it_is,
) -> Worst:
    """The field with the largest ratio: error / (``times`` the larger of plain error and floor), all norms.

    ``view`` converts an outcome of the problem to the fields of ``got``.
    """
    with np.errstate(all="ignore"):
        plain, floor = plain_outcome(problem, t, accuracy, dtype), _floor(problem, t, accuracy, dtype)
        exact = t.outcome if dtype != "float64" else _wider(problem).outcome
    worst = NOTHING
    for name, x, exact_x, plain_x, floor_x in _fields(got, *map(view, (exact, plain, floor))):
        error, allowed = np.linalg.norm(x - exact_x), times * max(np.linalg.norm(plain_x - exact_x), floor_x)
        # this form makes NaN fail
        ratio = 0.0 if error == 0 else float(error / allowed) if allowed > 0 and error < np.inf else np.inf
        if ratio > worst.ratio or worst is NOTHING:
            worst = Worst(ratio, f"{name} as a norm", (), float(error), float(allowed))
    return worst


def _fields(*outcomes: Outcome) -> Iterator[tuple[Any, ...]]:
    """Yields (name, each outcome's values) for the loss and for every gradient of the second outcome."""
    by_name = [dict(parts(values, ("loss", *GRADIENT))) for values in outcomes]
    for name, exact in by_name[1].items():
        if exact is not None and np.size(exact):
            yield name, *(values[name] for values in by_name)


def _wider(problem: Problem) -> Truth:
    """The truth in longdouble: a float64 oracle is no more exact than the float64 computations under test."""
    columns = tuple(x.astype(np.longdouble) for x in problem.columns)
    return truth(replace(problem, rows=problem.rows.astype(np.longdouble), columns=columns))


def plain_outcome(problem: Problem, t: Truth, accuracy: Accuracy, dtype: str) -> Outcome:
    """The outcome of the plain computation, without statistics."""
    state = np.dtype(state_dtype(dtype))
    q, k, scale = t.q.astype(state), t.k.astype(state), state.type(t.scale)
    narrow_q, narrow_k = (_narrowed(x, accuracy.input_rounding) for x in (q, k))
    products = narrow_q @ narrow_k.T
    x = products * scale + state.type(t.bias)
    if not t.sides:
        weight = np.asarray(problem.row_weight, state)[:, None]
        signed_x = np.where(t.positive, -x, x)
        value = np.where(t.admitted, np.maximum(signed_x, 0) + np.log1p(np.exp(-np.abs(signed_x))), 0)
        loss = np.where(weight == 0, 0, weight * value).sum(dtype=state)
        slope = np.where(t.positive, -1, 1) / (1 + np.exp(-signed_x))
        G = np.where(t.admitted & (weight != 0), weight * slope, 0).astype(state)
    else:
        loss, G = _direction(x, t.sides[0])
        for side in t.sides[1:]:
            loss_across, G_across = _direction(x.T, side)
            loss, G = loss + loss_across, G + G_across.T
    d_rows, d_columns = (round_to(scale * gradient, dtype) for gradient in (G @ k, G.T @ q))
    return Outcome(
        loss=float64(loss),
        rows=d_rows,
        columns=column_blocks(problem, d_columns),
        scale=float64((G * products).sum(dtype=state)),
        bias=float64(G.sum(dtype=state)) if not t.sides else None,
    )


def _narrowed(x: Matrix, rounding: float) -> Matrix:
    """The features, rounded to nearest with this relative error before a product."""
    if rounding < UNIT["float32"] * 2:
        return x
    mantissa, exponent = np.frexp(x)
    return np.ldexp(np.rint(mantissa / (2 * rounding)) * (2 * rounding), exponent).astype(x.dtype)


def _direction(x: Matrix, side: Direction) -> tuple[Any, Matrix]:
    """One direction's loss ``-w sum_j y_ij log_softmax(x)_ij``, and its part of G, ``w (softmax(x) - y)``."""
    state, admitted = x.dtype, side.admitted
    weight, target = side.weight.astype(state)[:, None], np.where(side.positive, side.target.astype(state)[:, None], 0)
    masked = np.where(admitted, x, -np.inf).astype(state)
    maximum = masked.max(axis=1, initial=-np.inf, keepdims=True)
    shifted = masked - np.where(np.isfinite(maximum), maximum, 0).astype(state)
    log_sum = np.log(np.exp(shifted).sum(axis=1, keepdims=True, dtype=state))
    log_softmax = shifted - log_sum
    # a pair that is not admitted has log_softmax -inf, and target 0
    nll = -np.where(target == 0, 0, target * np.where(side.admitted, log_softmax, 0)).sum(axis=1, dtype=state)
    lse = (np.where(np.isfinite(maximum), maximum, 0).astype(state) + log_sum)[:, 0]
    terms = np.where(side.target == 0, lse, nll)
    loss = np.where(side.weight == 0, 0, weight[:, 0] * terms).sum(dtype=state)
    G = np.where(side.admitted & (weight != 0), weight * (np.exp(log_softmax) - target), 0)
    return loss, G.astype(state)


def _floor(problem: Problem, t: Truth, accuracy: Accuracy, dtype: str) -> Outcome:
    """Norms of unavoidable errors: one rounding of each input of a product, of each logit, of G and of the result.

    A logit's rounding e, relative to the size of its terms, moves probabilities: ``dp_j = p_j (e_j - sum_k p_k e_k)``,
    which is 0 where a row has one column. An exponential adds an error of its own, relative to p. Both may have one
    sign everywhere, so that they add up in a sum to one number. Roundings of G at positives add up too, because these
    entries are nearly equal where a model is not certain. At other pairs roundings of G are independent, and their
    squares add up. With several positives G is the difference of p and t, each with an error of its own. The scale's
    gradient is a sum of G times products, whose roundings are relative to the size of their terms.
    """
    u, a = max(accuracy.unit, accuracy.accumulate_unit), accuracy
    terms = abs(t.scale) * t.magnitudes + abs(t.bias)
    # roundings of the d products of a logit are independent
    rounded_features = np.sqrt(2.0 * (t.q**2 @ (t.k**2).T)) * a.input_rounding
    logit = u * (terms + a.exp_ulps) + abs(t.scale) * rounded_features
    G = np.where(np.isfinite(t.G), t.G, 0.0)
    if not t.sides:
        moved, differences = np.abs(G) * (logit + logit.max(initial=0.0)), np.zeros(G.shape)
    else:
        moved, differences = u * a.exp_ulps * np.abs(G), np.zeros(G.shape)
        swaps: tuple[Callable[[FloatArray], FloatArray], ...] = (np.asarray, np.transpose)
        for side, swap in zip(t.sides, swaps, strict=False):
            # for float64 features the kept log-sum-exps include the remainder of their rounding
            kept = 0.0 if dtype == "float64" else _kept_rounding(side)[:, None]
            moved = moved + swap(_moved(side, swap(logit)) + kept * np.abs(swap(G)))
            differences = differences + swap(_differences(side, a))
    rounded = (
        (a.gradient_rounding + a.unit) * np.abs(G)
        + a.unit * differences
        + np.where(G != 0, a.gradient_underflow * np.abs(problem.row_weight).max(initial=0.0), 0.0)
    )
    entry = np.sqrt(moved**2 + rounded**2)

    def matrix(E: FloatArray, other: FloatArray, exact: FloatArray) -> float:
        rounding = UNIT[dtype] * np.linalg.norm(exact) + UNDERFLOW[dtype] * np.sqrt(exact.size)
        return float(abs(t.scale) * np.sqrt((E**2 @ other**2).sum()) + rounding)

    rows = matrix(entry, t.k, t.outcome.rows)
    blocks = [block for block, _ in problem.blocks()]
    columns = [matrix(entry.T[at], t.q, exact) for at, exact in zip(blocks, t.outcome.columns, strict=True)]
    loss = np.abs(G * logit).sum() + _excess_rounding(t, a)

    def number(factor: FloatArray | float, inexact: FloatArray | float) -> float:
        at_positives = np.where(t.positive, rounded * np.abs(factor), 0.0).sum()
        at_negatives = np.sqrt((np.where(t.positive, 0.0, rounded * factor) ** 2 + (G * inexact) ** 2).sum())
        return float((moved * np.abs(factor)).sum() + at_positives + at_negatives)

    return Outcome(
        loss=float64(loss + a.unit * abs(t.outcome.loss) + UNDERFLOW["float32"]),
        rows=float64(rows),
        columns=tuple(float64(norm) for norm in columns),
        scale=float64(number(t.products, u * t.magnitudes) + a.unit * abs(t.outcome.scale) + UNDERFLOW["float32"]),
        bias=None if t.outcome.bias is None else float64(number(1.0, 0.0) + a.unit * abs(t.outcome.bias)),
    )


def _moved(side: Direction, e: FloatArray) -> FloatArray:
    """How far relative errors e of the exponentials move one direction's part of G, w p; (own, other)."""
    weight, p, e = np.abs(side.weight)[:, None], np.nan_to_num(side.p), np.expm1(np.minimum(e, 50.0))
    is_maximum = p == p.max(axis=1, initial=0.0, keepdims=True)
    mean = (p * e).sum(axis=1, keepdims=True)
    # for the only largest p, add up the other p: 1 - p would have a rounding of the size of 1
    is_lone = is_maximum & (is_maximum.sum(axis=1, keepdims=True) == 1)
    others = np.where(is_lone, np.where(is_lone, 0.0, p).sum(axis=1, keepdims=True), 1 - p)
    others_e = np.where(is_lone, np.where(is_lone, 0.0, p * e).sum(axis=1, keepdims=True), mean - p * e)
    return float64(weight * np.minimum(p * (others * e + others_e), 1.0))


def _kept_rounding(side: Direction) -> FloatArray:
    """One rounding of the log-sum-exps N and P, which are kept in float64; (own,)."""
    sizes = [np.where(np.isfinite(x), np.abs(x), 0.0) for x in (side.negative_lse, side.positive_lse)]
    return float64(UNIT["float64"] * (sizes[0] + sizes[1]))


def _differences(side: Direction, a: Accuracy) -> FloatArray:
    """The errors of w p and w t, in units, at positives of rows that have several; (own, other). G is w p - w t there.

    Each term is rounded once, and an exponential has an error of its own.
    """
    has_several = side.positive & (side.positive.sum(axis=1) > 1)[:, None]
    terms = np.abs(side.weight)[:, None] * ((1 + a.exp_ulps) * np.nan_to_num(side.p) + np.abs(side.target)[:, None])
    return float64(np.where(has_several, terms, 0.0))


def _excess_rounding(t: Truth, a: Accuracy) -> float:
    """One rounding of every row's and column's term of the loss, and of the term's log-sum-exps."""
    terms = [(np.abs(side.weight), a.unit * np.abs(side.nll) + _kept_rounding(side)) for side in t.sides]
    return float(sum(np.where(weight == 0, 0.0, weight * rounding).sum() for weight, rounding in terms))
