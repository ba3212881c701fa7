"""Metrics of a training step beside the loss."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor

from contrastile.training.chunks import positive
from contrastile.training.random_state import float32_at_least

TILE = 2048


@torch.no_grad()
def rank_at_1(query: Tensor, key: Tensor, tile: int = TILE) -> Tensor:
    """Share of queries whose own key (of the same row) has a strictly larger dot product than every other key.

    Takes ``tile`` x ``tile`` products at a time, in float32 or wider: no b x b matrix. A tie counts as a miss, so that
    embeddings that have collapsed to one point score 0.

    Args:
        query: (m, d), floating point, m >= 1.
        key: (n, d), n >= m, of the same dtype and device; rows from m on are further negatives.
        tile: rows and columns of a tile.

    Returns:
        0-d float32 on the features' device; NaN for no queries.

    Raises:
        TypeError: they are no tensors, or of two dtypes.
        ValueError: the shapes do not fit, or the tile is not positive.
    """
    found = [str(x.dtype) if isinstance(x, Tensor) else type(x).__name__ for x in (query, key)]
    if not isinstance(query, Tensor) or found[0] != found[1]:
        raise TypeError(f"query and key must be torch tensors of one dtype, got {' and '.join(found)}; convert them")
    if query.ndim != 2 or key.ndim != 2 or query.shape[1] != key.shape[1] or len(key) < len(query):
        raise ValueError(
            f"query and key must be (m, d) and (n, d) with n >= m, got {tuple(query.shape)} and {tuple(key.shape)}; "
            "give each query its key in the same row"
        )
    tile, wide = positive("tile", tile), float32_at_least(query.dtype)
    hits = torch.zeros((), device=query.device)
    for low in range(0, len(query), tile):
        rows = query[low : low + tile].to(wide)
        own = torch.arange(low, low + len(rows), device=query.device)
        best, right = (torch.full((len(rows),), -torch.inf, dtype=wide, device=query.device) for _ in range(2))
        for left in range(0, len(key), tile):
            columns = key[left : left + tile].to(wide)
            # autocast would round the products, and equal ones are ties
            with torch.autocast(query.device.type, enabled=False):
                x = rows @ columns.T
            mine = own[:, None] == torch.arange(left, left + len(columns), device=query.device)
            right = torch.maximum(right, x.masked_fill(~mine, -torch.inf).amax(dim=1))
            best = torch.maximum(best, x.masked_fill(mine, -torch.inf).amax(dim=1))
        hits += (right > best).sum()
    return hits / len(query)


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
