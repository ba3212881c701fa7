"""Calls of a known signature: their values are checked, few are held, and threads may ask at once."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import Tensor

import contrastile
from contrastile.autograd import prepared
from contrastile.autograd.prepared import CALLS

B, D = 11, 7


def leaves(seed: int, towers: int = 2, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    draw = torch.Generator().manual_seed(seed)
    found = [torch.randn(B, D, generator=draw).to(dtype).requires_grad_() for _ in range(towers)]
    return [*found, torch.tensor(1.5 + seed, requires_grad=True)]


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
