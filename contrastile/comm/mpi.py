"""Communicators over MPI, by mpi4py: arrays on the host without copies; on a device by NCCL, or through the host.

``mpirun -n 4 python -m mpi4py program.py``: with ``-m mpi4py`` a rank that raises ends all ranks at once. Without
``-m mpi4py`` it waits in MPI_Finalize until the deadline of the others has passed.
"""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from mpi4py import MPI

from contrastile.comm import buffers, nccl, watchdog
from contrastile.comm.calls import SAME_CALLS, Conflict
from contrastile.comm.communicator import Communicator, ExchangeError, MismatchError, Parts, Posted
from contrastile.comm.point_to_point import NUMBERS, PointToPoint, met
from contrastile.comm.watchdog import AbortNotice, PeerTimeout, deadline_and_error, deadline_or

_ABORT_TAG = NUMBERS + 1
_LONGEST_NOTICE = 4096


def of(comm: Any, deadline: float | None = None) -> Communicator:
    """The communicator of an mpi4py intracommunicator; freed with it. All ranks must make the first call for it.

    Raises:
        TypeError: ``comm`` is not an intracommunicator.
        ExchangeError: a rank did not call within the deadline.
    """
    if not isinstance(comm, MPI.Intracomm) or comm == MPI.COMM_NULL:
        raise TypeError(f"group must be an MPI intracommunicator, got {type(comm).__name__}; pass e.g. MPI.COMM_WORLD")
    with _CONNECTING.setdefault(MPI._handleof(comm), threading.Lock()):
        communicator = cast("PointToPoint | None", comm.Get_attr(_key()))
        if communicator is None:
            communicator = _connect(comm, deadline)
            comm.Set_attr(_key(), communicator)
            return communicator
    if deadline is not None:
        communicator.deadline = deadline_or(deadline)
    return communicator


def _connect(comm: Any, requested: float | None) -> PointToPoint:
    rank, size = comm.Get_rank(), comm.Get_size()
    if size == 1:
        return PointToPoint(rank, size, deadline_or(requested), None)
    deadline, error = deadline_and_error(requested)
    # messages of a duplicate never match those of the program
    duplicate, request = comm.Idup()
    if not watchdog.until(request.Test, watchdog.patience(deadline)):
        raise ExchangeError(
            f"a rank did not connect the group within {deadline:g} s; every rank of the group must call the loss"
        )
    duplicate.Set_errhandler(MPI.ERRORS_RETURN)
    global_ranks = duplicate.Get_group().Translate_ranks(list(range(size)), MPI.COMM_WORLD.Get_group())
    communicator = PointToPoint(rank, size, deadline, MPIChannel(duplicate), nccl.channel, global_ranks)
    try:
        communicator.meet(met(communicator.tell, error, global_ranks))
    except MismatchError:
        # freeing is collective, and every rank raises
        duplicate.Free()
        raise
    return communicator


_KEYS: list[int] = []
_CONNECTING: dict[int | None, threading.Lock] = {}
"""A lock for each group, by its handle: groups share no lock, because their ranks may wait for each other."""


def _key() -> int:
    """The key of the MPI attribute that holds the communicator."""
    with _CONNECTING.setdefault(None, threading.Lock()):
        if not _KEYS:
            # freeing the user's communicator is collective, so it may free the duplicate too
            _KEYS.append(MPI.Comm.Create_keyval(delete_fn=lambda comm, key, communicator: communicator.close()))
        return _KEYS[0]


@dataclass(slots=True, eq=False)
class MPIChannel:
    """Bytes on the host, by nonblocking messages between pairs of ranks."""

    comm: Any
    _under_way: dict[int, Any] = field(default_factory=dict)
    _notices: list[Any] = field(default_factory=list)

    name = "mpi"

    def post(self, outgoing: Parts, incoming: Parts, number: int, seconds: Callable[[], float]) -> Posted:
        requests: list[Any] = []
        ranks: list[int] = []
        sizes: list[int] = []
        # post receives first, so that early messages need no buffer of the engine
        for post, parts in ((self.comm.Irecv, incoming), (self.comm.Isend, outgoing)):
            for rank, piece in buffers.pieces(parts):
                requests.append(post([piece, MPI.BYTE], rank, number))
                ranks.append(rank)
                sizes += [piece.size] if parts is incoming else []
        # MPI writes into these arrays until the message is complete, even if no one waits for it any more
        self._under_way[id(requests)] = requests, outgoing, incoming

        def unanswered() -> list[int]:
            pairs = zip(requests, ranks, strict=True)
            return sorted({rank for request, rank in pairs if request != MPI.REQUEST_NULL and not request.Test()})

        def wait() -> None:
            statuses = [MPI.Status() for _ in requests]
            try:
                is_done = watchdog.until(lambda: MPI.Request.Testall(requests, statuses), seconds())
            except MPI.Exception as error:
                for rank, status in zip(ranks, statuses, strict=True):
                    if MPI.Get_error_class(status.Get_error()) == MPI.ERR_TRUNCATE:
                        raise Conflict(f"rank {rank} sent more bytes than were to come; {SAME_CALLS}") from error
                raise PeerTimeout(unanswered(), f"cannot be reached ({error.Get_error_string()})") from error
            if not is_done:
                raise PeerTimeout(unanswered(), "did not answer")
            for rank, size, status in zip(ranks, sizes, statuses, strict=False):
                if (received_size := status.Get_count(MPI.BYTE)) != size:
                    raise Conflict(f"rank {rank} sent {received_size} bytes where {size} were to come; {SAME_CALLS}")
            del self._under_way[id(requests)]

        return Posted(wait)

    def abort(self, notice: AbortNotice, seconds: float) -> Mapping[int, AbortNotice]:
        size, rank = self.comm.Get_size(), self.comm.Get_rank()
        atexit.register(self._abandon)
        encoded = notice.encode().encode()[:_LONGEST_NOTICE]
        for other in range(size):
            if other != rank:
                # so small a message is sent eagerly, without its receiver; no one waits for it
                self._notices.append((self.comm.Isend([encoded, MPI.BYTE], other, _ABORT_TAG), encoded))
        notices: dict[int, AbortNotice] = {}
        status, buffer = MPI.Status(), bytearray(_LONGEST_NOTICE)
        end = time.monotonic() + seconds
        while len(notices) < size - 1 and time.monotonic() < end:
            if self.comm.Iprobe(MPI.ANY_SOURCE, _ABORT_TAG, status):
                source, count = status.Get_source(), status.Get_count(MPI.BYTE)
                self.comm.Recv([buffer, MPI.BYTE], source, _ABORT_TAG)
                notices[source] = AbortNotice.decode(buffer[:count].decode())
            else:
                time.sleep(0.005)
        return notices

    def _abandon(self) -> None:
        # MPI_Finalize would wait for the missing rank
        if not MPI.Is_finalized():
            self.comm.Abort(1)

    def close(self) -> None:
        if self.comm != MPI.COMM_NULL:
            self.comm.Free()
