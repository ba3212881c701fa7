"""Communicators of one process: from a group to its communicator, what arrives, and when a rank does not answer."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import numpy as np
import pytest
import torch.distributed as dist
from launching import PATIENCE
from primitives import BY_THREADS, waits_in_any_order

from contrastile.comm import torch_group
from contrastile.comm.communicator import ExchangeError
from contrastile.comm.connect import connect
from contrastile.comm.inprocess import InProcess, InProcessGroup


def test_a_rank_that_comes_after_the_others_gave_up_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.testing._internal.distributed import fake_pg  # noqa: F401 (registers the backend)

    # all have called, and nobody connects
    monkeypatch.setattr(torch_group, "_told", lambda *what: ['["", "host"]'] * 2)
    dist.init_process_group("fake", store=dist.HashStore(), rank=1, world_size=2)
    try:
        with pytest.raises(ExchangeError, match=r"the other ranks gave up .*\(deadline 1 s\)"):
            connect("world", deadline=1)
    finally:
        dist.destroy_process_group()


def test_a_store_that_has_gone_is_an_error_within_the_deadline() -> None:
    from torch.testing._internal.distributed import fake_pg  # noqa: F401 (registers the backend)

    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    dist.init_process_group("fake", store=dist.TCPStore("127.0.0.1", server.port), rank=1, world_size=2)
    del server
    try:
        with pytest.raises(ExchangeError, match=r"the store of torch.distributed cannot be reached"):
            connect("world", deadline=1)
    finally:
        dist.destroy_process_group()


def test_connections_are_counted_by_the_store_whatever_a_process_did_before() -> None:
    from torch.testing._internal.distributed import fake_pg  # noqa: F401 (registers the backend)

    # a process of the worlds before, and one that is new here, meet under one name
    for _ in range(2):
        dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=2)
        torch_group._store("group", 0, 1.0).set("key", "value")
        assert dist.distributed_c10d._get_default_store().check(["contrastile/group/1/key"])
        dist.destroy_process_group()


def test_an_mpi_communicator_that_is_none_is_refused() -> None:
    from mpi4py import MPI

    with pytest.raises(TypeError, match="MPI intracommunicator"):
        connect(MPI.COMM_NULL)
    assert connect(MPI.COMM_SELF).size == 1
    assert connect(MPI.COMM_SELF) is connect(MPI.COMM_SELF)


# where every message is late, ranks that wait in different orders wait for each other
@pytest.mark.parametrize(
    ("check", "late"),
    [(check, late) for check in BY_THREADS for late in (False, True) if not (late and check is waits_in_any_order)],
)
@pytest.mark.parametrize("n", [1, 2, 3, 5, 8])
def test_every_primitive_gives_what_it_must(n: int, check: Callable[[InProcess], None], late: bool) -> None:
    InProcessGroup[None](n, late=late).run(check)


@pytest.mark.parametrize("late", [False, True])
def test_after_its_wait_a_sender_may_change_its_arrays(late: bool) -> None:
    def program(comm: InProcess) -> np.ndarray:
        kept, buffer = [], np.zeros(3)
        for step in range(4):
            incoming = [np.zeros(3)]
            buffer[:] = 10 * comm.rank + step
            comm.shift([buffer], incoming).wait()
            kept.append(incoming[0])
        return np.array(kept)

    for rank, found in enumerate(InProcessGroup[np.ndarray](3, late=late).run(program)):
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


@pytest.mark.parametrize(
    ("last", "words"), [("raises", "rank 2 raised KeyError: 'ill'"), ("leaves", "rank 2 has left")]
)
def test_the_others_hear_who_is_gone_at_once(last: str, words: str) -> None:
    heard: list[str] = []

    def program(comm: InProcess) -> None:
        if comm.rank == 2:
            if last == "raises":
                raise KeyError("ill")
            return
        with pytest.raises(ExchangeError) as error:
            comm.agree(np.array([1]))
        heard.append(str(error.value))

    with pytest.raises(KeyError) if last == "raises" else nullcontext():
        InProcessGroup[None](3, deadline=PATIENCE).run(program)
    assert heard == [f"{words}; every rank must make the same calls"] * 2


def test_ranks_that_wait_for_each_other_hear_it_at_once() -> None:
    def program(comm: InProcess) -> None:
        if comm.rank == 0:
            comm.agree(np.array([1]))
        else:
            # one message further than the other rank
            comm._next()
            comm.tell("")

    with pytest.raises(ExchangeError, match=r"rank \d waits for rank \d, and so does every rank for another"):
        InProcessGroup[None](2, deadline=PATIENCE).run(program)
