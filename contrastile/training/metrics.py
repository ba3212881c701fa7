"""What to watch in training beside the loss."""

from __future__ import annotations

import torch
from torch import Tensor

TILE = 2048


@torch.no_grad()
def rank_at_1(query: Tensor, key: Tensor, tile: int = TILE) -> Tensor:
    """Share of queries whose own key (of the same row) has a strictly larger dot product than every other key.

    Takes ``tile`` x ``tile`` products at a time: no b x b matrix. A tie counts as a miss, so that embeddings that have
    collapsed to one point score 0.

    Args:
        query: (m, d), floating point, m >= 1.
        key: (n, d), n >= m, of the same dtype and device; rows from m on are further negatives.
        tile: rows and columns of a tile.

    Returns:
        0-d float32 on the features' device; NaN for no queries.

    Raises:
        ValueError: the shapes do not fit.
    """
    if query.ndim != 2 or key.ndim != 2 or query.shape[1] != key.shape[1] or len(key) < len(query):
        raise ValueError(
            f"query and key must be (m, d) and (n, d) with n >= m, got {tuple(query.shape)} and {tuple(key.shape)}; "
            "give each query its key in the same row"
        )
    hits = torch.zeros((), device=query.device)
    for low in range(0, len(query), tile):
        rows = query[low : low + tile]
        own = torch.arange(low, low + len(rows), device=query.device)
        best, positive = (torch.full((len(rows),), -torch.inf, device=query.device) for _ in range(2))
        for left in range(0, len(key), tile):
            columns = key[left : left + tile]
            x = (rows @ columns.T).to(best.dtype)
            mine = own[:, None] == torch.arange(left, left + len(columns), device=query.device)
            positive = torch.maximum(positive, x.masked_fill(~mine, -torch.inf).amax(dim=1))
            best = torch.maximum(best, x.masked_fill(mine, -torch.inf).amax(dim=1))
        hits += (positive > best).sum()
    return hits / len(query)
