"""Positives and masks of one tile, from the block's vectors: by index where a row has one, dense for equal ids."""

from __future__ import annotations

import torch

from contrastile.backends.contract import Pairs


class _Pointers:
    """For each row of the tile, at most one of its columns.

    Attributes:
        column: (tr,) int64, clamped into the tile so that it may always be used as an index.
        inside: (tr,) bool, whether the row really points into this tile.
    """

    def __init__(self, column: torch.Tensor, columns: slice) -> None:
        self.column = (column - columns.start).clamp(0, columns.stop - columns.start - 1)
        self.inside = (column >= columns.start) & (column < columns.stop)


class TilePairs:
    """Which pairs of a tile count. Equal ids are never read where an index already decides the pair."""

    def __init__(self, pairs: Pairs, rows: slice, columns: slice, like: torch.Tensor, sync: bool) -> None:
        self._sync = sync
        self._every_row = torch.arange(like.shape[0], device=like.device)
        self._positive = None if pairs.positives is None else _Pointers(pairs.positives[rows], columns)
        self._excluded = None if pairs.excluded is None else _Pointers(pairs.excluded[rows], columns)
        self._dropped: torch.Tensor | None = None
        self._matched: torch.Tensor | None = None
        if self._positive is not None and pairs.excluded is not None:
            # an excluded pair is no positive, whatever else is said of it
            self._positive.inside &= pairs.positives[rows] != pairs.excluded[rows]  # type: ignore[index]
        if pairs.row_ids is not None and pairs.column_ids is not None:
            equal = pairs.row_ids[rows, None] == pairs.column_ids[None, columns]
            for decided in (self._positive, self._excluded):
                if decided is not None:
                    equal[self._every_row, decided.column] &= ~decided.inside
            # most tiles hold no equal ids
            if not sync or bool(equal.any()):
                self._dropped = equal if pairs.match == "drop" else None
                self._matched = equal if pairs.match == "target" else None

    def silence(self, x: torch.Tensor, value: float) -> None:
        """Write ``value`` over every pair that is not admitted. x: (tr, tc)."""
        if self._dropped is not None:
            x.masked_fill_(self._dropped, value)
        if self._excluded is not None:
            at = self._every_row, self._excluded.column
            x[at] = torch.where(self._excluded.inside, value, x[at])

    def positive_sums(self, x: torch.Tensor, spare: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Sums of positive logits over the tile's rows (tr,) and over its columns (tc,); None when it can hold none."""
        if self._positive is None and self._matched is None:
            return None
        row_sum, column_sum = x.new_zeros(x.shape[0]), x.new_zeros(x.shape[1])
        if self._positive is not None:
            column, inside = self._positive.column, self._positive.inside
            row_sum += torch.where(inside, x[self._every_row, column], 0.0)
            if self._sync:
                column_sum.index_add_(0, column, row_sum)
            else:
                # index_add_ would add in any order; an accumulating index_put_ sorts first
                column_sum.index_put_((column,), row_sum, accumulate=True)
        if self._matched is not None:
            spare.copy_(x).masked_fill_(~self._matched, 0.0)
            row_sum += spare.sum(1)
            column_sum += spare.sum(0)
        return row_sum, column_sum

    def negate_positives(self, x: torch.Tensor, spare: torch.Tensor) -> None:
        """Change the sign of every positive pair. x: (tr, tc)."""
        if self._positive is not None:
            at = self._every_row, self._positive.column
            x[at] = torch.where(self._positive.inside, -x[at], x[at])
        if self._matched is not None:
            torch.neg(x, out=spare)
            torch.where(self._matched, spare, x, out=x)

    def subtract_targets(
        self, g: torch.Tensor, row_term: torch.Tensor, column_term: torch.Tensor | None, spare: torch.Tensor
    ) -> None:
        """Subtract ``row_term_i + column_term_j`` from every positive pair. g: (tr, tc); terms: (tr,) and (tc,)."""
        if self._positive is not None:
            column, inside = self._positive.column, self._positive.inside
            term = row_term if column_term is None else row_term + column_term[column]
            at = self._every_row, column
            g[at] = torch.where(inside, g[at] - term, g[at])
        if self._matched is not None:
            spare.copy_(row_term[:, None].expand_as(g))
            if column_term is not None:
                spare.add_(column_term)
            g.sub_(spare.masked_fill_(~self._matched, 0.0))
