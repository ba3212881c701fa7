"""Poisoned memory: what passes without a read of unwritten memory, and fails with one."""

from __future__ import annotations

from typing import Any

import poisoned
import pytest
import torch

from contrastile.backends.arrays import TorchArrays


def checked() -> tuple[str, int, list[str]]:
    return poisoned.verify(
        "torch", "cpu", dtypes=["float32"], cases=["smoke", "ragged"], properties=["value", "gradients"]
    )


def test_what_writes_before_it_reads_passes_and_the_switches_are_put_back() -> None:
    before = torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory
    said, passed, failed = checked()
    assert (said, failed) == ("pass", [])
    assert passed
    after = torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory
    assert after == before


def test_sums_that_start_from_whatever_memory_held_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    full = TorchArrays.full

    def careless(self: Any, shape: tuple[int, ...], value: float, dtype: str, like: Any) -> Any:
        if value or len(shape) != 2:
            return full(self, shape, value, dtype, like)
        return torch.empty(shape, dtype=getattr(torch, dtype), device=like.device)

    monkeypatch.setattr(TorchArrays, "full", careless)
    said, _, failed = checked()
    assert said == "fail"
    assert any("gradients" in line for line in failed)
