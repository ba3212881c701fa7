"""Embeddings and their gradients on the host: the same step, bit for bit."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from chunked_graphs import taken
from small_towers import every_parameter, log_scale, setting
from torch import Tensor

import contrastile
from contrastile import training
from contrastile.backends import staging

LOSSES = contrastile.clip_loss, contrastile.nt_xent, contrastile.sigmoid_loss


def stepped(loss: Any, skin: str, dtype: torch.dtype, **how: Any) -> list[Tensor]:
    """The loss and the parameters' gradients."""
    towers, inputs = setting((17, 17), dtype)
    number = log_scale(dtype)
    torch.manual_seed(0)
    if skin == "cached_step":
        value = training.cached_step(towers, tuple(inputs), loss, scale=number.exp, chunk=5, **how)
    elif skin == "Cached":
        value = training.Cached(loss, towers, 5, **how)(*inputs, scale=number.exp)
        value.backward()
    else:
        found, replay = training.embed(towers, tuple(inputs), 5, **how)
        value = loss(*found, number.exp())
        value.backward()
        replay()
    return [value.detach(), *taken([*every_parameter(*towers), number])]


@pytest.mark.parametrize("skin", ["cached_step", "Cached", "embed"])
@pytest.mark.parametrize("loss", LOSSES)
def test_an_offloaded_step_has_the_bits_of_one_that_is_not(loss: Any, skin: str) -> None:
    for dtype in (torch.float64, torch.bfloat16):
        walk = functools.partial(loss, block=6)
        plain = stepped(walk, skin, dtype)
        assert all(map(torch.equal, stepped(walk, skin, dtype, offload=True), plain))
        assert all(x.abs().max() > 0 for x in plain)


def test_embeddings_go_home_chunk_by_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    stored: list[tuple[int, ...]] = []

    class Watched(staging.Staging):
        def store(self, x: Tensor, target: Tensor, buffer: Any = None) -> None:
            stored.append(tuple(x.shape))
            super().store(x, target, buffer)

    monkeypatch.setattr(training.replay, "Staging", Watched)
    stepped(contrastile.clip_loss, "cached_step", torch.float64, offload=True)
    assert stored == [(5, 6), (5, 6), (5, 6), (2, 6)] * 2


def test_rank_at_1_of_embeddings_on_the_host_is_refused() -> None:
    towers, inputs = setting((17, 17))
    with pytest.raises(ValueError, match="take rank_at_1 of some rows"):
        training.cached_step(
            towers, tuple(inputs), contrastile.clip_loss, scale=3.0, chunk=5, offload=True, metrics=("rank@1",)
        )
    assert all(p.grad is None for p in every_parameter(*towers))
