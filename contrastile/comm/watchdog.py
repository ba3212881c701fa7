"""Deadlines: how long a rank waits, which ranks it blames, and a watchdog for messages on a device."""

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
"""The longest deadline in seconds; longer ones are cut, because engines count milliseconds in 32 bits."""

_SPIN = 300e-6
_PAUSES = (20e-6, 500e-6)


class PeerTimeout(Exception):  # noqa: N818 - it becomes an ExchangeError once it is known who is to blame
    """Some ranks did not answer; ``how`` describes what this rank observed."""

    def __init__(self, ranks: Sequence[int], how: str) -> None:
        super().__init__(how)
        self.ranks, self.how = tuple(ranks), how


@dataclass(frozen=True, slots=True)
class AbortNotice:
    """A rank's notice to the others that it gives up: the ranks that it waited for, and its call and phase."""

    ranks: tuple[int, ...]
    place: str

    def encode(self) -> str:
        """The notice as text."""
        return f"{','.join(map(str, self.ranks))}|{self.place}"

    @classmethod
    def decode(cls, text: str) -> AbortNotice:
        """The inverse of ``encode``."""
        ranks, _, place = text.partition("|")
        return cls(tuple(int(x) for x in ranks.split(",") if x), place)


def deadline_or(deadline: float | None) -> float:
    """The given deadline, or that of CONTRASTILE_DEADLINE, or else ``DEADLINE``.

    Raises:
        ValueError: the deadline is not a positive number of seconds.
    """
    value = os.environ.get("CONTRASTILE_DEADLINE", DEADLINE) if deadline is None else deadline
    try:
        seconds = float(value)
    except (ValueError, TypeError, OverflowError):
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise ValueError(f"deadline must be a positive number of seconds, got {value!r}; give e.g. {DEADLINE:g}")
    return min(seconds, LONGEST)


def deadline_and_error(deadline: float | None) -> tuple[float, str]:
    """``deadline_or`` and "", or ``DEADLINE`` and the error's text, for the other ranks."""
    try:
        return deadline_or(deadline), ""
    except ValueError as error:
        return DEADLINE, str(error)


def patience(deadline: float) -> float:
    """Seconds to wait for another rank; the rest of the deadline is for finding the missing rank, and for exiting."""
    return 0.75 * deadline


def grace(deadline: float) -> float:
    """Seconds in which this rank collects the other ranks' notices."""
    return min(1.0, 0.1 * deadline)


def until(ready: Callable[[], bool], seconds: float) -> bool:
    """Whether ``ready()`` becomes true in time. It polls often at first, then every 0.5 ms, to save processor time."""
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
    """The ranks to blame, in order: from the lost ranks, follow which ranks they wait for to those without a notice.

    The result is empty if every rank waits for another, that is, if the ranks make different calls.
    """
    visited: set[int] = set()
    pending = list(lost)
    while pending:
        rank = pending.pop()
        if rank not in visited:
            visited.add(rank)
            pending.extend(waiting.get(rank, ()))
    return tuple(sorted(visited - set(waiting)))


def describe(
    timeout: PeerTimeout, notices: Mapping[int, AbortNotice], deadline: float, global_ranks: Sequence[int]
) -> str:
    """The text of an ExchangeError, with the ranks' numbers in the whole program.

    ``notices`` has the notice of each rank that has given up, this one included.
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
        # ``how`` is about a rank that gave up itself, not about the rank that it waited for
        seen = f"did not answer, for whom {named(timeout.ranks)} waited"
    return f"{named(blamed)} {seen} (deadline {deadline:g} s); look into that rank's log, or raise CONTRASTILE_DEADLINE"


@dataclass(slots=True)
class InFlight:
    """A message under way on a device.

    Attributes:
        ready: returns whether this rank's earlier work is done; only then does the message wait for others.
        done: returns whether the message has arrived.
        ranks: the ranks that send and receive it.
        held: the objects that must live as long as the message: arrays, events.
    """

    ready: Callable[[], bool]
    done: Callable[[], bool]
    ranks: tuple[int, ...]
    held: object = None
    since: float = math.inf

    def expired(self, seconds: float) -> bool:
        """Whether the message has waited longer than this for other ranks."""
        if self.since == math.inf and self.ready():
            self.since = time.monotonic()
        return time.monotonic() - self.since > seconds and not self.done()


@dataclass(slots=True)
class Watchdog:
    """Watches messages under way on a device, for which a stream waits, but not the host.

    The host runs at most ``depth`` messages ahead, and raises if the oldest message has waited too long. A host that is
    blocked in the device's runtime cannot raise, and if the message were aborted, it would continue with garbage: then
    ``end`` ends the process, with the reason on stderr.

    The watching thread calls ``begin`` first.
    """

    deadline: Callable[[], float]
    depth: int = 64
    end: Callable[[str], None] = field(default_factory=lambda: _end)
    begin: Callable[[], None] = lambda: None
    _in_flight: list[InFlight] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _thread: threading.Thread | None = None
    _is_stopped: bool = False
    _next_check: float = 0.0

    def admit(self) -> None:
        """Wait until another message may be posted.

        Raises:
            PeerTimeout: the oldest message has waited for other ranks too long.
        """
        # poll only if necessary, because polling takes the host time
        if len(self._in_flight) < self.depth and time.monotonic() < self._next_check:
            return
        expired: list[InFlight] = []

        def is_wait_over() -> bool:
            with self._lock:
                self._sweep()
                if time.monotonic() >= self._next_check:
                    expired[:] = [x for x in self._in_flight if x.expired(patience(self.deadline()))]
                    self._next_check = time.monotonic() + self._interval()
                return bool(expired) or len(self._in_flight) < self.depth

        until(is_wait_over, math.inf)
        if expired:
            self._is_stopped = True
            raise PeerTimeout(expired[0].ranks, "did not answer")

    def add(self, message: InFlight) -> None:
        """Watch a message until it is done."""
        with self._lock:
            self._in_flight.append(message)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="contrastile watchdog", daemon=True)
                self._thread.start()

    def close(self) -> None:
        """Stop watching."""
        self._is_stopped = True
        with self._lock:
            self._in_flight.clear()

    def _sweep(self) -> None:
        # messages usually arrive in order, and polling takes the host time: stop at the first that has not arrived
        count = next((i for i, x in enumerate(self._in_flight) if not x.done()), len(self._in_flight))
        del self._in_flight[:count]

    def _interval(self) -> float:
        """Seconds between two checks for late messages."""
        return min(0.5, 0.02 * self.deadline())

    def _run(self) -> None:
        self.begin()
        while not self._is_stopped:
            time.sleep(self._interval())
            # until then the host may still raise, and exit
            limit = patience(self.deadline()) + grace(self.deadline())
            with self._lock:
                self._sweep()
                expired = [x for x in self._in_flight if x.expired(limit)]
            if expired and not self._is_stopped:
                ranks = ", ".join(str(r) for r in expired[0].ranks)
                self.end(f"rank(s) {ranks} did not answer on the device (deadline {self.deadline():g} s)")
                return


def _end(reason: str) -> None:
    sys.stderr.write(f"contrastile: {reason}; the process ends, for its results would be garbage\n")
    sys.stderr.flush()
    os._exit(1)
