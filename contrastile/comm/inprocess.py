"""All ranks in one process, a thread each. One thread runs at a time; when it has to wait, the next one runs.

For property tests and for teaching: the interleaving is always the same, and no package is needed. With ``late`` every
message arrives at the last allowed moment: its buffers hold garbage until the receiver waits, and then receive the
values that the sender's arrays hold *at that moment*. This catches a buffer that is reused too early.
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
    """Arrays that one rank sends to another; until ``taken`` they belong to the sender.

    ``head`` must be equal at both ends, or is None if it is compared later; ``place`` names the call for the user.
    """

    content: Any
    head: tuple[Any, ...] | None
    place: str
    taken: bool = False


@dataclass(slots=True)
class InProcessGroup(Generic[T]):
    """The ranks of one process.

    Attributes:
        late: whether messages arrive at the last allowed moment.
        deadline: the deadline of the communicators; no rank waits that long, because a deadlock is detected at once.
        hosts: the ranks of each host; None for a single host.
        failure: the error of ranks at different calls, if any; after it the group carries no more messages.
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
    # turns since the last event that another rank may wait for
    _idle: int = 0

    def run(self, program: Callable[[InProcess], T]) -> list[T]:
        """Run ``program(communicator)`` on each rank; returns the results, by rank.

        Raises:
            BaseException: the exception that a program raised first.
        """
        results: list[Any] = [None] * self.size
        errors: list[BaseException] = []

        def run_rank(rank: int) -> None:
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

        threads = [threading.Thread(target=run_rank, args=(rank,), name=f"rank {rank}") for rank in range(self.size)]
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
        """Wait for a message and remove it from the mailbox; the caller must mark it ``taken``.

        Raises:
            Conflict: the message has another head.
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
        """Let other ranks run until ``ready`` returns true.

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
        """Give the turn to the next rank that is not gone."""
        ranks = (other % self.size for other in range(rank + 1, rank + self.size + 1))
        self._turn = next((other for other in ranks if other not in self._gone), rank)
        self._condition.notify_all()


class InProcess(Communicator):
    """One rank's communicator."""

    name = "in-process"
    # any device of a library, because no array leaves the process
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
        """See ``Communicator``. This rank's own part is sent like the others', so that it can be late."""
        number, place, is_late = self._next(), str(self.calls.label), self.group.late
        sent = []
        for target, arrays in outgoing.items():
            content = list(arrays) if is_late else list(map(buffers.copied, arrays))
            message = Message(content, self._head(arrays), place)
            sent.append((target, self.group.send(self.rank, target, number, message)))
        own_ids = set(map(id, outgoing.get(self.rank, ())))
        for x in (x for arrays in incoming.values() for x in arrays) if is_late else ():
            # this rank may receive its own part in the array that it sends
            if id(x) not in own_ids:
                dtype = str(x.dtype)
                x[...] = float("nan") if "float" in dtype else 255 if "uint8" in dtype else -(2**31)
        expected = {source: self._head(arrays) for source, arrays in incoming.items()}

        def wait() -> None:
            for source, arrays in incoming.items():
                message = self.group.receive(source, self.rank, number, expected[source], place)
                for x, sent_array in zip(arrays, message.content, strict=True):
                    x[...] = sent_array
                message.taken = True
            # with late messages the sender may change its arrays only after every receiver has copied them
            for target, message in sent if is_late else ():
                self.group.until(lambda message=message: message.taken, self.rank, target)  # type: ignore[misc]

        return Posted(wait)

    def _head(self, arrays: Sequence[Array]) -> tuple[Any, ...]:
        label = self.calls.label
        return label.serial, label.phase, self.calls.messages, [(tuple(x.shape), str(x.dtype)) for x in arrays]

    def check(self) -> None:
        super().check()
        self.group.check()

    def explain(self, error: Conflict | PeerTimeout) -> str:
        self.group.failure = self.group.failure or str(error)
        return super().explain(error)
