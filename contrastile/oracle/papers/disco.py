"""DisCo-CLIP (Chen et al., 2023), Eq. 1-7 and Alg. 1, over simulated ranks, as corrected.

Letters: N ranks, rank n holds I_n and T_n, both (b_n, D); I_A and T_A are their concatenations, both (B, D); t
multiplies the dot products. The paper leaves the weight of L_1 and L_2 open; Eq. 3 equals Eq. 1 only if each term is
a share of the mean over the whole batch, so every term here is a sum over its rows divided by B.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from contrastile.oracle.arrays import FloatArray, IntArray
from contrastile.oracle.general import lse
from contrastile.oracle.papers.collectives import all_gather, reduce_scatter, row_slices


def cross_entropy(X: FloatArray, Y: FloatArray, r: IntArray, t: float, B: float) -> float:
    """DisCo Eq. 1, either term: ``L_1(X, Y) = 1/B sum_i (log sum_j exp(t <x_i, y_j>) - t <x_i, y_{r_i}>)``.

    X: (b, D), images for L_1 and texts for L_2; Y: (m, D); r: (b,), each row's positive column; B: the divisor.
    """
    x = t * (X @ Y.T)
    return float((lse(x, axis=1) - x[np.arange(len(r)), r]).sum() / B)


def cross_entropy_gradients(
    X: FloatArray, Y: FloatArray, r: IntArray, t: float, B: float
) -> tuple[FloatArray, FloatArray, float]:
    """Gradients of either term of DisCo Eq. 1: with H = (softmax - one-hot) / B, dX = t H Y, dY = t H' X.

    The arguments are those of `cross_entropy`. Returns dX (b, D), dY (m, D), and ``dt = sum_ij H_ij <x_i, y_j>``.
    """
    z = X @ Y.T
    x = t * z
    e = np.exp(x - x.max(axis=1, keepdims=True))
    H = e / e.sum(axis=1, keepdims=True)
    H[np.arange(len(r)), r] -= 1.0
    H /= B
    return t * (H @ Y), t * (H.T @ X), float((H * z).sum())


def labels(sizes: Sequence[int], rank: int) -> IntArray:
    """Positive column of each of a rank's rows (the `labels` of DisCo Alg. 1), for shards of any size.

    sizes: rows of each of N ranks. Returns (b_rank,) int64, the rows' places in the gathered batch.
    """
    rows = row_slices(sizes)[rank]
    return np.arange(rows.start, rows.stop, dtype=np.int64)


def loss(I_A: FloatArray, T_A: FloatArray, t: float) -> float:
    """DisCo Eq. 1: L = L_1(I_A, T_A) + L_2(T_A, I_A); Alg. 1 halves it.

    I_A, T_A: (B, D), row i of each is a pair.
    """
    B = len(I_A)
    r = np.arange(B, dtype=np.int64)
    return cross_entropy(I_A, T_A, r, t, B) + cross_entropy(T_A, I_A, r, t, B)


def partition(shards: Sequence[FloatArray], n: int) -> tuple[FloatArray, FloatArray]:
    """DisCo Eq. 2: I_A = [I_n, I_nbar], the features of rank n and those of all other ranks.

    shards: N arrays (b_n, D); n: the hosting rank. Returns I_n (b_n, D), and I_nbar (B - b_n, D) in rank order.
    """
    others = [shard for i, shard in enumerate(shards) if i != n]
    return shards[n], np.concatenate([*others, shards[n][:0]])


def decomposed_loss(
    I: Sequence[FloatArray], T: Sequence[FloatArray], n: int, t: float
) -> tuple[float, float, float, float]:
    """DisCo Eq. 3: L_d = L_1(I_n, T_A) + L_1(I_nbar, T_A) + L_2(T_n, I_A) + L_2(T_nbar, I_A).

    I, T: N shards (b_n, D); n: the hosting rank. Returns the four terms, in that order.
    """
    sizes = [len(shard) for shard in I]
    I_A, T_A, B = np.concatenate(I), np.concatenate(T), sum(sizes)
    r_n = labels(sizes, n)
    r_others = np.setdiff1d(np.arange(B, dtype=np.int64), r_n)
    I_n, I_others = partition(I, n)
    T_n, T_others = partition(T, n)
    return (
        cross_entropy(I_n, T_A, r_n, t, B),
        cross_entropy(I_others, T_A, r_others, t, B),
        cross_entropy(T_n, I_A, r_n, t, B),
        cross_entropy(T_others, I_A, r_others, t, B),
    )


def gradients(I: Sequence[FloatArray], T: Sequence[FloatArray], n: int, t: float) -> tuple[FloatArray, FloatArray]:
    """DisCo Eq. 4: dL_d/dI_n and dL_d/dT_n, each two intra-GPU terms and one inter-GPU term.

    I, T: N shards (b_n, D); n: the hosting rank. Returns two arrays (b_n, D).
    """
    dI_rows, dI_columns, dT_columns, dT_rows = intra_gpu_gradients(I, T, n, t)
    dI_others, dT_others = inter_gpu_gradients(I, T, n, t)
    return dI_rows + dI_columns + dI_others, dT_rows + dT_columns + dT_others


def inter_gpu_gradients(
    I: Sequence[FloatArray], T: Sequence[FloatArray], n: int, t: float
) -> tuple[FloatArray, FloatArray]:
    """DisCo Eq. 5: dL_2(T_nbar, I_A)/dI_n = sum_{i != n} dL_2(T_i, I_A)/dI_n, and likewise for T_n.

    I, T: N shards (b_n, D); n: the hosting rank. Returns two arrays (b_n, D).
    """
    dI, dT = np.zeros_like(I[n]), np.zeros_like(T[n])
    for i in range(len(I)):
        if i != n:
            dI_i, dT_i = sent_gradients(I, T, i, n, t)
            dI += dI_i
            dT += dT_i
    return dI, dT


def intra_gpu_gradients(
    I: Sequence[FloatArray], T: Sequence[FloatArray], n: int, t: float
) -> tuple[FloatArray, FloatArray, FloatArray, FloatArray]:
    """DisCo Eq. 6: [dL_1(I_n, T_A)/dI_n, dL_2(T_n, I_A)/dI_n, dL_1(I_n, T_A)/dT_n, dL_2(T_n, I_A)/dT_n].

    I, T: N shards (b_n, D); n: the hosting rank. Returns four arrays (b_n, D): all that rank n can compute alone.
    """
    sizes = [len(shard) for shard in I]
    r, B = labels(sizes, n), sum(sizes)
    dI_rows, dT_A, _ = cross_entropy_gradients(I[n], np.concatenate(T), r, t, B)
    dT_rows, dI_A, _ = cross_entropy_gradients(T[n], np.concatenate(I), r, t, B)
    return dI_rows, dI_A[r], dT_A[r], dT_rows


def sent_gradients(
    I: Sequence[FloatArray], T: Sequence[FloatArray], i: int, n: int, t: float
) -> tuple[FloatArray, FloatArray]:
    """DisCo Eq. 7: [dL_2(T_i, I_A)/dI_n, dL_1(I_i, T_A)/dT_n], which rank i computes and rank n collects.

    I, T: N shards (b_n, D); i: the rank that computes; n: the rank that collects. Returns two arrays (b_n, D).
    """
    sizes = [len(shard) for shard in I]
    B = sum(sizes)
    _, dI_A, _ = cross_entropy_gradients(T[i], np.concatenate(I), labels(sizes, i), t, B)
    _, dT_A, _ = cross_entropy_gradients(I[i], np.concatenate(T), labels(sizes, i), t, B)
    return dI_A[labels(sizes, n)], dT_A[labels(sizes, n)]


def rank_gradients(
    I: Sequence[FloatArray], T: Sequence[FloatArray], rank: int, t: float, B: float
) -> tuple[float, FloatArray, FloatArray, float]:
    """One rank's part of DisCo Alg. 1: its halved loss, and its gradients by the gathered features.

    I, T: N shards (b_n, D); B: the divisor of this rank's sum over rows. Returns the loss, dI_A, dT_A (B, D) and dt.
    """
    r = labels([len(shard) for shard in I], rank)
    I_A, T_A = np.concatenate(I), np.concatenate(T)
    L = cross_entropy(I[rank], T_A, r, t, B) + cross_entropy(T[rank], I_A, r, t, B)
    dI_rows, dT_A, dt_i = cross_entropy_gradients(I[rank], T_A, r, t, B)
    dT_rows, dI_A, dt_t = cross_entropy_gradients(T[rank], I_A, r, t, B)
    dI_A[r] += dI_rows
    dT_A[r] += dT_rows
    return L / 2, dI_A / 2, dT_A / 2, (dt_i + dt_t) / 2


def algorithm_1(
    I: Sequence[FloatArray], T: Sequence[FloatArray], t: float
) -> tuple[float, list[FloatArray], list[FloatArray], list[float], int]:
    """DisCo Alg. 1: gather, two (b_n, B) logit matrices per rank, reduce-scatter the gradients (SUM).

    A rank's loss is its rows' sum times N / B (its mean, when shards are equal), so the loss is the mean over ranks,
    the features get N times the gradient of the global loss, and DDP's mean over ranks divides by N, once.

    I, T: N shards (b_n, D), uneven and empty ones too. Returns the loss (half of Eq. 1), which every rank reports; each
    rank's gradients of its images, of its texts and of t; and the bytes that all ranks send for the gradients.
    """
    N, sizes = len(I), [len(shard) for shard in I]
    I_A, _ = all_gather(I)
    ranks = [rank_gradients(I, T, n, t, len(I_A) / N) for n in range(N)]
    dI, sent_I = reduce_scatter([rank[1] for rank in ranks], sizes)
    dT, sent_T = reduce_scatter([rank[2] for rank in ranks], sizes)
    return sum(rank[0] for rank in ranks) / N, dI, dT, [rank[3] for rank in ranks], sent_I + sent_T
