"""Frames between the ranks of one host, through shared memory, so that no frame has to wake a thread of an engine.

Each rank has two slots and writes them in turn. A rank writes its next frame only after it has read all ranks' last
frames, so no slot is overwritten before all ranks have read it.
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
"""Seconds between two checks for processes that have ended."""


class Board:
    """Memory that the ranks of one host share; ``processes`` are their process ids."""

    def __init__(self, rank: int, processes: Sequence[int], memory: mmap.mmap) -> None:
        self._rank, self._processes, self._memory, self._turn = rank, processes, memory, 0

    def gather(self, own: bytes, seconds: float) -> list[bytes]:
        """All ranks' bytes, of the same length, at most ``ROOM``.

        Raises:
            PeerTimeout: a rank's process has ended, or it did not answer in time.
        """
        self._turn += 1
        start = self._offset(self._rank)
        self._memory[start : start + _HEAD.size + len(own)] = _HEAD.pack(self._turn, len(own), self._crc(own)) + own
        frames: list[bytes | None] = [None] * len(self._processes)
        next_check = time.monotonic() + _LIVING

        def has_arrived() -> bool:
            nonlocal next_check
            for rank, frame in enumerate(frames):
                if frame is None:
                    frames[rank] = self._read(rank)
            if None in frames and time.monotonic() > next_check:
                next_check = time.monotonic() + _LIVING
                ended = [r for r, frame in enumerate(frames) if frame is None and not _lives(self._processes[r])]
                # a process may have written its frame before it ended
                if lost := [r for r in ended if self._read(r) is None]:
                    raise PeerTimeout(lost, "cannot be reached (its process has ended)")
            return None not in frames

        if not watchdog.until(has_arrived, seconds):
            raise PeerTimeout([r for r, frame in enumerate(frames) if frame is None], "did not answer")
        return [frame for frame in frames if frame is not None]

    def _offset(self, rank: int) -> int:
        return _SLOT * (2 * rank + self._turn % 2)

    def _crc(self, frame: bytes) -> int:
        return zlib.crc32(frame, self._turn & 0xFFFFFFFF)

    def _read(self, rank: int) -> bytes | None:
        """A rank's frame of this turn, or None until it is complete; the checksum detects writes in another order."""
        start = self._offset(rank)
        turn, size, checksum = _HEAD.unpack_from(self._memory, start)
        if turn != self._turn:
            return None
        frame = self._memory[start + _HEAD.size : start + _HEAD.size + min(size, ROOM)]
        return frame if self._crc(frame) == checksum else None


def opened(rank: int, size: int, tell: Callable[[str], Sequence[str]]) -> Board | None:
    """The board of the ranks; None if a rank cannot share memory with the others, or cannot see their processes.

    Every rank must call this at the same point. ``tell`` returns all ranks' texts, by rank.
    """
    name = ""
    with suppress(OSError):
        if rank == 0:
            descriptor, name = tempfile.mkstemp(prefix="contrastile-", dir=_MEMORY)
            with open(descriptor, "wb") as file:
                # write all bytes: if the file system is full, touching reserved memory would end the process
                file.write(bytes(2 * _SLOT * size))
    answers = [json.loads(text) for text in tell(json.dumps([name, os.getpid()]))]
    path, processes, memory = answers[0][0], [process for _, process in answers], None
    with suppress(OSError, ValueError), open(path, "r+b") as file:
        memory = mmap.mmap(file.fileno(), 2 * _SLOT * size)
    able = tell("able" if memory is not None and all(map(_lives, processes)) else "")
    if name:
        # the memory lasts as long as a process has it open
        os.unlink(name)
    return Board(rank, processes, memory) if memory is not None and all(able) else None


def _lives(process: int) -> bool:
    try:
        os.kill(process, 0)
    except OSError as error:
        return isinstance(error, PermissionError)
    return True
