"""Cached steps beside those without a cache, where ``contrastile verify`` does not take them; chunks, ranks."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from chunked_graphs import graphs_kept, product, towers
from launching import launch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import contrastile
from contrastile import training
from contrastile.training import chunks

B, D = 17, 6


def every_parameter(*modules: nn.Module) -> list[Tensor]:
    return [p for module in modules for p in module.parameters()]


def reentrant(net: nn.Module) -> Callable[[Tensor], Tensor]:
    # such checkpoints need an input that requires a gradient
    return lambda x: checkpoint(net, x.clone().requires_grad_(), use_reentrant=True)


COMPILED = pytest.param(functools.partial(torch.compile, backend="aot_eager"), marks=pytest.mark.slow)


@pytest.mark.parametrize("made", [reentrant, COMPILED])
def test_encoders_may_be_checkpointed_or_compiled(made: Any) -> None:
    nets, inputs = towers(B, D)
    parameters = every_parameter(*nets)
    expected = graphs_kept(nets, [x.split(5) for x in inputs], 3.0, parameters)
    encoders = [made(net) for net in nets]
    torch.manual_seed(0)
    found = training.cached_step(encoders, tuple(inputs), product, scale=3.0, chunk=5)
    assert all(torch.equal(x, y) for x, y in zip((found, *(p.grad for p in parameters)), expected, strict=True))


def test_the_seconds_of_the_loss_are_those_between_the_two_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that ticks once in each encoding, and seven times in the loss."""
    ticks = 0

    def tick(count: int) -> None:
        nonlocal ticks
        ticks += count

    def loss(a: Tensor, b: Tensor, scale: float) -> Tensor:
        tick(7)
        return contrastile.clip_loss(a, b, scale)

    nets, inputs = towers(B, D)
    for net in nets:
        net.register_forward_pre_hook(lambda *_: tick(1))
    monkeypatch.setattr("contrastile.training.metrics.time.perf_counter", lambda: float(ticks))
    found = training.cached_step(nets, tuple(inputs), loss, scale=2.0, chunk=5, metrics=("loss", "loss_seconds"))
    assert found["loss_seconds"] == 7
    assert ticks == 7 + 2 * 8


def test_chunks_are_views_and_keep_their_types() -> None:
    class Encoding(dict[str, Any]):
        pass

    x = torch.arange(6)
    batch = Encoding(a=x, b=(x, [x]), flag=True, name="n", none=None, number=torch.tensor(3.0))
    first, second = chunks.Sliced(batch, 4)
    assert type(first) is Encoding
    assert type(first["b"]) is tuple
    assert type(first["b"][1]) is list
    assert first["a"].data_ptr() == x.data_ptr()
    assert second["b"][1][0].tolist() == [4, 5]
    assert (second["flag"], second["name"], second["none"], second["number"]) == (True, "n", None, batch["number"])


PROGRAM = str(Path(__file__).parent / "programs" / "train_cached.py")
REFUSED = [
    "sync must find the DDP or FSDP2 modules whose gradients are reduced, got none in encode",
    "sync must find the DDP or FSDP2 modules whose gradients are reduced, got none in the modules that it names",
    "encode must call the DDP module itself",
    "scale must be a tensor, got a DTensor",
    "DDP must have static_graph=False",
    "must find a gradient of every parameter, got none of extra; use them",
    "FSDP2 must reduce in the backward pass of the last chunk",
    "must have all its parameters in DDP, got 2 outside, such as one of shape",
]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
def test_gradients_are_those_of_the_global_loss_and_reduced_once(ranks: int) -> None:
    ended = launch("torch", PROGRAM, ranks=ranks, seconds=1200)
    assert ended.code == 0, ended.output
    for rank in range(ranks):
        found = dict(line.split(": ", 1) for line in ended.said(rank))
        # of DDP, and two for each module that FSDP2 shards
        assert found.pop("restored") == "7 flags"
        for i, message in enumerate(REFUSED):
            assert message in found.pop(f"refused {i}")
        assert len(found) == 9 + 4
        for trial, error in found.items():
            # two DDP modules reduce once each, FSDP2 once for each of the three modules that it shards
            name, last = trial.rsplit(" ", 1)
            if not name.startswith("frozen"):
                assert last == {"one each": "2", "fsdp": "3"}.get(name, "1"), trial
            assert float(error) < 1e-13, (trial, error)
    assert ended.orphans == 0
