"""Steps in CUDA graphs, and the memory that steps leave, for tests on a GPU."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any


def captured(call: Callable[[], list[Any]]) -> tuple[Any, list[Any]]:
    """A graph of a call, and where it leaves its results; what a first call loads is loaded before."""
    # asked for by tests of a GPU alone
    import torch

    side: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = call()
    return graph, found


def comes_down_to(allocated: int, seconds: float = 600.0) -> bool:
    """Whether torch's memory does: the thread of a backward pass may let go of it after its caller went on."""
    import torch

    end = time.monotonic() + seconds
    while torch.cuda.memory_allocated() > allocated and time.monotonic() < end:
        time.sleep(0.01)
    return torch.cuda.memory_allocated() <= allocated
