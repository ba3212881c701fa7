"""Waiting with an end: how long, for whom, and what is done about a device that waits where the host cannot see it."""

from __future__ import annotations

import math
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from contrastile.comm import calls

_SPIN = 300e-6
_PAUSES = (20e-6, 500e-6)


class Silence(Exception):  # noqa: N818 - it becomes an ExchangeError once it is known who is to blame
    """These ranks did not answer; ``how`` says what was seen of them."""

    def __init__(self, ranks: Sequence[int], how: str) -> None:
        super().__init__(how)
        self.ranks, self.how = tuple(ranks), how


@dataclass(frozen=True, slots=True)
class Word:
    """What a rank that gives up says to the others.

    Attributes:
        ranks: whom it waited for.
        place: at which phase of which call.
    """

    ranks: tuple[int, ...]
    place: str

    def encode(self) -> str:
        """As text."""
        return f"{','.join(map(str, self.ranks))}|{self.place}"

    @classmethod
    def decode(cls, text: str) -> Word:
        """What ``encode`` wrote."""
        ranks, _, place = text.partition("|")
        return cls(tuple(int(x) for x in ranks.split(",") if x), place)


def patience(deadline: float) -> float:
    """Seconds to wait for another rank; the rest of the deadline is for asking who is missing, and for leaving."""
    return 0.75 * deadline


def grace(deadline: float) -> float:
    """Seconds in which the others may say whom they wait for."""
    return min(1.0, 0.1 * deadline)


def _last(deadline: float) -> float:
    """Seconds after which the process ends: the host would have raised by then, and leaving takes its time too."""
    return patience(deadline) + grace(deadline)


def until(ready: Callable[[], bool], seconds: float) -> bool:
    """Whether it becomes so in time. It is asked often at first, then every half millisecond: no core is kept busy."""
    start, pause = time.monotonic(), _PAUSES[0]
    while not ready():
        waited = time.monotonic() - start
        if waited >= seconds:
            return False
        if waited < _SPIN:
            # other ranks may share this core
            time.sleep(0)
        else:
            time.sleep(pause)
            pause = min(1.5 * pause, _PAUSES[1])
    return True


def missing(lost: Sequence[int], waiting: Mapping[int, Sequence[int]]) -> tuple[int, ...]:
    """The ranks to blame: follow who waits for whom to those who say nothing.

    Args:
        lost: whom this rank waits for.
        waiting: of each rank that has given up too, whom it waited for.

    Returns:
        Ranks in order; none when everybody waits for somebody, that is, when the ranks make different calls.
    """
    seen: set[int] = set()
    ahead = list(lost)
    while ahead:
        rank = ahead.pop()
        if rank not in seen:
            seen.add(rank)
            ahead.extend(waiting.get(rank, ()))
    return tuple(sorted(seen - set(waiting)))


def describe(silence: Silence, words: Mapping[int, Word], deadline: float, titles: Sequence[int]) -> str:
    """What an ExchangeError says, of ranks by their numbers in the whole program; ``words`` are this rank's too."""
    blamed = missing(silence.ranks, {r: word.ranks for r, word in words.items()})

    def named(ranks: Sequence[int]) -> str:
        return calls.named([titles[r] for r in ranks])

    if not blamed:
        places = calls.whereabouts({titles[r]: words[r].place for r in sorted(words)})
        return f"{named(sorted(words))} wait for each other ({silence.how}): {places}"
    seen = silence.how
    if set(blamed) != set(silence.ranks):
        # what was seen of a rank that had itself given up says nothing of the one it waited for
        seen = f"did not answer, for whom {named(silence.ranks)} waited"
    return f"{named(blamed)} {seen} (deadline {deadline:g} s); see what became of it, or raise CONTRASTILE_DEADLINE"


@dataclass(slots=True)
class Flight:
    """A message under way on a device.

    Attributes:
        ready: whether this rank's work before it is done; only from then on does the message wait for others.
        done: whether it has arrived.
        ranks: from whom and to whom.
        held: what belongs to it: arrays, events.
    """

    ready: Callable[[], bool]
    done: Callable[[], bool]
    ranks: tuple[int, ...]
    held: object = None
    since: float = math.inf

    def expired(self, seconds: float) -> bool:
        """Whether it has waited longer than this for others."""
        if self.since == math.inf and self.ready():
            self.since = time.monotonic()
        return time.monotonic() - self.since > seconds and not self.done()


@dataclass(slots=True)
class Watch:
    """The messages under way on a device, where waiting makes a stream wait and not the host.

    The host never runs further ahead than ``depth`` messages, and raises when the oldest has waited too long. Where
    the host itself sits in the device's runtime it cannot raise, and a message that is broken off would let it go on
    with garbage: then the process ends, with the reason on stderr.

    Attributes:
        deadline: seconds.
        depth: messages under way at most.
        end: ends the process.
        begin: called first in the thread that asks what has arrived.
    """

    deadline: Callable[[], float]
    depth: int = 64
    end: Callable[[str], None] = field(default_factory=lambda: _end)
    begin: Callable[[], None] = lambda: None
    _flights: list[Flight] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _thread: threading.Thread | None = None
    _told: bool = False
    _look: float = 0.0

    def admit(self) -> None:
        """Wait until another message may be posted.

        Raises:
            Silence: the oldest message has waited for other ranks too long.
        """
        # asking what has arrived costs the host time: only where it matters
        if len(self._flights) >= self.depth or time.monotonic() >= self._look:
            self.settle(self.depth)

    def settle(self, most: int) -> None:
        """Wait until fewer than ``most`` messages are under way."""
        late: list[Flight] = []

        def few() -> bool:
            with self._lock:
                self._sweep()
                if time.monotonic() >= self._look:
                    late[:] = [x for x in self._flights if x.expired(patience(self.deadline()))]
                    self._look = time.monotonic() + self._interval()
                return bool(late) or len(self._flights) < most

        until(few, math.inf)
        if late:
            self._told = True
            raise Silence(late[0].ranks, "did not answer")

    def add(self, flight: Flight) -> None:
        """Watch a message until it is done."""
        with self._lock:
            self._flights.append(flight)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="contrastile watch", daemon=True)
                self._thread.start()

    def close(self) -> None:
        """Watch no longer."""
        self._told = True
        with self._lock:
            self._flights.clear()

    def _sweep(self) -> None:
        # as a rule they arrive in their order, and asking costs the host time
        arrived = next((i for i, x in enumerate(self._flights) if not x.done()), len(self._flights))
        del self._flights[:arrived]

    def _interval(self) -> float:
        """Seconds between two looks for messages that are late."""
        return min(0.5, 0.02 * self.deadline())

    def _run(self) -> None:
        self.begin()
        while not self._told:
            time.sleep(self._interval())
            with self._lock:
                self._sweep()
                late = [x for x in self._flights if x.expired(_last(self.deadline()))]
            if late and not self._told:
                ranks = ", ".join(str(r) for r in late[0].ranks)
                self.end(f"rank(s) {ranks} did not answer on the device (deadline {self.deadline():g} s)")
                return


def _end(reason: str) -> None:
    sys.stderr.write(f"contrastile: {reason}; the process ends, for its results would be garbage\n")
    sys.stderr.flush()
    os._exit(1)
