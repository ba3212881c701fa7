"""``Communicator``: messages between the ranks of a group.

``docs/how-to/write-communicator.md`` shows how to write one.
Implementations: ``inprocess`` (threads of one process, for tests and teaching); and, over ``point_to_point``, ``mpi``
(mpi4py) and ``torch_group`` (torch.distributed), which send arrays on GPUs by ``nccl``.

A message is a list of contiguous arrays whose shapes both sides know: the handshake exchanges sizes once. Messages are
matched by order: every rank posts the same messages in the same order, and ``calls`` detects ranks that do not. From
``post`` until ``wait`` the arrays belong to the message: the sender must not change them, and the receiver must not
read them. On a GPU the current stream waits, not the host.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from contrastile.backends.contract import Array
from contrastile.comm import buffers, calls, watchdog
from contrastile.comm.calls import Calls, Conflict, Label
from contrastile.comm.watchdog import DEADLINE, AbortNotice, PeerTimeout

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

T = TypeVar("T")

Parts = Mapping[int, Sequence[Array]]
"""Arrays by the rank that receives or sends them."""

Hosts = tuple[tuple[int, ...], ...]


def hosts_of(names: Sequence[str]) -> Hosts:
    """The ranks of each host, from the name of each rank's host."""
    return tuple(tuple(r for r, other in enumerate(names) if other == name) for name in dict.fromkeys(names))


class ExchangeError(RuntimeError):
    """A rank died, stalled or left early, or the ranks disagree; the message names the rank where it is known."""


class MismatchError(ValueError):
    """The ranks' parts do not fit together; every rank raises it with the same message."""


class Pending(Protocol):
    """A message under way."""

    def wait(self) -> None:
        """Wait until work that is queued from now on may read the received arrays and change the sent ones.

        Raises:
            PeerTimeout: a rank is gone, or did not answer in time; ``Communicator`` makes it an ExchangeError.
            Conflict: the received bytes are not those expected; ``Communicator`` makes it an ExchangeError.
        """
        ...


@dataclass(slots=True, eq=False)
class Posted:
    """A message under way, given by its ``wait`` function."""

    wait: Callable[[], None]


class Communicator(ABC):
    """Messages between the ranks of one group.

    An implementation sets ``name`` and ``devices``, calls ``__init__``, and defines ``gather_bytes``, ``post`` and, if
    it holds resources, ``close``. This class implements everything else.

    Attributes:
        name: the name in reports: "in-process", "mpi", "torch gloo", "nccl".
        devices: the kinds of devices whose arrays it carries.
        rank: this rank's number, 0..size-1.
        size: the number of ranks.
        deadline: the seconds after which waiting for another rank raises.
        global_ranks: the ranks' numbers in the whole program, for error messages.
        hosts: the ranks of each host, in rising order, the same on every rank; by default all ranks are on one host.
        calls: this rank's position among the calls of the group.
    """

    name: str
    devices: Sequence[str] = ("cpu", "cuda")

    def __init__(self, rank: int, size: int, deadline: float = DEADLINE) -> None:
        self.rank, self.size, self.deadline = rank, size, deadline
        self.global_ranks: Sequence[int] = range(size)
        self.hosts: Hosts = (tuple(range(size)),)
        self.calls = Calls()
        self._failure: str | None = None

    # methods that an implementation defines

    @abstractmethod
    def gather_bytes(self, own: bytes) -> list[bytes]:
        """All ranks' bytes, by rank; the length is the same on all ranks. It runs on the host and waits.

        Raises:
            PeerTimeout: a rank is gone, or did not answer in time.
        """

    @abstractmethod
    def post(self, outgoing: Parts, incoming: Parts) -> Pending | None:
        """Start to send ``outgoing[r]`` to rank r and to receive ``incoming[r]`` from rank r; return without waiting.

        This rank's own part has been copied already: ``others`` leaves it out. Returns None if nothing is under way.

        Raises:
            PeerTimeout: a rank is gone.
        """

    def close(self) -> None:
        """Release the resources; an implementation that holds any extends this method."""
        self._failure = self._failure or "its communicator is closed; connect the group again"

    def explain(self, error: Conflict | PeerTimeout) -> str:
        """The ExchangeError's text. An implementation that learns whom other ranks wait for extends this method."""
        if isinstance(error, Conflict):
            return str(error)
        notices = {self.rank: AbortNotice(error.ranks, str(self.calls.label))}
        return watchdog.describe(error, notices, self.deadline, self.global_ranks)

    def others(self, parts: Parts) -> dict[int, list[Array]]:
        """The other ranks' parts, without torch.func's wrappers, and without arrays of size 0, which are never sent."""
        stored = {r: [buffers.stored(x) for x in xs if x.nbytes] for r, xs in parts.items() if r != self.rank}
        return {r: xs for r, xs in stored.items() if xs}

    @property
    def captures(self) -> bool:
        """Whether a CUDA graph can capture its messages; the same on every rank."""
        return self.size == 1

    # methods that the schedules use

    def agree(self, record: npt.NDArray[np.int64], label: Label | None = None) -> npt.NDArray[np.int64]:
        """All ranks' records, (size, k) from (k,) each; it runs on the host and waits.

        Args:
            record: (k,), the same k on every rank, at most ``calls.MOST``.
            label: the phase of a call that begins; None within a phase.

        Raises:
            ExchangeError: a rank is at another phase or has posted more messages than another, and every rank raises
                the same text; or a rank did not answer within the deadline.
        """
        self.check()
        return self._guarded(self._agreed, record, label)

    def _agreed(self, record: npt.NDArray[np.int64], label: Label | None) -> npt.NDArray[np.int64]:
        import numpy as np

        self.calls.enter(label)
        try:
            frames = self.gather_bytes(self.calls.frame(np.ascontiguousarray(record, dtype=np.int64)))
            calls.compare(frames, self.global_ranks)
        finally:
            self.calls.agreed()
        records = [np.frombuffer(calls.content(frame), np.int64, record.size) for frame in frames]
        return np.array(records).reshape(self.size, *record.shape)

    def tell(self, text: str) -> list[str]:
        """All ranks' texts, by rank; it runs on the host and waits. For errors, and while connecting.

        Raises:
            ExchangeError: a rank did not answer within the deadline.
        """
        import numpy as np

        own = np.frombuffer(bytearray(text.encode()), dtype=np.uint8)
        lengths = self.agree(np.array([own.size]))[:, 0]
        texts = [np.empty(int(k), dtype=np.uint8) for k in lengths]
        self.all_to_all([own] * self.size, texts).wait()
        return [x.tobytes().decode() for x in texts]

    def exchange(self, outgoing: Parts, incoming: Parts) -> Pending:
        """Send ``outgoing[r]`` to rank r and receive ``incoming[r]`` from rank r, array by array, in one message."""
        self.check()
        for source, target in zip(outgoing.get(self.rank, ()), incoming.get(self.rank, ()), strict=True):
            if source is not target:
                buffers.copy(source, target)
        # every rank counts every message, even if it has no part in it
        self._guarded(self.calls.post)
        pending = self._guarded(self.post, outgoing, incoming)

        def wait() -> None:
            nonlocal pending
            # a second wait returns at once
            if pending is not None:
                self.check()
                self._guarded(pending.wait)
                pending = None

        return Posted(wait)

    def replay(self, graph: Any, like: Array) -> None:
        """Queue the replay of a CUDA graph that may hold messages; ``like`` is an array on its device."""
        self.check()
        self._guarded(self._replay, graph, like)

    def _replay(self, graph: Any, like: Array) -> None:
        graph.replay()

    def shift(self, outgoing: Sequence[Array], incoming: Sequence[Array]) -> Pending:
        """Send to rank + 1 and receive from rank - 1, around the ring."""
        ahead, behind = (self.rank + 1) % self.size, (self.rank - 1) % self.size
        return self.exchange({ahead: outgoing}, {behind: incoming})

    def all_to_all(self, outgoing: Sequence[Array], incoming: Sequence[Array]) -> Pending:
        """Send ``outgoing[r]`` to rank r and receive ``incoming[r]`` from rank r, this rank's own part included."""
        return self.exchange({r: [x] for r, x in enumerate(outgoing)}, {r: [x] for r, x in enumerate(incoming)})

    def all_gather(self, own: Array, whole: Array, sizes: Sequence[int]) -> Pending:
        """Join all ranks' ``own`` (sizes[rank], ...) in ``whole`` (sum(sizes), ...), in the order of the ranks."""
        return self.all_to_all([own] * self.size, buffers.split(whole, sizes))

    def check(self) -> None:
        """Raise ExchangeError if this group has failed or is closed."""
        if self._failure is not None:
            raise ExchangeError(f"this group can carry nothing more: {self._failure}")

    def _guarded(self, action: Callable[..., T], *arguments: Any) -> T:
        try:
            with buffers.untransformed():
                return action(*arguments)
        except (Conflict, PeerTimeout) as error:
            self._failure = self.explain(error)
            raise ExchangeError(self._failure) from error.__cause__
