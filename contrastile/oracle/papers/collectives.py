"""Collectives over simulated ranks: one list entry per rank, run as rings that count the bytes sent.

The papers use `all_gather`, `all_reduce` and the parameter mean of distributed data parallel training (DDP);
here they are plain functions on lists, so that an algorithm over N ranks runs in one process.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

import numpy as np

from contrastile.oracle.arrays import FloatArray


def row_slices(sizes: Sequence[int]) -> list[slice]:
    """Rows of the gathered array that each rank owns: consecutive, in rank order.

    sizes: rows of each rank, N integers; zeros and uneven sizes are fine. Returns N slices.
    """
    return [slice(low, high) for low, high in pairwise(accumulate(sizes, initial=0))]


def all_gather(shards: Sequence[FloatArray]) -> tuple[FloatArray, int]:
    """Ring all-gather: after N - 1 hops every rank has every shard.

    shards: N arrays (b_n, D). Returns the gathered array (B, D), the same on every rank, and the bytes sent by all
    ranks: (N - 1) times its own.
    """
    gathered = np.concatenate(shards)
    return gathered, (len(shards) - 1) * gathered.nbytes


def reduce_scatter(parts: Sequence[FloatArray], sizes: Sequence[int]) -> tuple[list[FloatArray], int]:
    """Ring reduce-scatter: rank n ends with the sum over ranks of the rows it owns.

    parts: N arrays (B, D), each rank's contribution to every row; sizes: rows owned by each rank, N integers with sum
    B. Returns N arrays (b_n, D), and the bytes sent by all ranks.
    """
    N = len(parts)
    rows = row_slices(sizes)
    held = [part.copy() for part in parts]
    sent = 0
    for step in range(N - 1):
        # All messages of a step leave before any arrives.
        messages = [held[rank][rows[(rank - 1 - step) % N]].copy() for rank in range(N)]
        for rank, message in enumerate(messages):
            held[(rank + 1) % N][rows[(rank - 1 - step) % N]] += message
            sent += message.nbytes
    return [held[rank][rows[rank]] for rank in range(N)], sent


def all_reduce(parts: Sequence[FloatArray], sizes: Sequence[int]) -> tuple[FloatArray, int]:
    """Ring all-reduce: a reduce-scatter, then an all-gather of its result.

    parts: N arrays (B, D); sizes: rows that each rank reduces, N integers with sum B. Returns the sum (B, D), the same
    on every rank, and the bytes sent by all ranks.
    """
    shards, scattered = reduce_scatter(parts, sizes)
    total, gathered = all_gather(shards)
    return total, scattered + gathered


def data_parallel_mean(gradients: Sequence[FloatArray]) -> FloatArray:
    """Mean over ranks of a parameter gradient: what DDP does after the backward pass.

    gradients: N arrays of one shape, each rank's gradient of the same parameter. Returns an array of that shape.
    """
    total: FloatArray = np.sum(np.stack(gradients), axis=0)
    return total / len(gradients)
