"""The in-process communicator: what arrives, when, in which order, and what happens when a rank does not answer."""

from __future__ import annotations

import time

import numpy as np
import pytest

from contrastile.comm.communicator import ExchangeError
from contrastile.comm.inprocess import InProcess, InProcessGroup

WORLDS = [1, 2, 3, 5, 8]
LATE = pytest.mark.parametrize("late", [False, True], ids=["eager", "late"])


def uneven(n: int) -> list[int]:
    """Sizes that differ, one of them 0 where there are several."""
    return [(3 * rank + 2) % 5 for rank in range(n)]


@LATE
@pytest.mark.parametrize("n", WORLDS)
def test_shift_goes_to_the_next_rank(n: int, late: bool) -> None:
    sizes = uneven(n)

    def program(comm: InProcess) -> list[np.ndarray]:
        behind = (comm.rank - 1) % n
        outgoing = [np.full((sizes[comm.rank], 2), comm.rank), np.arange(3) + 10 * comm.rank]
        incoming = [np.zeros((sizes[behind], 2), int), np.zeros(3, int)]
        comm.shift(outgoing, incoming).wait()
        return incoming

    for rank, (matrix, vector) in enumerate(InProcessGroup[list[np.ndarray]](n, late=late).run(program)):
        behind = (rank - 1) % n
        np.testing.assert_array_equal(matrix, np.full((sizes[behind], 2), behind))
        np.testing.assert_array_equal(vector, np.arange(3) + 10 * behind)


@LATE
@pytest.mark.parametrize("n", WORLDS)
def test_all_to_all_sorts_by_sender(n: int, late: bool) -> None:
    def program(comm: InProcess) -> np.ndarray:
        outgoing = [np.array([10.0 * comm.rank + target]) for target in range(n)]
        incoming = [np.zeros(1) for _ in range(n)]
        comm.all_to_all(outgoing, incoming).wait()
        return np.concatenate(incoming)

    for rank, found in enumerate(InProcessGroup[np.ndarray](n, late=late).run(program)):
        np.testing.assert_array_equal(found, 10.0 * np.arange(n) + rank)


@LATE
@pytest.mark.parametrize("n", WORLDS)
def test_all_gather_joins_in_the_order_of_the_ranks(n: int, late: bool) -> None:
    sizes = uneven(n)
    whole = np.arange(2.0 * sum(sizes)).reshape(-1, 2)
    ends = np.cumsum(sizes)

    def program(comm: InProcess) -> np.ndarray:
        found = np.zeros_like(whole)
        own = whole[ends[comm.rank] - sizes[comm.rank] : ends[comm.rank]].copy()
        comm.all_gather(own, found, sizes).wait()
        return found

    for found in InProcessGroup[np.ndarray](n, late=late).run(program):
        np.testing.assert_array_equal(found, whole)


@pytest.mark.parametrize("n", WORLDS)
def test_agree_and_tell_reach_everybody(n: int) -> None:
    def program(comm: InProcess) -> tuple[np.ndarray, list[str]]:
        return comm.agree(np.array([comm.rank, 5])), comm.tell(f"rank {comm.rank}")

    for records, texts in InProcessGroup[tuple[np.ndarray, list[str]]](n).run(program):
        np.testing.assert_array_equal(records, [[rank, 5] for rank in range(n)])
        assert texts == [f"rank {rank}" for rank in range(n)]


def exchanged(late: bool, spoil: str) -> list[np.ndarray]:
    """What three ranks see that touch an array between posting and waiting."""

    def program(comm: InProcess) -> np.ndarray:
        outgoing, incoming = [np.full(4, float(comm.rank))], [np.zeros(4)]
        pending = comm.shift(outgoing, incoming)
        seen = incoming[0].copy()
        if spoil == "send":
            outgoing[0][:] = -9.0
        pending.wait()
        return seen if spoil == "receive" else incoming[0]

    return InProcessGroup[np.ndarray](3, late=late).run(program)


def test_late_delivery_shows_a_send_buffer_that_is_reused_before_the_wait() -> None:
    for rank, (eager, late) in enumerate(zip(exchanged(False, "send"), exchanged(True, "send"), strict=True)):
        np.testing.assert_array_equal(eager, np.full(4, (rank - 1) % 3))
        np.testing.assert_array_equal(late, np.full(4, -9.0))


def test_late_delivery_fills_what_is_read_before_the_wait_with_garbage() -> None:
    assert all(np.isnan(seen).all() for seen in exchanged(True, "receive"))


def test_after_its_wait_a_sender_may_change_its_arrays() -> None:
    def program(comm: InProcess) -> np.ndarray:
        kept, buffer = [], np.zeros(3)
        for step in range(4):
            incoming = [np.zeros(3)]
            buffer[:] = 10 * comm.rank + step
            comm.shift([buffer], incoming).wait()
            kept.append(incoming[0])
        return np.array(kept)

    for rank, found in enumerate(InProcessGroup[np.ndarray](3, late=True).run(program)):
        np.testing.assert_array_equal(found, 10 * ((rank - 1) % 3) + np.arange(4)[:, None] * np.ones(3))


def test_messages_are_matched_in_the_order_of_posting() -> None:
    def program(comm: InProcess) -> tuple[float, float]:
        first, second = [np.zeros(1)], [np.zeros(1)]
        one = comm.shift([np.array([1.0 + comm.rank])], first)
        two = comm.shift([np.array([100.0 + comm.rank])], second)
        two.wait()
        one.wait()
        return float(first[0][0]), float(second[0][0])

    assert InProcessGroup[tuple[float, float]](3).run(program) == [(3.0, 102.0), (1.0, 100.0), (2.0, 101.0)]


@LATE
def test_ranks_take_turns_in_the_same_way_every_time(late: bool) -> None:
    def program(comm: InProcess) -> None:
        log.append((comm.rank, 0))
        comm.agree(np.array([1]))
        log.append((comm.rank, 1))

    logs = []
    for _ in range(2):
        log: list[tuple[int, int]] = []
        InProcessGroup[None](4, late=late).run(program)
        logs.append(log)
    assert logs[0] == logs[1]
    assert sorted(logs[0]) == [(rank, step) for rank in range(4) for step in range(2)]


def test_a_rank_that_raises_is_what_the_run_raises() -> None:
    def program(comm: InProcess) -> None:
        if comm.rank == 1:
            raise KeyError("rank 1 had enough")
        comm.agree(np.array([1]))

    with pytest.raises(KeyError, match="rank 1 had enough"):
        InProcessGroup[None](3).run(program)


@pytest.mark.parametrize(
    ("last", "words"), [("raises", "rank 2 raised KeyError: 'ill'"), ("leaves", "rank 2 has left")]
)
def test_the_others_hear_who_is_gone_at_once(last: str, words: str) -> None:
    def program(comm: InProcess) -> str:
        if comm.rank == 2:
            if last == "raises":
                raise KeyError("ill")
            return "left"
        try:
            comm.agree(np.array([1]))
        except ExchangeError as error:
            heard.append(str(error))
        return "heard"

    heard: list[str] = []
    began = time.monotonic()
    group = InProcessGroup[str](3)
    if last == "raises":
        with pytest.raises(KeyError):
            group.run(program)
    else:
        assert group.run(program) == ["heard", "heard", "left"]
    assert heard == [f"{words}; every rank must make the same calls"] * 2
    assert time.monotonic() - began < group.deadline


def test_ranks_that_wait_for_each_other_hear_it_at_once() -> None:
    def program(comm: InProcess) -> None:
        if comm.rank == 0:
            comm.agree(np.array([1]))
        else:
            # one message further than the other rank
            comm._next()
            comm.tell("")

    began = time.monotonic()
    with pytest.raises(ExchangeError, match=r"rank \d waits for rank \d, and so does every rank for another"):
        InProcessGroup[None](2).run(program)
    assert time.monotonic() - began < 5


def test_it_carries_every_array_of_its_process() -> None:
    comm = InProcess(InProcessGroup[None](1), 0)
    assert [comm.refusal(device) for device in ("cpu", "cuda", "mps")] == [None] * 3
    assert (comm.name, comm.size, comm.deadline) == ("in-process", 1, 60.0)
    comm.close()
