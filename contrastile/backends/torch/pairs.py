"""Positives and masks of a block and of a tile, from vectors: an index for each row, or a dense mask of equal ids."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch

from contrastile.backends.contract import Block
from contrastile.backends.torch.products import LOG2_E, Products


def cut(x: torch.Tensor, where: slice) -> torch.Tensor:
    """Some rows of x; x itself where the slice covers all."""
    return x if where.stop - where.start == x.shape[0] else x[where]


class _Diagonal:
    """The pairs (i, i) of a block that lie in a tile."""

    def __init__(self, rows: slice, columns: slice) -> None:
        self._offset = rows.start - columns.start
        start, stop = max(rows.start, columns.start), min(rows.stop, columns.stop)
        # the rows of the tile whose diagonal pair lies in the tile
        self._rows = slice(start - rows.start, max(start, stop) - rows.start)

    def read(self, x: torch.Tensor) -> torch.Tensor:
        """The pairs' elements, which share x's memory. x: (tr, tc)."""
        return x.diagonal(self._offset)

    def write(self, x: torch.Tensor, value: float | torch.Tensor) -> None:
        """Write one value, or a value for each row of the tile, (tr,), to the pairs. x: (tr, tc)."""
        if isinstance(value, torch.Tensor):
            self.read(x).copy_(cut(value, self._rows))
        else:
            self.read(x).fill_(value)

    def negate(self, x: torch.Tensor) -> None:
        """Change the sign of the pairs' elements. x: (tr, tc)."""
        self.read(x).neg_()

    def copy_to(self, x: torch.Tensor, into: torch.Tensor) -> None:
        """Copy the pairs' elements to their rows' places. x: (tr, tc), into: (tr,)."""
        cut(into, self._rows).copy_(self.read(x))


class _Pointers:
    """For each row of a tile, at most one of its columns."""

    def __init__(self, column: torch.Tensor, columns: slice, sync: bool) -> None:
        all_inside = sync and len(column) > 0 and _all_in_range(column, columns)
        # rows that point outside the tile read some column, and write back what they read
        self._inside = None if all_inside else ((column >= columns.start) & (column < columns.stop))[:, None]
        self._column = (column - columns.start).clamp_(0, columns.stop - columns.start - 1)[:, None]

    def read(self, x: torch.Tensor) -> torch.Tensor:
        return x.gather(1, self._column).squeeze(1)

    def write(self, x: torch.Tensor, value: Any) -> None:
        value = value[:, None] if isinstance(value, torch.Tensor) else value
        if self._inside is not None:
            value = torch.where(self._inside, value, x.gather(1, self._column))
        x.scatter_(1, self._column, value)

    def negate(self, x: torch.Tensor) -> None:
        self.write(x, -self.read(x))

    def copy_to(self, x: torch.Tensor, into: torch.Tensor) -> None:
        values = self.read(x).to(into.dtype)
        into.copy_(values if self._inside is None else torch.where(self._inside.squeeze(1), values, into))


def _guide_products(rows: torch.Tensor, columns: torch.Tensor) -> Callable[[slice, slice], torch.Tensor]:
    """A function that gives the dot products of a guide's features, (m, e) and (n, e), in a tile, in new memory."""
    products = Products(Block(rows, columns, rows.new_ones(())), unit=1.0)

    def tile_products(row_range: slice, column_range: slice) -> torch.Tensor:
        q, k = map(products.operand, (cut(rows, row_range), cut(columns, column_range)))
        out = q.new_empty((q.shape[0], k.shape[0]), dtype=products.state)
        return products.logits(q, k, out, diagonal=False)

    return tile_products


class BlockPairs:
    """The pairs of a block: the facts that its tiles share.

    Attributes:
        limits: of the rows and of the columns, in base 2, each None where there are none.
    """

    def __init__(self, block: Block, sync: bool) -> None:
        self.block, self.sync = block, sync
        self.positives, self.excluded = block.pairs.positives, block.pairs.excluded
        if self.positives is not None and self.excluded is not None:
            # an excluded pair is never positive
            self.positives = self.positives.masked_fill(self.positives == self.excluded, -1)
        self.is_diagonal, self.excludes_diagonal = map(self._is_diagonal, (self.positives, self.excluded))
        rows, columns = block.pairs.row_guide, block.pairs.column_guide
        self.guide = None if rows is None or columns is None else _guide_products(rows, columns)
        unit = LOG2_E if self.guide is None else 1.0
        limits = block.pairs.row_limits, block.pairs.column_limits
        self.limits = [None if x is None else x * unit for x in limits]

    def _is_diagonal(self, columns: torch.Tensor | None) -> bool:
        """Whether row i's column is i, as in most losses: then no index is needed."""
        if not self.sync or columns is None:
            return False
        return torch.equal(columns, torch.arange(len(columns), device=columns.device))

    def positive_index(self) -> slice | torch.Tensor | None:
        """An index that gives each row its positive's element of a vector over the columns; without a positive, any.

        None where no row has a positive; a slice of all where every row i has column i and there are no other columns.
        """
        m, n = self.block.rows.shape[0], self.block.columns.shape[0]
        if self.positives is None or n == 0:
            return None
        return slice(0, n) if self.is_diagonal and m == n else self.positives.clamp(0, n - 1)

    def locate(
        self, column: torch.Tensor | None, is_diagonal: bool, rows: slice, columns: slice
    ) -> _Diagonal | _Pointers | None:
        """The places in a tile of the pairs of each row with its column."""
        if column is None:
            return None
        return _Diagonal(rows, columns) if is_diagonal else _Pointers(cut(column, rows), columns, self.sync)


def _all_in_range(column: torch.Tensor, columns: slice) -> bool:
    """Whether all indices lie in the range; there must be at least one."""
    smallest, largest = column.aminmax()
    return bool(columns.start <= smallest) and bool(largest < columns.stop)


def _ranges_overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether the ranges of two vectors overlap; with ids in rising order, those of most tiles do not."""
    (a_min, a_max), (b_min, b_max) = a.aminmax(), b.aminmax()
    return bool((a_min <= b_max) & (b_min <= a_max))


class TilePairs:
    """Which pairs of a tile count. Equal ids are never read where an index already decides the pair.

    Attributes:
        positive: the positive pairs that an index names.
        matched: the positive pairs that equal ids name, (tr, tc) bool; None where the tile has none.
    """

    def __init__(self, block_pairs: BlockPairs, rows: slice, columns: slice) -> None:
        self._block_pairs, self._place, pairs = block_pairs, (rows, columns), block_pairs.block.pairs
        self.positive = block_pairs.locate(block_pairs.positives, block_pairs.is_diagonal, rows, columns)
        self._excluded = block_pairs.locate(block_pairs.excluded, block_pairs.excludes_diagonal, rows, columns)
        self._dropped: torch.Tensor | None = None
        self.matched: torch.Tensor | None = None
        if pairs.row_ids is None or pairs.column_ids is None:
            return
        row_ids, column_ids = cut(pairs.row_ids, rows), cut(pairs.column_ids, columns)
        if not block_pairs.sync or _ranges_overlap(row_ids, column_ids):
            equal = row_ids[:, None] == column_ids
            for named in (self.positive, self._excluded):
                if named is not None:
                    named.write(equal, False)
            # most tiles hold no equal ids; torch takes the maximum of bytes many times as fast as that of booleans
            if not block_pairs.sync or bool(equal.view(torch.uint8).max()):
                self._dropped = equal if pairs.match == "drop" else None
                self.matched = equal if pairs.match == "target" else None

    def silence(self, x: torch.Tensor, value: float) -> None:
        """Write ``value`` over every pair that is not admitted. x: (tr, tc)."""
        if self._dropped is not None:
            x.masked_fill_(self._dropped, value)
        if self._excluded is not None:
            self._excluded.write(x, value)

    def within_limits(
        self, dim: int, x: torch.Tensor, reference: float | None, out: torch.Tensor | None, *, is_exp: bool = False
    ) -> torch.Tensor | None:
        """0 where a pair that ids do not make positive exceeds its row's limit, or with dim 0 its column's, else 1.

        None where there are no limits. A product takes a fifth of a mask's time, but 0 x inf is NaN. x: (tr, tc),
        logits in base 2. With a reference their exponentials are compared, which x must hold if ``is_exp``.
        """
        limits = self._block_pairs.limits[1 - dim]
        if limits is None:
            return None
        limits = cut(limits, self._place[1 - dim])
        if self._guide is not None:
            x = self._guide
        elif reference is not None:
            limits, x = torch.exp2(limits - reference), x if is_exp else (x - reference).exp2_()
        within = torch.gt(x, limits.unsqueeze(dim), out=torch.empty_like(x) if out is None else out)
        # not "less or equal": NaN leaves no pair out
        torch.sub(within.new_ones(()), within, out=within)
        return within if self.matched is None else within.masked_fill_(self.matched, 1.0)

    @cached_property
    def _guide(self) -> torch.Tensor | None:
        """The guide's dot products."""
        return None if self._block_pairs.guide is None else self._block_pairs.guide(*self._place)

    def hide_positives(self, x: torch.Tensor, value: float) -> None:
        """Write ``value`` over every positive pair. x: (tr, tc)."""
        if self.positive is not None:
            self.positive.write(x, value)
        if self.matched is not None:
            x.masked_fill_(self.matched, value)

    def negate_positives(self, x: torch.Tensor, spare: torch.Tensor) -> None:
        """Change the sign of every positive pair. x: (tr, tc)."""
        if self.positive is not None:
            self.positive.negate(x)
        if self.matched is not None:
            torch.neg(x, out=spare)
            torch.where(self.matched, spare, x, out=x)

    def subtract_matched(
        self, g: torch.Tensor, row_term: torch.Tensor, column_term: torch.Tensor | None, spare: torch.Tensor
    ) -> None:
        """Subtract ``row_term_i + column_term_j`` from every pair of equal ids. g: (tr, tc); terms: (tr,) and (tc,)."""
        if self.matched is not None:
            if column_term is None:
                torch.sub(g, row_term[:, None], out=spare)
            else:
                torch.add(row_term[:, None], column_term, out=spare)
                torch.sub(g, spare, out=spare)
            torch.where(self.matched, spare, g, out=g)
