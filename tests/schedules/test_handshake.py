"""Before a feature moves: what differs or is wrong on one rank, every rank hears in the same words."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from in_process_worlds import errors

import contrastile
from contrastile.comm.inprocess import InProcess
from contrastile.schedules import handshake

N, B, D = 3, 4, 5
rng = np.random.default_rng(3)
IMAGE, TEXT = (rng.standard_normal((N, B, D)).astype(np.float32) for _ in range(2))


def everybody(call: Callable[[int, Any], Any]) -> str:
    """The one thing that all ranks say."""
    words = [text for (text,) in errors(N, lambda comm: call(comm.rank, comm))]
    assert len(set(words)) == 1, words
    return words[0]


def clip(rank: int, comm: Any, **more: Any) -> Any:
    return contrastile.clip_loss(IMAGE[rank], TEXT[rank], 10.0, group=comm, **more)


def test_what_a_communicator_cannot_carry_every_rank_hears(monkeypatch: pytest.MonkeyPatch) -> None:
    reason = "the group carries no arrays on cpu; move them to cuda"
    monkeypatch.setattr(InProcess, "devices", property(lambda self: ["cuda"] if self.rank == 1 else ["cpu"]))
    assert everybody(clip) == f"MismatchError: rank 1: {reason}"


def test_ranks_that_would_take_different_backends_hear_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    # each rank asks once
    names = iter(("numpy", "torch", "torch"))
    monkeypatch.setattr(handshake, "choose", lambda *call, guide: next(names))
    told = "MismatchError: the backend that 'auto' takes (name one that every rank has) must be the same on every rank"
    assert everybody(clip).startswith(told)
