"""Which call a message belongs to: ranks that are at different calls all raise, and say which."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from launching import PATIENCE
from mpi4py import MPI
from primitives import refusal

import contrastile
from contrastile.comm import calls
from contrastile.comm.calls import Calls, Conflict, Label
from contrastile.comm.communicator import ExchangeError, Parts
from contrastile.comm.inprocess import InProcess, InProcessGroup
from contrastile.comm.mpi import MPIChannel
from contrastile.comm.point_to_point import FRAMES, NUMBERS, PointToPoint

EXCHANGES = ("ring", "gather")
AGAIN = "; every rank must make the same calls in the same order, forward and backward"
FAULTY = 1


def pair(comm: InProcess) -> list[torch.Tensor]:
    draw = np.random.default_rng(comm.rank)
    return [torch.tensor(x, requires_grad=True) for x in draw.standard_normal((2, 4 + comm.rank, 5))]


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_backwards_in_another_order_are_found_before_a_message_of_theirs(exchange: str) -> None:
    def program(comm: InProcess) -> str:
        losses = [contrastile.clip_loss(*pair(comm), 2.0, group=comm, exchange=exchange) for _ in range(2)]
        order = reversed(losses) if comm.rank == FAULTY else losses
        return refusal(ExchangeError, lambda: [loss.backward() for loss in order])

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


def test_ranks_that_want_other_gradients_say_so() -> None:
    heads = [Calls(Label(1, "backward", "clip_loss", wants)).head(3) for wants in (0b101, 0b100, 0b101)]
    where = "at the backward of call 1 (clip_loss) for the gradients of"
    with pytest.raises(Conflict) as caught:
        calls.compare(heads, range(3))
    assert str(caught.value) == f"ranks 0, 2 are {where} scale, rows, rank 1 is {where} rows{AGAIN}"


class Numbered:
    """A host's channel that carries nothing, and notes the numbers of messages."""

    name = "host"

    def __init__(self) -> None:
        self.numbers: list[int] = []

    def post(self, outgoing: Parts, incoming: Parts, number: int, seconds: Callable[[], float]) -> Numbered:
        self.numbers.append(number)
        return self

    def wait(self) -> None:
        pass


def test_no_message_has_the_number_of_frames() -> None:
    host: Any = Numbered()
    comm = PointToPoint(0, 2, PATIENCE, host)
    comm.calls.messages = NUMBERS - 3
    for _ in range(6):
        comm.shift([np.zeros(1)], [np.zeros(1)]).wait()
    assert {NUMBERS - 1, 0} <= set(host.numbers)
    assert FRAMES not in host.numbers
    comm.gather_bytes(b"a frame")
    assert host.numbers[-1] == FRAMES


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


def test_two_threads_within_one_phase_are_refused() -> None:
    one = Calls()
    one.enter(Label(1))
    with ThreadPoolExecutor(1) as another:
        # while the first waits for the other ranks
        assert "two threads of this rank use one group" in str(another.submit(one.enter, Label(2)).exception())
        one.agreed()
        one.post()
        # and once it sends
        assert isinstance(another.submit(one.post).exception(), Conflict)
        one.leave()
        assert another.submit(one.post).result() == 2
