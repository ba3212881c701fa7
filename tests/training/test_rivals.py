"""Rules that other gradient caches break: their result, by their formula, beside ours."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, spectral_norm

from contrastile import training

D = 6


def test_autocast_to_float16_around_the_call_leaves_the_loss_in_float32() -> None:
    seen = []

    def loss(a: Tensor) -> Tensor:
        seen.append((a.dtype, (a @ a.T).dtype))
        return a.sum()

    net = nn.Linear(4, 3)
    with torch.autocast("cpu", dtype=torch.float16):
        training.cached_step((net,), (torch.ones(5, 4),), loss, chunk=2)
        assert net(torch.ones(5, 4)).dtype is torch.float16
    assert seen == [(torch.float32, torch.float32)]


@pytest.mark.parametrize(
    ("layer", "named"),
    [
        (nn.BatchNorm1d(D), "BatchNorm1d '1' computes"),
        (parametrizations.spectral_norm(nn.Linear(D, D)), "spectral_norm '1' computes"),
        (spectral_norm(nn.Linear(D, D)), "spectral_norm '1' computes"),
        (nn.Sequential(parametrizations.spectral_norm(nn.Linear(D, D))), "spectral_norm '1.0' computes"),
    ],
)
def test_layers_of_which_a_chunk_makes_another_function_are_warned_of_by_name(layer: nn.Module, named: str) -> None:
    net = nn.Sequential(nn.Linear(4, D), layer)
    x = torch.randn(6, 4)
    told = f"^{named} a chunk otherwise than the whole batch, .* the gradients are not those of the batch; call its"
    with pytest.warns(UserWarning, match=told) as found:
        training.cached_step((net,), (x,), lambda a: (a * a).mean(), chunk=3)
    assert [each.filename for each in found] == [__file__]
    net.eval()
    training.cached_step((net,), (x,), lambda a: (a * a).mean(), chunk=3)


@pytest.mark.parametrize(
    "made", [lambda net: [net], lambda net: {"image": net}, lambda net: SimpleNamespace(nets=[net])]
)
def test_layers_are_found_wherever_encode_keeps_them(made: Callable[[nn.Module], Any]) -> None:
    kept = made(nn.BatchNorm1d(4))

    def encode(x: Tensor) -> Tensor:
        (net,) = kept if isinstance(kept, list) else kept.values() if isinstance(kept, dict) else kept.nets
        return net(x)

    with pytest.warns(UserWarning, match="^BatchNorm1d 'itself' computes"):
        training.cached_step((encode,), (torch.randn(6, 4),), lambda a: (a * a).mean(), chunk=3)


@pytest.mark.parametrize(
    "generator", [torch.Generator().manual_seed(0), np.random.default_rng(0), None], ids=["torch", "NumPy", "none"]
)
def test_an_encoder_with_a_generator_of_its_own_is_refused(generator: Any) -> None:
    net = nn.Linear(4, D)

    def encode(x: Tensor) -> Tensor:
        if isinstance(generator, np.random.Generator):
            return net(x) * torch.from_numpy(generator.random((len(x), D)) > 0.1)
        return net(x) * (torch.rand(len(x), D, generator=generator) > 0.1)

    def run() -> None:
        training.cached_step((encode,), (torch.randn(6, 4),), lambda a: (a * a).mean(), chunk=3)

    if generator is None:
        run()
        return
    with pytest.raises(ValueError, match=r"same embeddings both times, got a chunk that differs by .* in encode$"):
        run()
    assert net.weight.grad is None


def test_batch_norm_without_running_averages_is_warned_of_in_eval_mode_too() -> None:
    net = nn.Sequential(nn.Linear(4, D), nn.BatchNorm1d(D, track_running_stats=False)).eval()
    with pytest.warns(UserWarning, match=r"^BatchNorm1d '1' computes a chunk otherwise .* needs running averages"):
        training.cached_step((net,), (torch.randn(6, 4),), lambda a: (a * a).mean(), chunk=3)


def test_generators_are_put_back_after_an_error() -> None:
    calls: list[int] = []
    weight = nn.Parameter(torch.ones(4, D))

    def encode(x: Tensor) -> Tensor:
        calls.append(1)
        torch.rand(3)
        if len(calls) == 3:
            raise OSError("out of something")
        return x @ weight

    torch.manual_seed(0)
    with pytest.raises(OSError, match="out of something"):
        training.cached_step((encode,), (torch.ones(4, 4),), lambda a: a.sum(), chunk=2)
    found = torch.rand(1)
    torch.manual_seed(0)
    torch.rand(6)
    assert torch.equal(found, torch.rand(1))
