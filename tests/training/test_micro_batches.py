"""Micro-batch streaming: chunks are views of a batch, and copied one ahead."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from contrastile import training
from contrastile.training import chunks
from contrastile.training.stream import Loaded

DOUBLE = torch.float64


def test_a_budget_smaller_than_a_sample_takes_one_at_a_time() -> None:
    batch = {"ids": torch.zeros(10, 7, dtype=torch.int64), "length": torch.ones(10)}
    # no budget is too small for one sample
    assert len(training.stream(batch, training.Budget(3), "cpu")) == 10
    assert chunks.Sliced(torch.ones(5), training.Budget(2)).count == 3


def test_chunks_are_views_and_keep_their_types() -> None:
    class Encoding(dict[str, Any]):
        pass

    x = torch.arange(6)
    batch = Encoding(a=x, b=(x, [x]), flag=True, name="n", none=None, number=torch.tensor(3.0))
    first, second = chunks.Sliced(batch, 4)
    assert type(first) is Encoding
    assert type(first["b"]) is tuple
    assert type(first["b"][1]) is list
    assert first["a"].data_ptr() == x.data_ptr()
    assert second["b"][1][0].tolist() == [4, 5]
    assert (second["flag"], second["name"], second["none"], second["number"]) == (True, "n", None, batch["number"])


class Timeline:
    """CUDA's streams and events as far as streaming uses them, in the order of their use."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list[str] = []
        self.events = 0
        empty = torch.empty

        def unpinned(*shape: Any, pin_memory: bool = False, **settings: Any) -> Tensor:
            assert pin_memory
            self.log.append("pin")
            return empty(*shape, **settings)

        monkeypatch.setattr(torch, "empty", unpinned)
        monkeypatch.setattr(torch.cuda, "Stream", lambda device: self)
        monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: self)
        monkeypatch.setattr(torch.Tensor, "record_stream", lambda x, stream: self.log.append("hold"))

    def record_event(self) -> Any:
        number, self.events = self.events, self.events + 1
        self.log.append(f"send {number}")

        class Event:
            name = number

            def synchronize(event) -> None:  # noqa: N805
                self.log.append(f"sent {event.name}")

        return Event()

    def wait_event(self, event: Any) -> None:
        self.log.append(f"wait {event.name}")


def test_chunks_are_copied_one_ahead_through_two_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    timeline = Timeline(monkeypatch)
    x = torch.arange(14)
    # the copy to "the device" copies, as one between devices does
    monkeypatch.setattr(torch.Tensor, "to", lambda x, *_, **__: x.clone())
    loaded = Loaded({"x": x}, 4, torch.device("cpu"))
    seen = []
    for chunk in loaded._ahead():
        seen.append(chunk["x"])
        timeline.log.append("work")
    assert [part.tolist() for part in seen] == [part.tolist() for part in x.split(4)]
    assert timeline.log == [
        *["pin", "send 0", "pin", "send 1", "wait 0", "hold", "work"],
        # a buffer is written again once its copy is done, and the work of a chunk waits for its own copy alone
        *["sent 0", "send 2", "wait 1", "hold", "work"],
        *["sent 1", "send 3", "wait 2", "hold", "work"],
        *["wait 3", "hold", "work"],
    ]
