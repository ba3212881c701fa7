"""The public ``statistics``: N, P and D, and the gradients of a loss of them that nobody has, alone and over ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from contrastile import losses
from contrastile.backends.contract import Bars, state_dtype
from contrastile.comm.communicator import Communicator
from contrastile.oracle.arrays import float64
from contrastile.oracle.pairs import target_weights
from contrastile.schedules.placement import Shards
from contrastile.schedules.problem import Problem
from contrastile.verify.arithmetic import Spread
from contrastile.verify.bars import bound_of_bars, drawn_bars, truth_of_bars
from contrastile.verify.bounds import bounds
from contrastile.verify.comparison import GRADIENT, Comparisons, Worst, compare
from contrastile.verify.draws import pairs
from contrastile.verify.execution import putter
from contrastile.verify.rearrange import folded
from contrastile.verify.rounding import UNIT, round_to
from contrastile.verify.shards import Cut, shares
from contrastile.verify.trial import Property, Subject
from contrastile.verify.truth import Outcome, masks, truth
from contrastile.verify.worlds import judged

_M, _N, _WIDTH = 37, 53, 20
_FIELDS = (
    *(f"{side}_{name}" for side in ("row", "column") for name in ("negative_lse", "positive_lse", "positive_sum")),
)


def _problems(dtype: str) -> Iterator[tuple[str, Problem]]:
    """Problems of every kind of pairs, whose weights are 1: an outcome's statistics and bounds know no others."""
    draw = np.random.default_rng(23)
    both = [round_to(x, dtype) for x in pairs(draw, _N, _WIDTH)]
    rows, columns, scale = both[0][:_M], both[1], float64(12.5)
    ids, of_columns, where = draw.integers(0, 9, _M), draw.integers(0, 9, _N), draw.integers(0, _N, _M)
    blocks = (columns[:_M], columns[_M:])
    kinds: dict[str, dict[str, Any]] = {
        "blocks": {"columns": blocks, "positives": np.arange(_M)},
        "positives": {"positives": np.where(draw.random(_M) < 0.2, -1, where)},
        "as many columns": {"columns": (columns[:_M],), "positives": where % _M},
        "left out": {"positives": where, "row_ids": ids, "column_ids": of_columns},
        "ids": {"row_ids": ids, "column_ids": of_columns, "match": "target"},
        "labels": {"columns": (rows,), "row_ids": ids, "column_ids": ids, "match": "target", "excluded": np.arange(_M)},
    }
    for kind, given in kinds.items():
        given = {"columns": (columns,), **given}
        made = Problem(rows=rows, scale=scale, row_weight=np.ones(_M), row_target=np.ones(_M), **given)
        _, positive = masks(made)
        target, over = (target_weights(x).max(axis=1, initial=0.0) for x in (positive, positive.T))
        two_sided = {} if made.excluded is not None else {"column_weight": np.ones(len(over)), "column_target": over}
        yield kind, replace(made, row_target=target, **two_sided)


class _Expected:
    """What is right of a problem, within which bounds, and the bars of the loss."""

    def __init__(self, problem: Problem, subject: Subject, spread: Spread | None = None) -> None:
        exact, how = truth(problem), (subject.accuracy, subject.dtype)
        sides = [side for side in (exact.row, exact.column) if side is not None]
        random = np.random.default_rng(7)
        bars = [drawn_bars(random, side, even=False) for side in sides]
        # of what is -inf there is no loss
        self.bars = [
            Bars(
                *(
                    np.where(np.isfinite(x), bar, 0.0)
                    for x, bar in zip((s.negative_lse, s.positive_lse, s.positive_lse), each, strict=True)
                )
            )
            for s, each in zip(sides, bars, strict=True)
        ]
        known = truth_of_bars(exact, [*self.bars, None][:2])
        allowed = bounds(problem, exact, *how, spread=spread)
        gradients = bound_of_bars(problem, known, self.bars, *how, subject.options, spread)
        self.itself = problem.excluded is not None
        found = (known.outcome, gradients)
        outcome, bound = map(folded, found) if self.itself else found
        values: dict[str, Any] = {}
        errors: dict[str, Any] = {}
        for name, side in zip(("row", "column"), sides, strict=False):
            n, p, s = (getattr(allowed, f"{name}_{x}") for x in ("negative_lse", "positive_lse", "positive_sum"))
            mean, there = side.target * side.positive_sum, np.isfinite(side.positive_lse)
            size = UNIT["float64"] * 4 * (np.abs(mean) + np.where(there, np.abs(side.positive_lse), 0.0))
            spread_of = np.where(there, side.positive_lse - mean, 0.0)
            errors |= dict(zip(_FIELDS[3 * (name == "column") :], (n, p, p + side.target * s + size), strict=False))
            values |= dict(
                zip(_FIELDS[3 * (name == "column") :], (side.negative_lse, side.positive_lse, spread_of), strict=False)
            )
        # D stands where an outcome has the sum of the positives
        self.outcome, self.bound = replace(outcome, **values), replace(bound, **errors)

    def compare(self, got: Outcome) -> Worst:
        fields = [x for x in _FIELDS if getattr(self.outcome, x) is not None and getattr(got, x) is not None]
        return compare(got, self.outcome, self.bound, [*fields, *(GRADIENT[:3] if got.rows is not None else ())])


def _called(problem: Problem, bars: Sequence[Bars], subject: Subject, **settings: Any) -> Outcome:
    """The statistics of a problem by the public function, and where there is autograd the gradients of their loss."""
    arrays = subject.backend.arrays
    put = putter(arrays, subject.device)
    rows, *columns = leaves = [put(x, subject.dtype) for x in (problem.rows, *problem.columns)]
    scale, itself = put(problem.scale, state_dtype(subject.dtype)), problem.excluded is not None
    by_autograd = settings.pop("by_autograd", True) and arrays.name == "torch"
    if by_autograd:
        for x in (*leaves, scale):
            x.requires_grad_()
    names = ("positives", "row_ids") if itself else ("positives", "row_ids", "column_ids")
    keywords = {name: put(x, "int64") for name in names if (x := getattr(problem, name)) is not None}
    if problem.match == "target":
        keywords["ids_are"] = "positives"
    if itself:
        found = losses.statistics(rows, None, scale, **keywords, **settings)
    else:
        found = losses.statistics(rows, columns[0], scale, negatives=columns[1:], **keywords, **settings)
    values = dict(zip(_FIELDS, (x for side in found for x in side), strict=True))
    gradients: Any = (None, (), None)
    if by_autograd:
        import torch

        given = [
            (x, put(bar, "float64"))
            for s, each in zip(found, bars, strict=False)
            for x, bar in zip(s, each, strict=True)
        ]
        # a bar of 0 times -inf would be NaN
        total: Any = sum((torch.where(bar == 0, torch.zeros_like(x), x) * bar).sum() for x, bar in given)
        total.backward()
        of_columns = () if itself else tuple(float64(arrays.to_numpy(x.grad)) for x in columns)
        gradients = float64(arrays.to_numpy(rows.grad)), of_columns, float64(arrays.to_numpy(scale.grad))
    taken: dict[str, Any] = {
        name: float64(arrays.to_numpy(x)) for name, x in values.items() if not (itself and name[0] == "c")
    }
    return Outcome(np.zeros(()), *gradients, **taken)


def alone(subject: Subject, case: str) -> Comparisons:
    """The public statistics, and gradients of a loss of them, agree with the oracle's, also in blocks."""
    ways: dict[str, dict[str, Any]] = {"": {}, ", a tile of 9": {"tile": 9}}
    if subject.backend.arrays.name == "torch":
        ways[", blocks of 9"] = {"block": 9}
    for kind, problem in _problems(subject.dtype):
        expected = _Expected(problem, subject)
        for way, settings in ways.items():
            if way and kind not in ("ids", "labels"):
                # columns of their own and rows against themselves are cut in their own ways
                continue
            given = {"backend": subject.name, **subject.settings, **settings}
            yield kind + way, expected.compare(_called(problem, expected.bars, subject, **given))


def over_ranks(subject: Subject, case: str) -> Comparisons:
    """Each rank has the statistics of its own rows and columns, and what the ranks make of them adds up to one loss."""
    world = subject.ranks
    weights = [(2 * r + 3) % 5 for r in range(world.size)]
    by_autograd = not (subject.device == "cuda" and world.can_be_late and world.size > 1)
    for kind, problem in _problems(subject.dtype):
        if kind == "blocks":
            continue
        for turn, exchange in enumerate(("ring", "gather", "replicate")):
            (columns,) = problem.columns
            rows = shares(_M, weights)
            over = rows if len(columns) == _M else shares(len(columns), weights[::-1])
            how = {"exchange": exchange, "parameter_reduction": ("mean", "sum")[turn % 2], "by_autograd": by_autograd}
            yield f"{kind}, {exchange}", _of_ranks(problem, subject, rows, over, how)


def _of_ranks(
    problem: Problem, subject: Subject, rows: Sequence[int], over: Sequence[int], how: dict[str, Any]
) -> Worst:
    cut = Cut(problem, Shards(tuple(rows), tuple((size,) for size in over)))
    expected = _Expected(problem, subject, Spread(tuple(rows), tuple(over), halved=True))

    def program(communicator: Communicator) -> Outcome:
        rank = communicator.rank
        places = cut.rows(rank), cut.columns(rank, 0)
        bars = [Bars(*(x[where] for x in each)) for each, where in zip(expected.bars, places, strict=False)]
        return _called(
            cut.part(rank), bars, subject, backend=subject.name, group=communicator, **subject.settings, **how
        )

    parts = subject.ranks.run(program)

    def judge() -> Worst:
        first = parts[0]
        values: dict[str, Any] = {
            name: np.concatenate([getattr(x, name) for x in parts])
            for name in _FIELDS
            if getattr(first, name) is not None
        }
        if first.rows is None:
            return expected.compare(replace(first, **values))
        joined = tuple(np.concatenate(x) for x in zip(*(part.columns for part in parts), strict=True))
        gradients = np.concatenate([part.rows for part in parts]), joined, float64(sum(part.scale for part in parts))
        return expected.compare(Outcome(first.loss, *gradients, **values))

    return judged(subject.ranks, judge)


ALONE = Property("public-statistics", alone, "public-losses")
OVER_RANKS = Property("statistics", over_ranks, "front-door")
