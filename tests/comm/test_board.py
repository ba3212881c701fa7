"""Frames through memory that processes share; here threads stand for them."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from contrastile.comm import board
from contrastile.comm.board import Board
from contrastile.comm.watchdog import PeerTimeout


def among(size: int, program: Callable[[int, Board | None], Any]) -> list[Any]:
    """What a program gives on each of so many threads, each a rank with its board."""
    told, met = [""] * size, threading.Barrier(size)

    def rank(number: int) -> Any:
        def tell(text: str) -> list[str]:
            told[number] = text
            met.wait()
            found = list(told)
            met.wait()
            return found

        return program(number, board.opened(number, size, tell))

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(rank, range(size)))


def test_every_rank_reads_every_frame() -> None:
    def program(rank: int, held: Board | None) -> list[list[bytes]]:
        assert held is not None
        return [held.gather(bytes([turn, rank]) * 100, 60) for turn in range(200)]

    expected = [[bytes([turn, rank]) * 100 for rank in range(3)] for turn in range(200)]
    assert among(3, program) == [expected] * 3


def pair(*processes: int) -> tuple[Board, Board]:
    """Two ranks of this process, of which the caller says in which processes they are."""
    memory = board.mmap.mmap(-1, 4096)
    return Board(0, processes, memory), Board(1, processes, memory)


def test_who_writes_no_frame_is_named() -> None:
    mine, _ = pair(os.getpid(), os.getpid())
    with pytest.raises(PeerTimeout, match="did not answer") as found:
        mine.gather(b"frame", 0.2)
    assert found.value.ranks == (1,)


def test_a_process_that_has_ended_is_named_at_once_unless_its_frame_is_there() -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    mine, other = pair(os.getpid(), ended.pid)
    with pytest.raises(PeerTimeout, match="did not answer"):
        other.gather(b"first", 0.0)
    assert mine.gather(b"other", 60) == [b"other", b"first"]
    start = time.monotonic()
    with pytest.raises(PeerTimeout, match="process has ended") as found:
        mine.gather(b"frame", 60)
    assert found.value.ranks == (1,)
    assert time.monotonic() - start < 30


def test_a_frame_is_read_when_all_of_it_is_there() -> None:
    mine, other = pair(os.getpid(), os.getpid())
    with pytest.raises(PeerTimeout):
        other.gather(b"frame", 0.0)
    at = other._place(1) + board._HEAD.size
    mine._memory[at : at + 1] = b"g"
    with pytest.raises(PeerTimeout):
        mine.gather(b"frame", 0.1)


def test_no_memory_to_share_is_no_board(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    taken, unlink = [], os.unlink
    monkeypatch.setattr(board.os, "unlink", lambda name: (taken.append(os.stat(name).st_blocks), unlink(name)))
    assert among(1, lambda rank, held: held) != [None]
    # what is merely reserved may not be there when it is written: that ends the process
    assert taken > [0]
    monkeypatch.setattr(board, "_MEMORY", f"{tmp_path}/none")
    assert among(2, lambda rank, held: held) == [None, None]
