"""What training refuses, before any gradient is added and mostly before any forward, and what it warns of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import contrastile
from contrastile import training

X, WIDTH = torch.randn(6, 4), 6
clip = contrastile.clip_loss


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 3))
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x @ self.weight


class Engine(Net):
    """What deepspeed.initialize returns at ZeRO stage 3; other stages: contrastile/verify/calls.txt."""

    def zero_optimization_stage(self) -> int:
        return 3

    def backward(self, loss: Tensor) -> None: ...


Engine.__name__ = "DeepSpeedEngine"


def step(encode: Any, inputs: Any, loss: Any = clip, **settings: Any) -> Any:
    return training.cached_step(encode, inputs, loss, **({"scale": 2.0, "chunk": 2} | settings))


def squares(a: Tensor, scale: float) -> Tensor:
    return (a * a).mean()


# what needs no encoder is refused in contrastile/verify/calls.txt
BEFORE: list[tuple[Callable[[Net], Any], str]] = [
    (lambda n: step(n, X * n.weight.sum(), split=torch.split), "inputs must have no graph"),
    (lambda n: step((n, Engine()), (X, X)), "ZeRO stage 0 to 2, got stage 3"),
    (lambda n: step((n, n), (X, X), backward=Engine().backward), "ZeRO stage 0 to 2, got stage 3"),
]


def of_one(a: Tensor, *more: Any) -> Tensor:
    return a.sum()


AFTER: list[tuple[Callable[[Net], Any], str]] = [
    (lambda n: step((lambda x: (n(x), n.weight.sum() * n.calls),), (X,), of_one), "as a scale is, got 12 to 36"),
    (
        lambda n: step((lambda x: n(x["x"].sub_(1)),), (training.stream({"x": X.clone()}, 2, "cpu"),), chunk=None),
        "inputs and parameters must stay as they are",
    ),
    (
        lambda n: step((lambda x: torch.cat([n(x)] * (1 if n.calls < 3 else 2)),), (X,), of_one),
        r"same shapes both times, got \(4, 3\) where it was \(2, 3\)",
    ),
]


@pytest.mark.parametrize(("call", "told"), [*BEFORE, *AFTER])
def test_refused_before_any_gradient_and_mostly_before_any_forward(call: Callable[[Net], Any], told: str) -> None:
    net = Net()
    with pytest.raises(ValueError, match=told):
        call(net)
    assert (net.calls > 0) == (told in [x for _, x in AFTER])
    assert net.weight.grad is None


def test_layers_of_which_a_chunk_makes_another_function_are_warned_of_by_name() -> None:
    """Which layers: contrastile/verify/calls.txt."""
    net = nn.Sequential(nn.Linear(4, WIDTH), nn.Sequential(parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))))
    told = "^spectral_norm '1.0' computes a chunk otherwise than the whole batch, .* the gradients are not those of"
    with pytest.warns(UserWarning, match=told) as found:
        step((net,), (X,), squares)
    assert [each.filename for each in found] == [__file__]
    step((net.eval(),), (X,), squares)
