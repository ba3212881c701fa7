"""From a group to its communicator, in a world of one process."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from contrastile.comm import torch_group
from contrastile.comm.communicator import ExchangeError
from contrastile.comm.connect import connect
from contrastile.comm.inprocess import InProcessGroup


@pytest.fixture
def group() -> Iterator[Any]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    if dist.is_initialized():
        dist.destroy_process_group()


def test_the_default_group_has_two_names_and_one_communicator(group: Any) -> None:
    found = connect("world", deadline=3)
    assert connect(group) is found
    assert (found.name, found.rank, found.size, found.deadline) == ("alone", 0, 1, 3)
    assert connect(group, deadline=7) is found
    assert found.deadline == 7


def test_a_world_of_one_needs_no_engine(group: Any) -> None:
    comm = connect(group)
    x, y = torch.arange(6.0).reshape(2, 3), torch.zeros(2, 3)
    comm.shift([x], [y]).wait()
    assert torch.equal(x, y)
    comm.all_gather(x + 1, y, [2]).wait()
    assert torch.equal(x + 1, y)
    assert comm.agree(np.array([5, 6])).tolist() == [[5, 6]]
    assert comm.tell("λ") == ["λ"]


def test_without_a_default_group_it_says_what_to_call() -> None:
    with pytest.raises(ExchangeError, match=r"init_process_group\(\) first"):
        connect("world")


def test_a_rank_that_comes_after_the_others_gave_up_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.testing._internal.distributed import fake_pg  # noqa: F401 (registers the backend)

    # all have called, and nobody connects
    monkeypatch.setattr(torch_group, "_told", lambda *what: ["", ""])
    dist.init_process_group("fake", store=dist.HashStore(), rank=1, world_size=2)
    try:
        with pytest.raises(ExchangeError, match=r"the other ranks gave up .*\(deadline 1 s\)"):
            connect("world", deadline=1)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("wrong", ["words", 3, object()])
def test_what_is_no_group_is_refused(group: Any, wrong: Any) -> None:
    with pytest.raises(TypeError, match="group must be"):
        connect(wrong)


def test_a_communicator_is_its_own_and_has_its_own_deadline() -> None:
    def program(comm: Any) -> None:
        assert connect(comm) is comm
        with pytest.raises(ValueError, match="deadline must be None for a Communicator"):
            connect(comm, deadline=3)

    InProcessGroup(1).run(program)


def test_an_mpi_communicator_that_is_none_is_refused() -> None:
    from mpi4py import MPI

    with pytest.raises(TypeError, match="MPI intracommunicator"):
        connect(MPI.COMM_NULL)
    assert connect(MPI.COMM_SELF).size == 1
    assert connect(MPI.COMM_SELF) is connect(MPI.COMM_SELF)


def test_arrays_elsewhere_are_refused_with_the_reason(group: Any) -> None:
    comm = connect(group)
    assert comm.refusal("cpu") is comm.refusal("cuda") is None
    assert comm.refusal("mps") == "the group carries no arrays on mps; move them to cpu or cuda"


def test_a_closed_communicator_refuses(group: Any) -> None:
    comm = connect(group)
    comm.close()
    with pytest.raises(ExchangeError, match="its communicator is closed"):
        comm.tell("")


def test_a_communicator_goes_with_its_group() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    kept = weakref.ref(connect("world"))
    gone = weakref.ref(dist.group.WORLD)
    dist.destroy_process_group()
    gc.collect()
    # some versions of torch keep a group once torch.compile has been imported
    assert (kept() is None) == (gone() is None)
