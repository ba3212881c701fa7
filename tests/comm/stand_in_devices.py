"""GPUs of one host, made of the host's memory and of threads: what copies between them do, when and in what order.

A stream is a thread that works off its queue. Every copy may be made to wait first, so that what is not ordered by the
protocol comes in another order than it was queued in.
"""

from __future__ import annotations

import ctypes
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any, TypeVar

import numpy as np

from contrastile.comm.copies import CopyChannel
from contrastile.comm.driver import DriverError, Flags
from contrastile.comm.peers import Parts
from contrastile.comm.watch import Silence, Watch, Word, until

T = TypeVar("T")


class Stream:
    """A thread and its queue."""

    def __init__(self) -> None:
        self.work: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while (work := self.work.get()) is not None:
            work()


@dataclass(eq=False)
class StandIn:
    """One GPU: a ``staging.Device``.

    Attributes:
        delay: seconds that a copy waits at most before it begins.
        fails: the call that raises DriverError.
        deaf: kinds of flags, by their numbers in ``staging``, that nobody waits for: a defect.
        memory: what is allocated.
        captured: whether the current stream is said to go into a graph.
    """

    delay: float = 0.0
    fails: str = ""
    deaf: int = -1
    memory: dict[int, Any] = field(default_factory=dict)
    mapped: set[int] = field(default_factory=set)
    captured: bool = False
    compute: Stream = field(default_factory=Stream)
    draw: random.Random = field(default_factory=lambda: random.Random(0))

    def _may(self, name: str) -> None:
        if self.fails == name:
            raise DriverError(f"{name} fails")

    @contextmanager
    def active(self) -> Iterator[None]:
        yield

    def allocate(self, nbytes: int) -> int:
        self._may("allocate")
        x = np.zeros(nbytes, dtype=np.uint8)
        self.memory[x.ctypes.data] = x
        return int(x.ctypes.data)

    def free(self, address: int) -> None:
        # kept, for a stray copy must not end the process; whoever reads it reads garbage
        self.memory.pop(address)[:] = 0xEE

    def export(self, address: int) -> bytes:
        self._may("export")
        return address.to_bytes(8, "little")

    def map(self, exported: bytes) -> int:
        self._may("map")
        found = int.from_bytes(exported, "little")
        self.mapped.add(found)
        return found

    def unmap(self, address: int) -> None:
        self.mapped.remove(address)

    def stream(self) -> Stream:
        return Stream()

    def end(self, stream: Stream) -> None:
        stream.work.put(None)

    def current(self, x: Any) -> Stream:
        return self.compute

    def capturing(self, stream: Stream) -> bool:
        return self.captured

    def address(self, x: Any) -> int:
        return int(x.ctypes.data)

    def record(self, stream: Stream) -> threading.Event:
        event = threading.Event()
        stream.work.put(event.set)
        return event

    def follow(self, stream: Stream, event: threading.Event) -> None:
        stream.work.put(event.wait)

    def passed(self, event: threading.Event) -> bool:
        return event.is_set()

    def copy(self, stream: Stream, target: int, source: int, nbytes: int) -> None:
        self._may("copy")
        pause = self.draw.random() * self.delay

        def move() -> None:
            time.sleep(pause)
            ctypes.memmove(target, source, nbytes)

        stream.work.put(move)

    def flags(self, stream: Stream, written: Flags, awaited: Flags) -> None:
        def step() -> None:
            for address, value in written:
                self.put(address, value)
            for address, value in awaited:
                if self._kind(address) != self.deaf:
                    until(lambda address=address, value=value: self.get(address) >= value, 20)  # type: ignore[misc]

        stream.work.put(step)

    def _kind(self, address: int) -> int:
        base = max(x for x in self.memory if x <= address)
        return (address - base) // 4 % 3

    def put(self, address: int, value: int) -> None:
        ctypes.c_int32.from_address(address).value = value

    def get(self, address: int) -> int:
        return int(ctypes.c_int32.from_address(address).value)


@dataclass(eq=False)
class Mail:
    """A channel between threads, for what is not copied.

    Attributes:
        letters: of all ranks.
        rank: whose end this is.
        posted: how many messages there were.
    """

    letters: dict[tuple[int, int, int], list[Any]]
    rank: int
    posted: int = 0
    closed: bool = False

    name = "mail"

    def post(self, outgoing: Parts, incoming: Parts, number: int, seconds: Callable[[], float]) -> Any:
        self.posted += 1
        for r, xs in outgoing.items():
            self.letters[self.rank, r, number] = [x.copy() for x in xs]

        class Pending:
            def wait(pending) -> None:  # noqa: N805
                for r, xs in incoming.items():
                    key = (r, self.rank, number)
                    if not until(lambda key=key: key in self.letters, seconds()):  # type: ignore[misc]
                        raise Silence([r], "did not answer")
                    for x, found in zip(xs, self.letters.pop(key), strict=True):
                        x[...] = found

        return Pending()

    def prepare(self, size: int) -> bool:
        return False

    def give_up(self, word: Word, seconds: float) -> Mapping[int, Word]:
        return {}

    def close(self) -> None:
        self.closed = True


class Ranks:
    """Several ranks of one process, each with a GPU of its own."""

    def __init__(self, size: int, deadline: float = 20.0, **first: Any) -> None:
        """``first`` says what is particular about rank 0's GPU."""
        self.size, self.devices = size, [StandIn(**first), *(StandIn() for _ in range(size - 1))]
        self._barrier, self._told = threading.Barrier(size), [""] * size
        letters: dict[tuple[int, int, int], list[Any]] = {}
        self.watches = [Watch(lambda: deadline, end=lambda reason: None) for _ in range(size)]
        self.channels = [
            CopyChannel(
                Mail(letters, r), self.watches[r], r, size, lambda text, r=r: self._tell(r, text), self._made(r)
            )  # type: ignore[misc]
            for r in range(size)
        ]

    def _made(self, rank: int) -> Callable[[], StandIn]:
        return lambda: self.devices[rank]

    def _tell(self, rank: int, text: str) -> list[str]:
        self._told[rank] = text
        self._barrier.wait(20)
        found = list(self._told)
        self._barrier.wait(20)
        return found

    def run(self, program: Callable[[int, CopyChannel], T]) -> list[T]:
        """What the program returns on each rank.

        Raises:
            BaseException: the first that a rank raised.
        """
        found: list[Any] = [None] * self.size
        errors: list[BaseException] = []

        def one(rank: int) -> None:
            try:
                found[rank] = program(rank, self.channels[rank])
            except BaseException as error:
                errors.append(error)
                self._barrier.abort()

        threads = [threading.Thread(target=one, args=(rank,)) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        return found

    def finish(self, rank: int) -> None:
        """Wait until this rank's compute stream has come to its end."""
        device = self.devices[rank]
        assert device.record(device.compute).wait(20)
