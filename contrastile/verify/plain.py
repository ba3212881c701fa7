"""The yardstick beside the bounds: how far a plain computation with full logits in the same dtype is off."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import numpy as np
import numpy.typing as npt

from contrastile.backends.contract import state_dtype
from contrastile.exchange.problem import Problem
from contrastile.oracle.arrays import BoolArray, float64
from contrastile.oracle.sigmoid import sigma, softplus
from contrastile.verify.rounding import round_to
from contrastile.verify.truth import Direction, Outcome, Truth, split

Matrix = npt.NDArray[Any]


def plain_error(problem: Problem, truth: Truth, dtype: str, upstream: float = 1.0) -> Outcome:
    """Absolute errors of the plain computation: every (m, n) matrix is held in ``dtype``, sums in the state dtype.

    That is what a framework does with full logits: products accumulate in the state dtype and are rounded once, the
    exponentials and sums are taken in it, and each result is rounded to ``dtype`` when it is stored.

    Args:
        problem: the problem of which ``truth`` is the truth.
        truth: computed with the same ``upstream``.
        dtype: the features' dtype.
        upstream: gradient with respect to the loss.
    """
    with np.errstate(all="ignore"):
        got = _plain(problem, truth, dtype, upstream)
        return Outcome(**{f.name: _distance(getattr(got, f.name), getattr(truth.outcome, f.name)) for f in fields(got)})


def _distance(got: Any, exact: Any) -> Any:
    if exact is None:
        return None
    if isinstance(exact, tuple):
        return tuple(_distance(*each) for each in zip(got, exact, strict=True))
    same = (got == exact) | (np.isnan(got) & np.isnan(exact))
    return float64(np.where(same, 0.0, np.abs(got - exact)))


def _plain(problem: Problem, t: Truth, dtype: str, upstream: float) -> Outcome:
    state = np.dtype(state_dtype(dtype))

    def stored(a: Matrix) -> Matrix:
        return round_to(a, dtype).astype(state)

    q, k, scale = t.q.astype(state), t.k.astype(state), state.type(t.scale)
    products = stored(q @ k.T)
    x = stored(products * scale + state.type(t.bias))
    lse: list[Matrix | None] = [None, None]
    positive: list[Matrix | None] = [None, None]
    if t.row is None:
        weight = np.asarray(problem.row_weight, state)[:, None]
        at = np.where(t.positive, -x, x)
        value = np.where(t.admitted, stored(softplus(at)), 0)
        loss = float64(np.where(weight == 0, 0, weight * value).sum(dtype=state))
        slope = np.where(t.admitted, np.where(t.positive, -1, 1) * stored(sigma(at)), 0)
        G = np.where(weight == 0, 0, state.type(upstream) * weight * slope)
    else:
        loss, G = float64(0.0), np.zeros(x.shape, state)
        seen: list[tuple[int, Direction, Matrix, BoolArray, BoolArray]] = [(0, t.row, x, t.admitted, t.positive)]
        if t.column is not None:
            seen.append((1, t.column, x.T, t.admitted.T, t.positive.T))
        for number, side, own, admitted, is_positive in seen:
            lse[number], positive[number], p = _softmax(own, admitted, is_positive)
            target, weight = side.target.astype(state), (upstream * side.weight).astype(state)[:, None]
            excess = lse[number] - np.where(target == 0, 0, target * positive[number])
            loss = loss + np.where(side.weight == 0, 0, side.weight.astype(state) * excess).sum(dtype=state)
            part = np.where(weight == 0, 0, weight * (stored(p) - np.where(is_positive, target[:, None], 0)))
            G = G + (part if number == 0 else part.T)
    G = stored(G)
    d_rows, d_columns = (round_to(scale * each, dtype) for each in (G @ k, G.T @ q))
    return Outcome(
        loss=float64(float64(loss).astype(state)),
        row_lse=lse[0],
        row_positive=positive[0],
        column_lse=lse[1],
        column_positive=positive[1],
        rows=d_rows,
        columns=split(problem, d_columns),
        scale=float64((G * products).sum(dtype=state)),
        bias=float64(G.sum(dtype=state)) if t.row is None else None,
    )


def _softmax(x: Matrix, admitted: BoolArray, positive: BoolArray) -> tuple[Matrix, Matrix, Matrix]:
    """Row log-sum-exps, sums of positives and probabilities, in x's own dtype."""
    seen = np.where(admitted, x, -np.inf).astype(x.dtype)
    top = seen.max(axis=1, initial=-np.inf)
    shift = np.where(np.isfinite(top), top, 0).astype(x.dtype)
    lse = shift + np.log(np.exp(seen - shift[:, None]).sum(axis=1))
    p = np.where(admitted, np.exp(x - lse[:, None]), 0).astype(x.dtype)
    return lse, np.where(positive, x, 0).sum(axis=1), p
