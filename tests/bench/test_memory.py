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

    assert memory.peak_extra(call, "torch", "cpu") == 3 * MIB + 25


def test_allocations_inside_the_engine_during_backward_are_counted() -> None:
    # exp saves its output, which the backward releases in C++ only after it has formed the gradient
    leaf, seed = torch.zeros(257, 41, requires_grad=True), torch.ones(257, 41)
    peak = memory.peak_extra(lambda: torch.autograd.grad(leaf.exp(), leaf, seed), "torch", "cpu")
    assert peak == 2 * 4 * 257 * 41


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
