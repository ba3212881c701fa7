"""Whether a backend serves losses that nobody has written yet: gradients of bars of any sign and size.

A loss of the statistics is known to a backend by its bars alone (``contract.Bars``): what is right for any bars is
right for any such loss. Their truth is the dense equation of ``contract.SideWeights``, in float64; their bound is
derived as that of the softmax loss is in ``bounds``, from N and P each by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from contrastile.backends.contract import Accuracy, Bars, Options, SideStatistics, SideWeights, Weights
from contrastile.oracle.arrays import BoolArray, FloatArray, float64
from contrastile.oracle.general import gradients
from contrastile.schedules import local
from contrastile.schedules.problem import Problem
from contrastile.verify import rearrange
from contrastile.verify.arithmetic import Arithmetic, Spread, arithmetic, gamma
from contrastile.verify.bounds import (
    FLUSHED,
    ORACLE,
    Side,
    gradient_bounds,
    logit_error,
    lse_error,
    positive_lse_error,
    shared_reference,
    sides,
)
from contrastile.verify.comparison import GRADIENT, Comparisons, compare
from contrastile.verify.execution import materialise, taken
from contrastile.verify.rounding import UNDERFLOW, UNIT
from contrastile.verify.trial import SkipError, Trial
from contrastile.verify.truth import Direction, Outcome, Truth, truth


def bars(trial: Trial) -> Comparisons:
    """The gradients of any loss of N, P and D, whose derivatives by these are drawn, agree with the oracle's."""
    trial.only_small()
    if trial.problem.kind == "sigmoid":
        raise SkipError("the sigmoid loss has no statistics")
    trial.only_finite()
    n = sum(rearrange.sizes(trial.problem))
    problem, random = rearrange.regrouped(trial.problem, [n]), trial.random()
    exact = truth(problem)
    for label, even in (("drawn", False), ("without D", True)):
        drawn = [None if side is None else drawn_bars(random, side, even) for side in (exact.row, exact.column)]
        known = truth_of_bars(exact, drawn)
        found = _outcomes(trial, problem, drawn)
        bound = bound_of_bars(problem, known, drawn, trial.subject.accuracy, trial.subject.dtype, trial.subject.options)
        for form, got in found.items():
            yield f"{label}, {form}", compare(got, known.outcome, bound, GRADIENT)


def drawn_bars(random: np.random.Generator, side: Direction, even: bool) -> Bars:
    """Bars of three orders of magnitude, some of them 0: of a mean, whose gradients no dtype is too narrow for."""
    size = len(side.weight)

    def one() -> FloatArray:
        return random.standard_normal(size) * 10.0 ** random.uniform(-3, 0, size) * (random.random(size) < 0.8) / size

    return Bars(one(), one(), one() * (not even))


def _part(x: FloatArray, positive: BoolArray, side: Direction, bars: Bars) -> FloatArray:
    """One side's part of G."""
    by_n, by_p, by_d = (bar[:, None] for bar in bars)
    target = np.where(positive, side.target[:, None], 0.0)
    at_positive = by_p * side.q + by_d * (side.q - target)
    negative = np.where(by_n == 0, 0.0, by_n * np.exp(x - side.negative_lse[:, None]))
    return float64(np.where(positive, at_positive, np.where(side.admitted, negative, 0.0)))


@np.errstate(all="ignore")
def truth_of_bars(t: Truth, drawn: Sequence[Bars | None]) -> Truth:
    """The truth of these bars: of the outcome, the gradients alone."""
    assert t.row is not None
    assert drawn[0] is not None
    G = _part(t.x, t.positive, t.row, drawn[0])
    if t.column is not None and drawn[1] is not None:
        G = G + _part(t.x.T, t.positive.T, t.column, drawn[1]).T
    found = gradients(t.q, t.k, t.scale, G)
    sizes = np.cumsum([len(x) for x in t.outcome.columns])[:-1]
    outcome = Outcome(t.outcome.loss, found.d_rows, tuple(np.split(found.d_columns, sizes)), found.d_scale)
    return replace(t, outcome=outcome, G=G, row_sum=G @ t.k, column_sum=G.T @ t.q, oracle_bounds={})


@np.errstate(all="ignore")
def _outcomes(trial: Trial, problem: Problem, drawn: list[Bars | None]) -> dict[str, Outcome]:
    """The gradients by ``gradients``, and by ``finished`` where the backend has one."""
    backend, options, dtype = trial.subject.backend, trial.subject.options, trial.subject.dtype
    arrays, native = backend.arrays, materialise(problem, backend, dtype, trial.subject.device)
    ((_, block),) = native.blocks()
    backend.check(block, options)
    found = backend.lse(block, native.column_weight is not None, options)

    def side(statistics: SideStatistics, weight: Any, target: Any, bars: Bars) -> SideWeights:
        given = Bars(*(arrays.asarray(x, "float64", native.scale) for x in bars))
        return SideWeights(*statistics[:2], weight, target, given)

    assert drawn[0] is not None
    columns = None
    if found.columns is not None and drawn[1] is not None:
        columns = side(found.columns, native.column_weight, native.column_target, drawn[1])
    weights = Weights(side(found.rows, native.row_weight, native.row_target, drawn[0]), columns)
    of_rows, of_columns = (local.accumulator(backend, x, True) for x in (block.rows, block.columns))
    backend.gradients(block, weights, of_rows, of_columns, options)
    wanted, gathered = local.Wanted(True, (True,)), local.Sums(of_rows, (of_columns,), None)
    made = {"gradients": local.gradients_from_sums(block.rows, block.scale, gathered, None, wanted, arrays)}
    if backend.finished is not None:
        done = backend.finished(block, weights, None, "gradient", options)
        made["finished"] = local.Gradients(done.rows, (done.columns,), done.inner, None)

    def outcome(x: local.Gradients) -> Outcome:
        rows, joined, scale = (taken(arrays, y) for y in (x.rows, x.columns[0], x.scale))
        return Outcome(np.zeros(()), rows, (joined,), scale)

    return {name: outcome(x) for name, x in made.items()}


def bound_of_bars(
    problem: Problem,
    t: Truth,
    drawn: Sequence[Bars | None],
    accuracy: Accuracy,
    dtype: str,
    options: Options | None = None,
    spread: Spread | None = None,
) -> Outcome:
    """The bounds of the gradients: the backend's and the oracle's own."""
    blocks, m = [len(block) for block in problem.columns], len(t.q)

    def derive(facts: Any, dtype: str, *how: Any) -> dict[str, Any]:
        a = arithmetic(facts, dtype, m, blocks, *how)
        with np.errstate(all="ignore"):
            E, reference, dG = logit_error(t, a), shared_reference(t, a), np.zeros(t.x.shape)
            for number, (view, bars) in enumerate(zip(sides(problem, t, E, a), drawn, strict=False)):
                assert bars is not None
                part = _gradient_error(view, bars, reference, a)
                dG = dG + (part if number == 0 else part.T)
            largest = max(np.abs(bar).max(initial=0.0) for bars in drawn if bars is not None for bar in bars)
            return gradient_bounds(problem, t, dG, largest, a)

    ours, oracle = derive(accuracy, dtype, options, spread), derive(ORACLE, "float64")
    coarser = UNIT[dtype] > accuracy.unit
    return Outcome(
        np.zeros(()),
        ours["rows"] + oracle["rows"],
        tuple(a + b for a, b in zip(ours["columns"], oracle["columns"], strict=True)),
        ours["scale"] + oracle["scale"],
        rounding=(UNIT[dtype], UNDERFLOW[dtype]) if coarser else (0.0, 0.0),
    )


def _gradient_error(view: Side, bars: Bars, reference: float | None, a: Arithmetic) -> FloatArray:
    """The error of one side's part of G, before G is rounded: see ``bounds._softmax_gradient_error``.

    * A negative pair: ``Nbar p expm1(eta)`` with p = exp(x - N), of which N's error is a part.
    * A positive: q has such an error unless it is alone, and is multiplied by Pbar + Dbar.
    * Roundings are relative to the largest bar w of the row, by which a backend may divide the others: of w, t and L,
      and of each term of ``w ((q - t) - q r)``, whose r is at most 3.
    """
    u, c, side = a.accuracy.unit, a.accuracy.exp_ulps, view.side
    by_n, by_p, by_d = (np.abs(bar)[:, None] for bar in bars)
    largest = np.maximum(np.maximum(by_n, by_p), by_d)
    negative = lse_error(view, view.admitted & ~view.positive, side.negative_lse, reference, a)[:, None]
    positive = positive_lse_error(view, reference, a)[:, None]
    roundings = gamma((9 + a.shared) * u)

    def probability(p: FloatArray, lse: FloatArray, error: FloatArray) -> FloatArray:
        far = np.abs(view.x - lse[:, None]) if reference is None else np.abs(view.x) + 2 * reference
        # L lies above N by at most the logarithm of the quotient of the bars
        quotient = np.log(np.where(by_n > 0, largest / np.where(by_n > 0, by_n, 1.0), 1.0))
        eta = (1 + 6 * u) * (view.E + error) + u * (3 * (far + 2 * quotient + np.abs(quotient)) + 2 * c + 2)
        moved = np.where(p > 0, p * np.expm1(eta), 0.0)
        return np.minimum(moved, np.maximum(p, 1 - p) + 8 * u) + (a.tiny if reference is None else FLUSHED)

    p = np.where(view.admitted & ~view.positive, np.exp(view.x - side.negative_lse[:, None]), 0.0)
    dp = probability(p, side.negative_lse, negative)
    alone = (view.positive.sum(axis=1) == 1)[:, None]
    dq = np.where(alone, 0.0, probability(side.q, side.positive_lse, positive))
    target = np.where(view.positive, np.abs(side.target)[:, None], 0.0)
    at_positive = (by_p + by_d) * dq + roundings * largest * (4 * (side.q + dq) + 2 * target)
    error = np.where(view.positive, at_positive, by_n * dp + roundings * by_n * (p + dp))
    return float64(np.where(view.admitted & (largest > 0), error + largest * a.tiny + 4 * a.tiny, 0.0))
