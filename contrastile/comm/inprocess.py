"""All ranks in one process: a thread each, of which one runs at a time, until it has to wait; then the next one does.

For property tests and for teaching: the same interleaving every time, no packages. With ``late`` every message arrives
at the last moment allowed: its buffers hold garbage until the receiver waits, and it then gets what the sender's arrays
hold *at that moment*. So a buffer that is reused too early is caught.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from contrastile.backends.contract import Array
from contrastile.comm import buffers, calls
from contrastile.comm.calls import Conflict
from contrastile.comm.communicator import Communicator, ExchangeError, Hosts, Parts, Posted
from contrastile.comm.watchdog import DEADLINE, PeerTimeout

T = TypeVar("T")


@dataclass(slots=True)
class Message:
    """What one rank sends another: arrays that still belong to the sender, until ``taken``.

    ``head`` is what both ends must agree on, None where that is compared later; ``place`` names it for the user.
    """

    content: Any
    head: tuple[Any, ...] | None
    place: str
    taken: bool = False


@dataclass(slots=True)
class InProcessGroup(Generic[T]):
    """The ranks of one process.

    Attributes:
        late: messages arrive at the last moment allowed.
        deadline: of the communicators; nobody waits so long here, for a deadlock shows at once.
        hosts: which ranks are to share a host; None for all.
        failure: the error of ranks at different calls, if any; the group then carries nothing more.
    """

    size: int
    late: bool = False
    deadline: float = DEADLINE
    hosts: Hosts | None = None
    failure: str | None = None
    _condition: threading.Condition = field(default_factory=threading.Condition)
    _mailbox: dict[tuple[int, int, int], Message] = field(default_factory=dict)
    _gone: dict[int, str] = field(default_factory=dict)
    _turn: int = 0
    # turns since something has happened that another rank may wait for
    _idle: int = 0

    def run(self, program: Callable[[InProcess], T]) -> list[T]:
        """What ``program(communicator)`` returns on each rank.

        Raises:
            BaseException: the first exception of a program, in the order in which they were raised.
        """
        results: list[Any] = [None] * self.size
        errors: list[BaseException] = []

        def one(rank: int) -> None:
            with self._condition:
                self._condition.wait_for(lambda: self._turn == rank)
                try:
                    results[rank] = program(InProcess(self, rank))
                    self._gone[rank] = f"rank {rank} has left"
                except BaseException as error:
                    errors.append(error)
                    self._gone[rank] = f"rank {rank} raised {type(error).__name__}: {error}"
                finally:
                    self._idle = 0
                    self._pass_on(rank)

        threads = [threading.Thread(target=one, args=(rank,), name=f"rank {rank}") for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        return results

    def send(self, source: int, target: int, number: int, message: Message) -> Message:
        self._mailbox[(source, target, number)] = message
        self._idle = 0
        return message

    def receive(self, source: int, target: int, number: int, head: tuple[Any, ...] | None, place: str) -> Message:
        """Wait for the message with this head and take it; the caller is still to mark it ``taken``.

        Raises:
            Conflict: it has another head.
            ExchangeError: see ``until``.
        """
        key = (source, target, number)
        self.until(lambda: key in self._mailbox, target, source)
        message = self._mailbox.pop(key)
        if message.head != head:
            raise Conflict(calls.whereabouts({source: message.place, target: place}))
        return message

    def check(self) -> None:
        if self.failure is not None:
            raise ExchangeError(f"this group can carry nothing more: {self.failure}")

    def until(self, ready: Callable[[], bool], rank: int, other: int) -> None:
        """Let other ranks run until this is so.

        Raises:
            ExchangeError: the other rank is gone, or all ranks wait.
        """
        while not ready():
            self.check()
            if other in self._gone:
                raise ExchangeError(f"{self._gone[other]}; every rank must make the same calls")
            self._idle += 1
            if self._idle > self.size:
                raise ExchangeError(
                    f"rank {rank} waits for rank {other}, and so does every rank for another; "
                    "every rank must make the same calls in the same order"
                )
            self._pass_on(rank)
            self._condition.wait_for(lambda: self._turn == rank)
        self._idle = 0

    def _pass_on(self, rank: int) -> None:
        """The turn goes to the next rank that is there."""
        following = (each % self.size for each in range(rank + 1, rank + self.size + 1))
        self._turn = next((each for each in following if each not in self._gone), rank)
        self._condition.notify_all()


class InProcess(Communicator):
    """One rank's communicator."""

    name = "in-process"
    # whatever a library has: nothing leaves the process
    devices = ("cpu", "cuda", "mps", "xpu")

    def __init__(self, group: InProcessGroup[Any], rank: int) -> None:
        super().__init__(rank, group.size, group.deadline)
        self.group, self._number = group, 0
        self.hosts = group.hosts or self.hosts

    def gather_bytes(self, own: bytes) -> list[bytes]:
        number, place = self._next(), str(self.calls.label)
        for target in range(self.size):
            self.group.send(self.rank, target, number, Message(own, None, place))
        return [self.group.receive(r, self.rank, number, None, place).content for r in range(self.size)]

    def _next(self) -> int:
        self._number += 1
        return self._number

    def post(self, outgoing: Parts, incoming: Parts) -> Posted:
        """See ``Communicator``. This rank's own part travels like any other's, so that it can be late."""
        number, place, late = self._next(), str(self.calls.label), self.group.late
        sent = []
        for target, xs in outgoing.items():
            content = list(xs) if late else list(map(buffers.copied, xs))
            message = Message(content, self._head(xs), place)
            sent.append((target, self.group.send(self.rank, target, number, message)))
        stays = set(map(id, outgoing.get(self.rank, ())))
        for x in (x for xs in incoming.values() for x in xs) if late else ():
            # this rank's own part may be its own already
            if id(x) not in stays:
                kind = str(x.dtype)
                x[...] = float("nan") if "float" in kind else 255 if "uint8" in kind else -(2**31)
        expected = {source: self._head(xs) for source, xs in incoming.items()}

        def wait() -> None:
            for source, xs in incoming.items():
                message = self.group.receive(source, self.rank, number, expected[source], place)
                for x, arrived in zip(xs, message.content, strict=True):
                    x[...] = arrived
                message.taken = True
            # late, the sender may change its arrays only now that everybody has them
            for target, message in sent if late else ():
                self.group.until(lambda message=message: message.taken, self.rank, target)  # type: ignore[misc]

        return Posted(wait)

    def _head(self, xs: Sequence[Array]) -> tuple[Any, ...]:
        label = self.calls.label
        return label.serial, label.phase, self.calls.messages, [(tuple(x.shape), str(x.dtype)) for x in xs]

    def check(self) -> None:
        super().check()
        self.group.check()

    def explain(self, error: Conflict | PeerTimeout) -> str:
        self.group.failure = self.group.failure or str(error)
        return super().explain(error)
