"""Error bounds for every element of a result, derived from the problem and the backend's facts and never tuned.

Notation: u the state's unit roundoff, ``gamma`` and the model of one operation as in ``arithmetic``, c = exp_ulps,
B_ij = sum_k |q_ik| |k_jk|, T partial results merged, d the width, w_i either direction's weight; N and P the
log-sum-exps over negatives and positives.
The features are exact: they were rounded to the backend's dtype before the truth was computed.

* logit:  ``E_ij = |s| (g_d B_ij + d tiny) + tiny``, ``g_d = (1 + u_in)^2 (1 + gamma(ua depth(d) + 3u)) - 1``: inputs
  rounded, products and chain, scale twice (its product with log2 e may be rounded too); a bias adds ``u (|x| + E)``.
* log-sum-exps, sums of positives, loss: ``lse_error``, ``_positive_error``, ``_softmax_loss_error``. Because N and P
  are separate, the loss of a row that is certain of its positive has a *relative* bound.
* G: ``_softmax_gradient_error``, ``_bars_error`` of any loss of the statistics, ``_sigmoid_errors``. Forward and
  backward use the same rounded logits, so a probability never exceeds 1, and q of a single positive is 1.
* dQ, dK, dscale, dbias: ``_sum_error``, ``_features_error``, ``_scale_error``.
* n ranks that share the problem (``Spread``): their log-sum-exps and gradient sums are merged and added like those of
  further blocks; the factor n in the weights costs one rounding and its removal another; ``_over_ranks`` for dscale
  and dbias.

The truth is computed in float64 and has rounding errors of its own: their bound, by the same derivation with
u = 2^-53, is added. It matters only for float64 backends. Where the truth is not finite the bound is 0: such values
are compared for equality. A projection onto the set that holds the truth (``max(L - t positive, 0)``) moves no value
away from the truth, so the bound stays the same.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import numpy as np

from contrastile.backends.contract import Accuracy, Options
from contrastile.oracle.arrays import BoolArray, FloatArray, float64
from contrastile.oracle.general import Direction
from contrastile.oracle.sigmoid import sigma, softplus
from contrastile.schedules.problem import Problem
from contrastile.verify.arithmetic import Arithmetic, Lengths, Spread, arithmetic, gamma
from contrastile.verify.rounding import UNDERFLOW, UNIT
from contrastile.verify.truth import Outcome, Truth, column_blocks

ORACLE = Accuracy(unit=UNIT["float64"], accumulate_unit=UNIT["float64"])
"""The oracle's own arithmetic: dense, one tile, sums in any order."""


def bounds(
    problem: Problem,
    truth: Truth,
    accuracy: Accuracy,
    dtype: str,
    upstream: float | FloatArray = 1.0,
    options: Options | None = None,
    spread: Spread | None = None,
    *,
    separate_positives: bool = True,
) -> Outcome:
    """Absolute error bounds for every element of the truth's outcome, in the same shapes.

    Args:
        problem: the problem.
        truth: its truth, computed with the same ``upstream``.
        accuracy: the backend's facts.
        dtype: the features' dtype.
        upstream: gradient with respect to the loss; a number is applied in the state dtype.
        options: those of the call; a smaller tile means more merges.
        spread: how the ranks of a world share the problem; None for a single process.
        separate_positives: whether positives stay out of the log-sum-exps, as the contract requires. False gives the
            bound of a computation that subtracts positives from a log-sum-exp, and targets from probabilities.
    """
    blocks, m, magnitude = [len(block) for block in problem.columns], len(truth.q), np.abs(upstream)

    def derive(accuracy: Accuracy, dtype: str, *sharing: Any) -> Outcome:
        a = arithmetic(accuracy, dtype, m, blocks, *sharing)
        key = a.facts(truth.q.shape[1]), separate_positives
        with np.errstate(all="ignore"):
            if key not in truth.bounds and problem.kind == "sigmoid":
                truth.bounds[key] = _sigmoid(problem, truth, a, magnitude)
            elif key not in truth.bounds:
                truth.bounds[key] = _softmax(problem, truth, a, magnitude, separate_positives)
        return truth.bounds[key]

    both_bounds = derive(accuracy, dtype, options, spread), derive(ORACLE, "float64")
    names = [field.name for field in fields(Outcome) if field.name != "rounding"]
    values: dict[str, Any] = {
        name: _total(*(getattr(outcome, name) for outcome in (*both_bounds, truth.outcome))) for name in names
    }
    coarser = UNIT[dtype] > accuracy.unit
    return Outcome(**values, rounding=(UNIT[dtype], UNDERFLOW[dtype]) if coarser else (0.0, 0.0))


def _total(backend: Any, oracle: Any, exact: Any) -> Any:
    """The sum of the two bounds; 0 where the truth is not finite, inf where a finite truth has no bound."""
    if exact is None:
        return None
    if isinstance(exact, tuple):
        return tuple(_total(*parts) for parts in zip(backend, oracle, exact, strict=True))
    total = float64(backend + oracle)
    return float64(np.where(np.isfinite(exact), np.where(np.isnan(total), np.inf, total), 0.0))


def _softmax(problem: Problem, t: Truth, a: Arithmetic, upstream: Any, separate_positives: bool) -> Outcome:
    """The bounds of a softmax loss: both directions share the logits' error E, and each has a ``Side`` of its own."""
    E = token_error = logit_error(t if t.late is None else replace(t, scale=1.0), a)
    if t.late is not None:
        E = abs(t.scale) * t.late.score_error(token_error, a) + a.tiny
    if problem.margin is not None:
        # roundings of s m and of its sum with N; references are of logits without a margin
        E = E + 8 * a.accuracy.unit * abs(t.scale * problem.margin)
    reference, indexed = shared_reference(t, a), problem.match == "drop"
    side_E = (E, a.over_columns), (E.T, a.over_rows)
    views = [
        Side(side, *part, reference, indexed, separate_positives) for side, part in zip(t.sides, side_E, strict=False)
    ]
    loss, dG, largest = 0.0, np.zeros(t.x.shape), 0.0
    errors: list[Any] = []
    for view, G_error in zip(views, (dG, dG.T), strict=False):
        side = view.side
        dN = lse_error(view, side.admitted & ~side.positive, side.negative_lse, a)
        dP = positive_lse_error(view, a)
        dS = _positive_error(view, a)
        errors.append([dN, dP, _spread_error(side, dP, dS)])
        if side.bars is not None:
            side_error, weight = _bars_error(view, dN, dP, a), np.abs(side.bars)
        else:
            dL = _merged_error(view, dN, dP, a)
            loss += _softmax_loss_error(view, dN, dP, dL, dS, a)
            loss += _smoothing_loss_error(view, dP, dS, a)
            side_error = _softmax_gradient_error(view, dN, dP, dL, upstream, a)
            weight = upstream * np.abs(side.weight)
        G_error += side_error
        largest = max(largest, weight.max(initial=0.0))
    bound = partial(gradient_bounds, problem, t, largest=largest, a=a)
    gradients = bound(dG) if t.late is None else t.late.gradient_bounds(bound, dG, token_error, a)
    statistics = np.concatenate(errors, axis=1)
    if problem.kind == "statistics":
        return Outcome(loss=statistics, statistics=statistics, **gradients)
    gradients = _add_linear(t, gradients, problem, upstream, a)
    value = float64(loss + a.accuracy.unit * (abs(t.outcome.loss) + loss) + a.tiny)
    return Outcome(loss=value, statistics=statistics, **gradients)


def _spread_error(side: Direction, dP: FloatArray, dS: FloatArray) -> FloatArray:
    """Error of ``D = P - t S``, taken in float64."""
    size = np.abs(side.target * side.positive_sum) + np.abs(np.nan_to_num(side.positive_lse, neginf=0.0))
    return float64(dP + side.target * dS + 4 * UNIT["float64"] * size)


def _smoothing_loss_error(view: Side, dP: FloatArray, dS: FloatArray, a: Arithmetic) -> float:
    """Error of ``e sum_i w_i (P - D - mean_j x_ij)``: errors of P, of t S and of all logits, and roundings of terms."""
    side = view.side
    if not side.smoothed.any() or not side.x.size:
        return 0.0
    mean, error = np.abs(side.x).mean(axis=1), dP + np.abs(side.target) * dS + view.E.mean(axis=1)
    size = np.abs(np.nan_to_num(side.positive_lse)) + np.abs(side.target * side.positive_sum) + mean
    return float((np.abs(side.smoothed) * (error + gamma(8 * a.accuracy.unit) * size)).sum())


def _add_linear(t: Truth, gradients: dict[str, Any], problem: Problem, upstream: Any, a: Arithmetic) -> dict[str, Any]:
    """The bounds of gradients to which the linear parts of label smoothing and of a margin are added.

    H is the part of |G| that smoothing adds: the blocks' G is smaller by H and has roundings of its own. Both parts are
    rounded to the features' dtype, one after the other. The margin's part is a sum of bars in float64.
    """
    facts, m = a.accuracy, 0.0 if problem.margin is None else abs(problem.margin)
    by_scale = gamma(8 * facts.unit) * m * np.abs(np.nan_to_num(t.G)).sum() if m else 0.0
    if not any(side.smoothed.any() for side in t.sides):
        return gradients | {"scale": gradients["scale"] + by_scale}
    H = np.zeros(t.x.shape)
    for side, part in zip(t.sides, (H, H.T), strict=False):
        part += upstream * np.abs(side.smoothed)[:, None] * (side.y + 1 / max(side.y.shape[1], 1))
    by_scale += gamma(8 * facts.unit) * (H * np.abs(t.products)).sum()
    chain = a.product(a.over_columns.longest, a.over_columns.parts) + a.product(a.over_rows.longest, a.over_rows.parts)
    share = facts.gradient_rounding + chain + gamma(8 * facts.unit)

    def widened(bound: FloatArray, linear: FloatArray, exact: FloatArray) -> FloatArray:
        return a.cast(linear + np.abs(np.nan_to_num(exact)), bound + share * linear)

    columns = column_blocks(problem, abs(t.scale) * H.T @ np.abs(t.q))
    return {
        "rows": widened(gradients["rows"], abs(t.scale) * H @ np.abs(t.k), t.outcome.rows),
        "columns": tuple(map(widened, gradients["columns"], columns, t.outcome.columns)),
        "scale": gradients["scale"] + by_scale + share * (H * t.magnitudes).sum(),
    }


def _sigmoid(problem: Problem, t: Truth, a: Arithmetic, upstream: Any) -> Outcome:
    """The bounds of the sigmoid loss. A pair's weight is at most the sum of the row's two weights."""
    u, weight = a.accuracy.unit, np.abs(float64(problem.row_weight))
    if weight.ndim == 2:
        weight, a = weight.sum(axis=1), a.twice
    row_loss, dG = _sigmoid_errors(t, logit_error(t, a), upstream * weight, a)
    loss = float(np.where(weight == 0, 0.0, weight * row_loss).sum())
    magnitude = np.abs(t.G) + dG
    chain = gamma(u * (a.over_columns.tile + a.over_columns.parts + 2))
    bias = dG.sum() + (chain + a.float64_sum(t.x)) * magnitude.sum()
    gradients = gradient_bounds(problem, t, dG, upstream * weight.max(initial=0.0), a)
    return Outcome(
        loss=float64(loss + u * (abs(t.outcome.loss) + loss) + a.tiny),
        bias=_over_ranks(t.G.sum(axis=1), bias, a),
        **gradients,
    )


def logit_error(t: Truth, a: Arithmetic) -> FloatArray:
    """E (m, n), the error of a logit: see the module's docstring."""
    width = t.q.shape[1]
    E = abs(t.scale) * (a.product(width, 2) * t.magnitudes + width * a.tiny) + a.tiny
    return float64(E + a.accuracy.unit * (np.abs(t.x) + E) if t.bias else E)


def shared_reference(t: Truth, a: Arithmetic) -> float | None:
    """The largest shared reference, ``|s| max|q| max|k| + |bias|``, or None where each row has its own maximum."""
    if not a.accuracy.shared_reference:
        return None
    longest = [np.sqrt((z * z).sum(axis=1)).max(initial=0.0) for z in (t.q, t.k)]
    return float(abs(t.scale) * longest[0] * longest[1] + abs(t.bias))


@dataclass(frozen=True)
class Side:
    """One direction of the loss, how its sums are taken, and E (own, other), the errors of its logits.

    Attributes:
        reference: the largest shared reference; None where each row has its own maximum.
        indexed: whether column indices give the positives, rather than equal ids.
    """

    side: Direction
    E: FloatArray
    lengths: Lengths
    reference: float | None
    indexed: bool
    separate_positives: bool


def lse_error(view: Side, counted: BoolArray, exact: FloatArray, a: Arithmetic) -> FloatArray:
    """Error of ``exact = r + log sum exp(x - r)`` over the counted pairs, tiles merged in any order: (own,).

    * Each term carries ``e_j = (1 + 6u) E_j + u (3 |x_j - r| + c)`` in its exponent. The reference is a running maximum
      between x_j and the final maximum, so ``|x_j - r| <= max x - x_j + 2 max E``; or the shared one, and then no more
      than |x_j| + |r|. ``L(x + e) - L(x) = log sum_j p_j exp(e_j)``, attained when all e_j are positive, and by
      Jensen no smaller than the decrease when all are negative. (max_j E_j, the 1-Lipschitz bound, ignores that
      unlikely columns do not matter.)
    * The sum: one addition per term of a tile. A merge of (r, sum) pairs costs (c + 2)u, its exponents telescoping into
      e; a merge of finished log-sum-exps, ``max + log1p(exp(-D))``, costs at most ``u (2c + 2)`` beside the rounding
      of the stored value: the partial result is within D of L and has weight exp(-D), and ``D exp(-D) < 1``. Both are
      allowed, T times.
    * The end: the logarithm (c u |L - r|), r exact. A tile returns float64: its roundings, and r's in any unit.
    * n tiny for terms that underflow: with a row's own maximum the sum is at least 1. With a shared reference the
      sum of n terms is at least n tiny / u (``Accuracy.shared_reference``), so they cost at most u of it.
    """
    u, c, wide, lengths = a.accuracy.unit, a.accuracy.exp_ulps, UNIT["float64"], view.lengths
    x, E = view.side.x, view.E
    if not x.shape[1]:
        return np.zeros(len(x))
    maximum = np.where(counted, x, -np.inf).max(axis=1)
    slack = np.where(counted, E, 0.0).max(axis=1)
    if view.reference is None:
        r, shift = np.abs(maximum) + slack, np.abs(exact - maximum) + slack
        distance = maximum[:, None] - x + 2 * slack[:, None]
    else:
        r, shift = np.full(len(x), view.reference), np.abs(exact) + view.reference
        distance = np.abs(x) + E + view.reference
    flushed_error = x.shape[1] * a.tiny if view.reference is None else u
    e = (1 + 6 * u) * E + u * (3 * distance + c)
    p = np.where(counted, np.exp(x - exact[:, None]), 0.0)
    input_error = np.log1p(np.where(p > 0, p * np.expm1(e), 0.0).sum(axis=1))
    sum_error = gamma(u * (lengths.tile + lengths.parts * (2 * c + 2)))
    storage_error = u * c * shift + wide * ((lengths.parts + 4) * np.abs(exact) + 4 * r)
    error = (input_error + sum_error + storage_error + flushed_error) * (1 + gamma(u * (lengths.parts + 4)))
    # a log-sum-exp of nothing is exactly -inf
    return float64(np.where(counted.any(axis=1), error, 0.0))


def positive_lse_error(view: Side, a: Arithmetic) -> FloatArray:
    """Error of P: ``lse_error`` over the positives; for one positive P is its logit, with two roundings of unit."""
    one = np.where(view.side.positive, view.E + 2 * a.accuracy.unit * (np.abs(view.side.x) + view.E), 0.0).sum(axis=1)
    counts = view.side.positive.sum(axis=1)
    if (counts <= 1).all():
        # the log-sum-exp of no positive is exactly -inf
        return float64(one)
    several = lse_error(view, view.side.positive, view.side.positive_lse, a)
    return float64(np.where(counts == 1, one, several))


def _positive_error(view: Side, a: Arithmetic) -> FloatArray:
    """Error of sum_j x_ij over positives: their E, two roundings each, one addition each (zeros add exactly)."""
    x, E, positive = view.side.x, view.E, view.side.positive
    size = np.where(positive, np.abs(x) + E, 0.0).sum(axis=1)
    relative = a.accuracy.unit * (positive.sum(axis=1) + 2)
    return float64(np.where(positive, E, 0.0).sum(axis=1) + relative / (1 - relative) * size)


def _merged_error(view: Side, dN: FloatArray, dP: FloatArray, a: Arithmetic) -> FloatArray:
    """Error of L = log(exp N + exp P): ``log(s exp(dN) + (1 - s) exp(dP))``, s = sigma(N - P); or error of one sum."""
    side, s = view.side, view.side.negative_mass
    at_positives = np.where(s < 1, (1 - s) * np.expm1(dP), 0.0)
    at_negatives = np.where(s > 0, s * np.expm1(dN), 0.0)
    separate = float64(np.log1p(at_positives + at_negatives) + UNIT["float64"] * 4 * np.abs(np.nan_to_num(side.lse)))
    return separate if view.separate_positives else np.maximum(separate, lse_error(view, side.admitted, side.lse, a))


def _softmax_loss_error(
    view: Side, dN: FloatArray, dP: FloatArray, dL: FloatArray, dS: FloatArray, a: Arithmetic
) -> float:
    """Error of sum_i w_i (softplus(N_i - P_i) + (P_i - t_i S_i)), taken in float64.

    * The excess: ``softplus(z + d) - softplus(z) = log1p(sigma(z) expm1(d))`` with d = dN + dP, and its evaluation.
      Its error is relative to sigma(N - P), the probability of the negatives, and goes to 0 with the loss.
    * ``P - t S``: for one positive S is P, so ``|1 - t| dP`` remains; for several positives both errors count.
    * Without a target the term is L.
    """
    side, c = view.side, a.accuracy.exp_ulps
    target, weight, d = np.abs(side.target), np.abs(side.weight), dN + dP
    sums = gamma(UNIT["float64"] * (2 * len(target) + 4 + c + a.totals))
    excess = np.where(side.negative_mass > 0, np.log1p(side.negative_mass * np.expm1(d)), 0.0)
    is_single = view.side.positive.sum(axis=1) == 1
    dD = np.where(is_single, np.abs(1 - side.target) * dP, dP + target * dS)
    difference = np.abs(side.positive_lse - side.target * side.positive_sum)
    size = np.where(
        is_single & (side.target == 1), 0.0, np.abs(side.positive_lse) + np.abs(side.target * side.positive_sum)
    )
    exact = np.abs(side.nll) + difference
    with_target = excess + dD + UNIT["float64"] * 2 * size + sums * (exact + excess + dD)
    without_target = dL + sums * np.abs(side.nll)
    if not view.separate_positives:
        lse = np.abs(np.nan_to_num(side.lse))
        with_target = dL + target * dS + (a.accuracy.unit + sums) * (lse + np.abs(target * side.positive_sum))
    terms = np.where((target != 0) & view.side.positive.any(axis=1), with_target, without_target)
    return float(np.where(weight == 0, 0.0, weight * (terms + a.tiny)).sum())


def _softmax_gradient_error(
    view: Side, dN: FloatArray, dP: FloatArray, dL: FloatArray, upstream: Any, a: Arithmetic
) -> FloatArray:
    """The error of one direction's part of G, before G is rounded.

    * A negative pair: ``_probability_error``.
    * A positive, G = w ((q - t) - q s): s = sigma(N - P) changes by at most ``min(s, 1 - s) expm1(dN + dP)``;
      q = exp(x - P) is 1 for one positive and otherwise has an error like p's. Where equal ids give the positives, rows
      that are not certain of them may use w (p - t) instead.
    * At most seven roundings, relative to the terms: the target, the weight times the upstream gradient, that product
      times the other factor, and four additions of the terms of both directions; one more where the upstream gradient
      is first multiplied by the number of ranks.
    """
    u, side = a.accuracy.unit, view.side
    weight = upstream * np.abs(side.weight)[:, None]
    roundings = gamma((7 + a.shared) * u)
    dp = _probability_error(view, side.p, side.lse, dL[:, None], a)
    by_p = dp + roundings * (side.p + dp + np.abs(side.y))
    is_single = (view.side.positive.sum(axis=1) == 1)[:, None]
    dq = np.zeros(side.q.shape)
    if not is_single.all():
        dq = np.where(is_single, 0.0, _probability_error(view, side.q, side.positive_lse, dP[:, None], a))
    s = side.negative_mass[:, None]
    ds = np.minimum(np.minimum(s, 1 - s) * np.expm1(dN + dP)[:, None], 1.0)
    by_q = dq + side.q * ds + roundings * (np.abs(side.q - side.y) + side.q * (s + ds) + dq)
    # half of the threshold below which a backend treats a row as certain
    is_uncertain = (np.abs(side.target) <= 0.5) | (side.negative_mass >= 2.0**-9)
    may_subtract = ((is_uncertain & (not view.indexed)) | (not view.separate_positives))[:, None]
    error = weight * np.where(view.side.positive, np.where(may_subtract, np.maximum(by_p, by_q), by_q), by_p)
    # a weight of 0 removes the row even where its log-sum-exp is -inf or NaN
    return np.where(view.side.admitted & (weight > 0), error + 4 * a.tiny, 0.0)


def _probability_error(
    view: Side, p: FloatArray, lse: FloatArray, error: FloatArray, a: Arithmetic, extra: FloatArray | float = 0.0
) -> FloatArray:
    """The error of ``p = exp(x - L)``, (own, other), where L (own,) has the error ``error`` (own, 1).

    ``p expm1(eta)``, ``eta = (1 + 6u) (E_x + E_L) + u (3 |x - L| + c + extra)``. With a shared reference, which lies at
    most 70 (100 powers of two) above a log-sum-exp, p is exp(x - r) exp(r - L): |x| + |r| replaces |x - L|, c + 1 is
    added, and an underflow costs 2^-100 and 2^-26 of all negatives, or 2^-9 / n of them for n beyond 2^17. For any
    eta, both p lie in 0..1.
    """
    u, c, x = a.accuracy.unit, a.accuracy.exp_ulps, view.side.x
    distance, constant, flushed, share = np.abs(x - lse[:, None]), c, a.tiny, 0.0
    if view.reference is not None:
        distance = np.abs(x) + 2 * (view.reference + np.log(max(x.size, 1)) + 70)
        constant, flushed, share = 2 * c + 1, 2.0**-100, 2.0**-26 / max(1.0, max(x.shape) / 2**17)
    eta = (1 + 6 * u) * (view.E + error) + u * (3 * distance + constant + extra)
    error_of_p = np.minimum(np.where(p > 0, p * np.expm1(eta), 0.0), np.maximum(p, 1 - p) + 8 * u)
    return float64(error_of_p + flushed + share * view.side.negative_mass[:, None])


def _bars_error(view: Side, dN: FloatArray, dP: FloatArray, a: Arithmetic) -> FloatArray:
    """The error of one side's part of G, of a loss that its derivatives by N, P and D define, before G is rounded.

    * A negative pair: ``Nbar exp(x - N)``, with the error of N. At positives q has such an error, unless the positive
      is the only one, and is multiplied by Pbar + Dbar.
    * A backend may divide by the largest bar w of the row: L is then N plus the logarithm of the quotient, and is
      rounded. Roundings are relative to w: of w, t and L, and of each term of ``w ((q - t) - q r)``, r at most 3.
    """
    side, c = view.side, a.accuracy.exp_ulps
    assert side.bars is not None
    by_n, by_p, by_d = bars = np.abs(side.bars)[:, :, None]
    largest, roundings = bars.max(axis=0), gamma((9 + a.shared) * a.accuracy.unit)
    quotient = np.log(np.where(by_n > 0, largest / np.where(by_n > 0, by_n, 1.0), 1.0))
    is_single = (side.positive.sum(axis=1) == 1)[:, None]

    def error_of(p: FloatArray, lse: FloatArray, error: FloatArray) -> FloatArray:
        return _probability_error(view, p, lse, error[:, None], a, 9 * quotient + c + 2)

    p = np.where(side.admitted & ~side.positive, np.exp(side.x - side.negative_lse[:, None]), 0.0)
    dp, dq = error_of(p, side.negative_lse, dN), np.where(is_single, 0.0, error_of(side.q, side.positive_lse, dP))
    at_positive = (by_p + by_d) * dq + roundings * largest * (4 * (side.q + dq) + 2 * np.abs(side.y))
    error = np.where(side.positive, at_positive, by_n * dp + roundings * by_n * (p + dp))
    return np.where(side.admitted & (largest > 0), error + largest * a.tiny + 4 * a.tiny, 0.0)


def _sigmoid_errors(t: Truth, E: FloatArray, weight: FloatArray, a: Arithmetic) -> tuple[FloatArray, FloatArray]:
    """Errors of sum_j softplus(a_ij), (m,), and of G = -w z sigma(a), (m, n), at a = -z x.

    * ``softplus(a + E) - softplus(a) = log1p(sigma(a) expm1(E))``, and softplus is convex: a decrease is smaller.
      Its evaluation as ``max(a, 0) + log1p(exp(-|a|))`` costs ``u (3|a| + 2c)`` on the second term and u on the sum.
      A plain log(1 + exp) has an absolute error of u, which is the whole value where softplus is small.
    * ``|sigma(a + E) - sigma(a)| <= min(sigma, 1 - sigma) expm1(E)``; evaluation: 3|a|u in the exponent, with the same
      factor, and c + 4 roundings (exponential, sum, quotient, weight twice) on sigma.
    """
    u, c = a.accuracy.unit, a.accuracy.exp_ulps
    a_ij = np.where(t.positive, -t.x, t.x)
    value, slope = softplus(a_ij), sigma(a_ij)
    input_error = (1 + 6 * u) * E
    evaluation_error = np.log1p(np.exp(-np.abs(a_ij))) * np.expm1(u * (3 * np.abs(a_ij) + 2 * c)) + u * value + a.tiny
    dvalue = np.where(t.admitted, (np.log1p(slope * np.expm1(input_error)) + evaluation_error) * (1 + 4 * u), 0.0)
    length = gamma(u * (a.over_columns.tile + a.over_columns.parts)) + a.float64_sum(t.x)
    row_loss = (dvalue + length * (np.where(t.admitted, value, 0.0) + dvalue)).sum(axis=1)
    dslope = np.minimum(slope, sigma(-a_ij)) * np.expm1(input_error + u * 3 * np.abs(a_ij))
    dslope = dslope + gamma(u * (c + 4)) * (slope + dslope) + a.tiny
    dG = np.where(t.admitted & (weight[:, None] > 0), weight[:, None] * dslope + a.tiny, 0.0)
    return row_loss, dG


def gradient_bounds(problem: Problem, t: Truth, dG: FloatArray, largest: float, a: Arithmetic) -> dict[str, Any]:
    """The bounds of dQ, dK and dscale, which follow from G's error dG in the same way for every loss.

    G is rounded after the targets are subtracted and before the second products, so the rounding is relative to G:
    ``dG + u_q (|G| + dG)``. Its underflow is absolute, in units of the largest weight.
    """
    facts = a.accuracy
    moved = dG + facts.gradient_rounding * (np.abs(t.G) + dG)
    moved = moved + np.where(dG > 0, facts.gradient_underflow * largest, 0.0)
    rows = _sum_error(t.row_magnitudes, moved, t.k, a.over_columns, a)
    columns = _features_error(t, t.column_sum, _sum_error(t.column_magnitudes, moved.T, t.q, a.over_rows, a), a)
    return {
        "rows": _features_error(t, t.row_sum, rows, a),
        "columns": column_blocks(problem, columns),
        "scale": _scale_error(t, moved, rows, a),
    }


def _sum_error(
    magnitudes: FloatArray, dG: FloatArray, other: FloatArray, lengths: Lengths, a: Arithmetic
) -> FloatArray:
    """Error of R = G K: ``dG |K| + g (|G| + dG) |K| + n tiny``; g of a product of n terms and T additions of tiles.

    ``magnitudes`` is |G| |K|.
    """
    relative = a.product(lengths.longest, lengths.parts)
    moved = dG @ np.abs(other)
    return moved + relative * (magnitudes + moved) + len(other) * a.tiny


def _features_error(t: Truth, exact: FloatArray, error: FloatArray, a: Arithmetic) -> FloatArray:
    """Error of s R: the sum's error times s, two roundings (the upstream gradient may multiply s), and the one cast.

    Two more roundings where n ranks share the problem: the upstream gradient times n, and the mean divided by n.
    """
    value = np.abs(t.scale * exact)
    scaled = abs(t.scale) * error
    return a.cast(value, scaled + gamma((2 + 2 * a.shared) * a.accuracy.unit) * (value + scaled) + 2 * a.tiny)


def _scale_error(t: Truth, moved: FloatArray, row_error: FloatArray, a: Arithmetic) -> FloatArray:
    """Error of ``dscale = sum_i <q_i, R_i>``: absolute, since it cancels (each row of a softmax's G sums to about 0).

    G's error enters through the products themselves, ``sum_ij dG_ij |<q_i, k_j>|``, which is smaller than through
    R's error; the product G K costs ``g sum (|G| + dG) B``; the inner products over d are in the state dtype, their sum
    over rows in float64; the rest in ``_over_ranks``.
    """
    u, width = a.accuracy.unit, t.q.shape[1]
    relative = a.product(a.over_columns.longest, a.over_columns.parts)
    error = (moved * np.abs(t.products)).sum() + relative * ((np.abs(t.G) + moved) * t.magnitudes).sum()
    inner = gamma(u * (width + 1)) + a.float64_sum(t.x)
    error += inner * (np.abs(t.q) * (np.abs(t.row_sum) + row_error)).sum() + t.q.size * (len(t.k) + 1) * a.tiny
    return _over_ranks((t.q * t.row_sum).sum(axis=1), error, a)


def _over_ranks(terms: FloatArray, error: float, a: Arithmetic) -> FloatArray:
    """Error of ``sum_i terms_i`` in the state dtype, where ``error`` bounds the sum of the terms' errors.

    A single process rounds once. Each rank has a float64 sum, which may be large where the total cancels: n sums are
    added, divided by n, and added once more by the reduction over ranks. A factor n rounds once more.
    """
    ends = np.cumsum(a.ranks)
    parts = [abs(terms[end - rows : end].sum()) for rows, end in zip(a.ranks, ends, strict=True)]
    wide = gamma(UNIT["float64"] * (len(parts) + 3)) * (sum(parts) + error) if a.shared else 0.0
    return float64(error + wide + gamma(a.accuracy.unit * (1 + a.shared)) * (abs(terms.sum()) + error) + a.tiny)
