"""The checks of ``contrastile bench`` before it measures, and its meters of memory."""

import mmap
import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from contrastile.backends.contract import Accuracy
from contrastile.backends.registry import load
from contrastile.backends.settings import GRAPHS
from contrastile.bench import agreement, peers, plain, sweep


@pytest.mark.parametrize("name", ["numpy", "torch", "plain"])
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
def test_every_implementation_agrees(name: str, dtype: str) -> None:
    implementation = peers.plain() if name == peers.PLAIN else peers.ours(name)
    result = agreement.check(implementation, dtype, "cpu", 14.3, rows=131)
    assert result.agrees or (name, dtype) == ("numpy", "bfloat16"), result


@pytest.mark.parametrize("index", range(4))
@pytest.mark.parametrize(
    "change",
    [lambda x: 2 * x, lambda x: -x, lambda x: x * float("nan"), torch.zeros_like],
    ids=["doubled", "negated", "nan", "zero"],
)
def test_a_wrong_loss_or_gradient_does_not_agree(index: int, change: Callable[[Any], Any]) -> None:
    plain_peer = peers.plain()

    def target(*arguments: Any, **options: Any) -> Any:
        values = [*plain_peer.target(*arguments, **options)]
        values[index] = change(values[index])
        return values

    result = agreement.check(replace(plain_peer, target=target), "float32", "cpu", 10.0, rows=67)
    assert result.ratio is not None
    assert not result.agrees


def test_a_plain_loss_that_ignores_ids_does_not_agree() -> None:
    without_ids = replace(peers.plain(), target=peers.with_autograd(lambda i, t, s, ids: plain.clip(i, t, s)))
    result = agreement.check(without_ids, "float32", "cpu", 10.0, rows=67)
    assert not result.agrees
    assert "ids" in result.reason


def test_an_infinite_bound_proves_nothing() -> None:
    backend = replace(load("torch"), accuracy=lambda *_: Accuracy(unit=0.5, accumulate_unit=0.5))
    inaccurate = replace(peers.ours("torch"), backend=backend)
    result = agreement.check(inaccurate, "float32", "cpu", 10.0, rows=67)
    assert result.ratio is None
    assert "no finite bound" in result.reason


MIB = 2**20


def test_the_peak_adds_tensors_that_live_together_and_ignores_those_from_before() -> None:
    before = [torch.empty(8 * MIB, dtype=torch.uint8)]

    def call() -> list[torch.Tensor]:
        before.clear()
        first = torch.empty(3 * MIB, dtype=torch.uint8)
        del first
        results = [torch.empty(size, dtype=torch.uint8) for size in (2 * MIB, MIB + 5)]
        later = torch.empty(5, dtype=torch.float32)
        del later
        return results

    assert sweep.peak_extra(call, "torch", "cpu") == 3 * MIB + 25


def test_allocations_inside_the_engine_during_backward_are_counted() -> None:
    # exp saves its output, which the backward pass in C++ frees only after it has computed the gradient
    leaf, seed = torch.zeros(257, 41, requires_grad=True), torch.ones(257, 41)
    peak = sweep.peak_extra(lambda: torch.autograd.grad(leaf.exp(), leaf, seed), "torch", "cpu")
    assert peak == 2 * 4 * 257 * 41


def test_numpy_buffers_are_counted_and_little_else() -> None:
    kept = np.zeros(MIB, dtype=np.uint8)

    def call() -> np.ndarray:
        scratch = np.zeros(3 * MIB, dtype=np.uint8)
        del scratch
        return np.zeros(2 * MIB, dtype=np.uint8) + kept[:1]

    # the sum and the array that it reads live together: 4 MiB, and a few hundred bytes of objects around the buffers
    peak = sweep.peak_extra(call, "numpy", "cpu")
    assert 4 * MIB <= peak < 4 * MIB + mmap.PAGESIZE


def test_memory_is_measured_without_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(GRAPHS, "1")
    values = list[str]()
    sweep.peak_extra(lambda: values.append(os.environ[GRAPHS]), "numpy", "cpu")
    assert values == ["0"]
    assert os.environ[GRAPHS] == "1"
