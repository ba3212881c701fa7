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


def stepped(skin: str, dtype: torch.dtype, **how: Any) -> list[Tensor]:
    """The parameters' gradients of a loss in blocks."""
    towers, inputs = setting((17, 17), dtype)
    loss, number = functools.partial(contrastile.clip_loss, block=6), log_scale(dtype)
    torch.manual_seed(0)
    if skin == "Cached":
        training.Cached(loss, towers, 5, **how)(*inputs, scale=number.exp).backward()
    else:
        found, replay = training.embed(towers, tuple(inputs), 5, **how)
        loss(*found, number.exp()).backward()
        replay()
    return taken([*every_parameter(*towers), number])


# by cached_step contrastile verify offloads them
@pytest.mark.parametrize("skin", ["Cached", "embed"])
def test_an_offloaded_step_has_the_bits_of_one_that_is_not(skin: str) -> None:
    plain = stepped(skin, torch.bfloat16)
    assert all(map(torch.equal, stepped(skin, torch.bfloat16, offload=True), plain))
    assert all(x.abs().max() > 0 for x in plain)


def test_embeddings_go_home_chunk_by_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    stored: list[tuple[int, ...]] = []

    class Watched(staging.Staging):
        def store(self, x: Tensor, target: Tensor, buffer: Any = None) -> None:
            stored.append(tuple(x.shape))
            super().store(x, target, buffer)

    monkeypatch.setattr(training.replay, "Staging", Watched)
    stepped("Cached", torch.float64, offload=True)
    assert stored == [(5, 6), (5, 6), (5, 6), (2, 6)] * 2


def test_rank_at_1_of_embeddings_on_the_host_is_refused() -> None:
    towers, inputs = setting((17, 17))
    with pytest.raises(ValueError, match="take rank_at_1 of some rows"):
        training.cached_step(
            towers, tuple(inputs), contrastile.clip_loss, scale=3.0, chunk=5, offload=True, metrics=("rank@1",)
        )
    assert all(p.grad is None for p in every_parameter(*towers))
