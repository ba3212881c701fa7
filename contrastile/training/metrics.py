"""Metrics of a training step beside the loss."""

from __future__ import annotations

import time

import torch
from torch import Tensor

from contrastile.retrieval import ranks


def rank_at_1(query: Tensor, key: Tensor, tile: int | None = None) -> Tensor:
    """Share of queries whose own key (of the same row) has a strictly larger dot product than every other key.

    A tie counts as a miss, so that embeddings that have collapsed to one point score 0: see ``retrieval.ranks``.

    Args:
        query: (m, d), floating point, m >= 1.
        key: (n, d), n >= m, of the same dtype and device; rows from m on are further negatives.
        tile: see ``retrieval.ranks``.

    Returns:
        0-d float32 on the features' device; NaN for no queries.

    Raises:
        TypeError, ValueError: see ``retrieval.ranks``, whose rows are the queries.
    """
    return (ranks(query, key, tile=tile) == 0).float().mean()


def clock() -> float:
    """The host's seconds, when CUDA, where it is in use, has done what was queued."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
    return time.perf_counter()
