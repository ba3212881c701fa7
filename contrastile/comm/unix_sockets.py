"""Unix sockets between the ranks of one host, for the frames that the ranks compare before each phase of a call.

An engine's messages on the host are made for arrays: threads of its own carry them, and waking these takes longer than
a frame travels. Ranks on several hosts use the engine. The sockets save 5 to 21 % of a gather of 256 pairs per rank on
two CPU cores (``benchmarks/NOTES.md``, 2026-11-22).
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

from contrastile.comm.watchdog import PeerTimeout

_GREETING = struct.Struct("<16sq")
_BACKLOG = 128
_LONGEST_POLL = 10**9
"""Milliseconds; ``poll`` takes no more than 2^31."""
_SPIN = 1e-3
"""Seconds in which a rank polls: usually all are there by then, and a sleeping thread wakes slowly."""


_yield: Callable[[], None] = getattr(os, "sched_yield", lambda: time.sleep(0))


def host() -> str:
    """A name of this host, unique where several share a host name."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return f"{socket.gethostname()} {boot.read_text(encoding='ascii').strip() if boot.exists() else ''}"


@dataclass(slots=True, eq=False)
class UnixSockets:
    """A socket to each other rank.

    Attributes:
        rank: this rank's number.
        sockets: by rank, connected.
    """

    rank: int
    sockets: dict[int, socket.socket]

    def all_gather(self, own: bytes, seconds: float) -> list[bytes]:
        """Everybody's frame, by rank; all are of one size.

        Raises:
            PeerTimeout: a rank is gone, or did not answer in time.
        """
        for rank, connection in self.sockets.items():
            try:
                # it fits: a frame is far smaller than a socket's buffer, and the one before it has been answered
                connection.sendall(own)
            except OSError as error:
                raise _unreachable(rank, error) from error
        arrived = {self.rank: own, **self._received(len(own), seconds)}
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
                    raise PeerTimeout([rank], "cannot be reached (connection closed)")
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
            raise PeerTimeout(sorted(lacking), "did not answer")
        if waited < _SPIN:
            # other ranks may share this core; a sleep of no length lasts tens of microseconds on some hosts
            _yield()
            return
        _readable([self.sockets[rank] for rank in lacking], seconds - waited)

    def close(self) -> None:
        """Close all of them."""
        for connection in self.sockets.values():
            connection.close()


def _readable(sockets: Sequence[socket.socket], seconds: float) -> None:
    """Wait until one of them can be read, or for so long."""
    poll = select.poll()
    for each in sockets:
        poll.register(each, select.POLLIN)
    poll.poll(min(1e3 * seconds + 1, _LONGEST_POLL))


def _unreachable(rank: int, error: OSError) -> PeerTimeout:
    return PeerTimeout([rank], f"cannot be reached ({error.strerror})")


def connect(rank: int, size: int, tell: Callable[[str, str], Sequence[str]], seconds: float) -> UnixSockets | None:
    """Sockets between all ranks; None on every rank where some cannot reach each other.

    Args:
        rank: this rank's number.
        size: the number of ranks.
        tell: everybody's text under a key, by rank; all ranks call it with the same keys.
        seconds: how long a rank waits for the others to connect, and to be accepted itself.
    """
    connections = UnixSockets(rank, {})
    with ExitStack() as until_connected:
        place = listening = None
        # only ranks of this group learn it
        token = secrets.token_bytes(16)
        with suppress(OSError, AttributeError):
            place, listening = _listening(until_connected)
        told = tell("addresses", json.dumps([host(), place, token.hex()] if place else []))
        places = [json.loads(each) for each in told]
        reached = all(places) and len({each[0] for each in places}) == 1
        if reached:
            lower = [(address, bytes.fromhex(secret)) for _, address, secret in places[:rank]]
            reached = _connected(connections, lower, seconds)
        if all(each == "yes" for each in tell("connected", "yes" if reached else "no")):
            # every rank that will connect has connected
            assert listening is not None
            accepted = _accepted(connections, listening, range(rank + 1, size), token, seconds)
            if all(each == "yes" for each in tell("accepted", "yes" if accepted else "no")):
                return connections
    connections.close()
    return None


def _listening(until_connected: ExitStack) -> tuple[str, socket.socket]:
    """An address that the others can connect to, in a folder that only this user can read."""
    folder = until_connected.enter_context(tempfile.TemporaryDirectory(prefix="contrastile-"))
    place = str(Path(folder, "socket"))
    listening = until_connected.enter_context(socket.socket(socket.AF_UNIX))
    listening.bind(place)
    listening.listen(_BACKLOG)
    return place, listening


def _connected(connections: UnixSockets, places: Sequence[tuple[str, bytes]], seconds: float) -> bool:
    """Connect to the ranks of lower numbers; whether they could be reached."""
    with suppress(OSError):
        for other, (place, token) in enumerate(places):
            connection = connections.sockets[other] = socket.socket(socket.AF_UNIX)
            connection.settimeout(min(seconds, _LONGEST_POLL / 1e3))
            connection.connect(place)
            connection.sendall(_GREETING.pack(token, connections.rank))
            connection.setblocking(False)
        return True
    return False


def _accepted(
    connections: UnixSockets, listening: socket.socket, others: Sequence[int], token: bytes, seconds: float
) -> bool:
    """Accept these ranks and nobody else; whether all have connected in time."""
    end = time.monotonic() + seconds
    heard: dict[socket.socket, bytes] = {}
    listening.setblocking(False)
    while lacking := [r for r in others if r not in connections.sockets]:
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
            secret, rank = _GREETING.unpack(heard.pop(caller).ljust(_GREETING.size, b"\0"))
            if hmac.compare_digest(secret, token) and rank in lacking and rank not in connections.sockets:
                connections.sockets[rank] = caller
            else:
                caller.close()
    for stranger in heard:
        stranger.close()
    return all(r in connections.sockets for r in others)


def _listened(caller: socket.socket, heard: dict[socket.socket, bytes]) -> bool:
    """Read more of a caller's greeting; whether nothing more will come."""
    try:
        some = caller.recv(_GREETING.size - len(heard[caller]))
    except BlockingIOError:
        return False
    except OSError:
        some = b""
    heard[caller] += some
    return not some or len(heard[caller]) == _GREETING.size
