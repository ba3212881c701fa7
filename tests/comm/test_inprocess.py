"""The in-process communicator: what arrives, when, in which order, and what happens when a rank does not answer."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import numpy as np
import pytest
from launching import PATIENCE, PROGRAMS

from contrastile.comm.communicator import ExchangeError
from contrastile.comm.inprocess import InProcess, InProcessGroup

sys.path.append(str(PROGRAMS))
from primitives import BY_THREADS, waits_in_any_order


# where every message is late, ranks that wait in different orders wait for each other
@pytest.mark.parametrize(
    ("check", "late"),
    [(check, late) for check in BY_THREADS for late in (False, True) if not (late and check is waits_in_any_order)],
)
@pytest.mark.parametrize("n", [1, 2, 3, 5, 8])
def test_every_primitive_gives_what_it_must(n: int, check: Callable[[InProcess], None], late: bool) -> None:
    InProcessGroup[None](n, late=late).run(check)


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


@pytest.mark.parametrize("late", [False, True], ids=["eager", "late"])
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
    group = InProcessGroup[str](3, deadline=PATIENCE)
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
        InProcessGroup[None](2, deadline=PATIENCE).run(program)
    assert time.monotonic() - began < PATIENCE


def test_it_carries_every_array_of_its_process() -> None:
    comm = InProcess(InProcessGroup[None](1), 0)
    assert [comm.refusal(device) for device in ("cpu", "cuda", "mps")] == [None] * 3
    assert (comm.name, comm.size, comm.deadline) == ("in-process", 1, 60.0)
    comm.close()
