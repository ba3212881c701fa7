"""Sockets between the ranks of one host, for the records that the ranks compare before each exchange.

An engine's messages on the host are made for arrays: threads of its own carry them, and to wake these takes longer than
the record travels. Ranks on several hosts have no wires.
"""

from __future__ import annotations

import os
import select
import socket
import struct
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from contrastile.exchange.watch import Silence

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

_HEADER, _RANK = struct.Struct("<qq"), struct.Struct("<q")
_SPIN = 1e-3
"""Seconds in which a rank asks again and again: as a rule all are there by then, and a sleeper wakes slowly."""


_yield: Callable[[], None] = getattr(os, "sched_yield", lambda: time.sleep(0))


def host() -> str:
    """This host, also where several have one name."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return f"{socket.gethostname()} {boot.read_text(encoding='ascii').strip() if boot.exists() else ''}"


@dataclass(slots=True, eq=False)
class Wires:
    """A socket to each other rank.

    Attributes:
        rank: this rank's number.
        sockets: by rank, connected.
    """

    rank: int
    sockets: dict[int, socket.socket]
    _number: int = 0

    def exchange(self, own: npt.NDArray[np.int64], everyone: npt.NDArray[np.int64], seconds: float) -> None:
        """Everybody's record, (size, k), from (k,) each.

        Raises:
            Silence: a rank is gone, did not answer in time, or made another call than this one.
        """
        self._number += 1
        header = _HEADER.pack(self._number, own.nbytes)
        frame = header + own.tobytes()
        for rank, wire in self.sockets.items():
            try:
                # it fits: a record is far smaller than a socket's buffer, and the one before it has been answered
                wire.sendall(frame)
            except OSError as error:
                raise _unreachable(rank, error) from error
        everyone[self.rank] = own
        for rank, arrived in self._received(header, len(frame), seconds).items():
            everyone[rank] = memoryview(arrived)[_HEADER.size :].cast("q")

    def _received(self, header: bytes, size: int, seconds: float) -> dict[int, bytes]:
        arrived = dict.fromkeys(self.sockets, b"")
        lacking, start = list(arrived), time.monotonic()
        while lacking:
            came = False
            for rank in lacking:
                try:
                    some = self.sockets[rank].recv(size - len(arrived[rank]))
                except BlockingIOError:
                    continue
                except OSError as error:
                    raise _unreachable(rank, error) from error
                if not some:
                    raise Silence([rank], "cannot be reached (connection closed)")
                came = True
                arrived[rank] += some
                if not header.startswith(arrived[rank][: _HEADER.size]):
                    raise Silence([rank], "made another call")
            if came:
                lacking = [rank for rank in lacking if len(arrived[rank]) < size]
            else:
                self._pause(lacking, time.monotonic() - start, seconds)
        return arrived

    def _pause(self, lacking: Sequence[int], waited: float, seconds: float) -> None:
        """Until something may have come."""
        if waited >= seconds:
            raise Silence(sorted(lacking), "did not answer")
        if waited < _SPIN:
            # other ranks may share this core; a sleep of no length lasts tens of microseconds on some hosts
            _yield()
            return
        poll = select.poll()
        for rank in lacking:
            poll.register(self.sockets[rank], select.POLLIN)
        poll.poll(1e3 * (seconds - waited) + 1)

    def close(self) -> None:
        """Hang up."""
        for wire in self.sockets.values():
            wire.close()


def _unreachable(rank: int, error: OSError) -> Silence:
    return Silence([rank], f"cannot be reached ({error.strerror})")


def connect(rank: int, size: int, tell: Callable[[str, str], Sequence[str]]) -> Wires | None:
    """Wires between all ranks; None on every rank where some cannot reach each other.

    Args:
        rank: this rank's number.
        size: how many.
        tell: everybody's text about a matter, by rank; all ranks call it, about the same matters.
    """
    wires = Wires(rank, {})
    with ExitStack() as until_connected:
        place = listening = None
        with suppress(OSError, AttributeError):
            place, listening = _listening(until_connected, size)
        places = tell("places", f"{host()}@{place}" if place else "")
        reached = all(places) and len({each.partition("@")[0] for each in places}) == 1
        if reached:
            reached = _dialled(wires, [each.partition("@")[2] for each in places[:rank]])
        if all(each == "yes" for each in tell("dialled", "yes" if reached else "no")):
            # all that will call have called: nobody is waited for
            assert listening is not None
            _answered(wires, listening, size)
            return wires
    wires.close()
    return None


def _listening(until_connected: ExitStack, size: int) -> tuple[str, socket.socket]:
    """Where the others can call; a folder that is this user's alone."""
    folder = until_connected.enter_context(tempfile.TemporaryDirectory(prefix="contrastile-"))
    place = str(Path(folder, "wire"))
    listening = until_connected.enter_context(socket.socket(socket.AF_UNIX))
    listening.bind(place)
    listening.listen(size)
    return place, listening


def _dialled(wires: Wires, places: Sequence[str]) -> bool:
    """Call the ranks of lower numbers, and whether they could be reached."""
    with suppress(OSError):
        for other, place in enumerate(places):
            wire = wires.sockets[other] = socket.socket(socket.AF_UNIX)
            wire.connect(place)
            wire.sendall(_RANK.pack(wires.rank))
        return True
    return False


def _answered(wires: Wires, listening: socket.socket, size: int) -> None:
    """Take the calls of the ranks of higher numbers."""
    for _ in range(wires.rank + 1, size):
        wire, _ = listening.accept()
        (other,) = _RANK.unpack(wire.recv(_RANK.size, socket.MSG_WAITALL))
        wires.sockets[other] = wire
    for wire in wires.sockets.values():
        wire.setblocking(False)
