"""Features, steps, CUDA graphs, bits and memory, for tests on a GPU."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any


def unit_features(count: int, rows: int, width: int, dtype: str = "bfloat16", seed: int = 0) -> list[Any]:
    """Torch matrices with unit rows on the GPU."""
    import torch

    generator = torch.Generator("cuda").manual_seed(seed)
    matrices = (torch.randn(rows, width, generator=generator, device="cuda") for _ in range(count))
    return [torch.nn.functional.normalize(x, dim=1).to(getattr(torch, dtype)) for x in matrices]


def value_and_gradients(loss: Callable[..., Any], leaves: list[Any], upstream: float = 1, **options: Any) -> list[Any]:
    """The loss, and the gradients of the leaves."""
    import torch

    value = loss(*leaves, **options)
    return [value.detach(), *torch.autograd.grad(upstream * value, leaves)]


def bits(arrays: Iterable[Any]) -> list[bytes]:
    """The bytes of arrays of torch or CuPy, converted to float32."""
    hosts = (x.detach().float().cpu().numpy() if hasattr(x, "cpu") else x.astype("float32").get() for x in arrays)
    return [x.tobytes() for x in hosts]


def capture(call: Callable[[], list[Any]]) -> tuple[Any, list[Any]]:
    """Capture a call in a CUDA graph, after a first call that loads kernels; return the graph and its outputs."""
    import torch

    side: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = call()
    return graph, outputs


def falls_to(allocated: int, seconds: float = 600.0) -> bool:
    """Whether torch's memory falls to this size in time; the thread of a backward pass may free tensors late."""
    import torch

    end = time.monotonic() + seconds
    while torch.cuda.memory_allocated() > allocated and time.monotonic() < end:
        time.sleep(0.01)
    return torch.cuda.memory_allocated() <= allocated
