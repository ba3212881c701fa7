"""Columns renumbered, and outcomes folded or multiplied."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from contrastile.oracle.arrays import IntArray
from contrastile.schedules.problem import Problem
from contrastile.verify.truth import Outcome, masks

ROW_VECTORS = ("row_weight", "row_target", "row_ids", "row_limits", "row_guide")
COLUMN_VECTORS = ("column_weight", "column_target", "column_ids", "column_limits", "column_guide")
POINTERS = ("positives", "excluded")


def sizes(problem: Problem) -> list[int]:
    return [int(x.shape[0]) for x in problem.columns]


def redirected(pointers: Any, columns: IntArray) -> Any:
    """Column numbers, where column ``columns[j]`` is now column j; what points at no column still does."""
    if pointers is None:
        return None
    place = np.argsort(columns)
    inside = (pointers >= 0) & (pointers < len(place))
    moved = pointers.copy()
    moved[inside] = place[pointers[inside]]
    return moved


def is_symmetric(problem: Problem) -> bool:
    """Whether a problem of one direction compares rows with themselves, by the same pairs either way round."""
    if problem.column_weight is not None or problem.kind == "sigmoid" or len(problem.columns) != 1:
        return False
    if problem.excluded is not None and not np.array_equal(problem.excluded, np.arange(len(problem.rows))):
        return False
    return np.array_equal(problem.rows, problem.columns[0]) and all(np.array_equal(x, x.T) for x in masks(problem))


def folded(outcome: Outcome) -> Outcome:
    """The same of features that are rows and columns at once: their gradient is the sum of both."""
    return replace(outcome, rows=outcome.rows + outcome.columns[0], columns=())


def scaled(outcome: Outcome, by: float, names: Sequence[str]) -> Outcome:
    """The outcome with the named fields multiplied by a number."""

    def times(x: Any) -> Any:
        return None if x is None else tuple(map(times, x)) if isinstance(x, tuple) else by * x

    return replace(outcome, **{name: times(getattr(outcome, name)) for name in names})


def take(x: Any, where: Any) -> Any:
    """Some elements of a vector, if there is one."""
    return None if x is None else x[where]
