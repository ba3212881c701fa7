"""Deadlines: how long a rank waits, whom it blames, and a watchdog for messages that a device waits for."""

from __future__ import annotations

import math
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from contrastile.comm import calls

DEADLINE = 60.0
"""Seconds that a rank waits for another before it raises ``ExchangeError``."""

LONGEST = 1e6
"""The longest deadline in seconds; longer ones are cut, for engines count milliseconds in 32 bits."""

_SPIN = 300e-6
_PAUSES = (20e-6, 500e-6)


class PeerTimeout(Exception):  # noqa: N818 - it becomes an ExchangeError once it is known who is to blame
    """These ranks did not answer; ``how`` says what was seen of them."""

    def __init__(self, ranks: Sequence[int], how: str) -> None:
        super().__init__(how)
        self.ranks, self.how = tuple(ranks), how


@dataclass(frozen=True, slots=True)
class AbortNotice:
    """What a rank that gives up tells the others: whom it waited for, and the phase and the call that it was at."""

    ranks: tuple[int, ...]
    place: str

    def encode(self) -> str:
        """As text."""
        return f"{','.join(map(str, self.ranks))}|{self.place}"

    @classmethod
    def decode(cls, text: str) -> AbortNotice:
        """What ``encode`` wrote."""
        ranks, _, place = text.partition("|")
        return cls(tuple(int(x) for x in ranks.split(",") if x), place)


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
    """``deadline_or`` and "", or ``DEADLINE`` and its error, which is told to the other ranks."""
    try:
        return deadline_or(deadline), ""
    except ValueError as error:
        return DEADLINE, str(error)


def patience(deadline: float) -> float:
    """Seconds to wait for another rank; the rest of the deadline is for finding who is missing, and for exiting."""
    return 0.75 * deadline


def grace(deadline: float) -> float:
    """Seconds in which this rank collects the others' notices."""
    return min(1.0, 0.1 * deadline)


def until(ready: Callable[[], bool], seconds: float) -> bool:
    """Whether ``ready`` becomes true in time. It polls often at first, then every 0.5 ms, to spare the core."""
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
    """The ranks to blame, in order: follow who waits for whom, from those lost to those that sent no notice.

    There are none when every rank waits for another, that is, when the ranks make different calls.
    """
    seen: set[int] = set()
    ahead = list(lost)
    while ahead:
        rank = ahead.pop()
        if rank not in seen:
            seen.add(rank)
            ahead.extend(waiting.get(rank, ()))
    return tuple(sorted(seen - set(waiting)))


def describe(
    timeout: PeerTimeout, notices: Mapping[int, AbortNotice], deadline: float, global_ranks: Sequence[int]
) -> str:
    """What an ExchangeError says, with the ranks' numbers in the whole program.

    The notices are of each rank that has given up, this one included.
    """
    blamed = missing(timeout.ranks, {r: notice.ranks for r, notice in notices.items()})

    def named(ranks: Sequence[int]) -> str:
        return calls.named([global_ranks[r] for r in ranks])

    if not blamed:
        if len({notice.place for notice in notices.values()}) == 1:
            place, late = notices[timeout.ranks[0]].place, "one came after another's deadline"
            advice = f"({deadline:g} s); look into their logs, or raise CONTRASTILE_DEADLINE"
            return f"{named(sorted(notices))} have all come to {place}, but {late} {advice}"
        places = calls.whereabouts({global_ranks[r]: notices[r].place for r in sorted(notices)})
        return f"{named(sorted(notices))} wait for each other ({timeout.how}): {places}"
    seen = timeout.how
    if set(blamed) != set(timeout.ranks):
        # what was seen of a rank that had itself given up says nothing of the one it waited for
        seen = f"did not answer, for whom {named(timeout.ranks)} waited"
    return f"{named(blamed)} {seen} (deadline {deadline:g} s); look into that rank's log, or raise CONTRASTILE_DEADLINE"


@dataclass(slots=True)
class InFlight:
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
class Watchdog:
    """Watches messages under way on a device, which a stream waits for and not the host.

    The host never runs more than ``depth`` messages ahead, and raises when the oldest has waited too long. While it is
    blocked in the device's runtime it cannot raise, and aborting a message would let it go on with garbage: then the
    process ends, with the reason on stderr.

    ``begin`` is called first in the thread that asks what has arrived.
    """

    deadline: Callable[[], float]
    depth: int = 64
    end: Callable[[str], None] = field(default_factory=lambda: _end)
    begin: Callable[[], None] = lambda: None
    _in_flight: list[InFlight] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _thread: threading.Thread | None = None
    _told: bool = False
    _look: float = 0.0

    def admit(self) -> None:
        """Wait until another message may be posted.

        Raises:
            PeerTimeout: the oldest message has waited for other ranks too long.
        """
        # polling costs the host time: only where it matters
        if len(self._in_flight) < self.depth and time.monotonic() < self._look:
            return
        late: list[InFlight] = []

        def few() -> bool:
            with self._lock:
                self._sweep()
                if time.monotonic() >= self._look:
                    late[:] = [x for x in self._in_flight if x.expired(patience(self.deadline()))]
                    self._look = time.monotonic() + self._interval()
                return bool(late) or len(self._in_flight) < self.depth

        until(few, math.inf)
        if late:
            self._told = True
            raise PeerTimeout(late[0].ranks, "did not answer")

    def add(self, message: InFlight) -> None:
        """Watch a message until it is done."""
        with self._lock:
            self._in_flight.append(message)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="contrastile watchdog", daemon=True)
                self._thread.start()

    def close(self) -> None:
        """Stop watching."""
        self._told = True
        with self._lock:
            self._in_flight.clear()

    def _sweep(self) -> None:
        # they usually arrive in order, and polling costs the host time
        arrived = next((i for i, x in enumerate(self._in_flight) if not x.done()), len(self._in_flight))
        del self._in_flight[:arrived]

    def _interval(self) -> float:
        """Seconds between two looks for messages that are late."""
        return min(0.5, 0.02 * self.deadline())

    def _run(self) -> None:
        self.begin()
        while not self._told:
            time.sleep(self._interval())
            # by then the host would have raised, and exiting takes time too
            last = patience(self.deadline()) + grace(self.deadline())
            with self._lock:
                self._sweep()
                late = [x for x in self._in_flight if x.expired(last)]
            if late and not self._told:
                ranks = ", ".join(str(r) for r in late[0].ranks)
                self.end(f"rank(s) {ranks} did not answer on the device (deadline {self.deadline():g} s)")
                return


def _end(reason: str) -> None:
    sys.stderr.write(f"contrastile: {reason}; the process ends, for its results would be garbage\n")
    sys.stderr.flush()
    os._exit(1)
