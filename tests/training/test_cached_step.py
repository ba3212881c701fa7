"""Cached steps against steps without a cache, with encoders and ranks that ``contrastile verify`` does not test."""

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

from contrastile import training

B, D = 17, 6


def every_parameter(*modules: nn.Module) -> list[Tensor]:
    return [p for module in modules for p in module.parameters()]


def reentrant(net: nn.Module) -> Callable[[Tensor], Tensor]:
    # reentrant checkpoints need an input that requires a gradient
    return lambda x: checkpoint(net, x.clone().requires_grad_(), use_reentrant=True)


COMPILED = pytest.param(functools.partial(torch.compile, backend="aot_eager"), marks=pytest.mark.slow)


@pytest.mark.parametrize("wrap", [reentrant, COMPILED])
def test_encoders_may_be_checkpointed_or_compiled(wrap: Any) -> None:
    nets, inputs = towers(B, D)
    parameters = every_parameter(*nets)
    expected = graphs_kept(nets, [x.split(5) for x in inputs], 3.0, parameters)
    encoders = [wrap(net) for net in nets]
    torch.manual_seed(0)
    loss = training.cached_step(encoders, tuple(inputs), product, scale=3.0, chunk=5)
    assert all(torch.equal(x, y) for x, y in zip((loss, *(p.grad for p in parameters)), expected, strict=True))


PROGRAM = str(Path(__file__).parent / "programs" / "train_cached.py")


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
def test_gradients_are_those_of_the_global_loss_and_reduced_once(ranks: int) -> None:
    result = launch("torch", PROGRAM, ranks=ranks, seconds=1200)
    assert result.code == 0, result.output
    for rank in range(ranks):
        errors = dict(line.split(": ", 1) for line in result.lines(rank))
        assert len(errors) == 9 + 4
        for trial, error in errors.items():
            # two DDP modules reduce once each, FSDP2 once for each of the three modules that it shards
            name, reductions = trial.rsplit(" ", 1)
            if not name.startswith("frozen"):
                assert reductions == {"one each": "2", "fsdp": "3"}.get(name, "1"), trial
            assert float(error) < 1e-13, (trial, error)
    assert result.orphans == 0
