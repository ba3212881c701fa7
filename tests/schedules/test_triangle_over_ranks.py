"""Rows against themselves over ranks: each pair once, by one rank, with a few messages for each rank it meets."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from in_process_worlds import Counting, group, placement

from contrastile.backends.contract import Block, Options, Statistics, Weights
from contrastile.backends.registry import load
from contrastile.comm.inprocess import InProcess
from contrastile.schedules import schedule, triangle
from contrastile.schedules.local import Wanted
from contrastile.verify import cases
from contrastile.verify.execution import materialise
from contrastile.verify.shards import Cut

NUMPY = load("numpy")


def computed(n: int, exchange: str, case: str = "views") -> list[tuple[list[int], Any]]:
    """The areas of the blocks of each rank's forward and of its backward, and its messages."""
    parts = Cut.of_itself(cases.build(case, "float64").problem, [1] * n)

    def program(comm: InProcess) -> tuple[list[int], Any]:
        areas = [0, 0]

        def lse(block: Block, columns: bool, options: Options) -> Statistics:
            areas[0] += block.rows.shape[0] * block.columns.shape[0]
            return NUMPY.lse(block, columns, options)

        def gradients(block: Block, weights: Weights, *rest: Any) -> None:
            areas[1] += block.rows.shape[0] * block.columns.shape[0]
            NUMPY.gradients(block, weights, *rest)

        backend, counting = replace(NUMPY, lse=lse, gradients=gradients), Counting(comm)
        problem = materialise(parts.part(comm.rank, placement(counting, parts, exchange)), NUMPY, "float64")  # type: ignore[arg-type]
        _, state = schedule.loss(problem, backend, Options())
        schedule.gradients(problem, state, np.asarray(1.0), Wanted(True, ()), backend, Options())
        return areas, counting.count

    found: list[Any] = group(n).run(program)
    return found


@pytest.mark.parametrize("exchange", ["ring", "gather"])
@pytest.mark.parametrize("n", [1, 2, 3, 4, 5])
def test_half_of_the_logits_are_computed_in_equal_parts(n: int, exchange: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triangle, "CPU_ROWS", most := 5)
    size = 150
    each = [areas for areas, _ in computed(n, exchange)]
    # a row more or less of one rank, and halves of opposite ones that begin at a multiple of some rows
    slack = size * size / n / n / 16 + 2 * size
    for forward, backward in each:
        assert forward == backward <= (size * size / 2 + most * size / 2) / n + slack
    assert sum(forward for forward, _ in each) <= size * size / 2 + most * size / 2


@pytest.mark.parametrize("n", [2, 3, 5])
def test_the_messages_are_few(n: int) -> None:
    met = n // 2
    for _, count in computed(n, "ring"):
        assert count == {
            # features; and log-sum-exps, weights and targets
            "shift 2": met,
            "shift 2 2 2 1 1": met,
            # statistics and gradient sums go home
            "exchange 2 2 2": met,
            "exchange 2": met,
            # the loss and the scale's gradient
            "exchange number": 2,
        }
    for _, count in computed(n, "gather"):
        assert count == {
            "exchange 2": 2,
            "exchange 2 2 1 1": 1,
            "exchange 2 2 2": 1,
            "exchange number": 2,
        }


def test_what_asks_for_nothing_sends_nothing() -> None:
    parts = Cut.of_itself(cases.build("labels", "float64").problem, [1, 2, 1])

    def program(comm: InProcess) -> Any:
        problem = materialise(parts.part(comm.rank, placement(comm, parts)), NUMPY, "float64")
        _, state = schedule.loss(problem, NUMPY, Options())
        wanted = (
            Wanted(*each) for each in ((True, (), True), (True, (), False), (False, (), True), (False, (), False))
        )
        return [schedule.gradients(problem, state, np.asarray(2.0), each, NUMPY, Options()) for each in wanted]

    for both, features, number, nothing in group(3).run(program):
        assert np.array_equal(both.rows, features.rows)
        assert both.scale == number.scale
        assert (features.scale, number.rows, nothing.rows, nothing.scale) == (None, None, None, None)
