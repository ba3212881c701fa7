"""N, P and D, and the gradients of losses of them that nobody has: of every case, by the public ``statistics`` too.

A loss of the statistics is known to a backend by its bars alone (``contract.Bars``): what is right for any bars is
right for any such loss.
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
"""Columns of their own, and rows against themselves: they are cut in their own ways."""

_OF_RANKS = ("ragged", "square-ragged", "ids-drop", "ids-target@far", "labels", "limits", "guide")


def stated(problem: Problem) -> Problem:
    """The statistics of a problem's rows and columns, all of which count; of rows against themselves, of the rows.

    A positive that is no column is none, and other rows leave no column out.
    """
    m, n, at = len(problem.rows), sum(map(len, problem.columns)), problem.positives
    itself = problem.excluded is not None and at is None and is_symmetric(problem)
    positives = None if at is None else np.where((at >= 0) & (at < n), at, -1)
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
    for label, by_spread in (("drawn", 1.0), ("without D", 0.0)):
        drawn = _drawn(random, problem)
        drawn[2] *= by_spread
        oracle = truth(problem, drawn)
        bound = subject.bounds(problem, oracle, drawn)
        for form, each in forms.items():
            got = each.run(problem, upstream=drawn)
            yield f"{label}, {form}", compare(got, oracle.outcome, bound, ("loss", *GRADIENT))


def _drawn(random: np.random.Generator, problem: Problem) -> FloatArray:
    """Bars of three orders of magnitude, some of them 0: of a mean, whose gradients no dtype is too narrow for."""
    sizes = [len(x) for x in (problem.row_weight, problem.column_weight) if x is not None]
    shape, size = (3, sum(sizes)), np.repeat(sizes, sizes)
    kept = random.random(shape) < 0.8
    return float64(random.standard_normal(shape) * 10.0 ** random.uniform(-3, 0, shape) * kept / size)


def _expected(
    problem: Problem, subject: Subject, spread: Spread | None = None
) -> tuple[FloatArray, Callable[[Outcome], Worst]]:
    """The bars of a loss, and what compares its outcome with what is right."""
    drawn = _drawn(np.random.default_rng(7), problem)
    n, p, _ = truth(problem, drawn).outcome.loss
    # of what is -inf there is no loss
    drawn *= np.isfinite([n, p, p])
    exact = truth(problem, drawn)
    bound = bounds(problem, exact, subject.accuracy, subject.dtype, drawn, subject.options, spread)
    right, most = (x if problem.excluded is None else folded(x) for x in (exact.outcome, bound))
    return drawn, lambda got: compare(got, right, most, ("loss", *(GRADIENT[:3] if got.rows is not None else ())))


def _called(problem: Problem, bars: FloatArray, subject: Subject, **settings: Any) -> Outcome:
    """The statistics of a problem by the public function, and where there is autograd the gradients of their loss."""
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
    found: Any = losses.statistics(rows, None if itself else columns[0], scale, **keywords, **settings)
    found = found[: 2 - itself]
    value = np.concatenate([[arrays.to_numpy(x) for x in side] for side in found], axis=1)
    gradients: Any = (None, (), None)
    if by_autograd:
        import torch

        given = put(bars, "float64")
        # a bar of 0 times -inf would be NaN
        total = torch.where(given == 0, 0.0, torch.cat([torch.stack(tuple(side)) for side in found], 1)) * given
        total.sum().backward()
        of_rows, *of_columns, of_scale = (float64(arrays.to_numpy(x.grad)) for x in (*leaves, scale))
        gradients = of_rows, tuple(of_columns), of_scale
    return Outcome(float64(value), *gradients)


def public_statistics(trial: Trial) -> Comparisons:
    """The public statistics, and gradients of a loss of them, agree with the oracle's, also in blocks."""
    trial.only_small()
    subject, problem = trial.subject, trial.problem
    if problem.kind == "sigmoid" or problem.bias is not None or not problem.rows.size:
        raise SkipError("the public function has rows, and no bias")
    trial.only_finite()
    problem = stated(problem)
    drawn, compared = _expected(problem, subject)
    ways: list[dict[str, Any]] = [{}, *[{"tile": 9}, {"block": 9}] * (trial.case in _IN_BLOCKS)]
    for way in ways[: 3 if subject.backend.arrays.name == "torch" else 2]:
        yield ", ".join(f"{name} of 9" for name in way), compared(_called(problem, drawn, subject, **way))


def over_ranks(subject: Subject, case: str) -> Comparisons:
    """Each rank has the statistics of its own rows and columns, and what the ranks make of them adds up to one loss."""
    world = subject.ranks
    weights = [(2 * r + 3) % 5 for r in range(world.size)]
    by_autograd = not (subject.device == "cuda" and world.can_be_late and world.size > 1)
    for kind in _OF_RANKS:
        problem, backend = stated(cases.build(kind, subject.dtype)), subject.backend
        taken = backend.limits if problem.row_guide is None else subject.dtype in backend.guides
        if problem.row_limits is not None and not taken:
            continue
        m, n = len(problem.rows), len(problem.columns[0])
        for turn, exchange in enumerate(SCHEDULES):
            rows = shares(m, weights)
            over = rows if m == n else shares(n, weights[::-1])
            how = {"exchange": exchange, "parameter_reduction": ("mean", "sum")[turn % 2], "by_autograd": by_autograd}
            yield f"{kind}, {exchange}", _of_ranks(problem, subject, rows, over, how)


def _of_ranks(
    problem: Problem, subject: Subject, rows: Sequence[int], over: Sequence[int], how: dict[str, Any]
) -> Worst:
    m, cut = len(problem.rows), Cut(problem, Shards(tuple(rows), tuple((size,) for size in over)))
    drawn, compared = _expected(problem, subject, cut.spread(how["exchange"], subject.ranks.hosts))

    def program(communicator: Communicator) -> Outcome:
        rank = communicator.rank
        places = np.arange(m)[cut.rows(rank)], m + np.arange(sum(over))[cut.columns(rank, 0)]
        own = np.concatenate(places[: 1 + (problem.column_weight is not None)])
        return _called(cut.part(rank), drawn[:, own], subject, group=communicator, **how)

    parts = subject.ranks.run(program)

    def judge() -> Worst:
        each = [np.split(x.loss, [size], axis=1) for x, size in zip(parts, rows, strict=True)]
        value = np.concatenate([x for side in zip(*each, strict=True) for x in side], axis=1)
        # each rank's own
        scale: Any = None if parts[0].scale is None else float64(sum(part.scale for part in parts))
        return compared(replace(cut.joined(parts, 1.0), loss=value, scale=scale))

    return judged(subject.ranks, judge)
