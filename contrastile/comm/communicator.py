"""What a ring and a gather need of whatever carries their messages, and where it comes from.

Implementations: ``inprocess`` (all ranks in one process, for tests and teaching), ``mpi`` (mpi4py) and ``torchgroup``
(torch.distributed), and of these for arrays on GPUs ``nccl``. A message is a list of contiguous arrays whose
shapes both sides know beforehand: sizes cross once, in the handshake (``world``).

Every rank posts the same messages in the same order, and messages are matched by that order; ``calls`` finds ranks that
do not. "Posted" means that the arrays belong to the message until it has been waited for: the sender changes none, the
receiver reads none. On a GPU, waiting makes the current stream wait and not the host.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from contrastile.backends.contract import Array
from contrastile.comm.calls import Calls, Label

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from contrastile.backends.arrays import ArrayLibrary

DEADLINE = 60.0
"""Seconds that a rank waits for another before it raises ``ExchangeError``."""

LONGEST = 1e6
"""Seconds of the longest deadline, a longer one is cut to it: engines count milliseconds in 32 bits."""


class ExchangeError(RuntimeError):
    """A rank died, stalled, left early, or the ranks do not agree; the message names the rank where it is known."""


class MismatchError(ValueError):
    """The ranks were given parts that do not fit together; every rank raises it with the same message."""


class Pending(Protocol):
    """A message under way."""

    def wait(self) -> None:
        """What was to arrive is there, for work queued from now on, and what was sent may be changed.

        Raises:
            ExchangeError: not within the deadline.
        """
        ...


class Communicator(Protocol):
    """Messages between the ranks of one group."""

    @property
    def name(self) -> str:
        """What it is, for reports: "in-process", "mpi", "torch gloo", "nccl", "torch nccl"."""
        ...

    @property
    def rank(self) -> int:
        """This rank's number, 0..size-1."""
        ...

    @property
    def size(self) -> int:
        """How many ranks there are."""
        ...

    @property
    def deadline(self) -> float:
        """Seconds until waiting for another rank raises."""
        ...

    def refusal(self, arrays: ArrayLibrary, device: str) -> str | None:
        """Why it cannot carry this library's arrays on this kind of device ("cpu", "cuda"), or None."""
        ...

    @property
    def calls(self) -> Calls:
        """Where this rank is among the calls of the group."""
        ...

    def agree(self, record: npt.NDArray[np.int64], label: Label | None = None) -> npt.NDArray[np.int64]:
        """Everybody's record, (size, k) from (k,) each; on the host, and it waits.

        Args:
            record: (k,), the same k on every rank.
            label: the phase of a call that begins with this; None within one.

        Raises:
            ExchangeError: a rank is at another phase or has posted more messages than another, which every rank then
                says in the same words; or a rank did not answer within the deadline.
        """
        ...

    def tell(self, text: str) -> list[str]:
        """Everybody's text, by rank; on the host, and it waits. Used only where ranks disagree.

        Raises:
            ExchangeError: a rank did not answer within the deadline.
        """
        ...

    def exchange(self, outgoing: Mapping[int, Sequence[Array]], incoming: Mapping[int, Sequence[Array]]) -> Pending:
        """``outgoing[r]`` go to rank r, ``incoming[r]`` come from rank r, array for array; one message for all."""
        ...

    def shift(self, outgoing: Sequence[Array], incoming: Sequence[Array]) -> Pending:
        """Send to rank + 1 and receive from rank - 1, around the ring."""
        ...

    def all_to_all(self, outgoing: Sequence[Array], incoming: Sequence[Array]) -> Pending:
        """``outgoing[r]`` goes to rank r, ``incoming[r]`` comes from rank r, this rank's own part included."""
        ...

    def all_gather(self, own: Array, whole: Array, sizes: Sequence[int]) -> Pending:
        """Every rank's ``own`` (sizes[rank], ...) joined in ``whole`` (sum(sizes), ...) in the order of the ranks."""
        ...

    def prepare(self, like: Array, nbytes: int) -> bool:
        """Make ready for messages of so many bytes between two ranks, of arrays beside ``like``.

        Every rank calls it with the same number at the same place among its messages. It holds until the next call;
        0 says that what is saved on the device is not worth what the host has to do for it.

        Returns:
            whether such messages travel without taking anything from the kernels that run meanwhile; the same on
            every rank, and the same every time.

        Raises:
            ExchangeError: a rank did not answer within the deadline.
        """
        ...

    def visit(self, step: int, owner: int) -> None:
        """Told at each step of a ring whose shard is at hand; for logs."""
        ...

    def close(self) -> None:
        """Give back what it holds; using it afterwards raises ExchangeError."""
        ...


def deadline_or(deadline: float | None) -> float:
    """The deadline that was given, else CONTRASTILE_DEADLINE's, else ``DEADLINE``.

    Raises:
        ValueError: it is not a positive number of seconds.
    """
    given = os.environ.get("CONTRASTILE_DEADLINE", DEADLINE) if deadline is None else deadline
    try:
        seconds = float(given)
    except (ValueError, TypeError, OverflowError):
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise ValueError(f"deadline must be a positive number of seconds, got {given!r}; give e.g. {DEADLINE:g}")
    return min(seconds, LONGEST)


def deadline_and_error(deadline: float | None) -> tuple[float, str]:
    """``deadline_or``, and ""; or where that raises ``DEADLINE`` and what it says: the other ranks are to hear it."""
    try:
        return deadline_or(deadline), ""
    except ValueError as error:
        return DEADLINE, str(error)


def refuse(told: Sequence[str]) -> None:
    """Raise the first error that a rank has told the others of, if any has.

    Raises:
        MismatchError: some rank has; the same on every rank.
    """
    for rank, text in enumerate(told):
        if text:
            raise MismatchError(f"rank {rank}: {text}")


class Connecting:
    """A lock for each group: its ranks connect it once, also where several threads of a rank want it first."""

    def __init__(self) -> None:
        self._own, self._locks = threading.Lock(), dict[Any, threading.Lock]()

    def lock(self, key: Any) -> threading.Lock:
        """The lock of the group with this key. None is held for another group: its ranks may wait for each other."""
        with self._own:
            return self._locks.setdefault(key, threading.Lock())


def connect(group: Any, *, deadline: float | None = None) -> Communicator:
    """The communicator of a group.

    Args:
        group: a Communicator, a torch.distributed ProcessGroup, "world" for torch.distributed's default group, or an
            mpi4py communicator. One is made for each group, and kept: it has a channel of its own, so that its
            messages meet nobody else's. The first call for a group is made on all of its ranks.
        deadline: seconds within which a rank that waits for another raises; None leaves it as it is, at first
            the environment variable CONTRASTILE_DEADLINE, or 60.

    Raises:
        TypeError: none of these.
        ValueError: the deadline is not a positive number of seconds, or one is given for a Communicator, which has
            its own.
        MismatchError: in the first call for a group, on every rank: some rank's deadline is not a positive number of
            seconds. The group can be connected again.
        ExchangeError: "world" without an initialised default group.
    """
    if isinstance(group, str) or type(group).__module__.partition(".")[0] == "torch":
        from contrastile.comm import torchgroup

        return torchgroup.of(group, deadline)
    if type(group).__module__.partition(".")[0] == "mpi4py":
        from contrastile.comm import mpi

        return mpi.of(group, deadline)
    if not hasattr(group, "shift"):
        raise TypeError(
            "group must be a torch.distributed group, 'world', an mpi4py communicator or a contrastile Communicator, "
            f"got {type(group).__name__}; pass e.g. group='world'"
        )
    if deadline is not None:
        raise ValueError(f"deadline must be None for a Communicator, got {deadline!r}; it has its own")
    found: Communicator = group
    return found
