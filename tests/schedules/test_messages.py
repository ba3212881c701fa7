"""What ranks hold in a ring, and compute and send of rows against themselves: see test_timing for the rest."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from in_process_worlds import Counting, measured

from contrastile import compute
from contrastile.backends.arrays import ArrayLibrary
from contrastile.backends.contract import Options
from contrastile.backends.registry import load
from contrastile.comm.inprocess import InProcess, InProcessGroup
from contrastile.schedules import triangle
from contrastile.schedules.local import Wanted, Work
from contrastile.schedules.placement import Placement
from contrastile.verify import cases
from contrastile.verify.execution import materialise
from contrastile.verify.shards import Cut

NUMPY = load("numpy")
WANTED, RAGGED = Wanted(True, (True,), True), cases.build("ragged", "float64")


def placement(comm: InProcess, parts: Cut, exchange: str = "ring") -> Placement:
    """A rank's place."""
    return Placement(comm, exchange, "mean", parts.shards)  # type: ignore[arg-type]


@pytest.mark.parametrize("n", [4, 8])
def test_nothing_is_larger_than_a_shard(n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = Cut.of(RAGGED, [1] * n, [1] * n)
    largest = max(*parts.shards.rows, *parts.shards.widths)
    made: list[int] = []
    full = ArrayLibrary.full

    def counted(self: ArrayLibrary, shape: tuple[int, ...], *rest: Any) -> Any:
        made.append(shape[0] if shape else 0)
        return full(self, shape, *rest)

    def program(comm: InProcess) -> None:
        problem = materialise(parts.part(comm.rank, placement(comm, parts)), NUMPY, "float64")
        _, state = compute.problem_loss(problem, Work(NUMPY, Options()))
        compute.problem_gradients(problem, state, np.asarray(1.0), WANTED, Work(NUMPY, Options()))

    monkeypatch.setattr(ArrayLibrary, "full", counted)
    InProcessGroup[None](n).run(program)
    # one number of each rank is gathered to be summed: n of them
    assert max(made) <= max(largest, n)
    assert largest < sum(parts.shards.widths)


def computed(n: int, exchange: str) -> list[tuple[list[int], Any]]:
    """The areas of the blocks of each rank's forward and of its backward, and its messages."""
    parts = Cut.of_itself(cases.build("views", "float64"), [1] * n)

    def program(comm: InProcess) -> tuple[list[int], Any]:
        backend, areas = measured(NUMPY)
        counting = Counting(comm)
        problem = materialise(parts.part(comm.rank, placement(counting, parts, exchange)), NUMPY, "float64")  # type: ignore[arg-type]
        _, state = compute.problem_loss(problem, Work(backend, Options()))
        compute.problem_gradients(problem, state, np.asarray(1.0), Wanted(True, ()), Work(backend, Options()))
        return areas, counting.count

    return InProcessGroup[tuple[list[int], Any]](n).run(program)


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
def test_rows_against_themselves_send_few_messages(n: int) -> None:
    for exchange, met in (("ring", n // 2), ("gather", 1)):
        for _, count in computed(n, exchange):
            assert count == {
                # features, and what is found of their gradient; log-sum-exps, weights and targets with them
                "features": 2 * met,
                "features 2 2 1 1": met,
                # what is found of the statistics
                "2 2 2": met,
                # the loss and the scale's gradient
                "number": 2,
            }
