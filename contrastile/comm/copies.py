"""Large messages between the GPUs of one host by their copy engines, which take no multiprocessor from a kernel.

``staging`` has the memory that they go through. Messages below ``LEAST`` bytes between two ranks go by another channel:
what they cost is the host's time.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from contrastile.backends.contract import Array
from contrastile.comm.buffers import nbytes
from contrastile.comm.communicator import Pending
from contrastile.comm.driver import DriverError
from contrastile.comm.peers import Channel, Parts
from contrastile.comm.staging import Device, Staging
from contrastile.comm.watch import Flight, Watch, Word
from contrastile.comm.wires import host

LEAST = 4 << 20
"""Bytes between two ranks from which on a message is copied."""
SETTING = "CONTRASTILE_COPY_ENGINES"
"""The environment variable that says 0 where there are to be no copies."""

_TRIAL_SECONDS = 10.0
_LEAVING_SECONDS = 1.0

_log = logging.getLogger(__name__)

_LEFT: list[Staging] = []
"""Memory that other ranks may still have mapped, of channels that are closed."""


def _tidy() -> None:
    with suppress(DriverError):
        _LEFT[:] = [x for x in _LEFT if not x.free(alone=False)]


@dataclass(slots=True, eq=False)
class CopyChannel:
    """Large messages by copies, all others by another channel.

    Attributes:
        small: the other channel.
        watch: raises where the host may, and ends the process where it cannot; the other channel's too.
        rank: this rank's number.
        size: how many.
        tell: everybody's text, by rank.
        device: makes this rank's ``Device``.
    """

    small: Channel
    watch: Watch
    rank: int
    size: int
    tell: Callable[[str], list[str]]
    device: Callable[[], Device]
    _staging: Staging | None = None
    _asked: bool = False
    _wanted: bool = False
    _broken: bool = False

    @property
    def name(self) -> str:
        """The other channel's, and whether there are copies beside it."""
        return self.small.name if self._staging is None else f"{self.small.name} and copy engines"

    def prepare(self, size: int) -> bool:
        self._wanted = size >= LEAST
        if not self._wanted:
            return False
        if not self._asked:
            self._asked = True
            self._open()
        return self._staging is not None

    def _open(self) -> None:
        """Make staging memory, map everybody's, and try it; all ranks do, or none."""
        _tidy()
        staging: Staging | None = None
        exported, reason = b"", "" if os.environ.get(SETTING, "1") != "0" else f"{SETTING} is 0"
        if not reason:
            try:
                staging = Staging(self.device(), self.rank, self.size)
                exported = staging.allocate()
            except DriverError as error:
                reason = str(error)
        told = [json.loads(x) for x in self.tell(json.dumps([host(), exported.hex(), reason]))]
        if len({here for here, _, _ in told}) > 1:
            reason = "the ranks are on several hosts"
        if not any([reason, *(why for _, _, why in told)]) and staging is not None:
            try:
                staging.map([bytes.fromhex(x) for _, x, _ in told])
            except DriverError as error:
                reason = str(error)
            # a copy waits for others, who must all have mapped this rank's memory, or none may try
            if not any(self.tell(reason)):
                try:
                    reason = staging.trial(min(_TRIAL_SECONDS, self.watch.deadline() / 3))
                except DriverError as error:
                    reason = str(error)
        reasons = [why or before for why, (_, _, before) in zip(self.tell(reason), told, strict=True)]
        if not any(reasons):
            self._staging = staging
            _log.debug("messages from %d MiB on go by copy engines", LEAST >> 20)
            return
        rank, reason = next((r, why) for r, why in enumerate(reasons) if why)
        _log.debug("messages go by %s alone: rank %d: %s", self.small.name, rank, reason)
        left = staging is not None and _left(staging, broken=True)
        # nobody maps it any more once all have come here
        self.tell("")
        if left and staging is not None:
            with suppress(DriverError):
                staging.free(alone=True)

    def post(self, outgoing: Parts, incoming: Parts, number: int, seconds: Callable[[], float]) -> Pending:
        staging = self._staging
        if staging is None or not self._wanted:
            return self.small.post(outgoing, incoming, number, seconds)
        large, rest = zip(*map(_divided, (outgoing, incoming)), strict=True)
        if not any(large):
            return self.small.post(outgoing, incoming, number, seconds)
        device = staging.device
        with device.active():
            now = device.current(next(x for parts in large for xs in parts.values() for x in xs))
            if device.capturing(now):
                # flags count what is sent once, and a captured message is sent again and again
                return self.small.post(outgoing, incoming, number, seconds)
        self.watch.admit()
        with device.active():
            spans = [{r: [(device.address(x), nbytes(x)) for x in xs] for r, xs in parts.items()} for parts in large]
            start, points = staging.queue(now, *spans)

        def done() -> bool:
            # a message that was broken off is never done
            with suppress(DriverError):
                return all(map(device.passed, points))
            return False

        ranks = tuple(sorted({*large[0], *large[1]}))
        flight = Flight(lambda: device.passed(start), done, ranks, large)
        self.watch.add(flight)
        copied = _Queued(device, points, large, flight)
        return _Both(copied, self.small.post(rest[0], rest[1], number, seconds)) if any(rest) else copied

    def give_up(self, word: Word, seconds: float) -> Mapping[int, Word]:
        self._broken = True
        return self.small.give_up(word, seconds)

    def close(self) -> None:
        self.watch.close()
        staging, self._staging = self._staging, None
        if staging is not None and _left(staging, broken=self._broken):
            _LEFT.append(staging)
            _tidy()
        self.small.close()


def _left(staging: Staging, *, broken: bool) -> bool:
    """Whether it no longer maps others' memory."""
    with suppress(DriverError):
        return staging.leave(_LEAVING_SECONDS, broken=broken)
    return False


def _divided(parts: Parts) -> tuple[Parts, Parts]:
    """What is copied, and what is not; either end of a pair comes to the same."""
    large, rest = dict[int, Sequence[Array]](), dict[int, Sequence[Array]]()
    for r, xs in parts.items():
        (large if sum(map(nbytes, xs)) >= LEAST else rest)[r] = xs
    return large, rest


@dataclass(slots=True, eq=False)
class _Queued:
    """Copies that the current stream waits for."""

    device: Device
    points: Sequence[Any]
    arrays: Sequence[Parts]
    flight: Flight

    def wait(self) -> None:
        device = self.device
        with device.active():
            now = device.current(next(x for parts in self.arrays for xs in parts.values() for x in xs))
            for point in self.points:
                device.follow(now, point)
        # from here on the order of the stream keeps the arrays' memory from being used too early
        self.arrays = ()
        self.flight.held = None


@dataclass(slots=True, eq=False)
class _Both:
    """The two ways of one message."""

    copied: Pending
    sent: Pending

    def wait(self) -> None:
        self.copied.wait()
        self.sent.wait()
