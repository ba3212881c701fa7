"""Metrics of a training step beside the loss."""

from __future__ import annotations

import time
from typing import Any

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


def mark() -> Any:
    """The current time: an event on the current CUDA stream where CUDA is in use, else the host's clock."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return time.perf_counter()
    event: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


def seconds(start: Any, end: Any) -> float:
    """The time between two marks; waits until the device has reached the second."""
    if isinstance(start, float):
        return float(end - start)
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3
