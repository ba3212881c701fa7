"""Waiting with an end, on events that are made up, and what a device may not keep secret; whom an error blames, and in
which words: contrastile/verify/calls.txt.

CUDA's driver and NCCL, made up too: which ranks take NCCL, and when a message is watched; what their calls do is held
by ranks on GPUs.
"""

from __future__ import annotations

import ctypes
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from contrastile.comm import nccl
from contrastile.comm.driver import Gpu
from contrastile.comm.nccl import NCCL, NCCLChannel
from contrastile.comm.watchdog import Watchdog


class Made:
    """CUDA's driver and NCCL in one, of which every call succeeds."""

    def __init__(self, lacks: str = "") -> None:
        self.lacks = lacks
        self.calls: list[tuple[str, list[Any]]] = []
        self.made: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        if name == self.lacks:
            raise AttributeError(name)

        def call(*arguments: Any) -> int:
            self.calls.append((name, [getattr(x, "value", x) for x in arguments]))
            return 0

        # a function, of which attributes can be set
        return self.made.setdefault(name, call)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Made]:
    def make(**facts: Any) -> Made:
        library = Made(**facts)
        monkeypatch.setattr(ctypes, "CDLL", lambda name: library)
        monkeypatch.setattr(nccl, "find_spec", lambda name: None)
        return library

    return make


@dataclass
class Pair:
    """Two ranks of whom this is the second; the first says what it is told to."""

    first: list[str]
    rank: int = 1
    size: int = 2
    deadline: float = 60.0
    heard: list[str] = field(default_factory=list)

    def tell(self, text: str) -> list[str]:
        self.heard.append(text)
        return [json.dumps(self.first), text]


@pytest.mark.parametrize(
    ("first", "lacks", "found"),
    [
        (["host", "0000:01:00.0", "ab" * 128], "", True),
        (["host", "0000:02:00.0", "ab" * 128], "", False),
        (["other host", "0000:02:00.0", "ab" * 128], "", True),
        (["host", "", ""], "", False),
        (["host", "0000:01:00.0", "ab" * 128], "ncclSend", False),
    ],
    ids=["two GPUs", "one GPU", "two hosts", "the first lacks it", "this one lacks it"],
)
def test_it_is_for_ranks_that_all_have_it_and_a_gpu_each(
    first: list[str], lacks: str, found: bool, made: Callable[..., Made], monkeypatch: pytest.MonkeyPatch
) -> None:
    library = made(lacks=lacks)
    monkeypatch.setattr(nccl, "host_name", lambda: "host")
    monkeypatch.setattr(Gpu, "place", lambda self: "0000:02:00.0")
    monkeypatch.setattr(nccl, "library_of", lambda x: SimpleNamespace(place=lambda x: "cuda:3"))
    pair = Pair(first)
    channel = nccl.channel(pair, np.zeros(1))  # type: ignore[arg-type]
    assert (channel is not None) == found
    assert json.loads(pair.heard[0]) == ["host", "" if lacks else "0000:02:00.0", ""]
    (calls,) = [given for name, given in library.calls if name == "ncclCommInitRank"] or [None]
    assert (calls is not None) == found
    if calls is not None:
        assert (calls[1], bytes(calls[2].content), calls[3]) == (2, bytes([0xAB] * 128), 1)
    if channel is not None:
        assert channel.name == "nccl"
        channel.close()


def test_a_message_is_watched_before_it_is_queued(made: Callable[..., Made], monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks that meet for the first time wait for each other in the call itself."""
    library = made()
    sending = NCCLChannel(NCCL(), 4096, Gpu(0), 9, Watchdog(lambda: 60.0))
    seen: list[int] = []

    def noted(self: Watchdog, message: Any) -> None:
        seen.append(sum(name == "ncclGroupEnd" for name, _ in library.calls))
        assert not message.done()

    monkeypatch.setattr(Watchdog, "add", noted)
    # arrays of NumPy pass for a GPU's
    monkeypatch.setattr(Gpu, "current", lambda self, x: 7)
    monkeypatch.setattr(Gpu, "address", lambda self, x: int(x.ctypes.data))
    sending.post({1: [np.zeros(5)]}, {}, 0, lambda: 1.0)
    assert seen == [0]
    sending.watchdog.close()
