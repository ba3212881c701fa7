"""Before a feature moves: what differs or is wrong on one rank, every rank hears in the same words."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from in_process_worlds import errors

import contrastile
from contrastile.comm.inprocess import InProcess

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


# dtypes, widths, scales, tiles, losses, ids, exchanges and gradients wanted that differ are in verify's "mistakes"
DIFFERENT: dict[str, tuple[Callable[[int, Any], Any], str]] = {
    "reduction": (
        lambda rank, comm: clip(rank, comm, parameter_reduction=("mean", "sum")[rank % 2]),
        'parameter_reduction must be the same on every rank, got "mean" on ranks 0, 2, "sum" on rank 1',
    ),
    "backend": (
        lambda rank, comm: clip(rank, comm, backend=("numpy", "auto")[rank % 2]),
        'backend must be the same on every rank, got "numpy" on ranks 0, 2, "auto" on rank 1',
    ),
    "column blocks": (
        lambda rank, comm: contrastile.info_nce(
            IMAGE[rank], TEXT[rank], 10.0, negatives=[TEXT[rank]] * rank, group=comm
        ),
        "column blocks must be the same on every rank, got 1 on rank 0, 2 on rank 1, 3 on rank 2",
    ),
    "positives given": (
        lambda rank, comm: contrastile.info_nce(
            IMAGE[rank], TEXT[rank], 10.0, positives=np.arange(B) if rank else None, group=comm
        ),
        "positives must be the same on every rank, got false on rank 0, true on ranks 1, 2",
    ),
    "values of biases": (
        lambda rank, comm: contrastile.sigmoid_loss(
            *map(torch.tensor, (IMAGE[rank], TEXT[rank])), torch.tensor(10.0), torch.tensor(-1.0 * rank), group=comm
        ),
        "bias must be the same on every rank, got -0.0 on rank 0, -1.0 on rank 1, -2.0 on rank 2",
    ),
    "positives": (
        lambda rank, comm: contrastile.info_nce(
            IMAGE[rank], TEXT[rank], 10.0, positives=np.arange(B) + B * rank + (rank == 2), group=comm
        ),
        "rank 2: positives must lie in 0..11 (there are 12 columns), got 12",
    ),
    "no exchange": (
        lambda rank, comm: clip(rank, comm, exchange="star" if rank == 1 else "ring"),
        "rank 1: exchange must be one of auto, ring, two-level, gather, replicate, local, got 'star'",
    ),
}


@pytest.mark.parametrize(("call", "words"), DIFFERENT.values(), ids=DIFFERENT)
def test_what_differs_or_is_wrong_is_named_with_the_ranks(call: Callable[[int, Any], Any], words: str) -> None:
    assert everybody(call).startswith(f"MismatchError: {words}; ")


def test_what_a_communicator_cannot_carry_every_rank_hears(monkeypatch: pytest.MonkeyPatch) -> None:
    reason = "the group carries no arrays on cpu; move them to cuda"
    monkeypatch.setattr(InProcess, "devices", property(lambda self: ["cuda"] if self.rank == 1 else ["cpu"]))
    assert everybody(clip) == f"MismatchError: rank 1: {reason}"


@pytest.mark.parametrize("backend", ["numpy", "auto"])
def test_no_row_and_no_column_anywhere(backend: str) -> None:
    none = np.zeros((0, D), np.float32)
    words = everybody(lambda rank, comm: contrastile.clip_loss(none, none, 1.0, group=comm, backend=backend))
    assert words == "MismatchError: the ranks must hold at least one row together, got none; skip empty batches"
    words = everybody(
        lambda rank, comm: contrastile.info_nce(
            IMAGE[rank], none, 1.0, positives=np.zeros(B, np.int64), group=comm, backend=backend
        )
    )
    assert words == "MismatchError: the ranks must hold at least one column together, got none; skip empty batches"


def test_local_is_for_a_world_of_one() -> None:
    words = everybody(lambda rank, comm: clip(rank, comm, exchange="local"))
    assert words.startswith("MismatchError: exchange='local' is for a world of one, got 3 ranks")
    assert errors(1, lambda comm: clip(0, comm, exchange="local")) == [[""]]
