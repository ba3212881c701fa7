"""Which ranks use NCCL, and when the watchdog sees a message, with stand-ins for CUDA's driver and NCCL.

contrastile/verify/calls.txt tests the messages of the errors. Ranks on GPUs test the real driver and NCCL.
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


class Library:
    """A stand-in for CUDA's driver and for NCCL; every call succeeds."""

    def __init__(self, missing: str = "") -> None:
        self.missing = missing
        self.calls: list[tuple[str, list[Any]]] = []
        self.functions: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        if name == self.missing:
            raise AttributeError(name)

        def call(*arguments: Any) -> int:
            self.calls.append((name, [getattr(x, "value", x) for x in arguments]))
            return 0

        # callers set attributes of a function, so each name keeps its function
        return self.functions.setdefault(name, call)


@pytest.fixture
def make_library(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Library]:
    def make(**options: Any) -> Library:
        library = Library(**options)
        monkeypatch.setattr(ctypes, "CDLL", lambda name: library)
        monkeypatch.setattr(nccl, "find_spec", lambda name: None)
        return library

    return make


@dataclass
class Pair:
    """The second of two ranks; ``first`` is what the first rank tells."""

    first: list[str]
    rank: int = 1
    size: int = 2
    deadline: float = 60.0
    told: list[str] = field(default_factory=list)

    def tell(self, text: str) -> list[str]:
        self.told.append(text)
        return [json.dumps(self.first), text]


@pytest.mark.parametrize(
    ("first", "missing", "is_used"),
    [
        (["host", "0000:01:00.0", "ab" * 128], "", True),
        (["host", "0000:02:00.0", "ab" * 128], "", False),
        (["other host", "0000:02:00.0", "ab" * 128], "", True),
        (["host", "", ""], "", False),
        (["host", "0000:01:00.0", "ab" * 128], "ncclSend", False),
    ],
    ids=["two GPUs", "one GPU", "two hosts", "the first lacks it", "this one lacks it"],
)
def test_all_ranks_need_nccl_and_a_gpu_each(
    first: list[str], missing: str, is_used: bool, make_library: Callable[..., Library], monkeypatch: pytest.MonkeyPatch
) -> None:
    library = make_library(missing=missing)
    monkeypatch.setattr(nccl, "host_name", lambda: "host")
    monkeypatch.setattr(Gpu, "place", lambda self: "0000:02:00.0")
    monkeypatch.setattr(nccl, "library_of", lambda x: SimpleNamespace(place=lambda x: "cuda:3"))
    pair = Pair(first)
    channel = nccl.channel(pair, np.zeros(1))  # type: ignore[arg-type]
    assert (channel is not None) == is_used
    assert json.loads(pair.told[0]) == ["host", "" if missing else "0000:02:00.0", ""]
    (call,) = [arguments for name, arguments in library.calls if name == "ncclCommInitRank"] or [None]
    assert (call is not None) == is_used
    if call is not None:
        assert (call[1], bytes(call[2].content), call[3]) == (2, bytes([0xAB] * 128), 1)
    if channel is not None:
        assert channel.name == "nccl"
        channel.close()


def test_a_message_is_watched_before_it_is_queued(
    make_library: Callable[..., Library], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two ranks wait for each other within the call that sends their first message."""
    library = make_library()
    channel = NCCLChannel(NCCL(), 4096, Gpu(0), 9, Watchdog(lambda: 60.0))
    calls_before: list[int] = []

    def record(self: Watchdog, message: Any) -> None:
        calls_before.append(sum(name == "ncclGroupEnd" for name, _ in library.calls))
        assert not message.done()

    monkeypatch.setattr(Watchdog, "add", record)
    # arrays of NumPy stand in for those of a GPU
    monkeypatch.setattr(Gpu, "current", lambda self, x: 7)
    monkeypatch.setattr(Gpu, "address", lambda self, x: int(x.ctypes.data))
    channel.post({1: [np.zeros(5)]}, {}, 0, lambda: 1.0)
    assert calls_before == [0]
    channel.watchdog.close()
