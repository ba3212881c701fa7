"""N, P and D, and the gradients of arbitrary losses of them: on every case, and by the public ``statistics``.

A backend knows a loss of the statistics only by its bars (``contract.Bars``), the derivatives by N, P and D. So a
backend that is right for random bars is right for any such loss.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from contrastile import losses
from contrastile.backends.contract import state_dtype
from contrastile.comm.communicator import Communicator
from contrastile.oracle.arrays import FloatArray, float64
from contrastile.schedules.placement import SCHEDULES, Shards
from contrastile.schedules.problem import Problem
from contrastile.verify import cases
from contrastile.verify.arithmetic import Spread
from contrastile.verify.bounds import bounds
from contrastile.verify.comparison import GRADIENT, Comparisons, Worst, compare
from contrastile.verify.draws import targeted
from contrastile.verify.execution import putter
from contrastile.verify.rearrange import folded, is_symmetric
from contrastile.verify.shards import Cut, shares
from contrastile.verify.trial import SkipError, Subject, Trial
from contrastile.verify.truth import Outcome, truth
from contrastile.verify.worlds import judged

_IN_BLOCKS = "limits", "ids-drop", "labels"
"""Cases to compute in blocks too: rows against columns, and rows against themselves, are cut differently."""

_OF_RANKS = ("ragged", "square-ragged", "ids-drop", "ids-target@far", "labels", "limits", "guide")


def stated(problem: Problem) -> Problem:
    """The problem of the statistics of all rows and columns; of rows against themselves, of all rows.

    Positives of no column become -1; excluded columns stay only for rows against themselves.
    """
    m, n, j = len(problem.rows), sum(map(len, problem.columns)), problem.positives
    itself = problem.excluded is not None and j is None and is_symmetric(problem)
    positives = None if j is None else np.where((j >= 0) & (j < n), j, -1)
    bare = replace(problem, kind="statistics", positives=positives, excluded=problem.excluded if itself else None)
    return targeted(bare, np.ones(m), None if itself else np.ones(n))


def bars(trial: Trial) -> Comparisons:
    """The gradients of any loss of N, P and D, whose derivatives by these are drawn, agree with the oracle's."""
    trial.only_small()
    if trial.problem.kind == "sigmoid":
        raise SkipError("the sigmoid loss has no statistics")
    trial.only_finite()
    subject, problem, random = trial.subject, replace(trial.problem, kind="statistics"), trial.random()
    forms = {"gradients": replace(subject, backend=replace(subject.backend, finished=None, finished_columns=None))}
    if subject.backend.finished is not None:
        forms["finished"] = subject
    if trial.keeps and subject.keep is None:
        forms["keep 64"] = replace(subject, keep=64)
    for label, d_factor in (("drawn", 1.0), ("without D", 0.0)):
        drawn = _draw_bars(random, problem)
        drawn[2] *= d_factor
        oracle = truth(problem, drawn)
        bound = subject.bounds(problem, oracle, drawn)
        for name, form in forms.items():
            outcome = form.run(problem, upstream=drawn)
            yield f"{label}, {name}", compare(outcome, oracle.outcome, bound, ("loss", *GRADIENT))


def _draw_bars(random: np.random.Generator, problem: Problem) -> FloatArray:
    """Bars of three orders of magnitude, some of them 0, of a mean, so that narrow dtypes can hold the gradients."""
    sizes = [len(x) for x in (problem.row_weight, problem.column_weight) if x is not None]
    shape, size = (3, sum(sizes)), np.repeat(sizes, sizes)
    kept = random.random(shape) < 0.8
    return float64(random.standard_normal(shape) * 10.0 ** random.uniform(-3, 0, shape) * kept / size)


def _expected(
    problem: Problem, subject: Subject, spread: Spread | None = None
) -> tuple[FloatArray, Callable[[Outcome], Worst]]:
    """The bars of a loss, and a function that compares its outcome with the oracle's."""
    drawn = _draw_bars(np.random.default_rng(7), problem)
    n, p, _ = truth(problem, drawn).outcome.loss
    # a statistic of -inf must not enter the loss
    drawn *= np.isfinite([n, p, p])
    oracle = truth(problem, drawn)
    bound = bounds(problem, oracle, subject.accuracy, subject.dtype, drawn, subject.options, spread)
    expected, limit = (x if problem.excluded is None else folded(x) for x in (oracle.outcome, bound))
    return drawn, lambda x: compare(x, expected, limit, ("loss", *(GRADIENT[:3] if x.rows is not None else ())))


def _public_outcome(problem: Problem, bars: FloatArray, subject: Subject, **settings: Any) -> Outcome:
    """The statistics by the public function, and with autograd the gradients of the loss with these bars."""
    arrays, settings = subject.backend.arrays, {"backend": subject.name, **subject.settings, **settings}
    put = putter(arrays, subject.device)
    itself = problem.excluded is not None
    rows, *columns = leaves = [put(x, subject.dtype) for x in (problem.rows, *problem.columns[itself:])]
    scale = put(problem.scale, state_dtype(subject.dtype))
    by_autograd = settings.pop("by_autograd", True) and arrays.name == "torch"
    if by_autograd:
        for x in (*leaves, scale):
            x.requires_grad_()
    names = ("positives", "row_ids") if itself else ("positives", "row_ids", "column_ids")
    keywords = {name: put(x, "int64") for name in names if (x := getattr(problem, name)) is not None}
    limits = {"row_limits": problem.row_limits, "column_limits": problem.column_limits}
    keywords |= {name: put(x, state_dtype(subject.dtype)) for name, x in limits.items() if x is not None}
    if problem.row_guide is not None:
        keywords["guide"] = put(problem.row_guide, subject.dtype), put(problem.column_guide, subject.dtype)
    if problem.match == "target":
        keywords["ids_are"] = "positives"
    keywords |= {} if itself else {"negatives": columns[1:]}
    sides: Any = losses.statistics(rows, None if itself else columns[0], scale, **keywords, **settings)
    sides = sides[: 2 - itself]
    value = np.concatenate([[arrays.to_numpy(x) for x in side] for side in sides], axis=1)
    gradients: Any = (None, (), None)
    if by_autograd:
        import torch

        weights = put(bars, "float64")
        # a bar of 0 times -inf would be NaN
        total = torch.where(weights == 0, 0.0, torch.cat([torch.stack(tuple(side)) for side in sides], 1)) * weights
        total.sum().backward()
        d_rows, *d_columns, d_scale = (float64(arrays.to_numpy(x.grad)) for x in (*leaves, scale))
        gradients = d_rows, tuple(d_columns), d_scale
    return Outcome(float64(value), *gradients)


def public_statistics(trial: Trial) -> Comparisons:
    """The public statistics, and gradients of a loss of them, agree with the oracle's, also in blocks."""
    trial.only_small()
    subject, problem = trial.subject, trial.problem
    if problem.kind == "sigmoid" or problem.bias is not None or not problem.rows.size:
        raise SkipError("the public function has rows, and no bias")
    trial.only_finite()
    problem = stated(problem)
    drawn, worst_of = _expected(problem, subject)
    calls: list[dict[str, Any]] = [{}, *[{"tile": 9}, {"block": 9}] * (trial.case in _IN_BLOCKS)]
    for kwargs in calls[: 3 if subject.backend.arrays.name == "torch" else 2]:
        yield ", ".join(f"{name} of 9" for name in kwargs), worst_of(_public_outcome(problem, drawn, subject, **kwargs))


def over_ranks(subject: Subject, case: str) -> Comparisons:
    """Each rank has the statistics of its own rows and columns, and what the ranks make of them adds up to one loss."""
    world = subject.ranks
    weights = [(2 * r + 3) % 5 for r in range(world.size)]
    by_autograd = not (subject.device == "cuda" and world.can_be_late and world.size > 1)
    for name in _OF_RANKS:
        problem, backend = stated(cases.build(name, subject.dtype)), subject.backend
        is_supported = backend.limits if problem.row_guide is None else subject.dtype in backend.guides
        if problem.row_limits is not None and not is_supported:
            continue
        m, n = len(problem.rows), len(problem.columns[0])
        for k, exchange in enumerate(SCHEDULES):
            rows = shares(m, weights)
            columns = rows if m == n else shares(n, weights[::-1])
            kwargs = {"exchange": exchange, "parameter_reduction": ("mean", "sum")[k % 2], "by_autograd": by_autograd}
            yield f"{name}, {exchange}", _of_ranks(problem, subject, rows, columns, kwargs)


def _of_ranks(
    problem: Problem, subject: Subject, rows: Sequence[int], columns: Sequence[int], kwargs: dict[str, Any]
) -> Worst:
    m, cut = len(problem.rows), Cut(problem, Shards(tuple(rows), tuple((size,) for size in columns)))
    drawn, worst_of = _expected(problem, subject, cut.spread(kwargs["exchange"], subject.ranks.hosts))

    def program(communicator: Communicator) -> Outcome:
        rank = communicator.rank
        places = np.arange(m)[cut.rows(rank)], m + np.arange(sum(columns))[cut.columns(rank, 0)]
        own = np.concatenate(places[: 1 + (problem.column_weight is not None)])
        return _public_outcome(cut.part(rank), drawn[:, own], subject, group=communicator, **kwargs)

    parts = subject.ranks.run(program)

    def judge() -> Worst:
        values = [np.split(x.loss, [size], axis=1) for x, size in zip(parts, rows, strict=True)]
        value = np.concatenate([x for side in zip(*values, strict=True) for x in side], axis=1)
        # each rank has the gradient of its own part
        scale: Any = None if parts[0].scale is None else float64(sum(part.scale for part in parts))
        return worst_of(replace(cut.joined(parts, 1.0), loss=value, scale=scale))

    return judged(subject.ranks, judge)
