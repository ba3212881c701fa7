"""Which call a message belongs to: ranks that are at different calls all raise, and say which."""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from launching import PATIENCE
from mpi4py import MPI

import contrastile
from contrastile.comm import calls
from contrastile.comm.calls import Calls, Conflict, Label
from contrastile.comm.communicator import ExchangeError, Parts
from contrastile.comm.inprocess import InProcess, InProcessGroup
from contrastile.comm.mpi import MPIChannel
from contrastile.comm.point_to_point import FRAMES, NUMBERS, PointToPoint
from contrastile.comm.watchdog import AbortNotice, PeerTimeout, until

EXCHANGES = ("ring", "gather")
AGAIN = "; every rank must make the same calls in the same order, forward and backward"
FAULTY = 1


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_ranks_that_want_other_gradients_say_so(exchange: str) -> None:
    seen: list[Any] = []

    def program(comm: InProcess) -> str:
        draw = np.random.default_rng(comm.rank)
        image, text = (torch.tensor(x, requires_grad=True) for x in draw.standard_normal((2, 4 + comm.rank, 5)))
        inputs = [image, text, torch.tensor(2.0, requires_grad=True)]
        loss = contrastile.clip_loss(*inputs, group=comm, exchange=exchange)
        try:
            torch.autograd.grad(loss, inputs[: 1 if comm.rank == FAULTY else None])
        except ExchangeError as error:
            return str(error)
        seen.append(comm.rank)
        return "nothing"

    found = InProcessGroup[str](3).run(program)
    if seen:
        # this torch tells a function to make all gradients, whichever are asked for
        assert found == ["nothing"] * 3
        return
    assert len(set(found)) == 1
    assert found[0].startswith("ranks 0, 2 are at the backward of call 1 (clip_loss) for the gradients of scale, rows")
    assert "rank 1 is at the backward of call 1 (clip_loss) for the gradients of rows;" in found[0]


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_backwards_in_another_order_are_found_before_a_message_of_theirs(exchange: str) -> None:
    def program(comm: InProcess) -> str:
        draw = np.random.default_rng(comm.rank)
        pair = [torch.tensor(x, requires_grad=True) for x in draw.standard_normal((2, 4 + comm.rank, 5))]
        losses = [contrastile.clip_loss(*pair, 2.0, group=comm, exchange=exchange) for _ in range(2)]
        try:
            for loss in reversed(losses) if comm.rank == FAULTY else losses:
                loss.backward()
        except ExchangeError as error:
            return str(error)
        return "nothing"

    where = "ranks 0, 2 are at the backward of call 1 (clip_loss), rank 1 is at the backward of call 2 (clip_loss)"
    assert InProcessGroup[str](3).run(program) == [f"{where}{AGAIN}"] * 3


def test_calls_and_phases_that_are_the_same_conflict_in_what_was_posted() -> None:
    one, other = Calls(), Calls()
    label = Label(7, "backward", "clip_loss", 0b1101)
    for each in (one, other):
        each.enter(label)
        each.agreed()
    calls.compare([one.head(3), other.head(3)], range(2))
    other.post()
    with pytest.raises(Conflict) as caught:
        calls.compare([one.head(3), one.head(3), other.head(3)], (4, 5, 6))
    assert str(caught.value) == (
        "ranks 4, 5 are at the backward of call 7 (clip_loss) after 1 messages, "
        f"rank 6 is at the backward of call 7 (clip_loss) after 2 messages{AGAIN}"
    )


@dataclass
class Host:
    """A host's channel of one of several threads: arrays of one number arrive in the order in which they were sent."""

    rank: int
    sent: defaultdict[tuple[int, int, int], deque[Any]]
    numbers: list[int] = field(default_factory=list)

    name = "host"

    def post(self, outgoing: Parts, incoming: Parts, number: int, seconds: Callable[[], float]) -> Host:
        self.numbers.append(number)
        for r, xs in outgoing.items():
            self.sent[self.rank, r, number].extend(x.copy() for x in xs)
        self.wanted = [(self.sent[r, self.rank, number], x, r) for r, xs in incoming.items() for x in xs]
        self.seconds = seconds
        return copy(self)  # type: ignore[return-value]

    def wait(self) -> None:
        for queue, x, r in self.wanted:
            if not until(lambda queue=queue: bool(queue), self.seconds()):  # type: ignore[misc]
                raise PeerTimeout([r], "did not answer")
            came = queue.popleft()
            x[: came.size] = came

    def abort(self, notice: AbortNotice, seconds: float) -> dict[int, AbortNotice]:
        return {}


def pair(program: Callable[[PointToPoint], Any]) -> list[Any]:
    """What two ranks make of a program, each in a thread: what it returns, or the ExchangeError."""
    sent: defaultdict[tuple[int, int, int], deque[Any]] = defaultdict(deque)
    found: list[Any] = [None, None]

    def one(rank: int) -> None:
        try:
            found[rank] = program(PointToPoint(rank, 2, PATIENCE, Host(rank, sent)))
        except ExchangeError as error:
            found[rank] = str(error)

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_no_message_has_the_number_of_frames() -> None:
    def program(comm: PointToPoint) -> tuple[set[int], set[int]]:
        assert isinstance(comm.host, Host)
        comm.calls.messages = NUMBERS - 3
        for _ in range(6):
            comm.shift([np.zeros(1)], [np.zeros(1)]).wait()
        data = set(comm.host.numbers)
        comm.agree(np.zeros(1, np.int64))
        return data, set(comm.host.numbers) - data

    for data, frames in pair(program):
        assert {NUMBERS - 1, 0} <= data
        assert frames == {FRAMES}


def test_a_broken_group_carries_nothing_more() -> None:
    def program(comm: PointToPoint) -> str:
        with pytest.raises(ExchangeError):
            comm.agree(np.zeros(1, np.int64), Label(1 + comm.rank))
        with pytest.raises(ExchangeError, match=r"can carry nothing more: rank 0 is at the forward of call 1, rank 1"):
            comm.agree(np.zeros(1, np.int64))
        return "as it should"

    assert pair(program) == ["as it should"] * 2


@pytest.mark.parametrize(
    ("sent", "expected", "words"),
    [(3, 8, "rank 0 sent 3 bytes where 8 were to come"), (8, 3, "rank 0 sent more bytes than were to come")],
)
def test_mpi_takes_no_message_of_another_length(sent: int, expected: int, words: str) -> None:
    comm = MPI.COMM_SELF.Dup()
    comm.Set_errhandler(MPI.ERRORS_RETURN)
    outgoing, incoming = np.ones(sent, np.uint8), np.zeros(expected, np.uint8)
    pending = MPIChannel(comm).post({0: [outgoing]}, {0: [incoming]}, 5, lambda: PATIENCE)
    with pytest.raises(Conflict, match=words):
        pending.wait()
    comm.Free()


def in_another_thread(action: Callable[[], Any]) -> Any:
    """What it gives there, or raises."""
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(action())
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return found[0]


def test_two_threads_within_one_phase_are_refused() -> None:
    one = Calls()
    one.enter(Label(1))
    # while the first waits for the other ranks
    assert "two threads of this rank use one group" in str(in_another_thread(lambda: one.enter(Label(2))))
    one.agreed()
    one.post()
    # and once it sends
    found = in_another_thread(one.post)
    assert isinstance(found, Conflict)
    one.leave()
    assert in_another_thread(one.post) == 2
