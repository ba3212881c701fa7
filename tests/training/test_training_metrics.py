"""Metrics of a cached step, and what it holds in memory."""

from __future__ import annotations

import pytest
import torch
from small_towers import B, log_scale, setting, skins
from torch import Tensor

import contrastile
from contrastile import training


def test_metrics() -> None:
    towers, inputs = setting((B, B))
    number = log_scale()
    for net in towers:
        net.eval()
    found = training.cached_step(
        towers,
        tuple(inputs),
        contrastile.clip_loss,
        scale=number.exp,
        chunk=5,
        metrics=("scale", "rank@1", "loss_seconds"),
    )
    logits = towers[0](inputs[0]) @ towers[1](inputs[1]).T
    assert set(found) == {"loss", "scale", "rank@1", "loss_seconds"}
    assert torch.equal(found["scale"], number.exp().detach())
    assert found["rank@1"] == (logits.argmax(dim=1) == torch.arange(B)).float().mean()
    assert not any(x.requires_grad for x in found.values())


def test_the_seconds_of_the_loss_are_those_between_the_two_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that ticks once in each encoding, and seven times in the loss."""
    ticks = 0

    def tick(count: int) -> None:
        nonlocal ticks
        ticks += count

    def loss(a: Tensor, b: Tensor, scale: float) -> Tensor:
        tick(7)
        return contrastile.clip_loss(a, b, scale)

    towers, inputs = setting((B, B))
    for net in towers:
        net.register_forward_pre_hook(lambda *_: tick(1))
    monkeypatch.setattr("contrastile.training.metrics.time.perf_counter", lambda: float(ticks))
    found = training.cached_step(towers, tuple(inputs), loss, scale=2.0, chunk=5, metrics=("loss", "loss_seconds"))
    assert found["loss_seconds"] == 7
    assert ticks == 7 + 2 * 8


def test_rank_at_1_is_in_the_features_precision() -> None:
    query, key = torch.ones(2, 1, dtype=torch.float64), torch.tensor([[1.0 + 1e-12], [1.0]], dtype=torch.float64)
    assert training.rank_at_1(query, key) == 0.5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rank_at_1_does_not_round_products_to_16_bits(dtype: torch.dtype) -> None:
    # 1 + 2^-9 and 1 are one number in bfloat16
    key = torch.tensor([[1.0, 2.0**-9], [1.0, 0.0]], dtype=dtype)
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.float32):
        assert training.rank_at_1(torch.ones(1, 2, dtype=dtype), key) == 1.0


class Held:
    """A tensor that is saved for a backward pass; the most elements that were alive at a time are counted."""

    alive = most = 0

    def __init__(self, x: Tensor) -> None:
        self.x, self.size = x, x.numel() if x.shape[-1:] == (9,) else 0
        Held.alive += self.size
        Held.most = max(Held.most, Held.alive)

    def __del__(self) -> None:
        Held.alive -= self.size


@pytest.mark.parametrize("skin", skins())
def test_activations_of_one_chunk_are_alive_however_large_the_batch(skin: str) -> None:
    def most(samples: int, chunk: int) -> int:
        towers, inputs = setting((samples, samples))
        Held.alive = Held.most = 0
        with torch.autograd.graph.saved_tensors_hooks(Held, lambda held: held.x):
            skins()[skin](towers, tuple(inputs), contrastile.clip_loss, scale=log_scale().exp, chunk=chunk)
        return Held.most

    once = most(8, 8)
    assert once > 0
    assert most(8 * 64, 8) == once
    assert most(8 * 4, 32) == 4 * once
