"""NCCL's calls, made to a library that is made up: what is passed, in which order, and what an error becomes."""

from __future__ import annotations

import ctypes
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from made_libraries import Made

from contrastile.comm import nccl
from contrastile.comm.driver import Gpu
from contrastile.comm.nccl import NCCL, NCCLChannel, NCCLError
from contrastile.comm.watchdog import Watchdog


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Made]:
    def make(**facts: Any) -> Made:
        library = Made(**facts)
        monkeypatch.setattr(ctypes, "CDLL", lambda name: library)
        monkeypatch.setattr(nccl, "find_spec", lambda name: None)
        monkeypatch.setattr(Gpu, "current", lambda self, x: 7)
        monkeypatch.setattr(Gpu, "address", lambda self, x: int(x.ctypes.data))
        return library

    return make


def channel() -> NCCLChannel:
    return NCCLChannel(NCCL(), 4096, Gpu(0), 9, Watchdog(lambda: 60.0))


def test_without_the_library_or_a_call_it_says_so(made: Callable[..., Made], monkeypatch: pytest.MonkeyPatch) -> None:
    made(lacks="ncclSend")
    with pytest.raises(NCCLError, match="no NCCL: ncclSend"):
        NCCL()

    def missing(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    with pytest.raises(NCCLError, match=r"no NCCL: libnccl.so.2: cannot open"):
        NCCL()


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
    monkeypatch.setattr(nccl, "host", lambda: "host")
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


def test_a_message_is_one_group_behind_the_current_stream_and_receives_come_first(made: Callable[..., Made]) -> None:
    library = made()
    sending = channel()
    x, y, z = np.zeros(5), np.zeros(3, dtype=np.float32), np.zeros((2, 2))
    pending = sending.post({1: [x, y]}, {3: [z]}, 0, lambda: 1.0)
    names = "ncclGroupStart", "ncclRecv", "ncclSend", "ncclGroupEnd", "cuEventRecord", "cuStreamWaitEvent"
    assert library.named(*names) == [
        "cuEventRecord",
        "cuStreamWaitEvent",
        "ncclGroupStart",
        "ncclRecv",
        "ncclSend",
        "ncclSend",
        "ncclGroupEnd",
        "cuEventRecord",
    ]
    passed = [given for name, given in library.calls if name in ("ncclRecv", "ncclSend")]
    assert passed == [
        [z.ctypes.data, 32, 1, 3, 4096, 9],
        [x.ctypes.data, 40, 1, 1, 4096, 9],
        [y.ctypes.data, 12, 1, 1, 4096, 9],
    ]
    recorded = [given for name, given in library.calls if name == "cuEventRecord"]
    assert recorded == [[101, 7], [102, 9]]
    library.calls.clear()
    pending.wait()
    # the current stream waits for the end of the message, and the host for nothing
    assert [given[:2] for name, given in library.calls if name == "cuStreamWaitEvent"] == [[7, 102]]
    assert not library.named("cuEventQuery")
    sending.close()
    assert library.named("ncclCommAbort") == ["ncclCommAbort"]


def test_a_message_that_fails_is_an_error_and_its_group_is_closed(made: Callable[..., Made]) -> None:
    library = made(ncclSend=2)
    sending = channel()
    with pytest.raises(NCCLError, match="a message: unhandled system error"):
        sending.post({1: [np.zeros(5)]}, {}, 0, lambda: 1.0)
    assert library.named("ncclGroupEnd")
    sending.watchdog.close()


def test_a_message_is_watched_before_it_is_queued(made: Callable[..., Made], monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks that meet for the first time wait for each other in the call itself."""
    library = made()
    sending = channel()
    seen: list[int] = []

    def noted(self: Watchdog, message: Any) -> None:
        seen.append(len(library.named("ncclGroupEnd")))
        assert not message.done()

    monkeypatch.setattr(Watchdog, "add", noted)
    sending.post({1: [np.zeros(5)]}, {}, 0, lambda: 1.0)
    assert seen == [0]
    sending.watchdog.close()


def test_a_captured_message_is_not_watched_and_its_communicator_is_left_to_the_graph(
    made: Callable[..., Made],
) -> None:
    library = made(capturing=True)
    sending = channel()
    pending = sending.post({1: [np.zeros(5)]}, {}, 0, lambda: 1.0)
    pending.wait()
    assert not sending.watchdog._in_flight
    assert not library.named("cuEventQuery")
    sending.close()
    assert not library.named("ncclCommAbort")
