"""Sockets between the ranks of one host, for the frames that the ranks compare before each phase of a call.

An engine's messages on the host are made for arrays: threads of its own carry them, and to wake these takes longer than
a frame travels. Ranks on several hosts have no wires.
"""

from __future__ import annotations

import hmac
import json
import os
import secrets
import select
import socket
import struct
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

from contrastile.comm.watch import Silence

_HELLO = struct.Struct("<16sq")
_BACKLOG = 128
_LONGEST_POLL = 10**9
"""Milliseconds; ``poll`` takes no more than 2^31."""
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

    def exchange(self, own: bytes | bytearray, seconds: float) -> list[bytes]:
        """Everybody's frame, by rank; all are of one size.

        Raises:
            Silence: a rank is gone, or did not answer in time.
        """
        for rank, wire in self.sockets.items():
            try:
                # it fits: a frame is far smaller than a socket's buffer, and the one before it has been answered
                wire.sendall(own)
            except OSError as error:
                raise _unreachable(rank, error) from error
        arrived = {self.rank: bytes(own), **self._received(len(own), seconds)}
        return [arrived[rank] for rank in range(len(arrived))]

    def _received(self, size: int, seconds: float) -> dict[int, bytes]:
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
        _readable([self.sockets[rank] for rank in lacking], seconds - waited)

    def close(self) -> None:
        """Hang up."""
        for wire in self.sockets.values():
            wire.close()


def _readable(sockets: Sequence[socket.socket], seconds: float) -> None:
    """Wait until one of them can be read, or for so long."""
    poll = select.poll()
    for each in sockets:
        poll.register(each, select.POLLIN)
    poll.poll(min(1e3 * seconds + 1, _LONGEST_POLL))


def _unreachable(rank: int, error: OSError) -> Silence:
    return Silence([rank], f"cannot be reached ({error.strerror})")


def connect(rank: int, size: int, tell: Callable[[str, str], Sequence[str]], seconds: float) -> Wires | None:
    """Wires between all ranks; None on every rank where some cannot reach each other.

    Args:
        rank: this rank's number.
        size: how many.
        tell: everybody's text about a matter, by rank; all ranks call it, about the same matters.
        seconds: how long a rank waits for the others' calls, and for a socket to be free for its own.
    """
    wires = Wires(rank, {})
    with ExitStack() as until_connected:
        place = listening = None
        # who knows it is a rank of this group
        token = secrets.token_bytes(16)
        with suppress(OSError, AttributeError):
            place, listening = _listening(until_connected)
        told = tell("places", json.dumps([host(), place, token.hex()] if place else []))
        places = [json.loads(each) for each in told]
        reached = all(places) and len({each[0] for each in places}) == 1
        if reached:
            reached = _dialled(wires, [(there, bytes.fromhex(word)) for _, there, word in places[:rank]], seconds)
        if all(each == "yes" for each in tell("dialled", "yes" if reached else "no")):
            # all that will call have called
            assert listening is not None
            answered = _answered(wires, listening, range(rank + 1, size), token, seconds)
            if all(each == "yes" for each in tell("answered", "yes" if answered else "no")):
                return wires
    wires.close()
    return None


def _listening(until_connected: ExitStack) -> tuple[str, socket.socket]:
    """Where the others can call; a folder that is this user's alone."""
    folder = until_connected.enter_context(tempfile.TemporaryDirectory(prefix="contrastile-"))
    place = str(Path(folder, "wire"))
    listening = until_connected.enter_context(socket.socket(socket.AF_UNIX))
    listening.bind(place)
    listening.listen(_BACKLOG)
    return place, listening


def _dialled(wires: Wires, places: Sequence[tuple[str, bytes]], seconds: float) -> bool:
    """Call the ranks of lower numbers, and whether they could be reached."""
    with suppress(OSError):
        for other, (place, token) in enumerate(places):
            wire = wires.sockets[other] = socket.socket(socket.AF_UNIX)
            wire.settimeout(min(seconds, _LONGEST_POLL / 1e3))
            wire.connect(place)
            wire.sendall(_HELLO.pack(token, wires.rank))
            wire.setblocking(False)
        return True
    return False


def _answered(wires: Wires, listening: socket.socket, others: Sequence[int], token: bytes, seconds: float) -> bool:
    """Take the calls of these ranks, and of nobody else; whether all have called in time."""
    end = time.monotonic() + seconds
    heard: dict[socket.socket, bytes] = {}
    listening.setblocking(False)
    while lacking := [r for r in others if r not in wires.sockets]:
        if time.monotonic() >= end:
            break
        _readable([listening, *heard], end - time.monotonic())
        with suppress(BlockingIOError):
            caller, _ = listening.accept()
            caller.setblocking(False)
            heard[caller] = b""
        for caller in list(heard):
            if not _listened(caller, heard):
                continue
            word, rank = _HELLO.unpack(heard.pop(caller).ljust(_HELLO.size, b"\0"))
            if hmac.compare_digest(word, token) and rank in lacking and rank not in wires.sockets:
                wires.sockets[rank] = caller
            else:
                caller.close()
    for stranger in heard:
        stranger.close()
    return all(r in wires.sockets for r in others)


def _listened(caller: socket.socket, heard: dict[socket.socket, bytes]) -> bool:
    """Read more of what a caller says; whether that is all there will be of it."""
    try:
        some = caller.recv(_HELLO.size - len(heard[caller]))
    except BlockingIOError:
        return False
    except OSError:
        some = b""
    heard[caller] += some
    return not some or len(heard[caller]) == _HELLO.size
