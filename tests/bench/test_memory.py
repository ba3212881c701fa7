import mmap
import os

import numpy as np
import pytest
import torch

from contrastile.backends.replay import SETTING
from contrastile.bench import memory

MIB = 2**20


def test_what_lives_together_adds_up_and_what_was_live_before_neither_counts_nor_pays() -> None:
    before = [torch.empty(8 * MIB, dtype=torch.uint8)]

    def call() -> list[torch.Tensor]:
        before.clear()
        first = torch.empty(3 * MIB, dtype=torch.uint8)
        del first
        results = [torch.empty(size, dtype=torch.uint8) for size in (2 * MIB, MIB + 5)]
        later = torch.empty(5, dtype=torch.float32)
        del later
        return results

    assert memory.torch_peak(call) == 3 * MIB + 25


@pytest.mark.parametrize("rows", [257, 1000])
def test_allocations_inside_the_engine_during_backward_are_counted(rows: int) -> None:
    # exp saves its output, which the backward releases in C++ only after it has formed two more arrays of its size
    leaf = torch.zeros(rows, 41, requires_grad=True)
    seed = torch.ones(rows, 41)
    size = 4 * rows * 41

    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
            return x.exp()

        @staticmethod
        def backward(ctx: object, *gradients: torch.Tensor) -> torch.Tensor:
            scratch = [gradients[0].clone() for _ in range(3)]
            return scratch[0]

    def engine() -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(leaf.exp(), leaf, seed)

    def function() -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(Doubled.apply(leaf), leaf, seed)

    # the output saved for backward, and the gradient
    assert memory.torch_peak(engine) == 2 * size
    # the output, and the three arrays of the backward
    assert memory.torch_peak(function) == 4 * size


def test_numpy_buffers_are_counted_and_little_else() -> None:
    kept = np.zeros(MIB, dtype=np.uint8)

    def call() -> np.ndarray:
        scratch = np.zeros(3 * MIB, dtype=np.uint8)
        del scratch
        return np.zeros(2 * MIB, dtype=np.uint8) + kept[:1]

    # the sum and the array it reads live together: 4 MiB; the objects around the buffers are a few hundred bytes
    peak = memory.peak_extra(call, "numpy", "cpu")
    assert 4 * MIB <= peak < 4 * MIB + mmap.PAGESIZE


def test_a_step_that_could_be_replayed_is_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SETTING, "1")
    seen = list[str]()
    memory.peak_extra(lambda: seen.append(os.environ[SETTING]), "numpy", "cpu")
    assert seen == ["0"]
    assert os.environ[SETTING] == "1"
