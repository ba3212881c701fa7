"""Memory through which the GPUs of one host copy each other's messages, and the order of the copies.

Each rank owns staging memory, which the others map (CUDA IPC): for each of them ``SLOTS`` slots of ``PIECE`` bytes,
and flags that they write. A message between two ranks goes piece by piece through the slots that the sender has for the
receiver: the sender copies a piece into a slot and raises READY in the receiver's memory, the receiver copies it out
and raises PULLED in the sender's. Streams wait for flags and write them; the host only queues, and never waits.

Flags count the pieces between two ranks, from 1. *A slot is never overwritten too early*: piece k goes into the slot of
piece k - SLOTS, and its copy waits until PULLED has reached k - SLOTS, which the receiver writes behind its copy of
that piece. *A piece is never read too early*: the receiver's copy waits until READY has reached k, which the sender
writes behind its copy into the slot. Either is one stream's order, for the driver puts a fence before each flag.

The first ``SLOTS`` pieces are copied into their slots on the current stream: a copy within a GPU takes multiprocessors,
and beside a kernel that has them all it costs more than before it. The slots are as a rule free by then. What a message
has beyond that many pieces is copied as slots become free, on a stream of its own; and so is all that arrives.

*No wait goes round in a circle.* Number every piece by its message, then by its turn in that message; both ends number
it alike. The current stream waits for copies out of slots of earlier messages alone. The other streams take the turns
in order: copying out waits for the copy into that slot, of the same turn, and copying in for a copy out of an earlier
turn. So whatever is earliest can go on, in whatever order messages are waited for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any, NamedTuple, Protocol

from contrastile.backends.contract import Array
from contrastile.comm import watch
from contrastile.comm.driver import Flags

PIECE = 32 << 20
"""Bytes of a slot."""
SLOTS = 2

_HEADER = 1 << 16
_READY, _PULLED, _GONE, _KINDS = range(4)

Spans = Mapping[int, Sequence[tuple[int, int]]]
"""By rank: addresses, and how many bytes there."""


class Device(Protocol):
    """What is needed of a GPU: ``driver.Gpu``, whose docstrings say what each call does."""

    def active(self) -> AbstractContextManager[None]: ...
    def allocate(self, nbytes: int) -> int: ...
    def free(self, address: int) -> None: ...
    def export(self, address: int) -> bytes: ...
    def map(self, exported: bytes) -> int: ...
    def unmap(self, address: int) -> None: ...
    def stream(self) -> Any: ...
    def end(self, stream: Any) -> None: ...
    def current(self, x: Array) -> Any: ...
    def capturing(self, stream: Any) -> bool: ...
    def address(self, x: Array) -> int: ...
    def record(self, stream: Any) -> Any: ...
    def follow(self, stream: Any, event: Any) -> None: ...
    def passed(self, event: Any) -> bool: ...
    def copy(self, stream: Any, target: int, source: int, nbytes: int) -> None: ...
    def flags(self, stream: Any, written: Flags, awaited: Flags) -> None: ...
    def put(self, address: int, value: int) -> None: ...
    def get(self, address: int) -> int: ...


class _Piece(NamedTuple):
    """A copy, the flags that it waits for and the one that is raised behind it."""

    awaited: Flags
    target: int
    source: int
    size: int
    told: tuple[int, int]


@dataclass(slots=True)
class _Lane:
    """A stream of copies. What is told behind one goes out with what the next waits for, in one call."""

    device: Device
    stream: Any
    _told: Flags = ()

    def tell(self, flags: Flags) -> None:
        """Raise flags behind what is queued."""
        self.device.flags(self.stream, (*self._told, *flags), ())
        self._told = ()

    def copy(self, piece: _Piece) -> None:
        """Queue a copy."""
        self.device.flags(self.stream, self._told, piece.awaited)
        self.device.copy(self.stream, piece.target, piece.source, piece.size)
        self._told = (piece.told,)

    def end(self) -> Any:
        """The point behind all of it."""
        self.tell(())
        return self.device.record(self.stream)


@dataclass(slots=True, eq=False)
class Staging:
    """One rank's slots and flags, and the other ranks' as this one has mapped them.

    Attributes:
        device: this rank's GPU.
        rank: this rank's number.
        size: how many.
        own: the address of its staging memory.
        theirs: the addresses of the others', by rank.
    """

    device: Device
    rank: int
    size: int
    own: int = 0
    theirs: dict[int, int] = field(default_factory=dict)
    _sent: list[int] = field(default_factory=list)
    _taken: list[int] = field(default_factory=list)
    _lanes: list[_Lane] = field(default_factory=list)

    @property
    def others(self) -> list[int]:
        """All ranks but this one."""
        return [r for r in range(self.size) if r != self.rank]

    def allocate(self) -> bytes:
        """Make this rank's memory and streams; what the others need to map it."""
        device = self.device
        self._sent, self._taken = ([0] * self.size for _ in range(2))
        with device.active():
            self.own = device.allocate(_HEADER + (self.size - 1) * SLOTS * PIECE)
            self._lanes = [_Lane(device, device.stream()) for _ in range(2)]
            return device.export(self.own)

    def map(self, exported: Sequence[bytes]) -> None:
        """Map the others' memory, by rank."""
        with self.device.active():
            for r in self.others:
                self.theirs[r] = self.device.map(exported[r])

    def _flag(self, base: int, rank: int, kind: int) -> int:
        return base + 4 * (_KINDS * rank + kind)

    def _slot(self, base: int, owner: int, receiver: int, piece: int) -> int:
        place = receiver - (receiver > owner)
        return base + _HEADER + (place * SLOTS + piece % SLOTS) * PIECE

    def queue(self, now: Any, outgoing: Spans, incoming: Spans) -> tuple[Any, list[Any]]:
        """Queue a message, behind what the stream ``now`` has queued.

        Returns:
            the point on that stream from which on it waits for others only, and the points at which everything has
            left its place and at which everything has arrived.
        """
        device, n, me = self.device, self.size, self.rank
        leaving, arriving = self._lanes
        start = device.record(now)
        # in each turn every rank's slots are read by one rank at a time
        out = [self._departures(turn) for turn in _turns(outgoing, lambda r: (me - r) % n)]
        into = [self._arrivals(turn) for turn in _turns(incoming, lambda r: (r - me) % n)]
        at_once = [piece for turn in out[:SLOTS] for piece in turn]
        device.flags(now, (), [flag for piece in at_once for flag in piece.awaited])
        for piece in at_once:
            device.copy(now, piece.target, piece.source, piece.size)
        filled = device.record(now)
        for lane in self._lanes:
            device.follow(lane.stream, filled)
        leaving.tell([piece.told for piece in at_once])
        for departures, arrivals in zip_longest(out[SLOTS:], into, fillvalue=()):
            for piece in departures:
                leaving.copy(piece)
            for piece in arrivals:
                arriving.copy(piece)
        return start, [lane.end() for lane in self._lanes]

    def _departures(self, turn: Sequence[tuple[int, int, int]]) -> list[_Piece]:
        found = []
        for r, address, size in turn:
            k = self._sent[r] = self._sent[r] + 1
            # the first pieces find their slots empty
            free = ((self._flag(self.own, r, _PULLED), k - SLOTS),) if k > SLOTS else ()
            ready = self._flag(self.theirs[r], self.rank, _READY), k
            found.append(_Piece(free, self._slot(self.own, self.rank, r, k), address, size, ready))
        return found

    def _arrivals(self, turn: Sequence[tuple[int, int, int]]) -> list[_Piece]:
        found = []
        for r, address, size in turn:
            k = self._taken[r] = self._taken[r] + 1
            ready = ((self._flag(self.own, r, _READY), k),)
            pulled = self._flag(self.theirs[r], self.rank, _PULLED), k
            found.append(_Piece(ready, address, self._slot(self.theirs[r], r, self.rank, k), size, pulled))
        return found

    def trial(self, seconds: float) -> str:
        """Send every rank a number through every slot; "", or what went wrong."""
        device = self.device
        with device.active():
            scratch = self.own + _HEADER // 2
            for turn in range(2 * SLOTS):
                device.put(scratch, self._mark(self.rank, turn))
                arriving = {r: [(scratch + 4 * (r + 1), 4)] for r in self.others}
                quiet = self._lanes[0].stream
                points = self.queue(quiet, {r: [(scratch, 4)] for r in self.others}, arriving)[1]
                if not watch.until(lambda points=points: all(map(device.passed, points)), seconds):  # type: ignore[misc]
                    return "a trial copy did not arrive"
                found = {r: device.get(address) for r, [(address, _)] in arriving.items()}
                if any(x != self._mark(r, turn) for r, x in found.items()):
                    return "a trial copy arrived changed"
        return ""

    def _mark(self, rank: int, turn: int) -> int:
        return 1 + rank + turn * self.size

    def leave(self, seconds: float, *, broken: bool) -> bool:
        """Unmap the others' memory, and tell them; if ``broken``, what waits for them after so long is broken off.

        Returns:
            whether it could: copies under way keep what they copy from.
        """
        device = self.device
        with device.active():
            points = [device.record(lane.stream) for lane in self._lanes]

            def through() -> bool:
                return all(map(device.passed, points))

            if not watch.until(through, seconds):
                if not broken:
                    return False
                for r in self.others:
                    device.put(self._flag(self.own, r, _READY), self._taken[r])
                    device.put(self._flag(self.own, r, _PULLED), self._sent[r])
                if not watch.until(through, seconds):
                    return False
            for base in self.theirs.values():
                device.put(self._flag(base, self.rank, _GONE), 1)
                device.unmap(base)
            self.theirs.clear()
            for lane in self._lanes:
                device.end(lane.stream)
            self._lanes.clear()
        return True

    def free(self, *, alone: bool) -> bool:
        """Give this rank's memory back; unless ``alone``, only once every other rank has unmapped it."""
        if not self.own:
            return True
        with self.device.active():
            if not alone and not all(self.device.get(self._flag(self.own, r, _GONE)) for r in self.others):
                return False
            self.device.free(self.own)
            self.own = 0
        return True


def _turns(spans: Spans, order: Callable[[int], int]) -> Iterator[list[tuple[int, int, int]]]:
    """The first piece for each rank, the second for each, and so on: rank, address, bytes."""
    lists = [
        [(r, address + at, min(PIECE, size - at)) for address, size in spans[r] for at in range(0, size, PIECE)]
        for r in sorted(spans, key=order)
    ]
    for turn in zip_longest(*lists):
        yield [piece for piece in turn if piece is not None]
