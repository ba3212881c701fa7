"""The whole of a small softmax loss of pairs (i, i): within the bounds, or left to the primitives."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch_blocks import backend

from contrastile.backends.arrays import library_of
from contrastile.backends.contract import Options
from contrastile.backends.torch.tiles import CPU_TILE
from contrastile.schedules import schedule
from contrastile.schedules.local import Wanted
from contrastile.schedules.problem import EqualPairs, Problem

PRIMITIVES = replace(backend, diagonal=None)
WANTED = Wanted(rows=True, columns=(True,))
OPTIONS = Options()


def problem_of(m: int, scale: float = 10.0, *, two_sided: bool = True, dtype: str = "float32", **made: Any) -> Problem:
    """Normalised features; ``towards`` moves each column towards its row, and ``seed`` draws others."""
    draw = np.random.default_rng(made.get("seed", 0))
    rows, columns = (draw.standard_normal((m, 24)) for _ in range(2))
    rows, columns = (x / np.linalg.norm(x, axis=1, keepdims=True) for x in (rows, columns))
    columns = columns + made.get("towards", 0.0) * rows
    rows, columns = (torch.from_numpy(x).to(getattr(torch, dtype)) for x in (rows, columns))
    state = "float64" if dtype == "float64" else "float32"
    number = torch.tensor(scale, dtype=getattr(torch, state))
    equal = EqualPairs.of(library_of(rows), (0.5 if two_sided else 1.0) / m, 0, m, state, rows)
    both = {"column_weight": equal.weight, "column_target": equal.target} if two_sided else {}
    return Problem(rows, (columns,), number, equal.weight, equal.target, positives=equal.positives, equal=equal, **both)


def results(problem: Problem, by: Any, upstream: float | None = None, options: Options = OPTIONS) -> list[Any]:
    """The loss, its state, and the gradients of rows, columns and scale."""
    value, state = schedule.loss(problem, by, options, WANTED)
    factor = None if upstream is None else torch.tensor(upstream, dtype=problem.scale.dtype)
    found = schedule.gradients(problem, state, factor, WANTED, by, options)
    return [value, state, found.rows, found.columns[0], found.scale]


@pytest.mark.parametrize("what", ["nan", "infinite", "zero scale", "nan scale", "cold", "hot", "certain"])
def test_numbers_out_of_its_limits_are_left_to_the_primitives(what: str) -> None:
    scale = {"zero scale": 0.0, "nan scale": float("nan"), "cold": -3e3, "hot": 3e3, "certain": 90.0}.get(what, 10.0)
    given = problem_of(37, scale, towards=1.0 if what in ("hot", "cold", "certain") else 0.0)
    if what in ("nan", "infinite"):
        given.rows[3, 5] = float(what[:3])
    value, state, *found = results(given, backend)
    assert len(state) > schedule.DIAGONAL
    expected = results(given, PRIMITIVES)
    for a, b in zip([value, *found], [expected[0], *expected[2:]], strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("upstream", [0.0, float("inf"), float("nan"), 1e-38])
def test_an_upstream_gradient_out_of_its_limits_is_left_to_the_primitives(upstream: float) -> None:
    given = problem_of(37)
    _, state, *found = results(given, backend, upstream)
    assert len(state) == schedule.DIAGONAL
    for a, b in zip(found, results(given, PRIMITIVES, upstream)[2:], strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


def test_a_second_pass_finds_the_same_and_only_what_is_wanted() -> None:
    given = problem_of(37)
    _, state = schedule.loss(given, backend, OPTIONS, WANTED)
    first, again = (schedule.gradients(given, state, None, WANTED, backend, OPTIONS) for _ in range(2))
    for name in ("rows", "scale"):
        assert torch.equal(getattr(first, name), getattr(again, name))
        alone = Wanted(rows=name == "rows", columns=(False,), scale=name == "scale")
        found = schedule.gradients(given, state, None, alone, backend, OPTIONS)
        assert torch.equal(getattr(found, name), getattr(first, name))
        assert sum(x is not None for x in (found.rows, found.scale, *found.columns)) == 1
    columns = schedule.gradients(given, state, None, Wanted(False, (True,), scale=False), backend, OPTIONS).columns
    assert torch.equal(columns[0], first.columns[0])


@pytest.mark.parametrize(
    "change",
    ["weights", "targets", "positives", "ids", "excluded", "bias", "several blocks", "start", "tile", "keep", "large"],
)
def test_another_problem_is_none_of_its(change: str) -> None:
    given, options = problem_of(CPU_TILE[0] + 1 if change == "large" else 6), OPTIONS
    assert given.equal is not None
    changed: dict[str, Any] = {
        "weights": {"row_weight": given.row_weight * 2},
        "targets": {"column_target": given.column_target * 0},
        "positives": {"positives": given.positives.flip(0)},
        "ids": {"row_ids": given.positives, "column_ids": given.positives},
        "excluded": {"excluded": given.positives - 1},
        "bias": {"bias": torch.tensor(1.0)},
        "several blocks": {"columns": given.columns[0].split(3)},
        "start": {"equal": replace(given.equal, start=1)},
    }.get(change, {})
    if change in ("tile", "keep"):
        options = Options(tile=(8, 8)) if change == "tile" else Options(keep=0)
    _, state = schedule.loss(replace(given, **changed), backend, options, None)
    assert len(state) > schedule.DIAGONAL
