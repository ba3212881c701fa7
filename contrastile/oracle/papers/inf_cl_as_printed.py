"""Inf-CL's mistakes, each exactly as printed, to compare with `inf_cl`.

Where a printed line is one of several mistakes in an algorithm, the others are corrected here, so that each difference
has one cause. Letters and shapes are those of `inf_cl`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from contrastile.oracle.arrays import FloatArray, float64
from contrastile.oracle.papers.inf_cl import divide, local_backward, lse, to_the_next


@np.errstate(all="ignore")
def merge_lse(l: FloatArray, l_ij: FloatArray) -> FloatArray:
    """l^i <- l^i + log(1 + e^{l^ij - l^i}) (Inf-CL Eq. 4): overflows when l^ij - l^i does, NaN from -inf to -inf.

    l, l_ij: (t_r,), or (t_r,) float32 both.
    """
    return float64(l + np.log(1 + np.exp(l_ij - l)))


def chain(tiles: Sequence[FloatArray], l_0: float = 0.0) -> FloatArray:
    """The merge of a row of tiles from l = 0 (Inf-CL Eq. 4): log(S + 1) where log S is meant.

    tiles: l^{i,j} for j = 1..n_c, at least one, each (t_r,); l_0: the start, 0 as printed.
    """
    l = np.full_like(tiles[0], l_0)
    for l_ij in tiles:
        l = merge_lse(l, l_ij)
    return l


@np.errstate(all="ignore")
def image_gradient_first_line(I: FloatArray, T: FloatArray, l: FloatArray) -> FloatArray:
    """-1/b sum_j (dL/dx_ii dx_ii/dI_i dx_ij/dI_i - dL/dl_i dl_i/dx_ij dx_ij/dI_i) (Inf-CL Eq. 7, first line).

    dL/dx_ii = -1/b and dL/dl_i = 1/b hold the 1/b that the line puts in front again; dx_ij/dI_i = T_j in the first
    product makes it a product of two vectors, taken here entry by entry. I, T: (b, c); l: (b,). Returns (b, c).
    """
    b = len(I)
    positive = -1 / b * T * T.sum(axis=0)
    return float64(-1 / b * (positive - 1 / b * (np.exp(I @ T.T - l[:, None]) @ T)))


@np.errstate(all="ignore")
def tiled_image_gradient(I: FloatArray, T: FloatArray, l: FloatArray, t_c: int) -> FloatArray:
    """I'_i <- I'_i + e^{x_ij - l_i} T_j for j = 1..n_c (Inf-CL Eq. 8): scalars counted by the number of tiles.

    I, T: (b, c); l: (b,); t_c: at least 1. Returns (b, c), right only for t_c = 1.
    """
    b, I_prime = len(I), np.zeros_like(I)
    for T_j in T[: len(divide(T, t_c))]:
        I_prime += np.exp(I @ T_j - l)[:, None] * T_j
    return -T / b + I_prime / b


def tile_counts(b: int, t_r: int, t_c: int) -> tuple[int, int]:
    """n_r = ceil(b / t_r) and n_c = ceil(b / t_c) for a block of b_s x b_s, b the global batch (Inf-CL Eq. 9).

    t_r, t_c: tile size, at least 1. n times too many either way.
    """
    return -(-b // t_r), -(-b // t_c)


@np.errstate(all="ignore")
def local_lse(I: FloatArray, T: FloatArray, t_r: int, t_c: int, l_0: float = 0.0) -> FloatArray:
    """Alg. 2 with its inner loop to n_r (Inf-CL Alg. 2, line 6), and its start l_0 = 0 (line 5).

    I, T: (b_s, c). Column tiles past n_c are empty here; a kernel would read past the end of T.
    """
    rows, columns = divide(I, t_r), divide(T, t_c)
    no_more = [T[:0]] * max(0, len(rows) - len(columns))
    l = [chain([lse(I_i @ T_j.T) for T_j in (columns + no_more)[: len(rows)]], l_0) for I_i in rows]
    return np.concatenate(l)


def ring_backward(
    I: Sequence[FloatArray], T: Sequence[FloatArray], l: Sequence[FloatArray], t_r: int, t_c: int
) -> tuple[list[FloatArray], list[FloatArray]]:
    """Alg. 3 with k = (i + j - 1) mod n, no positive and no 1/b (Inf-CL Alg. 3, line 6).

    The cache still goes to the next rank, so in step j rank i holds the gradient of shard (i - j + 1) mod n and adds
    that of shard k to it. I, T: n shards (b_s, c), all of one length, as the paper has them; l: n vectors (b_s,).
    """
    n = len(I)
    dI, dT_cache = [np.zeros_like(I_i) for I_i in I], [np.zeros_like(T_i) for T_i in T]
    for j in range(1, n + 1):
        for i in range(n):
            dI_temp, dT_temp = local_backward(I[i], T[(i + j - 1) % n], l[i], t_r, t_c)
            dI[i] += dI_temp
            dT_cache[i] += dT_temp
        dT_cache = to_the_next(dT_cache)
    return dI, dT_cache


def local_backward_floor(
    I: FloatArray, T: FloatArray, l: FloatArray, t_r: int, t_c: int
) -> tuple[FloatArray, FloatArray]:
    """Alg. 4 with its inner loop to b // t_c, which drops the last, ragged column tile (Inf-CL Alg. 4, line 8).

    I: (b_s, c); T: (b_s', c); l: (b_s,). Returns dI (b_s, c) and dT (b_s', c).
    """
    whole = len(T) // t_c * t_c
    dI, dT = local_backward(I, T[:whole], l, t_r, t_c)
    return dI, np.concatenate([dT, np.zeros_like(T[whole:])])


def tile_logits(I_i: FloatArray, T_j: FloatArray) -> FloatArray:
    """X^{i,j} = I^i . T^j, without the transpose (Inf-CL Alg. 4, line 10): no product unless t_c = c.

    I_i: (t_r, c); T_j: (t_c, c).
    """
    return I_i @ T_j


def tile_text_gradient(I_i: FloatArray, dX: FloatArray) -> FloatArray:
    """dT^j += I^i . dX^{i,j}, without the transpose (Inf-CL Alg. 4, line 14): no product unless t_r = c.

    I_i: (t_r, c); dX: (t_r, t_c).
    """
    return I_i @ dX


def racing_text_gradient(I: FloatArray, T: FloatArray, l: FloatArray, t_r: int, t_c: int) -> FloatArray:
    """Alg. 4's dT when row tiles run in parallel as in Alg. 2: every one loads dT^j before any writes it back.

    Load, add and store are three steps (Inf-CL Alg. 4, lines 13-15), so only the last store remains.
    I: (b_s, c), at least one row; T: (b_s', c); l: (b_s,). Returns (b_s', c).
    """
    loaded = np.zeros_like(T)
    stored = loaded
    for I_i, l_i in zip(divide(I, t_r), divide(l, t_r), strict=True):
        stored = loaded + local_backward(I_i, T, l_i, t_r, t_c)[1]
    return stored


def loss_memory(b: int, n: int) -> float:
    """O(b / n^2) (Inf-CL Sec. 1 and Table 4): the printed growth, up to a constant.

    b: the global batch; n: ranks.
    """
    return b / n**2
