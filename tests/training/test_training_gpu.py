"""Training on CUDA: streamed copies, features on the host, and the random numbers of a device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from chunked_graphs import graphs_kept, product, towers
from torch import Tensor, nn

import contrastile
from contrastile import training

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize("pinned", [False, True])
def test_streamed_inputs_and_replayed_dropout(pinned: bool) -> None:
    nets, inputs = towers(1001, 8, "cuda")
    parameters = [p for net in nets for p in net.parameters()]
    expected = graphs_kept(nets, [x.cuda().split(64) for x in inputs], 3.0, parameters)
    torch.manual_seed(0)
    feeds = tuple(training.stream(x.pin_memory() if pinned else x, 64) for x in inputs)
    loss = training.cached_step(nets, feeds, product, scale=3.0)
    assert all(torch.equal(x, y) for x, y in zip((loss, *(p.grad for p in parameters)), expected, strict=True))


def test_a_slow_consumer_gets_whole_chunks() -> None:
    x = torch.arange(1 << 22, dtype=torch.float32).reshape(1 << 12, 1 << 10)
    ballast = torch.randn(4096, 4096, device="cuda")
    sums = []
    for chunk, _ in training.stream(x, 100):
        for _ in range(20):
            ballast = ballast @ ballast / 4096
        sums.append(chunk.sum(dim=1))
        del chunk
    assert torch.equal(torch.cat(sums).cpu(), torch.cat([part.cuda().sum(dim=1).cpu() for part in x.split(100)]))


def host_pairs(b: int, d: int, dtype: torch.dtype, pinned: bool) -> list[Tensor]:
    torch.manual_seed(b)
    pair = [nn.functional.normalize(torch.randn(b, d), dim=1).to(dtype) for _ in range(2)]
    return [(x.pin_memory() if pinned else x).requires_grad_() for x in pair]


def step(loss: Any, pair: list[Tensor], **options: Any) -> list[Tensor]:
    scale = torch.tensor(20.0, device="cuda", requires_grad=True)
    value = loss(*pair, scale, **options)
    assert value.device.type == "cuda"
    gradients = torch.autograd.grad(3 * value, [*pair, scale])
    assert all(x.device == y.device for x, y in zip(gradients, pair, strict=False))
    return [x.detach().cpu() for x in (value, *gradients)]


@pytest.mark.parametrize("backend", ["torch", "triton", "cupy"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("loss", [contrastile.clip_loss, contrastile.nt_xent, contrastile.sigmoid_loss])
def test_features_on_the_host_change_no_bit(loss: Any, dtype: torch.dtype, backend: str) -> None:
    if contrastile.backends.available()[backend] is not None:
        pytest.skip(f"{backend} is not here")
    for b, block in ((1000, 300), (1000, 999), (1000, 1000), (700, 4096)):
        on_device = [x.detach().cuda().requires_grad_() for x in host_pairs(b, 72, dtype, pinned=False)]
        # a batch of one block is a plain call
        rows = 2 * b if loss is contrastile.nt_xent else b
        expected = step(loss, on_device, backend=backend, **({"block": block} if block < rows else {}))
        for pinned in (False, True):
            results = step(loss, host_pairs(b, 72, dtype, pinned), device="cuda", block=block, backend=backend)
            assert all(torch.equal(x, y) for x, y in zip(results, expected, strict=True)), (b, block, pinned)


def test_device_memory_of_features_on_the_host_does_not_grow() -> None:
    block, d = 2048, 512

    def peak(b: int) -> int:
        pair = host_pairs(b, d, torch.bfloat16, pinned=True)
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        allocated = torch.cuda.memory_allocated()
        step(contrastile.clip_loss, pair, device="cuda", block=block, workspace=16)
        return torch.cuda.max_memory_allocated() - allocated

    peak(2 * block)
    small_peak, large_peak = peak(4 * block), peak(16 * block)
    # only vectors grow, by 192 bytes for each row and column; a row of features has 1024 bytes
    assert large_peak - small_peak <= 12 * block * 2 * 192 + 2**20
    assert small_peak <= 9 * block * d * 4 + 2**25 + 4 * block * 2 * 192 + 64 * 2**20
