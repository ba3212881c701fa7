"""A communicator from messages between pairs of ranks: the primitives, written once for every engine.

An engine gives a channel of the host, and may give one of the device; without, arrays on a device travel through
pinned host memory. A missing rank can be named, which no engine's own collective does; sums are the schedules', in the
order of the ranks, which no engine's own reduction promises.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from contrastile.backends.arrays import ArrayLibrary, library_of
from contrastile.backends.contract import Array
from contrastile.comm import buffers, calls, watch
from contrastile.comm.calls import Calls, Conflict, Label
from contrastile.comm.communicator import ExchangeError, Pending
from contrastile.comm.watch import Silence, Word
from contrastile.comm.wires import Wires

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

Parts = Mapping[int, Sequence[Array]]

NUMBERS = 32766
"""Messages are numbered below this: MPI promises tags up to the next number but one."""
FRAMES = NUMBERS
"""The number of all messages with frames: they are of one size, and in order."""


PACKED = 1 << 16
"""Bytes of several arrays for one rank up to which they go over a host as one."""


class Channel(Protocol):
    """Carries arrays between pairs of ranks, in order; a channel of the host carries vectors of bytes."""

    @property
    def name(self) -> str:
        """The engine's name."""
        ...

    def post(self, outgoing: Parts, incoming: Parts, number: int, seconds: Callable[[], float]) -> Pending:
        """Send and receive by rank; never this rank's own, never an array of size 0.

        Args:
            outgoing: by receiver.
            incoming: by sender.
            number: of this message, the same on every rank.
            seconds: how long its ``wait`` waits.

        Raises:
            Silence: a rank is gone; so does ``wait`` of what it returns, also when a rank did not answer.
            Conflict: from ``wait``: more or fewer bytes came than were to come, where the engine can see that.
        """
        ...

    def give_up(self, word: Word, seconds: float) -> Mapping[int, Word]:
        """Tell the others whom this rank waited for, and where, and hear for so long what they say, by rank."""
        ...

    def close(self) -> None:
        """Give back what it holds."""
        ...


def _nothing() -> None:
    pass


@dataclass(slots=True, weakref_slot=True)
class Peers:
    """A communicator over channels.

    Attributes:
        rank: this rank's number.
        size: how many.
        deadline: seconds within which waiting for another rank raises.
        host: carries arrays on the host, None in a world of one.
        on_device: makes the channel of arrays on a device, given one of them; None for none but through the host.
        titles: the numbers that the ranks have in the whole program, where they are others.
        wires: carry records; None for ``host``.
        calls: where this rank is among the calls of the group.
    """

    rank: int
    size: int
    deadline: float
    host: Channel | None
    on_device: Callable[[Peers, Array], Channel | None] = lambda peers, x: None
    titles: Sequence[int] = ()
    wires: Wires | None = None
    calls: Calls = field(default_factory=Calls)
    _device: Channel | None = None
    _broken: str | None = None

    @property
    def name(self) -> str:
        """The engine's name; of a world of one that has none, "alone"."""
        return "alone" if self.host is None else (self._device or self.host).name

    def refusal(self, arrays: ArrayLibrary, device: str) -> str | None:
        return (
            None if device in ("cpu", "cuda") else f"no exchange carries arrays on {device}; move them to cpu or cuda"
        )

    def agree(self, record: npt.NDArray[np.int64], label: Label | None = None) -> npt.NDArray[np.int64]:
        self._check()
        return self._guarded(self._agreed, record, label)  # type: ignore[no-any-return]

    def _agreed(self, record: npt.NDArray[np.int64], label: Label | None) -> npt.NDArray[np.int64]:
        import numpy as np

        self.calls.enter(label)
        try:
            found = [b""] * self.size
            for own in self.calls.frames(np.ascontiguousarray(record, dtype=np.int64)):
                everybodys = self._frames(own)
                calls.compare(everybodys, self._numbers)
                found = [before + calls.content(frame) for before, frame in zip(found, everybodys, strict=True)]
        finally:
            self.calls.agreed()
        return np.array([np.frombuffer(x, np.int64, record.size) for x in found]).reshape(self.size, *record.shape)

    def _frames(self, own: bytearray) -> list[bytes]:
        """Everybody's frame, by rank."""
        import numpy as np

        if self.wires is not None:
            return self.wires.exchange(own, self._seconds())
        others = [r for r in range(self.size) if r != self.rank]
        arrived = {r: [np.zeros(len(own), np.uint8)] for r in others}
        if self.host is not None:
            mine = np.frombuffer(own, np.uint8)
            sent = {r: [mine] for r in others}
            self.host.post(sent, arrived, FRAMES, self._seconds).wait()
        return [bytes(own) if r == self.rank else arrived[r][0].tobytes() for r in range(self.size)]

    @property
    def _numbers(self) -> Sequence[int]:
        """The ranks' numbers as the user knows them."""
        return self.titles or range(self.size)

    def tell(self, text: str) -> list[str]:
        import numpy as np

        own = np.frombuffer(bytearray(text.encode()), dtype=np.uint8)
        lengths = self.agree(np.array([own.size]))[:, 0]
        found = [np.empty(int(k), dtype=np.uint8) for k in lengths]
        self.all_to_all([own] * self.size, found).wait()
        return [x.tobytes().decode() for x in found]

    def exchange(self, outgoing: Parts, incoming: Parts) -> Pending:
        return self._send(outgoing, incoming)

    def shift(self, outgoing: Sequence[Array], incoming: Sequence[Array]) -> Pending:
        ahead, behind = (self.rank + 1) % self.size, (self.rank - 1) % self.size
        return self._send({ahead: outgoing}, {behind: incoming})

    def all_to_all(self, outgoing: Sequence[Array], incoming: Sequence[Array]) -> Pending:
        return self._send({r: [x] for r, x in enumerate(outgoing)}, {r: [x] for r, x in enumerate(incoming)})

    def all_gather(self, own: Array, whole: Array, sizes: Sequence[int]) -> Pending:
        return self.all_to_all([own] * self.size, buffers.split(whole, sizes))

    def _send(self, outgoing: Parts, incoming: Parts) -> Pending:
        self._check()
        for mine, arriving in zip(outgoing.get(self.rank, ()), incoming.get(self.rank, ()), strict=True):
            if mine is not arriving:
                buffers.copy(mine, arriving)
        # every rank counts every message, also one that has nothing for it
        self._guarded(self.calls.post)
        like = next(x for xs in (*outgoing.values(), *incoming.values()) for x in xs)
        return _Message(self, self._guarded(self._post, self._others(outgoing), self._others(incoming), like))

    def _post(self, outgoing: Parts, incoming: Parts, like: Array) -> Pending | None:
        if self.host is None:
            return None
        on_device = library_of(like).device(like) != "cpu"
        channel = self._for_device(self.host, like) if on_device else self.host
        if not (outgoing or incoming):
            return None
        number = self.calls.messages % NUMBERS
        if channel is not self.host:
            return channel.post(outgoing, incoming, number, self._seconds)
        outgoing, incoming, arrived = _packed(*self._labelled(*_on_host(outgoing, incoming, on_device)))
        return _Landing(channel.post(outgoing, incoming, number, self._seconds), arrived)

    def _labelled(
        self, outgoing: Parts, incoming: Parts, arrived: Callable[[], None]
    ) -> tuple[Parts, Parts, Callable[[], None]]:
        """Vectors of bytes with a header before those of each rank; ``arrived`` only once all headers are right."""
        import numpy as np

        def header(xs: Sequence[Array]) -> bytes:
            return self.calls.header(sum(x.size for x in xs))

        sent = {r: [np.frombuffer(bytearray(header(xs)), np.uint8), *xs] for r, xs in outgoing.items()}
        expected = {r: header(xs) for r, xs in incoming.items()}
        headers = {r: np.zeros(calls.HEADER, np.uint8) for r in incoming}
        label = self.calls.label

        def checked() -> None:
            for r, there in headers.items():
                calls.check_header(there.tobytes(), expected[r], self._numbers[r], label)
            arrived()

        return sent, {r: [headers[r], *xs] for r, xs in incoming.items()}, checked

    def _for_device(self, host: Channel, like: Array) -> Channel:
        """What carries arrays beside this one; made at the first message of any, which is the same on every rank."""
        self._device = self._device or self.on_device(self, like) or host
        return self._device

    def _seconds(self) -> float:
        return watch.patience(self.deadline)

    def _others(self, parts: Parts) -> dict[int, list[Array]]:
        full = {r: [x for x in xs if x.nbytes] for r, xs in parts.items() if r != self.rank}
        return {r: xs for r, xs in full.items() if xs}

    def _guarded(self, action: Callable[..., Any], *given: Any) -> Any:
        try:
            return action(*given)
        except Conflict as conflict:
            # where all ranks see it none waits for another
            if self._device not in (None, self.host):
                self._device.give_up(Word((), str(self.calls.label)), 0.0)
            self._broken = str(conflict)
            raise ExchangeError(self._broken) from None
        except Silence as silence:
            assert self.host is not None
            word = Word(silence.ranks, str(self.calls.label))
            words = {**self.host.give_up(word, watch.grace(self.deadline)), self.rank: word}
            if self._device not in (None, self.host):
                self._device.give_up(word, 0.0)
            self._broken = watch.describe(silence, words, self.deadline, self._numbers)
            raise ExchangeError(self._broken) from silence.__cause__

    def _check(self) -> None:
        if self._broken is not None:
            raise ExchangeError(f"this group can carry nothing more: {self._broken}")

    def visit(self, step: int, owner: int) -> None:
        pass

    def close(self) -> None:
        if self._broken is None:
            self._broken = "its communicator is closed; connect the group again"
        for channel in {id(x): x for x in (self.host, self._device) if x is not None}.values():
            channel.close()
        if self.wires is not None:
            self.wires.close()


@dataclass(slots=True)
class _Landing:
    """A message of a channel, and what is to be done with it on this rank once it is there."""

    pending: Pending
    arrived: Callable[[], None]

    def wait(self) -> None:
        self.pending.wait()
        self.arrived()


@dataclass(slots=True)
class _Message:
    """A message of ``Peers``, and what it waits for: nothing once it has arrived."""

    peers: Peers
    pending: Pending | None

    def wait(self) -> None:
        if self.pending is not None:
            self.peers._check()
            self.peers._guarded(self.pending.wait)
            self.pending = None


def _on_host(outgoing: Parts, incoming: Parts, on_device: bool) -> tuple[Parts, Parts, Callable[[], None]]:
    """The bytes to send and to receive; for arrays on a device of copies in pinned memory, and how they get back."""
    if not on_device:
        return _raw(outgoing), _raw(incoming), _nothing
    # what goes to several ranks leaves the device once
    leaving = {id(x): x for xs in outgoing.values() for x in xs}
    copies = dict(zip(leaving, buffers.leave(list(leaving.values())), strict=True))
    landings = {r: [buffers.land(x) for x in xs] for r, xs in incoming.items()}

    def arrived() -> None:
        for xs in landings.values():
            for _, arrive in xs:
                arrive()

    sent = {r: [copies[id(x)] for x in xs] for r, xs in outgoing.items()}
    return _raw(sent), _raw({r: [host for host, _ in xs] for r, xs in landings.items()}), arrived


def _packed(outgoing: Parts, incoming: Parts, arrived: Callable[[], None]) -> tuple[Parts, Parts, Callable[[], None]]:
    """Several short vectors of bytes for one rank as one: each costs an engine more than it costs to copy them."""
    import numpy as np

    if not any(map(_short, (*outgoing.values(), *incoming.values()))):
        return outgoing, incoming, arrived
    sent = {r: [np.concatenate(list(xs))] if _short(xs) else xs for r, xs in outgoing.items()}
    landings = {r: np.empty(sum(x.size for x in xs), np.uint8) for r, xs in incoming.items() if _short(xs)}

    def unpacked() -> None:
        for r, whole in landings.items():
            for x, part in zip(incoming[r], buffers.split(whole, [x.size for x in incoming[r]]), strict=True):
                x[...] = part
        arrived()

    return sent, {r: [landings[r]] if r in landings else xs for r, xs in incoming.items()}, unpacked


def _short(xs: Sequence[Array]) -> bool:
    """Whether they are packed; either end of a pair comes to the same."""
    return len(xs) > 1 and sum(x.size for x in xs) <= PACKED


def _raw(parts: Parts) -> Parts:
    return {r: [buffers.raw(x) for x in xs] for r, xs in parts.items()}
