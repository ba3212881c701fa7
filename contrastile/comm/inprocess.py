"""All ranks in one process: a thread each, of which one runs at a time, until it has to wait; then the next one does.

For property tests and for teaching: the same interleaving every time, no packages. With ``late`` every message arrives
at the last moment allowed: its buffers hold garbage until the receiver waits, and what arrives is what the sender's
arrays hold *then*, so that a buffer reused too early is caught and not forgiven.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, NoReturn, TypeVar

from contrastile.backends.contract import Array
from contrastile.comm import buffers, calls
from contrastile.comm.calls import Calls, Conflict, Label
from contrastile.comm.communicator import DEADLINE, ExchangeError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from contrastile.backends.arrays import ArrayLibrary

T = TypeVar("T")


@dataclass(slots=True)
class _Letter:
    """What one rank sends another: arrays that still belong to the sender, until ``taken``.

    ``head`` is what both ends must agree on, None where that is compared later; ``place`` says it to the user.
    """

    content: Any
    head: tuple[Any, ...] | None
    place: str
    taken: bool = False


@dataclass(slots=True)
class Town(Generic[T]):
    """The ranks of one process.

    Attributes:
        size: how many.
        late: messages arrive at the last moment allowed.
        deadline: what a communicator has; here nobody waits so long, for when all ranks wait it shows at once.
        log: (rank, step, owner) of every visit, in order.
    """

    size: int
    late: bool = False
    deadline: float = DEADLINE
    log: list[tuple[int, int, int]] = field(default_factory=list)
    _baton: threading.Condition = field(default_factory=threading.Condition)
    _mail: dict[tuple[int, int, int], _Letter] = field(default_factory=dict)
    _gone: dict[int, str] = field(default_factory=dict)
    _broken: str | None = None
    _turn: int = 0
    _idle: int = 0

    def run(self, program: Callable[[InProcess], T]) -> list[T]:
        """What ``program(communicator)`` returns on each rank.

        Raises:
            BaseException: the first exception of a program, in the order in which they were raised.
        """
        results: list[Any] = [None] * self.size
        errors: list[BaseException] = []

        def one(rank: int) -> None:
            with self._baton:
                self._baton.wait_for(lambda: self._turn == rank)
                try:
                    results[rank] = program(InProcess(self, rank))
                    self._gone[rank] = f"rank {rank} has left"
                except BaseException as error:
                    errors.append(error)
                    self._gone[rank] = f"rank {rank} raised {type(error).__name__}: {error}"
                finally:
                    self._progress()
                    self._pass_on(rank)

        threads = [threading.Thread(target=one, args=(rank,), name=f"rank {rank}") for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        return results

    def post(self, source: int, target: int, number: int, letter: _Letter) -> _Letter:
        """Leave a letter."""
        self._mail[(source, target, number)] = letter
        self._progress()
        return letter

    def fetch(self, source: int, target: int, number: int, head: tuple[Any, ...] | None, place: str) -> _Letter:
        """Take a letter with this head out of the mail, waiting for it; it is still to be marked ``taken``.

        Raises:
            ExchangeError: it has another, or see ``until``.
        """
        key = (source, target, number)
        self.until(lambda: key in self._mail, target, source)
        letter = self._mail.pop(key)
        if letter.head != head:
            self.broken(Conflict(calls.whereabouts({source: letter.place, target: place})))
        return letter

    def check(self) -> None:
        """Raise if ranks have been found at different calls.

        Raises:
            ExchangeError: they have.
        """
        if self._broken is not None:
            raise ExchangeError(f"this group can carry nothing more: {self._broken}")

    def broken(self, conflict: Conflict) -> NoReturn:
        """Ranks are at different calls: this rank raises, and so does every other that uses the group."""
        self._broken = self._broken or str(conflict)
        raise ExchangeError(str(conflict))

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
            self._baton.wait_for(lambda: self._turn == rank)
        self._progress()

    def _progress(self) -> None:
        """Something has happened that another rank may wait for."""
        self._idle = 0

    def _pass_on(self, rank: int) -> None:
        """The turn goes to the next rank that is there."""
        following = (each % self.size for each in range(rank + 1, rank + self.size + 1))
        self._turn = next((each for each in following if each not in self._gone), rank)
        self._baton.notify_all()


@dataclass(slots=True, weakref_slot=True)
class InProcess:
    """One rank's communicator."""

    town: Town[Any]
    rank: int
    calls: Calls = field(default_factory=Calls)
    _number: int = 0

    name = "in-process"

    @property
    def size(self) -> int:
        return self.town.size

    @property
    def deadline(self) -> float:
        return self.town.deadline

    def refusal(self, arrays: ArrayLibrary, device: str) -> str | None:
        return None

    def agree(self, record: npt.NDArray[np.int64], label: Label | None = None) -> npt.NDArray[np.int64]:
        import numpy as np

        try:
            self.calls.enter(label)
            try:
                everyone = self._all((self.calls.head(record.size), record.copy()))
            finally:
                self.calls.agreed()
            calls.compare([head for head, _ in everyone], range(self.size))
        except Conflict as conflict:
            self.town.broken(conflict)
        return np.stack([found for _, found in everyone])

    def tell(self, text: str) -> list[str]:
        return self._all(text)

    def _all(self, x: T) -> list[T]:
        number, town, place = self._next(), self.town, str(self.calls.label)
        for target in range(self.size):
            town.post(self.rank, target, number, _Letter(x, None, place))
        found: list[T] = []
        for source in range(self.size):
            letter = town.fetch(source, self.rank, number, None, place)
            letter.taken = True
            found.append(letter.content)
        return found

    def _next(self) -> int:
        self.town.check()
        self._number += 1
        return self._number

    def exchange(self, outgoing: Mapping[int, Sequence[Array]], incoming: Mapping[int, Sequence[Array]]) -> _Parcel:
        return self._send(outgoing, incoming)

    def shift(self, outgoing: Sequence[Array], incoming: Sequence[Array]) -> _Parcel:
        ahead, behind = (self.rank + 1) % self.size, (self.rank - 1) % self.size
        return self._send({ahead: outgoing}, {behind: incoming})

    def all_to_all(self, outgoing: Sequence[Array], incoming: Sequence[Array]) -> _Parcel:
        return self._send({r: [x] for r, x in enumerate(outgoing)}, {r: [x] for r, x in enumerate(incoming)})

    def all_gather(self, own: Array, whole: Array, sizes: Sequence[int]) -> _Parcel:
        return self.all_to_all([own] * self.size, buffers.split(whole, sizes))

    def _send(
        self,
        outgoing: Mapping[int, Sequence[Array]],
        incoming: Mapping[int, Sequence[Array]],
    ) -> _Parcel:
        number = self._next()
        try:
            self.calls.post()
        except Conflict as conflict:
            self.town.broken(conflict)
        place = str(self.calls.label)
        sent = []
        for target, xs in outgoing.items():
            content = list(xs) if self.town.late else [_copy(x) for x in xs]
            letter = _Letter(content, self._head(xs), place)
            sent.append((target, self.town.post(self.rank, target, number, letter)))
        stays = set(map(id, outgoing.get(self.rank, ())))
        for x in (x for xs in incoming.values() for x in xs) if self.town.late else ():
            # this rank's own part may be its own already
            if id(x) not in stays:
                x[...] = _garbage(x)
        expected = {source: self._head(xs) for source, xs in incoming.items()}
        return _Parcel(self, number, sent, incoming, expected, place)

    def _head(self, xs: Sequence[Array]) -> tuple[Any, ...]:
        label = self.calls.label
        return label.serial, label.phase, self.calls.messages, [(tuple(x.shape), str(x.dtype)) for x in xs]

    def visit(self, step: int, owner: int) -> None:
        self.town.log.append((self.rank, step, owner))

    def close(self) -> None:
        pass


@dataclass(slots=True)
class _Parcel:
    """The letters of one message of one rank."""

    home: InProcess
    number: int
    sent: list[tuple[int, _Letter]]
    incoming: Mapping[int, Sequence[Array]]
    expected: Mapping[int, tuple[Any, ...]]
    place: str

    def wait(self) -> None:
        town = self.home.town
        for source, xs in self.incoming.items():
            letter = town.fetch(source, self.home.rank, self.number, self.expected[source], self.place)
            for x, arrived in zip(xs, letter.content, strict=True):
                x[...] = arrived
            letter.taken = True
        if town.late:
            # the sender may change its arrays only now that everybody has them
            for target, letter in self.sent:
                town.until(lambda letter=letter: letter.taken, self.home.rank, target)  # type: ignore[misc]


def _copy(x: Array) -> Array:
    return x.clone() if hasattr(x, "clone") else x.copy()


def _garbage(x: Array) -> float | int:
    floating = "float" in str(x.dtype)
    return float("nan") if floating else -(2**31)
