"""Training on CUDA: streamed copies, a device's random numbers, float16 with a GradScaler."""

from __future__ import annotations

import functools

import pytest
import torch
from chunked_graphs import graphs_kept, taken, worst
from torch import Tensor, nn

import contrastile
from contrastile import training

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def setting(dtype: torch.dtype = torch.float64) -> tuple[list[nn.Module], list[Tensor]]:
    torch.manual_seed(0)
    nets: list[nn.Module] = [
        nn.Sequential(nn.Linear(6, 9), nn.Dropout(0.5), nn.Linear(9, 8)).to("cuda", dtype) for _ in range(2)
    ]
    return nets, [torch.randn(1001, 6, dtype=dtype) for _ in nets]


@pytest.mark.parametrize("pinned", [False, True])
def test_streamed_inputs_and_replayed_dropout(pinned: bool) -> None:
    nets, inputs = setting()
    parameters = [p for net in nets for p in net.parameters()]
    chunks = [x.cuda().split(64) for x in inputs]
    expected = graphs_kept(nets, chunks, contrastile.clip_loss, [lambda: 3.0], parameters)
    torch.manual_seed(0)
    feeds = tuple(training.stream(x.pin_memory() if pinned else x, 64) for x in inputs)
    value = training.cached_step(nets, feeds, contrastile.clip_loss, scale=3.0)
    assert torch.equal(value, expected.loss)
    assert worst(taken(parameters), expected) <= 1


def test_a_streamed_chunk_is_whole_however_slow_the_work() -> None:
    x = torch.arange(1 << 22, dtype=torch.float32).reshape(1 << 12, 1 << 10)
    ballast = torch.randn(4096, 4096, device="cuda")
    kept = []
    for chunk, _ in training.stream(x, 100):
        for _ in range(20):
            ballast = ballast @ ballast / 4096
        kept.append(chunk.sum(dim=1))
        del chunk
    assert torch.equal(torch.cat(kept).cpu(), torch.cat([part.cuda().sum(dim=1).cpu() for part in x.split(100)]))


def half(net: nn.Module, x: Tensor) -> Tensor:
    with torch.autocast("cuda", dtype=torch.float16):
        return net(x)


def test_a_grad_scaler_by_backward_and_by_the_loss() -> None:
    nets, inputs = setting(torch.float32)
    parameters = [p for net in nets for p in net.parameters()]
    encoders = [functools.partial(half, net) for net in nets]
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**12)
    found = []
    batch = tuple(x.cuda() for x in inputs)
    for way in ("backward", "loss"):
        torch.manual_seed(0)
        if way == "backward":
            training.cached_step(
                encoders,
                batch,
                contrastile.clip_loss,
                scale=3.0,
                chunk=64,
                backward=lambda surrogate: scaler.scale(surrogate).backward(),
            )
        else:
            scaler.scale(training.Cached(contrastile.clip_loss, encoders, 64)(*batch, scale=3.0)).backward()
        found.append(taken(parameters))
    assert all(torch.equal(x, y) for x, y in zip(*found, strict=True))
    assert all(x.abs().max() > 0 for x in found[0])
