"""Sockets between ranks: frames arrive whole and in order, and what is wrong with a rank is said of that rank."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import numpy as np
import pytest
from launching import PATIENCE

from contrastile.comm import unix_sockets
from contrastile.comm.unix_sockets import UnixSockets
from contrastile.comm.watchdog import PeerTimeout

T = TypeVar("T")


class Told:
    """What ranks tell each other about a matter; here each is a thread."""

    def __init__(self, size: int) -> None:
        self.size, self.matters, self.meeting = size, dict[str, dict[int, str]](), threading.Barrier(size)

    def by(self, rank: int) -> Callable[[str, str], list[str]]:
        def tell(matter: str, text: str) -> list[str]:
            self.matters.setdefault(matter, {})[rank] = text
            self.meeting.wait(PATIENCE)
            return [self.matters[matter][r] for r in range(self.size)]

        return tell


def on_every_rank(size: int, program: Callable[[int], T]) -> list[T]:
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(program, range(size)))


def connected(size: int) -> list[UnixSockets]:
    told = Told(size)
    found = on_every_rank(size, lambda rank: unix_sockets.connect(rank, size, told.by(rank), PATIENCE))
    assert all(found)
    return found  # type: ignore[return-value]


def close_all(connections: list[UnixSockets]) -> None:
    for each in connections:
        each.close()


def frame(rank: int, turn: int, size: int = 200) -> bytes:
    return np.random.default_rng([rank, turn]).bytes(size)


@pytest.mark.parametrize("size", [2, 3, 5])
def test_every_rank_has_everybodys_frames_in_their_order(size: int) -> None:
    there = connected(size)

    def program(rank: int) -> bool:
        same = True
        for turn in range(40):
            if turn % size == rank:
                # each is the last one once
                time.sleep(0.002)
            found = there[rank].all_gather(frame(rank, turn), PATIENCE)
            same &= found == [frame(r, turn) for r in range(size)]
        return same

    assert on_every_rank(size, program) == [True] * size
    close_all(there)


def exchanged(each: UnixSockets, seconds: float = PATIENCE) -> str:
    """What the exchange said, or "nothing"."""
    try:
        each.all_gather(frame(each.rank, 0), seconds)
    except PeerTimeout as timeout:
        return f"{list(timeout.ranks)} {timeout.how}"
    return "nothing"


def test_a_rank_that_says_nothing_is_named_in_time() -> None:
    there = connected(3)
    start = time.monotonic()
    said = on_every_rank(2, lambda i: exchanged(there[(0, 2)[i]], 1.0))
    assert said == ["[1] did not answer"] * 2
    assert 1.0 <= time.monotonic() - start < PATIENCE
    close_all(there)


def test_a_rank_that_leaves_while_others_wait_for_it_is_named_at_once() -> None:
    there = connected(3)
    leaves = threading.Timer(0.2, there[1].close)
    leaves.start()
    said = on_every_rank(2, lambda i: exchanged(there[(0, 2)[i]]))
    # what it left unread may make it a connection that was reset
    assert all(text.startswith("[1] cannot be reached (") for text in said)
    leaves.join()
    close_all(there)


def stranger(place: str, said: bytes) -> socket.socket:
    """A connection of somebody who is no rank."""
    found = socket.socket(socket.AF_UNIX)
    found.connect(place)
    found.sendall(said)
    return found


GREETINGS = {
    "silent": b"",
    "cut short": b"\0" * 5,
    "another token": unix_sockets._GREETING.pack(b"x" * 16, 2),
    "not of our size": b"GET / HTTP/1.1\r\nHost: here\r\n\r\n",
}


@pytest.mark.parametrize("said", GREETINGS.values(), ids=GREETINGS)
@pytest.mark.parametrize("hangs_up", [False, True])
def test_a_connection_that_is_no_rank_neither_joins_nor_holds_up(said: bytes, hangs_up: bool) -> None:
    size, told = 3, Told(3)
    strangers: list[socket.socket] = []

    def tell(rank: int) -> Callable[[str, str], list[str]]:
        def with_strangers(matter: str, text: str) -> list[str]:
            found = told.by(rank)(matter, text)
            if (matter, rank) == ("addresses", 0):
                # before any rank calls
                for _ in range(4):
                    strangers.append(stranger(json.loads(found[0])[1], said))
                    if hangs_up:
                        strangers[-1].close()
            told.meeting.wait(PATIENCE)
            return found

        return with_strangers

    start = time.monotonic()
    there = on_every_rank(size, lambda rank: unix_sockets.connect(rank, size, tell(rank), PATIENCE))
    assert all(there)
    assert time.monotonic() - start < PATIENCE / 2
    found = on_every_rank(size, lambda rank: there[rank].all_gather(frame(rank, 0), PATIENCE))  # type: ignore[union-attr]
    assert found == [[frame(r, 0) for r in range(size)]] * size
    for each in strangers:
        each.close()
    close_all(there)  # type: ignore[arg-type]


@pytest.mark.parametrize("why", ["several hosts", "no sockets", "out of reach"])
def test_without_a_way_between_them_no_rank_has_sockets(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    size, told = 3, Told(3)
    if why == "several hosts":
        hosts = iter("abb")
        monkeypatch.setattr(unix_sockets, "host", lambda: next(hosts))
    elif why == "no sockets":
        monkeypatch.delattr(unix_sockets.socket, "AF_UNIX")

    def tell(rank: int) -> Callable[[str, str], list[str]]:
        def with_a_defect(matter: str, text: str) -> list[str]:
            found = told.by(rank)(matter, text)
            if (why, matter, rank) != ("out of reach", "addresses", 2):
                return found
            return [json.dumps([here, f"{place} gone", token]) for here, place, token in map(json.loads, found)]

        return with_a_defect

    assert on_every_rank(size, lambda rank: unix_sockets.connect(rank, size, tell(rank), PATIENCE)) == [None] * size


def test_nothing_is_left_in_the_folder_for_temporary_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unix_sockets.tempfile, "tempdir", str(tmp_path))
    there = connected(3)
    assert not list(tmp_path.iterdir())
    assert exchanged(there[0], 0.05) == "[1, 2] did not answer"
    close_all(there)
