"""DisCo-CLIP's mistakes, as printed: Alg. 1's averaged feature gradients, its all-reduce, its labels."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from contrastile.oracle.arrays import FloatArray, IntArray
from contrastile.oracle.papers.collectives import all_reduce, row_slices
from contrastile.oracle.papers.disco import Step, rank_gradients


def labels(b: int, rank: int) -> IntArray:
    """DisCo Alg. 1, `labels = arange(b) + b * rank`, as printed: right only if every shard has b rows.

    b: rows of this rank; rank: the rank. Returns (b,) integers.
    """
    return np.arange(b, dtype=np.int64) + b * rank


def mean_loss(losses: Sequence[float]) -> float:
    """DisCo Alg. 1, `all_reduce(loss, op=AVG)` of each rank's mean, as printed: every rank weighs the same.

    losses: each rank's mean over its own rows, N floats. Returns the mean over ranks: the mean over the batch only if
    shards are equal.
    """
    return sum(losses) / len(losses)


def algorithm_1(I: Sequence[FloatArray], T: Sequence[FloatArray], t: float) -> Step:
    """DisCo Alg. 1 as printed: all-reduce (AVG) the gathered features' gradients, then slice the rank's rows.

    The AVG makes them the gradients of the global loss; DDP then averages the parameters' gradients over ranks
    again, although each rank back-propagates its own rows only: the parameters get 1/N.

    I: image shards, N arrays (b, D), all of one size; T: text shards, N arrays (b, D); t: the factor of the dot
    products. Returns the loss, the feature gradients, dt, and the bytes of the gradient communication.
    """
    N, sizes = len(I), [len(shard) for shard in I]
    ranks = [rank_gradients(I, T, n, t, sizes[n]) for n in range(N)]
    dI, sent_I = all_reduce([rank[1] for rank in ranks], sizes)
    dT, sent_T = all_reduce([rank[2] for rank in ranks], sizes)
    rows = row_slices(sizes)
    return Step(
        mean_loss([rank[0] for rank in ranks]),
        [dI[rows[n]] / N for n in range(N)],
        [dT[rows[n]] / N for n in range(N)],
        [rank[3] for rank in ranks],
        sent_I + sent_T,
    )
