"""Several column blocks under one row LSE: the same loss, with the columns in pieces.

A block may have rows of its own too (GTE puts q->d, q->q, d->q and d->d of pair i under one LSE): what the
blocks share is the number of rows, the row weights and the LSE.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from contrastile.oracle.arrays import BoolArray, FloatArray
from contrastile.oracle.general import (
    column_lse,
    expected_logit,
    gradients,
    logits,
    merge,
    one_direction,
    row_lse,
    weighted_sum,
)


class Block(NamedTuple):
    """Rows against one block of columns.

    q: (m, d); k: (n_b, d); A, y: (m, n_b); scale: a number or (m,). Targets of all blocks together sum to 1 a row.
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


def lse_over_blocks(blocks: Sequence[Block]) -> FloatArray:
    """L_i over the columns of all blocks: the merge of the blocks' row LSEs, in the order given.

    blocks: at least one, of m rows each. Returns (m,).
    """
    L = np.full(len(blocks[0].q), -np.inf)
    for block in blocks:
        L = merge(L, row_lse(block.x, block.A))
    return L


@np.errstate(all="ignore")
def loss_over_blocks(blocks: Sequence[Block], u: FloatArray) -> float:
    """sum_i u_i (L_i - sum_b sum_j y^b_ij x^b_ij), plus each block's own column terms.

    blocks: at least one, of m rows each; u: (m,).
    """
    expected = sum((expected_logit(block.x, block.y, axis=1) for block in blocks), np.zeros(len(u)))
    total = weighted_sum(u, lse_over_blocks(blocks) - expected)
    for block in blocks:
        if block.v is not None and block.y_c is not None:
            M = column_lse(block.x, block.A)
            total += weighted_sum(block.v, M - expected_logit(block.x, block.y_c, axis=0))
    return total


def gradients_over_blocks(blocks: Sequence[Block], u: FloatArray) -> list[BlockGradients]:
    """Each block's gradients: its G has the LSE of all blocks in it, everything else is its own.

    blocks: at least one, of m rows each; u: (m,). Returns one `BlockGradients` a block, in order.
    """
    L = lse_over_blocks(blocks)
    found = []
    for block in blocks:
        G = one_direction(block.x, block.A, u[:, None], L[:, None], block.y)
        if block.v is not None and block.y_c is not None:
            G = G + one_direction(block.x, block.A, block.v, column_lse(block.x, block.A), block.y_c)
        d_rows, d_columns, d_scale, d_bias = gradients(block.q, block.k, block.scale, G)
        found.append(BlockGradients(d_rows, d_columns if block.columns_need_gradient else None, d_scale, d_bias))
    return found
