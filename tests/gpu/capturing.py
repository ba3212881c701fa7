"""Features, steps, also in CUDA graphs, bits, and the memory that steps leave, for tests on a GPU."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any


def unit_features(count: int, rows: int, width: int, dtype: str = "bfloat16", seed: int = 0) -> list[Any]:
    """Matrices of unit rows on the GPU, of torch."""
    import torch

    draw = torch.Generator("cuda").manual_seed(seed)
    drawn = (torch.randn(rows, width, generator=draw, device="cuda") for _ in range(count))
    return [torch.nn.functional.normalize(x, dim=1).to(getattr(torch, dtype)) for x in drawn]


def stepped(loss: Callable[..., Any], leaves: list[Any], upstream: float = 1.0, **how: Any) -> list[Any]:
    """The value, and the gradients of the leaves."""
    import torch

    value = loss(*leaves, **how)
    return [value.detach(), *torch.autograd.grad(upstream * value, leaves)]


def bits(xs: Iterable[Any]) -> list[bytes]:
    """What arrays of torch or CuPy hold, as float32."""
    hosts = (x.detach().float().cpu().numpy() if hasattr(x, "cpu") else x.astype("float32").get() for x in xs)
    return [x.tobytes() for x in hosts]


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
