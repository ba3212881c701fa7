"""Failures of MPI and torch.distributed themselves. contrastile/verify/calls.txt tests the other errors of connect."""

from __future__ import annotations

import numpy as np
import pytest
import torch.distributed as dist
from launching import PATIENCE

from contrastile.comm import torch_group
from contrastile.comm.calls import Conflict
from contrastile.comm.communicator import ExchangeError
from contrastile.comm.connect import connect


def test_a_rank_that_connects_after_the_others_gave_up_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.testing._internal.distributed import fake_pg  # noqa: F401 (registers the backend)

    # all ranks have called connect, but none opens a connection
    monkeypatch.setattr(torch_group, "_told", lambda *_: ['["", "host"]'] * 2)
    dist.init_process_group("fake", store=dist.HashStore(), rank=1, world_size=2)
    try:
        with pytest.raises(ExchangeError, match=r"the other ranks gave up .*\(deadline 1 s\)"):
            connect("world", deadline=1)
    finally:
        dist.destroy_process_group()


def test_an_unreachable_store_is_an_error_within_the_deadline() -> None:
    from torch.testing._internal.distributed import fake_pg  # noqa: F401 (registers the backend)

    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    dist.init_process_group("fake", store=dist.TCPStore("127.0.0.1", server.port), rank=1, world_size=2)
    del server
    try:
        with pytest.raises(ExchangeError, match=r"the store of torch.distributed cannot be reached"):
            connect("world", deadline=1)
    finally:
        dist.destroy_process_group()


def test_the_null_communicator_of_mpi_is_refused() -> None:
    from mpi4py import MPI

    with pytest.raises(TypeError, match="MPI intracommunicator"):
        connect(MPI.COMM_NULL)
    assert connect(MPI.COMM_SELF).size == 1
    assert connect(MPI.COMM_SELF) is connect(MPI.COMM_SELF)


@pytest.mark.parametrize(
    ("sent", "expected", "error"),
    [(3, 8, "rank 0 sent 3 bytes where 8 were to come"), (8, 3, "rank 0 sent more bytes than were to come")],
)
def test_mpi_takes_no_message_of_another_length(sent: int, expected: int, error: str) -> None:
    from mpi4py import MPI

    from contrastile.comm.mpi import MPIChannel

    comm = MPI.COMM_SELF.Dup()
    comm.Set_errhandler(MPI.ERRORS_RETURN)
    outgoing, incoming = np.ones(sent, np.uint8), np.zeros(expected, np.uint8)
    pending = MPIChannel(comm).post({0: [outgoing]}, {0: [incoming]}, 5, lambda: PATIENCE)
    with pytest.raises(Conflict, match=error):
        pending.wait()
    comm.Free()
