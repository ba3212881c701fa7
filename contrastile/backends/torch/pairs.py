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

    def hide_positives(self, x: torch.Tensor, value: float) -> None:
        """Write ``value`` over every positive pair. x: (tr, tc)."""
        if self._positive is not None:
            at = self._every_row, self._positive.column
            x[at] = torch.where(self._positive.inside, value, x[at])
        if self._matched is not None:
            x.masked_fill_(self._matched, value)

    @property
    def matched(self) -> torch.Tensor | None:
        """The positive pairs that equal ids name, (tr, tc) bool; None where the tile has none."""
        return self._matched

    def named(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Of each row, whether an index names its positive in this tile, and that pair's element of x; (tr,) both."""
        if self._positive is None:
            return None
        return self._positive.inside, x[self._every_row, self._positive.column]

    def negate_positives(self, x: torch.Tensor, spare: torch.Tensor) -> None:
        """Change the sign of every positive pair. x: (tr, tc)."""
        if self._positive is not None:
            at = self._every_row, self._positive.column
            x[at] = torch.where(self._positive.inside, -x[at], x[at])
        if self._matched is not None:
            torch.neg(x, out=spare)
            torch.where(self._matched, spare, x, out=x)

    def set_named(self, g: torch.Tensor, value: torch.Tensor) -> None:
        """Write each row's value at the pair that an index names. g: (tr, tc); value: (tr,)."""
        if self._positive is not None:
            at = self._every_row, self._positive.column
            g[at] = torch.where(self._positive.inside, value, g[at])

    def subtract_matched(
        self, g: torch.Tensor, row_term: torch.Tensor, column_term: torch.Tensor | None, spare: torch.Tensor
    ) -> None:
        """Subtract ``row_term_i + column_term_j`` from every pair of equal ids. g: (tr, tc); terms: (tr,) and (tc,)."""
        if self._matched is not None:
            spare.copy_(row_term[:, None].expand_as(g))
            if column_term is not None:
                spare.add_(column_term)
            g.sub_(spare.masked_fill_(~self._matched, 0.0))
