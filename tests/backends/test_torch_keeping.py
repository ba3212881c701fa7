"""What the torch backend keeps on a host: when, how much, that the gradients are the same, and that it is freed."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import contrastile
from contrastile import plan
from contrastile.backends.contract import Block, Options, Weights
from contrastile.backends.registry import load
from contrastile.backends.torch.kept import CPU_KEEP_MIB, keeps
from contrastile.schedules import triangle

TORCH = load("torch")
M, N, D = 37, 53, 24
LABELS = torch.arange(M) // 3


class Seen:
    """The torch backend, and for each call of ``gradients`` whether its block had something kept."""

    def __init__(self) -> None:
        self.kept: list[bool] = []
        self.backend = replace(TORCH, gradients=self.gradients, diagonal=None)

    def gradients(self, block: Block, weights: Weights, *rest: Any) -> None:
        self.kept.append(weights.kept is not None)
        before = None if weights.kept is None else weights.kept.clone()
        TORCH.gradients(block, weights, *rest)
        # a second pass through the graph finds it again
        assert weights.kept is None or torch.equal(weights.kept, before)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Seen:
    """The backend instead of every other."""
    made = Seen()
    monkeypatch.setattr(plan, "load", lambda name: made.backend)
    return made


def leaves(*sizes: int, scale: float = 3.0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    found = [torch.nn.functional.normalize(torch.randn(n, D, generator=generator), dim=1) for n in sizes]
    return [x.requires_grad_() for x in (*found, torch.tensor(scale))]


def negatives(query: Tensor, key: Tensor, more: Tensor, scale: Tensor, **settings: Any) -> Tensor:
    return contrastile.info_nce(query, key, scale, negatives=[more, more.detach()], **settings)


def sup_con(features: Tensor, scale: Tensor, **settings: Any) -> Tensor:
    return contrastile.sup_con(features, LABELS, scale, **settings)


LOSSES: dict[str, tuple[Callable[..., Tensor], tuple[int, ...], int]] = {
    "clip_loss": (contrastile.clip_loss, (M, M), 1),
    "ids": (partial(contrastile.clip_loss, ids=LABELS), (M, M), 1),
    "info_nce": (contrastile.info_nce, (M, M), 1),
    "positives": (partial(contrastile.info_nce, positives=torch.arange(M) // 2), (M, N), 1),
    "negatives": (negatives, (M, M, N), 3),
    "nt_xent": (contrastile.nt_xent, (M, M), 7),
    "sup_con": (sup_con, (M,), 3),
}


@pytest.mark.parametrize("tile", [(512, 2048), (16, 32)])
@pytest.mark.parametrize("name", LOSSES)
def test_every_block_of_every_softmax_loss_is_kept_and_gives_the_bits_of_one_that_is_not(
    name: str, tile: tuple[int, int], seen: Seen, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("contrastile.backends.torch.tiles.CPU_TILE", tile)
    monkeypatch.setattr(triangle, "CPU_ROWS", 23)
    loss, sizes, blocks = LOSSES[name]
    given = leaves(*sizes)
    # logits so small have 0 for their reference in either pass
    value = loss(*given)
    found = [torch.autograd.grad(value, given, retain_graph=True), torch.autograd.grad(value, given)]
    assert seen.kept == [True] * 2 * blocks
    seen.kept.clear()
    plain = loss(*given, keep=0)
    assert torch.equal(plain, value)
    for gradients in found:
        assert all(map(torch.equal, gradients, torch.autograd.grad(plain, given, retain_graph=True)))
    assert seen.kept == [False] * 2 * blocks


def test_how_much_is_kept_is_bounded_and_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CONTRASTILE_KEEP_MIB", raising=False)
    side = math.isqrt(CPU_KEEP_MIB * 2**20 // 4)
    # the logits, and one number
    assert keeps(side, side, "float32", "cpu", Options()) == 4 * side * side + 4
    assert keeps(side, side + 1, "float32", "cpu", Options()) == 0
    assert keeps(side, side, "bfloat16", "cpu", Options()) > 0
    assert keeps(side, side, "float64", "cpu", Options()) == 0
    assert keeps(side, side, "float32", "cuda", Options()) == 0
    assert keeps(2, 2, "float32", "cpu", Options(tile=(1, 1))) == 0
    assert keeps(2, 2, "float32", "cpu", Options(keep=0)) == 0
    assert keeps(2 * side, 2 * side, "float32", "cpu", Options(keep=4 * CPU_KEEP_MIB)) > 0
    monkeypatch.setenv("CONTRASTILE_KEEP_MIB", "0")
    assert keeps(2, 2, "float32", "cpu", Options()) == 0
