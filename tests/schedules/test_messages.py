"""What ranks send and compute in a ring, a gather and of rows against themselves: how much, and in which order."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from in_process_worlds import Counting, measured

from contrastile import compute
from contrastile.backends.arrays import ArrayLibrary
from contrastile.backends.contract import Options
from contrastile.backends.registry import load
from contrastile.comm.inprocess import InProcess, InProcessGroup
from contrastile.schedules import gather, ring, triangle
from contrastile.schedules.local import Wanted, Work
from contrastile.schedules.placement import Placement
from contrastile.verify import cases
from contrastile.verify.execution import materialise
from contrastile.verify.shards import Cut
from contrastile.verify.wrapped import around

NUMPY = load("numpy")
WANTED, RAGGED = Wanted(True, (True,), True), cases.build("ragged", "float64")


def placement(comm: InProcess, parts: Cut, exchange: str = "ring") -> Placement:
    """A rank's place."""
    return Placement(comm, exchange, "mean", parts.shards)  # type: ignore[arg-type]


def recorded(n: int) -> tuple[list[list[str]], list[list[str]]]:
    """The events of forward and of backward around the ring on each rank."""
    parts = Cut.of(RAGGED, range(1, n + 1), range(n, 0, -1))

    def program(comm: InProcess) -> tuple[list[str], ...]:
        counting = Counting(comm)
        log = counting.log
        backend = around(NUMPY, lambda primitive, *call: log.append("compute") or primitive(*call))
        where = placement(counting, parts)  # type: ignore[arg-type]
        problem = materialise(parts.part(comm.rank, where), NUMPY, "float32")
        saved = ring.forward(problem, Work(backend, Options()))
        begins = len(log)
        ring.backward(problem, saved, np.asarray(1.0), WANTED, Work(backend, Options()))
        # of the ring alone
        both = log[:begins], log[begins:]
        return tuple([event for event in events if "number" not in event] for events in both)

    found = InProcessGroup[Any](n).run(program)
    return [a for a, _ in found], [b for _, b in found]


def test_the_next_shard_is_posted_before_the_block_is_computed_and_awaited_after() -> None:
    for events in recorded(4)[0]:
        posts = [i for i, event in enumerate(events) if event.startswith("post") and event.endswith("features")]
        computed = [i for i, event in enumerate(events) if event == "compute"]
        here = [i for i, event in enumerate(events) if event.startswith("have") and event.endswith("features")]
        assert len(posts) == len(here) == 3
        assert len(computed) == 4
        for step in range(3):
            assert posts[step] < computed[step] < here[step] < computed[step + 1]


def test_half_of_the_own_block_hides_the_last_message_home() -> None:
    for events in recorded(4)[1]:
        assert [event for event in events if event == "compute"] == ["compute"] * 5
        assert events[0].startswith("post")
        assert events[-2] == "compute"
        assert events[-3].startswith("post")
        assert events[-1] == events[-3].replace("post", "have")


@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_the_hops_are_as_few_as_they_can_be(n: int) -> None:
    forward, backward = recorded(n)
    hops = n if n > 1 else 0
    for events in forward:
        # K takes n - 1 hops, the two column vectors together come home on an n-th
        assert sum(event.startswith("post") and event.endswith("features") for event in events) == n - 1
        assert sum(event.startswith("post") and event.endswith("2") for event in events) == hops
    for events in backward:
        assert sum(event.startswith("post") for event in events) == n - 1 + hops


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
        saved = ring.forward(problem, Work(NUMPY, Options()))
        ring.backward(problem, saved, np.asarray(1.0), WANTED, Work(NUMPY, Options()))

    monkeypatch.setattr(ArrayLibrary, "full", counted)
    InProcessGroup[None](n).run(program)
    # one number of each rank is gathered to be summed: n of them
    assert max(made) <= max(largest, n)
    assert largest < sum(parts.shards.widths)


@pytest.mark.parametrize("n", [2, 3, 5])
def test_a_gather_sends_few_messages(n: int) -> None:
    parts = Cut.of(RAGGED, range(2, n + 2), range(n + 1, 1, -1))

    def program(comm: InProcess) -> Counter[str]:
        counting = Counting(comm)
        where = placement(counting, parts, "gather")  # type: ignore[arg-type]
        problem = materialise(parts.part(comm.rank, where), NUMPY, "float64")
        saved = gather.forward(problem, Work(NUMPY, Options()))
        gather.backward(problem, saved, np.asarray(-0.7), WANTED, Work(NUMPY, Options()))
        return counting.count

    expected = {
        # the columns, once
        "features": 1,
        # the loss, what each rank's rows give every column, and the weights and targets of its own
        "number 2 2 2 1 1": 1,
        # the columns' sums, and the scale's gradient
        "features number": 1,
    }
    assert InProcessGroup[Counter[str]](n).run(program) == [expected] * n


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
