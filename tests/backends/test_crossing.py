"""Between torch and CuPy on one GPU, with stand-ins that tell which stream was asked for: no GPU needed."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from contrastile.backends import crossing


@pytest.mark.parametrize(("pointer", "expected"), [(0, "default stream of 1"), (0x7F00, "stream at 32512 on 1")])
def test_torch_works_on_the_stream_that_cupy_works_on(pointer: int, expected: str) -> None:
    used: list[Any] = []

    def stream(x: Any) -> Any:
        used.append(x)
        return nullcontext()

    torch = SimpleNamespace(
        cuda=SimpleNamespace(
            stream=stream,
            # as torch does: a pointer of 0 is no pointer
            ExternalStream=lambda at, device: f"stream at {at} on {device}" if at else "any stream of the pool",
            default_stream=lambda device: f"default stream of {device}",
        )
    )
    current = SimpleNamespace(ptr=pointer)
    cupy = SimpleNamespace(cuda=SimpleNamespace(Device=nullcontext, get_current_stream=lambda device: current))
    with crossing.torch_for_cupy(SimpleNamespace(device=SimpleNamespace(id=1)), torch, cupy):
        pass
    assert used == [expected]
