"""Towers in which nothing learns."""

from __future__ import annotations

import pytest
import torch
from chunked_graphs import graphs_kept, taken
from small_towers import B, every_parameter, log_scale, setting, skins
from torch import Tensor, nn

import contrastile
from contrastile import training


@pytest.mark.parametrize("frozen", [0, 1])
def test_a_frozen_tower_is_encoded_once_and_gets_no_gradient(frozen: int) -> None:
    towers, inputs = setting((B, B))
    towers[frozen].requires_grad_(False)
    calls: list[int] = []
    towers[frozen].register_forward_pre_hook(lambda *_: calls.append(1))
    torch.manual_seed(0)
    training.cached_step(towers, tuple(inputs), contrastile.clip_loss, scale=2.0, chunk=5)
    assert len(calls) == 4
    assert all((p.grad is None) == (net is towers[frozen]) for net in towers for p in net.parameters())


class WithScale(nn.Module):
    """A frozen tower whose forward also returns a scale that learns."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net, self.log_scale = net.requires_grad_(False), log_scale()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.net(x), self.log_scale.exp()


@pytest.mark.parametrize("skin", ["cached_step", "Cached"])
def test_a_scale_that_comes_out_of_a_frozen_tower_learns(skin: str) -> None:
    towers, inputs = setting((B, B))
    first = WithScale(towers[0])

    def loss(a: Tensor, scale: Tensor, b: Tensor) -> Tensor:
        return contrastile.clip_loss(a, b, scale)

    parameters = [*every_parameter(towers[1]), first.log_scale]
    expected = graphs_kept(
        towers, [x.split(5) for x in inputs], contrastile.clip_loss, [first.log_scale.exp], parameters
    )
    torch.manual_seed(0)
    skins()[skin]((first, towers[1]), tuple(inputs), loss, chunk=5, scale=None)
    assert torch.equal(taken([first.log_scale])[0], expected.gradients[-1])
