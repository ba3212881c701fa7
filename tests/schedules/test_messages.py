"""The memory of ranks in a ring, and the products and messages of rows against themselves. See also test_timing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from in_process_worlds import Recorder, with_areas

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


def placement(comm: InProcess, cut: Cut, exchange: str = "ring") -> Placement:
    """The placement of a rank."""
    return Placement(comm, exchange, "mean", cut.shards)  # type: ignore[arg-type]


@pytest.mark.parametrize("n", [4, 8])
def test_no_array_of_a_rank_is_larger_than_a_shard(n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    cut = Cut.of(RAGGED, [1] * n, [1] * n)
    largest = max(*cut.shards.rows, *cut.shards.widths)
    lengths: list[int] = []
    full = ArrayLibrary.full

    def recording_full(self: ArrayLibrary, shape: tuple[int, ...], *arguments: Any) -> Any:
        lengths.append(shape[0] if shape else 0)
        return full(self, shape, *arguments)

    def program(comm: InProcess) -> None:
        problem = materialise(cut.part(comm.rank, placement(comm, cut)), NUMPY, "float64")
        _, state = compute.problem_loss(problem, Work(NUMPY, Options()))
        compute.problem_gradients(problem, state, np.asarray(1.0), WANTED, Work(NUMPY, Options()))

    monkeypatch.setattr(ArrayLibrary, "full", recording_full)
    InProcessGroup[None](n).run(program)
    # a sum over ranks gathers one number of each rank: n in all
    assert max(lengths) <= max(largest, n)
    assert largest < sum(cut.shards.widths)


def areas_and_messages(n: int, exchange: str) -> list[tuple[list[int], Any]]:
    """For each rank the areas of its blocks, forward and backward, and the number of its messages by kind."""
    cut = Cut.of_itself(cases.build("views", "float64"), [1] * n)

    def program(comm: InProcess) -> tuple[list[int], Any]:
        backend, areas = with_areas(NUMPY)
        communicator = Recorder(comm)
        problem = materialise(cut.part(comm.rank, placement(communicator, cut, exchange)), NUMPY, "float64")  # type: ignore[arg-type]
        _, state = compute.problem_loss(problem, Work(backend, Options()))
        compute.problem_gradients(problem, state, np.asarray(1.0), Wanted(True, ()), Work(backend, Options()))
        return areas, communicator.count

    return InProcessGroup[tuple[list[int], Any]](n).run(program)


@pytest.mark.parametrize("exchange", ["ring", "gather"])
@pytest.mark.parametrize("n", [1, 2, 3, 4, 5])
def test_half_of_the_logits_are_computed_in_equal_parts(n: int, exchange: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triangle, "CPU_ROWS", block := 5)
    size = 150
    areas_of_ranks = [areas for areas, _ in areas_and_messages(n, exchange)]
    # shards differ by a row, and halves of opposite shards begin at a multiple of several rows
    slack = size * size / n / n / 16 + 2 * size
    for forward, backward in areas_of_ranks:
        assert forward == backward <= (size * size / 2 + block * size / 2) / n + slack
    assert sum(forward for forward, _ in areas_of_ranks) <= size * size / 2 + block * size / 2


@pytest.mark.parametrize("n", [2, 3, 5])
def test_rows_against_themselves_send_few_messages(n: int) -> None:
    for exchange, meetings in (("ring", n // 2), ("gather", 1)):
        for _, counts in areas_and_messages(n, exchange):
            assert counts == {
                # features, and their partial gradients; log-sum-exps, weights and targets go with features
                "features": 2 * meetings,
                "features 2 2 1 1": meetings,
                # partial statistics
                "2 2 2": meetings,
                # the loss and the scale's gradient
                "number": 2,
            }
