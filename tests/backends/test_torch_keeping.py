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
from torch_blocks import block_of

import contrastile
from contrastile import plan
from contrastile.backends.contract import Block, Options, Pairs, Weights
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


@pytest.fixture
def small_triangle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triangle, "CPU_ROWS", 23)


@pytest.mark.usefixtures("small_triangle")
@pytest.mark.parametrize("tile", [(512, 2048), (16, 32)])
@pytest.mark.parametrize("name", LOSSES)
def test_every_block_of_every_softmax_loss_is_kept_and_gives_the_bits_of_one_that_is_not(
    name: str, tile: tuple[int, int], seen: Seen, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("contrastile.backends.torch.tiles.CPU_TILE", tile)
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


def test_it_is_freed_with_the_graph_and_a_change_of_the_features_is_refused() -> None:
    given = leaves(M, M)

    def kept(value: Any) -> list[Tensor]:
        return [x for x in value.grad_fn.saved_tensors if x is not None and x.numel() >= M * M]

    value = contrastile.clip_loss(*given, backend="torch")
    assert len(kept(value)) == 1
    value.backward()
    with pytest.raises(RuntimeError, match=r"second time|freed"):
        kept(value)
    assert not kept(contrastile.clip_loss(*given, backend="torch", keep=0))
    changed = contrastile.clip_loss(*given, backend="torch")
    with torch.no_grad():
        given[1].mul_(2)
    with pytest.raises(RuntimeError, match="inplace"):
        changed.backward()


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


def test_blocks_that_do_not_fit_together_keep_nothing(seen: Seen) -> None:
    # each alone is 1 MiB, and all of them more
    given = leaves(512, 512, 512)
    torch.autograd.grad(contrastile.info_nce(*given[:2], given[3], keep=1), given[:2])
    torch.autograd.grad(negatives(*given, keep=1), given)
    assert seen.kept == [True, False, False, False]


def test_sums_without_a_shared_reference_leave_nothing() -> None:
    block = block_of(2, 21, 29, 8, 1.0)
    far = replace(block, rows=block.rows * torch.linspace(1, 400, 21)[:, None])
    assert TORCH.keeping is not None
    assert TORCH.keeping(far, True, Options()).kept is None
    assert TORCH.keeping(block, True, Options()).kept is not None


def test_empty_blocks_keep_one_number() -> None:
    rows, none = torch.randn(4, 3), torch.empty(0, 3)
    assert TORCH.keeping is not None
    for a, b in ((rows, none), (none, rows), (none, none)):
        found = TORCH.keeping(Block(a, b, torch.tensor(1.0), None, Pairs()), True, Options())
        assert found.kept is None or found.kept.tolist() == [0.0]
