"""Inf-CL ("Breaking the Memory Barrier", Cheng et al., 2024), Eq. 1-9 and Algorithms 1-4, as corrected.

The paper's letters: I, T (b, c) are image and text features with the scale already in them, x = I T' the logits,
l (b,) the row LSE, m a tile's row maximum, b_s = b / n a shard's batch.
Shards may be of unequal sizes, or empty. A world of 1 is a ring of one rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import numpy as np

from contrastile.oracle import general
from contrastile.oracle.arrays import FloatArray

_T = TypeVar("_T")


@np.errstate(all="ignore")
def contrastive_loss(I: FloatArray, T: FloatArray) -> float:
    """L_I = -1/b sum_i log(e^{x_ii} / sum_j e^{x_ij}) (Inf-CL Eq. 1), with no guard against overflow.

    I, T: (b, c). Defined where e^x is: beyond |x| of about 709 it is inf/inf.
    """
    e = np.exp(I @ T.T)
    return float(-np.log(np.diag(e) / e.sum(axis=1)).sum() / len(I))


@np.errstate(all="ignore")
def decomposed_loss(I: FloatArray, T: FloatArray, l: FloatArray) -> float:
    """L_I = -1/b sum_i x_ii + 1/b sum_i l_i (Inf-CL Eq. 2): the positives need O(b), only l needs the matrix.

    I, T: (b, c); l: (b,), the row LSE.
    """
    b = len(I)
    return float(-np.einsum("ic,ic->i", I, T).sum() / b + l.sum() / b)


@np.errstate(all="ignore")
def tiled_lse(I: FloatArray, T: FloatArray, t_r: int, t_c: int) -> list[list[FloatArray]]:
    """The tiles' LSE vectors l^{i,j}, n_r x n_c of them (Inf-CL Eq. 3); Eq. 4 merges each row of them.

    I: (b, c); T: (b', c); t_r, t_c: tile size, at least 1. Entry i, j is (t_r,), shorter in the last row.
    """
    return [[lse(I_i @ T_j.T) for T_j in divide(T, t_c)] for I_i in divide(I, t_r)]


def merge_lse(l: FloatArray, l_ij: FloatArray) -> FloatArray:
    """l^i <- max(l^i, l^ij) + log(1 + e^{-|l^ij - l^i|}), from -inf (Inf-CL Eq. 4, corrected).

    l, l_ij: (t_r,). The same value as the printed form where that is defined, without its overflow and its NaN.
    """
    return general.merge(l, l_ij)


def lse(X: FloatArray) -> FloatArray:
    """A tile's l = m + log sum_k e^{X_k - m} with m = max_k X_k (Inf-CL Eq. 5); -inf where there is no column.

    X: (t_r, t_c). Returns (t_r,).
    """
    return general.lse(X, axis=1)


def chain_rule(dx: FloatArray, I: FloatArray, T: FloatArray) -> tuple[FloatArray, FloatArray]:
    """dL/dI_i = sum_j dL/dx_ij T_j and dL/dT_j = sum_i dL/dx_ij I_i (Inf-CL Eq. 6).

    dx: (b, b'), dL/dx; I: (b, c); T: (b', c). Returns (b, c) and (b', c).
    """
    return dx @ T, dx.T @ I


@np.errstate(all="ignore")
def image_gradient(I: FloatArray, T: FloatArray, l: FloatArray) -> FloatArray:
    """dL_I/dI_i = -1/b T_i + 1/b sum_j e^{x_ij - l_i} T_j (Inf-CL Eq. 7, second line; the first is wrong).

    I, T: (b, c); l: (b,). Returns (b, c).
    """
    b = len(I)
    return -T / b + np.exp(I @ T.T - l[:, None]) @ T / b


@np.errstate(all="ignore")
def tiled_image_gradient(I: FloatArray, T: FloatArray, l: FloatArray, t_c: int) -> FloatArray:
    """I' <- I' + e^{X^j - l} T^j over column TILES j, then dL_I/dI = (I' - T) / b (Inf-CL Eq. 8, corrected).

    I, T: (b, c); l: (b,); t_c: at least 1. Returns (b, c).
    """
    I_prime = np.zeros_like(I)
    for T_j in divide(T, t_c):
        I_prime += np.exp(I @ T_j.T - l[:, None]) @ T_j
    return (I_prime - T) / len(I)


def tile_counts(b_s: int, t_r: int, t_c: int) -> tuple[int, int]:
    """n_r = ceil(b_s / t_r) and n_c = ceil(b_s / t_c) tiles in one shard's block (Inf-CL Eq. 9, corrected).

    b_s: a shard's batch; t_r, t_c: tile size, at least 1.
    """
    return -(-b_s // t_r), -(-b_s // t_c)


def ring_forward(I: Sequence[FloatArray], T: Sequence[FloatArray], t_r: int, t_c: int) -> list[FloatArray]:
    """The global row LSE, one shard of it on each rank (Inf-CL Alg. 1).

    I, T: n shards (b_s, c), on simulated ranks; t_r, t_c: tile size, at least 1. Returns n vectors (b_s,).
    """
    l = [np.full(len(I_i), -np.inf) for I_i in I]
    held = list(T)
    for _ in range(len(I)):
        l = [merge_lse(l_i, local_lse(I_i, T_k, t_r, t_c)) for l_i, I_i, T_k in zip(l, I, held, strict=True)]
        held = to_the_next(held)
    return l


@np.errstate(all="ignore")
def local_lse(I: FloatArray, T: FloatArray, t_r: int, t_c: int) -> FloatArray:
    """One rank's row LSE over the columns it holds (Inf-CL Alg. 2, from -inf and over n_c tiles).

    I: (b_s, c); T: (b_s', c); t_r, t_c: tile size, at least 1. Returns (b_s,).
    """
    l = np.full(len(I), -np.inf)
    for i in range(0, len(I), t_r):
        for T_j in divide(T, t_c):
            l[i : i + t_r] = merge_lse(l[i : i + t_r], lse(I[i : i + t_r] @ T_j.T))
    return l


def ring_backward(
    I: Sequence[FloatArray], T: Sequence[FloatArray], l: Sequence[FloatArray], t_r: int, t_c: int
) -> tuple[list[FloatArray], list[FloatArray]]:
    """The gradients dL_I/dI and dL_I/dT, one shard of each on each rank (Inf-CL Alg. 3, corrected).

    In step j rank i holds the text shard (i - j + 1) mod n; its gradient accumulator travels with it and returns to
    its owner after n hops. The positive and the division by b, which the paper omits, come at the end.

    I, T: n shards (b_s, c), I[i] and T[i] of one length; l: n vectors (b_s,). Returns two lists of n (b_s, c).
    """
    n, b = len(I), sum(len(I_i) for I_i in I)
    dI, dT_cache = [np.zeros_like(I_i) for I_i in I], [np.zeros_like(T_i) for T_i in T]
    for j in range(1, n + 1):
        for i in range(n):
            dI_temp, dT_temp = local_backward(I[i], T[(i - j + 1) % n], l[i], t_r, t_c)
            dI[i] += dI_temp
            dT_cache[i] += dT_temp
        dT_cache = to_the_next(dT_cache)
    return (
        [(dI_i - T_i) / b for dI_i, T_i in zip(dI, T, strict=True)],
        [(dT_i - I_i) / b for dT_i, I_i in zip(dT_cache, I, strict=True)],
    )


@np.errstate(all="ignore")
def local_backward(I: FloatArray, T: FloatArray, l: FloatArray, t_r: int, t_c: int) -> tuple[FloatArray, FloatArray]:
    """Gradients of sum_i l_i over one rank's block, tile by tile (Inf-CL Alg. 4, with its transposes, over ceil).

    I: (b_s, c); T: (b_s', c); l: (b_s,), the GLOBAL row LSE. Returns dI (b_s, c) and dT (b_s', c).
    """
    dI, dT = np.zeros_like(I), np.zeros_like(T)
    for i in range(0, len(I), t_r):
        I_i, l_i = I[i : i + t_r], l[i : i + t_r]
        for j in range(0, len(T), t_c):
            T_j = T[j : j + t_c]
            dX = np.exp(I_i @ T_j.T - l_i[:, None])
            dI[i : i + t_r] += dX @ T_j
            # Row tiles may run in parallel only if this sum is not shared between them.
            dT[j : j + t_c] += dX.T @ I_i
    return dI, dT


def loss_memory(b: int, c: int, n: int) -> int:
    """Numbers a rank holds for the loss: I, T, dI, dT (b_s, c) and l (b_s,), O(b c / n) (Inf-CL Sec. 4, corrected).

    b: the global batch; c: the feature width; n: ranks. For equal shards, b_s = ceil(b / n). The one tile of
    logits is not counted.
    """
    return -(-b // n) * (4 * c + 1)


def divide(values: FloatArray, t: int) -> list[FloatArray]:
    """Tiles of t rows, the last one shorter (Inf-CL Alg. 2 and 4, lines 1-3).

    values: (b, ...). Returns ceil(b / t) views.
    """
    return [values[i : i + t] for i in range(0, len(values), t)]


def to_the_next(held: Sequence[_T]) -> list[_T]:
    """Each rank sends its entry to the next rank and receives the previous rank's (Inf-CL Alg. 1, lines 6-7).

    held: one entry per rank. Returns the entries after one hop.
    """
    return [held[i - 1] for i in range(len(held))]
