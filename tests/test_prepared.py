"""Calls of a known signature: their values are checked, few are held, and threads may ask at once."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor

import contrastile
from contrastile.autograd import prepared
from contrastile.autograd.prepared import CALLS

B, D = 11, 7
POSITIVES = torch.arange(B).flip(0)


def leaves(seed: int, towers: int = 2, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    draw = torch.Generator().manual_seed(seed)
    found = [torch.randn(B, D, generator=draw).to(dtype).requires_grad_() for _ in range(towers)]
    return [*found, torch.tensor(1.5 + seed, requires_grad=True)]


@pytest.mark.parametrize(
    ("right", "bad"),
    [({"tile": 1}, {"tile": True}), ({"tile": (1, 3)}, {"tile": (1, 3.0)}), ({"keep": 1}, {"keep": 1.0})],
)
def test_a_setting_of_a_wrong_type_is_refused_after_an_equal_one_of_the_right_type(right: Any, bad: Any) -> None:
    contrastile.clip_loss(*leaves(0), **right)
    with pytest.raises(TypeError, match=f"{next(iter(bad))} must be"):
        contrastile.clip_loss(*leaves(0), **bad)


def test_values_are_looked_at_in_every_call() -> None:
    *towers, scale = leaves(0)
    positives = POSITIVES.clone()
    for _ in range(2):
        contrastile.info_nce(*towers, scale, positives=positives)
        contrastile.clip_loss(*towers, scale)
        contrastile.clip_loss(*towers, 2.0)
    known = len(CALLS.prepared)
    with pytest.raises(ValueError, match="positives must lie in 0"):
        contrastile.info_nce(*towers, scale, positives=positives + 1)
    for wrong in (float("nan"), float("inf")):
        with pytest.raises(ValueError, match="scale must be finite"):
            contrastile.clip_loss(*towers, torch.full_like(scale, wrong, requires_grad=True))
        with pytest.raises(ValueError, match="scale must be finite"):
            contrastile.clip_loss(*towers, wrong)
    assert len(CALLS.prepared) == known


def test_few_signatures_are_held_and_threads_may_ask_at_once() -> None:
    towers = [x.detach() for x in leaves(0)[:2]]
    expected = [contrastile.clip_loss(*(x[: 1 + i % B] for x in towers), 1.0 + i) for i in range(3 * prepared.MOST)]
    found: list[list[Tensor]] = []

    def ask() -> None:
        found.append(
            [
                contrastile.clip_loss(*(x[: 1 + i % B] for x in towers), 1.0 + i, workspace=1 + i % 7)
                for i in range(3 * prepared.MOST)
            ]
        )

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == len(threads)
    assert all(all(map(torch.equal, each, expected)) for each in found)
    assert len(CALLS.prepared) <= prepared.MOST


def test_the_gradient_of_a_gradient_is_refused_and_what_was_written_to_is_noticed() -> None:
    for _ in range(2):
        image, text, scale = leaves(0)
        (gradient,) = torch.autograd.grad(contrastile.clip_loss(image, text, scale), image, create_graph=True)
        with pytest.raises(RuntimeError, match="must not be differentiated itself"):
            torch.autograd.grad(gradient.sum(), text)
        changed = contrastile.clip_loss(image, text, scale)
        with torch.no_grad():
            image.mul_(2)
        with pytest.raises(RuntimeError, match="inplace"):
            changed.backward()
