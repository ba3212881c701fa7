"""The general and the sigmoid loss on tiles: tr x tc logits alive at a time, O(m + n) state.

Tiles are walked row of tiles by row of tiles, left to right, so every merge and every sum has one fixed order.
Shapes are free: no rows, no columns and ragged last tiles are the same code.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from contrastile.oracle.arrays import BoolArray, FloatArray, float64
from contrastile.oracle.general import column_lse, logits, merge, one_direction, row_lse
from contrastile.oracle.pairs import NO_PAIRS, Pairs
from contrastile.oracle.sigmoid import gradient_of_sigmoid_logits, sigmoid_terms


class TileStatistics(NamedTuple):
    """The first pass: row_lse L (m,), column_lse M (n,), and the positives' logits summed.

    row_positive: (m,), sum_{j in P(i)} x_ij; column_positive: (n,), sum_{i in P(j)} x_ij; 0 where there is none.
    """

    row_lse: FloatArray
    column_lse: FloatArray
    row_positive: FloatArray
    column_positive: FloatArray


class TileGradients(NamedTuple):
    """R = G K (m, d) and C = G^T Q (n, d), both WITHOUT the factor s, and row_sum = sum_j G_ij (m,).

    dQ = s R, dK = s C, ds = sum_i <q_i, R_i>, dbeta = sum_i row_sum_i.
    """

    R: FloatArray
    C: FloatArray
    row_sum: FloatArray


class _Tile(NamedTuple):
    """One tile: its place, its features (tr, d) and (tc, d), and its logits and masks (tr, tc)."""

    rows: slice
    columns: slice
    q: FloatArray
    k: FloatArray
    x: FloatArray
    P: BoolArray
    A: BoolArray


@np.errstate(all="ignore")
def tile_statistics(
    q: npt.ArrayLike,
    k: npt.ArrayLike,
    scale: float,
    bias: float = 0.0,
    pairs: Pairs = NO_PAIRS,
    *,
    tile: tuple[int, int],
) -> TileStatistics:
    """Row and column LSE, and sums of positive logits, in one pass over the tiles (Inf-CL Eq. 3-5, both ways).

    q: (m, d); k: (n, d); tile: (tr, tc), each at least 1. A per-row scale is multiplied into q by the caller.
    """
    q, k = float64(q), float64(k)
    L, M = np.full(len(q), -np.inf), np.full(len(k), -np.inf)
    row_positive, column_positive = np.zeros(len(q)), np.zeros(len(k))
    for t in _tiles(q, k, scale, bias, pairs, tile):
        L[t.rows] = merge(L[t.rows], row_lse(t.x, t.A))
        M[t.columns] = merge(M[t.columns], column_lse(t.x, t.A))
        positive = np.where(t.P, t.x, 0.0)
        row_positive[t.rows] += positive.sum(axis=1)
        column_positive[t.columns] += positive.sum(axis=0)
    return TileStatistics(L, M, row_positive, column_positive)


@np.errstate(all="ignore")
def tile_gradients(
    q: npt.ArrayLike,
    k: npt.ArrayLike,
    scale: float,
    bias: float = 0.0,
    pairs: Pairs = NO_PAIRS,
    *,
    row_lse: npt.ArrayLike,
    row_weight: npt.ArrayLike,
    row_target: npt.ArrayLike,
    column_lse: npt.ArrayLike | None = None,
    column_weight: npt.ArrayLike | None = None,
    column_target: npt.ArrayLike | None = None,
    tile: tuple[int, int],
) -> TileGradients:
    """R = G K, C = G^T Q and the row sums of G, each tile's G recomputed from its logits (Inf-CL Eq. 6-8, both ways).

    q: (m, d); k: (n, d). The LSEs are those of the whole problem, of which q and k may be one block.
    row_lse L, row_weight u, row_target t: (m,), y_ij = t_i on positives; column_lse M, column_weight v,
    column_target t': (n,), y'_ij = t'_j on positives; the three column vectors are all None for one direction.
    tile: (tr, tc), each at least 1. A per-row scale is multiplied into q by the caller, and C then is dK.
    """
    q, k = float64(q), float64(k)
    L, u, t_row = float64(row_lse), float64(row_weight), float64(row_target)
    found = _nothing_yet(q, k)
    for t in _tiles(q, k, scale, bias, pairs, tile):
        y = np.where(t.P, t_row[t.rows, None], 0.0)
        G = one_direction(t.x, t.A, u[t.rows, None], L[t.rows, None], y)
        if column_lse is not None and column_weight is not None and column_target is not None:
            y_c = np.where(t.P, float64(column_target)[t.columns], 0.0)
            M, v = float64(column_lse)[t.columns], float64(column_weight)[t.columns]
            G = G + one_direction(t.x, t.A, v, M, y_c)
        _add(found, t, G)
    return found


@np.errstate(all="ignore")
def tile_sigmoid(
    q: npt.ArrayLike,
    k: npt.ArrayLike,
    scale: float,
    bias: float = 0.0,
    pairs: Pairs = NO_PAIRS,
    *,
    row_weight: npt.ArrayLike,
    tile: tuple[int, int],
) -> tuple[FloatArray, TileGradients]:
    """The sigmoid loss a row and its gradients in ONE pass: sum_j softplus(-z_ij x_ij), and R, C, row sums.

    q: (m, d); k: (n, d); row_weight u: (m,), 1 / b in SigLIP; tile: (tr, tc), each at least 1. Returns the losses (m,),
    unweighted, and the gradients of sum_i u_i loss_i. A per-row scale is multiplied into q by the caller, and C then
    is dK.
    """
    q, k, u = float64(q), float64(k), float64(row_weight)
    row_loss, found = np.zeros(len(q)), _nothing_yet(q, k)
    for t in _tiles(q, k, scale, bias, pairs, tile):
        row_loss[t.rows] += sigmoid_terms(t.x, t.P, t.A).sum(axis=1)
        w = u[t.rows, None]
        _add(found, t, np.where(w == 0, 0.0, w * gradient_of_sigmoid_logits(t.x, t.P, 1.0, t.A)))
    return row_loss, found


def _tiles(
    q: FloatArray, k: FloatArray, scale: float, bias: float, pairs: Pairs, tile: tuple[int, int]
) -> Iterator[_Tile]:
    """The tiles in their one order, each built when it is asked for."""
    tr, tc = tile
    for r in range(0, len(q), tr):
        for c in range(0, len(k), tc):
            rows, columns = slice(r, min(r + tr, len(q))), slice(c, min(c + tc, len(k)))
            q_t, k_t = q[rows], k[columns]
            here, m, n = pairs.tile(rows, columns), len(q_t), len(k_t)
            yield _Tile(
                rows,
                columns,
                q_t,
                k_t,
                x=logits(q_t, k_t, scale, bias),
                P=here.positive(m, n),
                A=here.admitted(m, n),
            )


def _nothing_yet(q: FloatArray, k: FloatArray) -> TileGradients:
    """Zero accumulators for rows q and columns k."""
    return TileGradients(np.zeros(q.shape), np.zeros(k.shape), np.zeros(len(q)))


def _add(found: TileGradients, t: _Tile, G: FloatArray) -> None:
    """Add one tile's G (tr, tc) to the accumulators, in place."""
    found.R[t.rows] += G @ t.k
    found.C[t.columns] += G.T @ t.q
    found.row_sum[t.rows] += G.sum(axis=1)
