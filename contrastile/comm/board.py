"""Frames between the ranks of one host, through shared memory: no thread of an engine has to wake for one.

Each rank has two slots and writes them in turn. A rank writes its next frame only after it has read everybody's last
one, so that no slot is overwritten before all have read it.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
import tempfile
import time
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from contrastile.comm import watchdog
from contrastile.comm.watchdog import PeerTimeout

_MEMORY = Path("/dev/shm")
_SLOT, _HEAD = 256, struct.Struct("<qqq")
ROOM = _SLOT - _HEAD.size
"""The most bytes of a frame."""
_LIVING = 0.05
"""Seconds between two looks for processes that have ended."""


class Board:
    """Memory that the ranks of one host, of these processes, share."""

    def __init__(self, rank: int, processes: Sequence[int], memory: mmap.mmap) -> None:
        self._rank, self._processes, self._memory, self._turn = rank, processes, memory, 0

    def gather(self, own: bytes, seconds: float) -> list[bytes]:
        """Every rank's bytes, of one length, ``ROOM`` at most.

        Raises:
            PeerTimeout: a rank's process has ended, or it did not answer in time.
        """
        self._turn += 1
        at = self._place(self._rank)
        self._memory[at : at + _HEAD.size + len(own)] = _HEAD.pack(self._turn, len(own), self._sum(own)) + own
        found: list[bytes | None] = [None] * len(self._processes)
        look = time.monotonic() + _LIVING

        def arrived() -> bool:
            nonlocal look
            for rank, frame in enumerate(found):
                if frame is None:
                    found[rank] = self._read(rank)
            if None in found and time.monotonic() > look:
                look = time.monotonic() + _LIVING
                ended = [r for r, x in enumerate(found) if x is None and not _lives(self._processes[r])]
                # it may have written its frame, and ended then
                if lost := [r for r in ended if self._read(r) is None]:
                    raise PeerTimeout(lost, "cannot be reached (its process has ended)")
            return None not in found

        if not watchdog.until(arrived, seconds):
            raise PeerTimeout([r for r, x in enumerate(found) if x is None], "did not answer")
        return [x for x in found if x is not None]

    def _place(self, rank: int) -> int:
        return _SLOT * (2 * rank + self._turn % 2)

    def _sum(self, frame: bytes) -> int:
        return zlib.crc32(frame, self._turn & 0xFFFFFFFF)

    def _read(self, rank: int) -> bytes | None:
        """A rank's frame of this turn; None until all of it is there, in whatever order a processor shows writes."""
        at = self._place(rank)
        turn, size, expected = _HEAD.unpack_from(self._memory, at)
        if turn != self._turn:
            return None
        frame = self._memory[at + _HEAD.size : at + _HEAD.size + min(size, ROOM)]
        return frame if self._sum(frame) == expected else None


def opened(rank: int, size: int, tell: Callable[[str], Sequence[str]]) -> Board | None:
    """The board of these ranks; None where one of them cannot share memory with the others, or see their processes.

    Every rank calls this at the same place. ``tell`` gives every rank's text, by rank.
    """
    name = ""
    with suppress(OSError):
        if rank == 0:
            number, name = tempfile.mkstemp(prefix="contrastile-", dir=_MEMORY)
            with open(number, "wb") as file:
                # written to: where the place is full, touching memory that is merely reserved would end the process
                file.write(bytes(2 * _SLOT * size))
    told = [json.loads(text) for text in tell(json.dumps([name, os.getpid()]))]
    place, processes, memory = told[0][0], [process for _, process in told], None
    with suppress(OSError, ValueError), open(place, "r+b") as file:
        memory = mmap.mmap(file.fileno(), 2 * _SLOT * size)
    able = tell("able" if memory is not None and all(map(_lives, processes)) else "")
    if name:
        # the memory lasts as long as somebody has it open
        os.unlink(name)
    return Board(rank, processes, memory) if memory is not None and all(able) else None


def _lives(process: int) -> bool:
    try:
        os.kill(process, 0)
    except OSError as error:
        return isinstance(error, PermissionError)
    return True
