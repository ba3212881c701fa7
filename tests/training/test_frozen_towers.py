"""Towers, and chunks of towers, in which nothing learns."""

from __future__ import annotations

import pytest
import torch
from chunked_graphs import graphs_kept, taken, worst
from small_towers import B, every_parameter, log_scale, setting, skins
from torch import Tensor, nn

import contrastile
from contrastile import training


@pytest.mark.parametrize("frozen", [0, 1])
def test_a_frozen_tower_is_encoded_once_and_gets_no_gradient(frozen: int) -> None:
    towers, inputs = setting((B, B))
    towers[frozen].requires_grad_(False)
    parameters = every_parameter(towers[1 - frozen])
    expected = graphs_kept(towers, [x.split(5) for x in inputs], contrastile.clip_loss, [lambda: 2.0], parameters)
    calls: list[int] = []
    towers[frozen].register_forward_pre_hook(lambda *_: calls.append(1))
    torch.manual_seed(0)
    training.cached_step(towers, tuple(inputs), contrastile.clip_loss, scale=2.0, chunk=5)
    assert len(calls) == 4
    assert worst(taken(parameters), expected) <= 1
    assert all(p.grad is None for p in towers[frozen].parameters())


class Skipping(nn.Module):
    """Nothing learns in some of its chunks, as where LayerDrop leaves out the one layer that does."""

    def __init__(self, net: nn.Module, at: int) -> None:
        super().__init__()
        self.net, self.at = net, at

    def forward(self, x: Tensor) -> Tensor:
        found = self.net(x)
        return found.detach() if x[0, 0] == self.at else found


@pytest.mark.parametrize("at", [0, 1, 3])
def test_a_chunk_in_which_nothing_learns_is_no_frozen_tower(at: int) -> None:
    towers, inputs = setting((B, B))
    towers[0] = Skipping(towers[0], at)
    inputs[0][::5, 0] = torch.arange(4)  # the chunk's number
    parameters = every_parameter(*towers)
    expected = graphs_kept(towers, [x.split(5) for x in inputs], contrastile.clip_loss, [lambda: 2.0], parameters)
    torch.manual_seed(0)
    training.cached_step(towers, tuple(inputs), contrastile.clip_loss, scale=2.0, chunk=5)
    assert worst(taken(parameters), expected) <= 1


@pytest.mark.parametrize("skin", ["cached_step", "Cached"])
def test_a_parameter_that_only_later_chunks_use_learns(skin: str) -> None:
    """A learnt embedding outside of every module, for captions that are missing."""
    towers, inputs = setting((B, B))
    towers[0].requires_grad_(False)
    missing = nn.Parameter(torch.ones_like(towers[0](inputs[0])[0]))
    net = towers[0]

    def encode(x: Tensor) -> Tensor:
        absent = x[:, 0] > 100
        return torch.where(absent[:, None], missing, net(x)) if absent.any() else net(x)

    inputs[0][12, 0] = 1000.0
    parameters = [missing, *every_parameter(towers[1])]
    expected = graphs_kept(
        [encode, towers[1]], [x.split(5) for x in inputs], contrastile.clip_loss, [lambda: 2.0], parameters
    )
    torch.manual_seed(0)
    skins()[skin]((encode, towers[1]), tuple(inputs), contrastile.clip_loss, chunk=5, scale=2.0)
    found = taken(parameters)
    assert found[0].any()
    assert worst(found, expected) <= 1


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
