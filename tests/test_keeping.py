"""What a forward pass may keep for the backward: asked for where both gradients will be, handed over, freed."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import contrastile
from contrastile import plan
from contrastile.backends.contract import Array, Backend, Block, ColumnForm, Finished, Options, Statistics, Weights
from contrastile.backends.registry import load

B, D = 23, 17
TORCH = load("torch")


class Keeping:
    """torch's backend, which keeps one byte array a forward pass.

    Attributes:
        left: a reference to the memory of each array that was kept.
        seen: what ``finished`` found in the one that it was given, None where there was none.
        asked: the calls of ``lse`` ("lse") and of ``keeping`` ("keeping") in their order.
    """

    def __init__(self) -> None:
        self.left: list[weakref.ref[Any]] = []
        self.seen: list[int | None] = []
        self.asked: list[str] = []
        self.backend: Backend = replace(TORCH, lse=self.lse, keeping=self.keeping, finished=self.finished, whole=None)

    def lse(self, block: Block, columns: bool, options: Options) -> Statistics:
        self.asked.append("lse")
        return TORCH.lse(block, columns, options)

    def keeping(self, block: Block, columns: bool, options: Options) -> Statistics:
        self.asked.append("keeping")
        memory = np.full(1 + block.rows.shape[0], 7, dtype=np.uint8)
        # a tensor is not the only owner of its memory: this one's dies with the last of them
        self.left.append(weakref.ref(memory))
        return replace(TORCH.lse(block, columns, options), kept=torch.from_numpy(memory))

    def finished(
        self, block: Block, weights: Weights, upstream: Array | None, columns: ColumnForm | None, options: Options
    ) -> Finished:
        self.seen.append(None if weights.kept is None else int(weights.kept[0]))
        if weights.kept is not None:
            assert weights.kept.dtype is torch.uint8
            assert (weights.kept == weights.kept[0]).all()
        factor = torch.ones(()) if upstream is None else upstream
        sums = [torch.zeros_like(x, dtype=block.scale.dtype) for x in (block.rows, block.columns)]
        TORCH.gradients(block, replace(weights, kept=None), *sums, options)
        inner = (sums[0] * block.rows).sum(dtype=torch.float64) * factor
        made = [(x * factor * block.scale).to(block.rows.dtype) for x in sums]
        return Finished(made[0], None if columns is None else made[1], inner)

    @property
    def alive(self) -> int:
        """How many of the arrays that were kept still take memory."""
        gc.collect()
        return sum(reference() is not None for reference in self.left)


@pytest.fixture
def keeping(monkeypatch: pytest.MonkeyPatch) -> Keeping:
    """The backend instead of every other."""
    made = Keeping()
    monkeypatch.setattr(plan, "load", lambda name: made.backend)
    return made


def towers() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    found = [torch.randn(B, D, generator=generator, dtype=torch.float64).requires_grad_() for _ in range(2)]
    return [*found, torch.tensor(2.5, dtype=torch.float64, requires_grad=True)]


def clip(*leaves: Tensor) -> Tensor:
    return contrastile.clip_loss(*leaves, backend="torch")


def test_what_is_kept_reaches_the_backward_and_is_freed_with_the_graph(keeping: Keeping) -> None:
    leaves = towers()
    value = clip(*leaves)
    assert keeping.asked == ["keeping"]
    assert keeping.alive == 1
    found = torch.autograd.grad(value, leaves)
    assert keeping.seen == [7]
    # the loss is still there
    assert keeping.alive == 0
    assert torch.isfinite(value)
    assert all(torch.isfinite(x).all() for x in found)


def test_hooks_on_what_is_saved_meet_it(keeping: Keeping) -> None:
    leaves, packed = towers(), []

    def pack(x: Tensor) -> Tensor:
        packed.append(x.dtype)
        return x.clone()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        value = clip(*leaves)
    assert packed.count(torch.uint8) == 1
    assert keeping.alive == 0
    torch.autograd.grad(value, leaves)
    assert keeping.seen == [7]


@pytest.mark.parametrize("frozen", ["image", "text", "scale", "no_grad", "inference"])
def test_only_a_loss_whose_towers_both_learn_keeps(frozen: str, keeping: Keeping) -> None:
    leaves = dict(zip(("image", "text", "scale"), towers(), strict=True))
    if frozen in leaves:
        leaves[frozen].requires_grad_(False)
    modes: dict[str, Callable[[], Any]] = {"no_grad": torch.no_grad, "inference": torch.inference_mode}
    with modes.get(frozen, torch.enable_grad)():
        value = clip(*leaves.values())
    assert keeping.asked == ["keeping" if frozen == "scale" else "lse"]
    assert keeping.alive == (frozen == "scale")
    if frozen in ("image", "text"):
        value.backward()
        assert all((leaf.grad is None) == (name == frozen) for name, leaf in leaves.items())
