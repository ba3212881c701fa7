"""Sockets between ranks: records arrive whole and in order, and what is wrong with a rank is said of that rank."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest

from contrastile.exchange import wires
from contrastile.exchange.watch import Silence
from contrastile.exchange.wires import Wires

T = TypeVar("T")


class Told:
    """What ranks tell each other about a matter; here each is a thread."""

    def __init__(self, size: int) -> None:
        self.size, self.matters, self.meeting = size, dict[str, dict[int, str]](), threading.Barrier(size)

    def by(self, rank: int) -> Callable[[str, str], list[str]]:
        def tell(matter: str, text: str) -> list[str]:
            self.matters.setdefault(matter, {})[rank] = text
            self.meeting.wait(20)
            return [self.matters[matter][r] for r in range(self.size)]

        return tell


def on_every_rank(size: int, program: Callable[[int], T]) -> list[T]:
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(program, range(size)))


def connected(size: int) -> list[Wires]:
    told = Told(size)
    found = on_every_rank(size, lambda rank: wires.connect(rank, size, told.by(rank)))
    assert all(found)
    return found  # type: ignore[return-value]


def hung_up(all_wires: list[Wires]) -> None:
    for each in all_wires:
        each.close()


def record(rank: int, turn: int, k: int = 11) -> Any:
    return np.arange(k, dtype=np.int64) - 2**62 + 100 * rank + 1000 * turn


@pytest.mark.parametrize("size", [2, 3, 5])
def test_every_rank_has_everybodys_records_in_their_order(size: int) -> None:
    there = connected(size)

    def program(rank: int) -> bool:
        same = True
        for turn in range(40):
            if turn % size == rank:
                # each is the last one once
                time.sleep(0.002)
            k = 1 + turn % 11
            everyone = np.full((size, k), -1, dtype=np.int64)
            there[rank].exchange(record(rank, turn, k), everyone, 20.0)
            same &= everyone.tolist() == [record(r, turn, k).tolist() for r in range(size)]
        return same

    assert on_every_rank(size, program) == [True] * size
    hung_up(there)


def exchanged(each: Wires, seconds: float = 20.0, k: int = 3) -> str:
    """What the exchange said, or "nothing"."""
    try:
        each.exchange(record(each.rank, 0, k), np.zeros((3, k), dtype=np.int64), seconds)
    except Silence as silence:
        return f"{list(silence.ranks)} {silence.how}"
    return "nothing"


def test_a_rank_that_says_nothing_is_named_in_time() -> None:
    there = connected(3)
    start = time.monotonic()
    said = on_every_rank(2, lambda i: exchanged(there[(0, 2)[i]], 1.0))
    assert said == ["[1] did not answer"] * 2
    assert 1.0 <= time.monotonic() - start < 2.5
    hung_up(there)


def test_a_rank_that_is_gone_is_named_at_once() -> None:
    there = connected(3)
    there[1].close()
    start = time.monotonic()
    said = on_every_rank(2, lambda i: exchanged(there[(0, 2)[i]]))
    assert all(text.startswith("[1] cannot be reached (") for text in said)
    assert time.monotonic() - start < 5
    hung_up(there)


def test_a_rank_that_leaves_while_others_wait_for_it_is_named_at_once() -> None:
    there = connected(3)
    start = time.monotonic()
    leaves = threading.Timer(0.2, there[1].close)
    leaves.start()
    said = on_every_rank(2, lambda i: exchanged(there[(0, 2)[i]]))
    # what it left unread may make it a connection that was reset
    assert all(text.startswith("[1] cannot be reached (") for text in said)
    assert 0.2 <= time.monotonic() - start < 5
    leaves.join()
    hung_up(there)


def test_a_rank_that_makes_another_call_is_named() -> None:
    there = connected(3)
    said = on_every_rank(3, lambda rank: exchanged(there[rank], 2.0, k=3 if rank != 1 else 2))
    assert said[0] == said[2] == "[1] made another call"
    assert said[1] in ("[0] made another call", "[2] made another call")
    hung_up(there)


@pytest.mark.parametrize("why", ["several hosts", "no sockets", "out of reach"])
def test_without_a_way_between_them_no_rank_has_wires(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    size, told = 3, Told(3)
    if why == "several hosts":
        hosts = iter("abb")
        monkeypatch.setattr(wires, "host", lambda: next(hosts))
    elif why == "no sockets":
        monkeypatch.delattr(wires.socket, "AF_UNIX")

    def tell(rank: int) -> Callable[[str, str], list[str]]:
        def with_a_defect(matter: str, text: str) -> list[str]:
            found = told.by(rank)(matter, text)
            return [str(Path(x).with_name("gone")) for x in found] if (why, rank) == ("out of reach", 2) else found

        return with_a_defect

    assert on_every_rank(size, lambda rank: wires.connect(rank, size, tell(rank))) == [None] * size


def test_nothing_is_left_in_the_folder_for_temporary_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wires.tempfile, "tempdir", str(tmp_path))
    there = connected(3)
    assert not list(tmp_path.iterdir())
    assert exchanged(there[0], 0.05) == "[1, 2] did not answer"
    hung_up(there)
