"""Renumbers columns, and folds or scales outcomes."""

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
    """Column numbers after column ``columns[j]`` becomes column j; a number of no column stays as it is."""
    if pointers is None:
        return None
    place = np.argsort(columns)
    is_column = (pointers >= 0) & (pointers < len(place))
    result = pointers.copy()
    result[is_column] = place[pointers[is_column]]
    return result


def is_symmetric(problem: Problem) -> bool:
    """Whether a problem of one direction compares rows with themselves, with symmetric masks of pairs."""
    if problem.column_weight is not None or problem.kind == "sigmoid" or len(problem.columns) != 1:
        return False
    if problem.excluded is not None and not np.array_equal(problem.excluded, np.arange(len(problem.rows))):
        return False
    return np.array_equal(problem.rows, problem.columns[0]) and all(np.array_equal(x, x.T) for x in masks(problem))


def folded(outcome: Outcome) -> Outcome:
    """The outcome for features that are both rows and columns: their gradient is the sum of both gradients."""
    return replace(outcome, rows=outcome.rows + outcome.columns[0], columns=())


def scaled(outcome: Outcome, factor: float, names: Sequence[str]) -> Outcome:
    """The outcome with the named fields multiplied by a number."""

    def scale(x: Any) -> Any:
        return None if x is None else tuple(map(scale, x)) if isinstance(x, tuple) else factor * x

    return replace(outcome, **{name: scale(getattr(outcome, name)) for name in names})


def take(x: Any, where: Any) -> Any:
    """Elements of a vector; None if the vector is None."""
    return None if x is None else x[where]
