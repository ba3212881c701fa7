"""Several column blocks under one row LSE: the same loss, with the columns in parts.

A block may have rows of its own, too (GTE puts q->d, q->q, d->q and d->d of pair i under one LSE): the blocks share
only the number of rows, the row weights and the LSE.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from contrastile.oracle.arrays import BoolArray, FloatArray
from contrastile.oracle.general import (
    gradients,
    logits,
    merge,
    negative_log_likelihood,
    one_direction,
    split_lse,
    weighted_sum,
)


class Block(NamedTuple):
    """Rows against one block of columns.

    q: (m, d); k: (n_b, d); A, y: (m, n_b); scale: a number or (m,). Targets of all blocks together sum to 1 per row.
    v: (n_b,) and y_c: (m, n_b), both or neither: this block's columns have an LSE of their own over its rows.
    columns_need_gradient: False for a queue of negatives; its d_columns is then None.
    """

    q: FloatArray
    k: FloatArray
    scale: npt.ArrayLike
    bias: float
    A: BoolArray
    y: FloatArray
    v: FloatArray | None = None
    y_c: FloatArray | None = None
    columns_need_gradient: bool = True

    @property
    def x(self) -> FloatArray:
        """The block's logits, (m, n_b)."""
        return logits(self.q, self.k, self.scale, self.bias)


class BlockGradients(NamedTuple):
    """One block's gradients: d_rows (m, d), d_columns (n_b, d) or None, d_scale () or (m,), d_bias."""

    d_rows: FloatArray
    d_columns: FloatArray | None
    d_scale: FloatArray
    d_bias: float


def lse_over_blocks(blocks: Sequence[Block]) -> tuple[FloatArray, FloatArray]:
    """N_i and P_i over the columns of all blocks: the merges of the blocks' own, in the order given (`split_lse`).

    blocks: at least one, of m rows each. Returns (m,) twice.
    """
    N, P = (np.full(len(blocks[0].q), -np.inf) for _ in range(2))
    for block in blocks:
        N_b, P_b = split_lse(block.x, block.A, block.y, axis=1)
        N, P = merge(N, N_b), merge(P, P_b)
    return N, P


@np.errstate(all="ignore")
def loss_over_blocks(blocks: Sequence[Block], u: FloatArray) -> float:
    """sum_i u_i (L_i - sum_b sum_j y^b_ij x^b_ij), plus each block's own column terms.

    blocks: at least one, of m rows each; u: (m,).
    """
    x, y = (np.concatenate(each, axis=1) for each in zip(*((b.x, b.y) for b in blocks), strict=True))
    total = weighted_sum(u, negative_log_likelihood(x, *lse_over_blocks(blocks), y, axis=1))
    for b in blocks:
        if b.v is not None and b.y_c is not None:
            M = split_lse(b.x, b.A, b.y_c, axis=0)
            total += weighted_sum(b.v, negative_log_likelihood(b.x, *M, b.y_c, axis=0))
    return total


def gradients_over_blocks(blocks: Sequence[Block], u: FloatArray) -> list[BlockGradients]:
    """Each block's gradients: its G depends on all blocks through the LSEs alone.

    blocks: at least one, of m rows each; u: (m,). Returns one `BlockGradients` per block, in order.
    """
    L = lse_over_blocks(blocks)
    found = []
    for b in blocks:
        G = one_direction(b.x, b.A, u, *L, b.y, axis=1)
        if b.v is not None and b.y_c is not None:
            G = G + one_direction(b.x, b.A, b.v, *split_lse(b.x, b.A, b.y_c, axis=0), b.y_c, axis=0)
        d_rows, d_columns, d_scale, d_bias = gradients(b.q, b.k, b.scale, G)
        found.append(BlockGradients(d_rows, d_columns if b.columns_need_gradient else None, d_scale, d_bias))
    return found
