"""Calls of a known signature: few are held, and threads may ask at once."""

from __future__ import annotations

import threading

import torch
from torch import Tensor

import contrastile
from contrastile.autograd import prepared
from contrastile.autograd.prepared import CALLS

B, D = 11, 7


def test_few_signatures_are_held_and_threads_may_ask_at_once() -> None:
    draw = torch.Generator().manual_seed(0)
    towers = [torch.randn(B, D, generator=draw) for _ in range(2)]
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
