"""Which pairs are positive and which are admitted, from O(m + n) vectors.

Every vector has one entry per row or per column, so the masks of a tile follow from slices of the vectors. Only the
dense oracle forms an m x n mask.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, TypeAlias

import numpy as np

from contrastile.oracle.arrays import BoolArray, FloatArray, IntArray, float64

Match: TypeAlias = Literal["drop", "target"]


class Pairs(NamedTuple):
    """The vectors that define positives P and admitted pairs A.

    positives: (m,) int64, the column of each row's positive; outside 0..n-1: none among these columns.
    row_ids: (m,) int64; column_ids: (n,) int64; read only where both are given.
    match: what equal ids mean. "drop": a false negative, not admitted unless it is the positive.
        "target": a positive (SupCon's labels); `positives` is then not read.
    excluded: (m,) int64, the column that a row excludes, even if it is its positive; outside 0..n-1: none.
    owners: (n,) int64, the one row for which a column counts; -1: all rows, below: none.
    """

    positives: IntArray | None = None
    row_ids: IntArray | None = None
    column_ids: IntArray | None = None
    match: Match = "drop"
    excluded: IntArray | None = None
    owners: IntArray | None = None

    def positive(self, m: int, n: int) -> BoolArray:
        """P_ij, (m, n) bool: column j is a positive of row i."""
        by_ids = self.match == "target"
        P = _equal(m, n, self.row_ids, self.column_ids) if by_ids else _pointed_at(m, n, self.positives)
        return P & ~self._unseen(m, n)

    def admitted(self, m: int, n: int) -> BoolArray:
        """A_ij, (m, n) bool: whether a pair counts in either direction; every positive is admitted."""
        unseen = self._unseen(m, n)
        if self.match == "drop":
            unseen |= _equal(m, n, self.row_ids, self.column_ids)
        return self.positive(m, n) | ~unseen

    def _unseen(self, m: int, n: int) -> BoolArray:
        """(m, n) bool: the row excludes the column, or another row owns the column."""
        excluded = _pointed_at(m, n, self.excluded)
        if self.owners is None:
            return excluded
        is_foreign: BoolArray = (self.owners != -1) & (self.owners != np.arange(m)[:, None])
        return excluded | is_foreign


def target_weights(P: BoolArray) -> FloatArray:
    """t_i = 1 / |P(i)|, the target of each positive of a row, and 0 where it has none (SupCon L_out).

    P: (m, n) bool. Returns (m,).
    """
    count = P.sum(axis=1)
    return float64(np.where(count == 0, 0.0, 1 / np.maximum(count, 1)))


def _pointed_at(m: int, n: int, column: IntArray | None) -> BoolArray:
    """(m, n) bool: j is the column that row i's index names."""
    if column is None:
        return np.zeros((m, n), dtype=np.bool_)
    is_pointed_at: BoolArray = np.asarray(column)[:, None] == np.arange(n)
    return is_pointed_at


def _equal(m: int, n: int, row_ids: IntArray | None, column_ids: IntArray | None) -> BoolArray:
    """(m, n) bool: row i and column j carry the same id."""
    if row_ids is None or column_ids is None:
        return np.zeros((m, n), dtype=np.bool_)
    is_equal: BoolArray = np.asarray(row_ids)[:, None] == np.asarray(column_ids)
    return is_equal
