"""Ranks of the positives, nearest columns and hard negatives of each row, without the m x n matrix.

All columns are compared, a tile at a time, so the results are those of the whole matrix of dot products. Dot products
are computed in float32, or in float64 for float64 features. Products of 16-bit features are exact, and their sums are
not rounded to 16 bits. No result has a gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from copy import copy
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from contrastile import validation
from contrastile.backends.choice import unusable
from contrastile.backends.contract import Block, Pairs, Search
from contrastile.backends.crossing import dtype_name
from contrastile.backends.registry import load
from contrastile.backends.torch.products import has_mixed_product
from contrastile.forms import ids_of_both
from contrastile.reporting import progress as bar
from contrastile.schedules.handshake import Handshake
from contrastile.schedules.sums import gathered, phase

TILE = 2048
"""Rows and columns of a tile on a CPU; to find many columns a tile has as many products, but more columns."""
GPU_PRODUCTS, GPU_COLUMNS = 2**26, 2**17
"""Products and columns of a tile on a GPU: large, for few launches and few lists of neighbours to merge."""
FUSED_MIN_ROWS = 128
"""The smallest number of rows for a fused search of neighbours: fewer rows leave most of a tile empty."""
FUSED_ROWS = 2**14
"""Rows of one call of a fused search: few launches, and less memory than the columns take."""


@torch.no_grad()
def ranks(
    rows: Tensor,
    columns: Tensor,
    *,
    positives: Tensor | None = None,
    row_ids: Tensor | None = None,
    column_ids: Tensor | None = None,
    group: Any = None,
    tile: int | None = None,
    progress: bool = False,
) -> Tensor:
    """The number of columns that beat each row's positive: 0 if the positive is the nearest column.

    A column beats the positive unless its dot product is smaller. So a tie counts, and a positive that is NaN ranks
    last. Equal columns tie if their products are equal; on a CPU these may differ in the last digit by their places.

    Args:
        rows: (m, d) float16, bfloat16, float32 or float64.
        columns: (n, d), same dtype and device. With a group, this rank's share of them.
        positives: (m,) integers, the index of each row's positive; None means column i for row i, and n >= m. With a
            group the index counts the columns of all ranks, rank by rank.
        row_ids: (m,) integers, given together with column_ids: other columns with the row's id do not count.
        column_ids: (n,) integers.
        group: see ``contrastile.plan.Settings``. Every rank holds the columns of all ranks while it searches.
        tile: rows and columns of a tile; None means tiles of 2^22 products, or 2^26 on a GPU. With Triton, products of
            16-bit features on a GPU are not stored unless tile is given.
        progress: whether to show a progress bar on stderr.

    Returns:
        (m,) int64. ``recall`` and ``mean_reciprocal_rank`` are means over these ranks.

    Raises:
        TypeError: wrong types or dtypes.
        ValueError: wrong shapes, devices or values.
        MismatchError: the ranks' parts do not fit together; every rank raises it.
        ExchangeError: a rank died, stalled or left.
    """
    search = _Search(rows, columns, positives, (row_ids, column_ids), group, tile, {}, {}, progress=progress)
    order = search.sort_by_ids() if search.fused is not None and row_ids is not None else None
    blocks = []
    for top, block_positives in search.blocks():
        if search.fused is not None:
            blocks.append(search.fused.ranks(search.block(top, block_positives)))
            continue
        positive_dots = search.positive_dots(top, block_positives)
        count = torch.zeros(len(block_positives), dtype=torch.int64, device=rows.device)
        for left, x in search.products(top):
            # sum floating-point numbers, which are exact here: sums of booleans take twice as long on a GPU
            smaller = search.masked(x.lt_(positive_dots[:, None]), top, left, block_positives, value=1.0)
            count += x.shape[1] - smaller.sum(1).long()
        blocks.append(count)
    result = torch.cat(blocks) if blocks else search.positives
    return result if order is None else torch.empty_like(result).scatter_(0, order, result)


def recall(ranks: Tensor, k: int) -> float:
    """recall@k: the share of positives among the k nearest columns; with k = 1 the accuracy. NaN for no rows.

    Args:
        ranks: (m,), of ``ranks``.
        k: at least 1.
    """
    return (torch.as_tensor(ranks) < _at_least("k", k, 1)).double().mean().item()


def mean_reciprocal_rank(ranks: Tensor, k: int | None = None) -> float:
    """MRR: the mean of 1 / (1 + rank); MRR@k counts 0 for a positive that is not among the k nearest. NaN for no rows.

    Args:
        ranks: (m,), of ``ranks``.
        k: at least 1; None for all ranks.
    """
    numbers = torch.as_tensor(ranks).double()
    is_counted = numbers < (torch.inf if k is None else _at_least("k", k, 1))
    return (is_counted / (1.0 + numbers)).mean().item()


@torch.no_grad()
def top_k(
    rows: Tensor,
    columns: Tensor,
    k: int,
    *,
    group: Any = None,
    tile: int | None = None,
    progress: bool = False,
) -> tuple[Tensor, Tensor]:
    """The k columns with the largest dot products with each row, in falling order; the first of equal ones comes first.

    Args:
        rows: see ``ranks``.
        columns: see ``ranks``.
        k: 1..n; with a group n counts the columns of all ranks.
        group: see ``ranks``.
        tile: see ``ranks``.
        progress: see ``ranks``.

    Returns:
        The dot products, (m, k) float32 (float64 for float64 features), and the columns' indices, (m, k) int64, among
        the columns of all ranks. NaN comes before all numbers.

    Raises:
        TypeError, ValueError, MismatchError, ExchangeError: see ``ranks``.
    """
    search = _Search(rows, columns, None, (None, None), group, tile, {"k": k}, {}, paired=False, progress=progress)
    k, n = int(k), len(search.columns)
    if k > n:
        raise ValueError(f"k must be at most the number of columns, got {k} of {n}; ask for fewer")
    blocks = [search.nearest(top, block_positives, k) for top, block_positives in search.blocks()]
    empty = search.products_of(rows[:0], search.columns[:k]), search.positives[:0, None].expand(0, k)
    values, numbers = zip(*blocks, strict=True) if blocks else ((empty[0],), (empty[1],))
    return torch.cat(values), torch.cat(numbers)


@torch.no_grad()
def mine_hard_negatives(
    rows: Tensor,
    columns: Tensor,
    k: int,
    *,
    positives: Tensor | None = None,
    row_ids: Tensor | None = None,
    column_ids: Tensor | None = None,
    range_min: int = 0,
    min_score: float | None = None,
    max_score: float | None = None,
    absolute_margin: float | None = None,
    relative_margin: float | None = None,
    group: Any = None,
    tile: int | None = None,
    progress: bool = False,
) -> Tensor:
    """The k nearest columns of each row that may be negatives, as in sentence-transformers' ``mine_hard_negatives``.

    The conditions apply to all columns: there is no ``range_max``, which could leave too few. A dot product that is NaN
    or -inf does not meet them.

    Args:
        rows: see ``ranks``.
        columns: see ``ranks``.
        k: the number of negatives of each row.
        positives: see ``ranks``.
        row_ids: see ``ranks``: columns with the row's id are no negatives.
        column_ids: see ``ranks``.
        range_min: the number of nearest columns to skip.
        min_score: negatives have at least this dot product.
        max_score: negatives have at most this dot product.
        absolute_margin: negatives have at most the dot product of the row's own positive minus this margin. Where a
            query has several positives, sentence-transformers takes the least similar one.
        relative_margin: negatives have at most s - margin x |s|, where s is the positive's dot product.
        group: see ``ranks``.
        tile: see ``ranks``.
        progress: see ``ranks``.

    Returns:
        (m, k) int64 indices among the columns of all ranks, the nearest first; -1 where a row has fewer negatives.

    Raises:
        TypeError, ValueError, MismatchError, ExchangeError: see ``ranks``.
    """
    sizes = {"k": k, "range_min": range_min}
    low = -torch.inf if min_score is None else min_score
    high = torch.inf if max_score is None else max_score
    bounds = {"min_score": low, "max_score": high}
    margins = {"absolute_margin": absolute_margin, "relative_margin": relative_margin}
    bounds |= {name: 0.0 if margin is None else margin for name, margin in margins.items()}
    ids = row_ids, column_ids
    search = _Search(rows, columns, positives, ids, group, tile, sizes, bounds, progress=progress)
    k, range_min, blocks = int(k), int(range_min), []

    def limits(positive_dots: Tensor) -> Tensor:
        limit = torch.full_like(positive_dots, high)
        if absolute_margin is not None:
            limit = torch.minimum(limit, positive_dots - absolute_margin)
        if relative_margin is not None:
            limit = torch.minimum(limit, positive_dots - relative_margin * positive_dots.abs())
        return limit

    for top, block_positives in search.blocks():
        values, numbers = search.nearest(top, block_positives, range_min + k, limits)
        # values fall, so columns below the smallest score come last
        numbers = numbers.masked_fill((values == -torch.inf) | (values < low), -1)[:, range_min:]
        blocks.append(torch.nn.functional.pad(numbers, (0, k - numbers.shape[1]), value=-1))
    return torch.cat(blocks) if blocks else search.positives[:, None].expand(0, k)


class _Search:
    """This rank's rows and the columns of all ranks, checked, and their dot products in tiles.

    Attributes:
        columns: (n, d), of all ranks.
        positives: (m,) int64.
        dtype: the dtype of the dot products.
        fused: the backend's search that does not store dot products, or None.
    """

    def __init__(
        self,
        rows: Tensor,
        columns: Tensor,
        positives: Tensor | None,
        ids: tuple[Tensor | None, Tensor | None],
        group: Any,
        tile: int | None,
        sizes: Mapping[str, int],
        bounds: Mapping[str, float],
        *,
        progress: bool,
        paired: bool = True,
    ) -> None:
        side = TILE if tile is None else tile
        self._has_positives, self._progress = paired, progress
        # a search with a group always gathers the columns
        world = Handshake.of(group, "auto" if group is None else "gather", "mean", backend="torch")
        world.build(self._meet, rows, columns, positives, ids, {"tile": side, **sizes}, bounds)
        rows, k = self.rows, sum(map(int, sizes.values()))
        self._height = self._width = side = int(side)
        if tile is None:
            # for a large k a tile has more columns, because merging its results then takes most of the time
            width, products = (GPU_COLUMNS, GPU_PRODUCTS) if rows.is_cuda else (max(side, 128 * k), side * side)
            # for few rows a tile has all columns
            self._width = max(1, min(len(self.columns), max(width, products // max(1, len(rows)))))
            self._height = max(1, products // self._width)
        # the products of one tile, with its first row and column: tiles with positives are needed twice
        self._kept_tile: tuple[tuple[int, int], Tensor] | None = None
        self.dtype: torch.dtype = torch.promote_types(rows.dtype, torch.float32)
        self.fused = _fused_search(rows, self.columns, k) if tile is None else None
        if self.fused is not None:
            self._height = FUSED_ROWS

    def _meet(
        self,
        rows: Tensor,
        columns: Tensor,
        positives: Tensor | None,
        ids: tuple[Tensor | None, Tensor | None],
        sizes: Mapping[str, int],
        bounds: Mapping[str, float],
        world: Handshake,
    ) -> None:
        """Check the arguments, and gather the columns and column ids of all ranks."""
        for name, size in sizes.items():
            _at_least(name, size, 0 if name == "range_min" else 1)
        for name, bound in bounds.items():
            validation.option(name, bound, -torch.inf, torch.inf, "none")
        # no autocast, unlike a loss: rounding the products would create ties
        with torch.autocast(rows.device.type if isinstance(rows, Tensor) else "cpu", enabled=False):
            named = {"rows": rows, "columns": columns}
            arrays, (rows, columns) = validation.features(True, may_be_empty=named, **named)
        if arrays.name != "torch":
            raise TypeError(f"rows must be a torch tensor, got {type(rows).__name__}; use torch.from_dlpack(x)")
        m, n = len(rows), len(columns)
        if self._has_positives and positives is None and n < m:
            raise ValueError(f"columns must be at least as many as rows, got {n} for {m}; give positives=")
        device_ids = [x.to(rows.device) if isinstance(x, Tensor) else x for x in ids]
        named_ids = ("row_ids", device_ids[0], m), ("column_ids", device_ids[1], n)
        self._row_ids, column_ids = ids_of_both(validation, arrays, rows, "row", *named_ids)
        positives = positives.to(rows.device) if isinstance(positives, Tensor) else positives
        positives = None if positives is None else validation.integers("positives", positives, m, "row", arrays, rows)
        batch = world.meet(
            arrays, rows, (columns,), may_be_empty=True, loss="a search", column_ids=column_ids is not None
        )
        self._explicit, self._start = positives is not None, batch.start
        diagonal = torch.arange(batch.start, batch.start + m, device=rows.device)
        self.rows, self.positives = rows, diagonal if positives is None else positives
        world.confirm(validation.positives(positives, batch.columns) if self._explicit else None)
        if batch.placement is not None:
            widths, shards = batch.placement.shards.widths, [columns, *([] if column_ids is None else [column_ids])]
            with phase(batch.placement):
                columns, *all_ids = gathered(batch.placement, arrays, *((arrays.detached(x), widths) for x in shards))
            column_ids = all_ids[0] if all_ids else None
        self.columns, self._column_ids = columns, column_ids

    def sort_by_ids(self) -> Tensor:
        """Sort rows and columns by their ids, so that few tiles have equal ids; return the rows' old numbers."""
        assert self._row_ids is not None
        assert self._column_ids is not None
        rows: Tensor = self._row_ids.argsort(stable=True)
        columns: Tensor = self._column_ids.argsort(stable=True)
        self._row_ids, self._column_ids = self._row_ids[rows], self._column_ids[columns]
        places = torch.empty_like(columns).scatter_(0, columns, torch.arange(len(columns), device=columns.device))
        self.rows, self.columns, self.positives = self.rows[rows], self.columns[columns], places[self.positives[rows]]
        return rows

    def blocks(self) -> Iterator[tuple[int, Tensor]]:
        """For each block of rows its first row and its positives."""
        with bar(shown=self._progress) as report:
            for top in range(0, len(self.rows), self._height):
                report(top, len(self.rows), "rows")
                yield top, self.positives[top : top + self._height]

    def block(self, top: int, positives: Tensor, numbers: Any = slice(None), limits: Tensor | None = None) -> Block:
        """The rows from ``top`` on and the columns of ``numbers`` as a block for ``fused``."""
        rows, ids = slice(top, top + len(positives)), (self._row_ids, self._column_ids)
        row_ids, column_ids = (None if x is None else x[index] for x, index in zip(ids, (rows, numbers), strict=True))
        pairs = Pairs(positives if self._has_positives else None, None, row_ids, column_ids, row_limits=limits)
        return Block(self.rows[rows], self.columns[numbers], torch.ones((), device=positives.device), None, pairs)

    def _subset(self, rows: Tensor) -> _Search:
        """A search of some of the rows, with stored tiles."""
        part = copy(self)
        part.fused, part._progress, part._explicit = None, False, True
        part._height = max(1, GPU_PRODUCTS // self._width)
        part.rows, part.positives = self.rows[rows], self.positives[rows]
        part._row_ids = None if self._row_ids is None else self._row_ids[rows]
        return part

    def products_of(self, rows: Tensor, columns: Tensor) -> Tensor:
        """Dot products, which are not rounded to the features' dtype."""
        # no autocast: rounding would create ties
        with torch.autocast(rows.device.type, enabled=False):
            if rows.is_cuda and rows.dtype != self.dtype and has_mixed_product():
                return torch.mm(rows, columns.T, out_dtype=self.dtype)
            return rows.to(self.dtype) @ columns.to(self.dtype).T

    def _tile(self, top: int, left: int) -> Tensor:
        """The products of a tile, which the caller may overwrite."""
        if self._kept_tile is not None and self._kept_tile[0] == (top, left):
            (_, x), self._kept_tile = self._kept_tile, None
            return x
        return self.products_of(self.rows[top : top + self._height], self.columns[left : left + self._width])

    def products(self, top: int) -> Iterator[tuple[int, Tensor]]:
        """For each tile of a block of rows its first column and its dot products."""
        for left in range(0, len(self.columns), self._width):
            yield left, self._tile(top, left)

    def positive_dots(self, top: int, positives: Tensor) -> Tensor:
        """The positives' dot products, computed like all others, so that ties are exactly equal."""
        if self.fused is not None:
            fused_dots: Tensor = self.fused.own(self.block(top, positives))
            return fused_dots
        dots = torch.empty(len(positives), dtype=self.dtype, device=positives.device)
        if self._explicit:
            tiles = torch.unique(positives // self._width).tolist()
        else:
            # positives on the diagonal: their tiles are known without waiting for the device
            first = self._start + top
            tiles = list(range(first // self._width, (first + len(positives) - 1) // self._width + 1))
        for tile in tiles:
            left = tile * self._width
            x = self._tile(top, left)
            index, is_inside = _locate(positives, left, x)
            dots = torch.where(is_inside, x.gather(1, index), dots[:, None])[:, 0]
            self._kept_tile = (top, left), x
        return dots

    def masked(self, x: Tensor, top: int, left: int, positives: Tensor, *, value: float) -> Tensor:
        """X (a tile) with ``value`` at the rows' positives and at columns of their ids."""
        if self._row_ids is not None and self._column_ids is not None:
            row_ids = self._row_ids[top : top + self._height, None]
            x = x.masked_fill_(row_ids == self._column_ids[left : left + self._width], value)
        index, is_inside = _locate(positives, left, x)
        return x.scatter_(1, index, torch.where(is_inside, value, x.gather(1, index)))

    def nearest(
        self, top: int, positives: Tensor, k: int, limits: Callable[[Tensor], Tensor] | None = None
    ) -> tuple[Tensor, Tensor]:
        """The k largest dot products of each row of a block, and their columns; fewer if there are fewer columns.

        ``limits`` maps the positives' dot products to the largest dot product of a negative of each row. Positives, and
        columns beyond the limit, count as -inf.
        """
        limit = None if limits is None else limits(self.positive_dots(top, positives))
        if self.fused is not None:
            # shuffle the columns: similar columns are often adjacent, and the k largest would be in few tiles
            generator = torch.Generator(positives.device).manual_seed(0)
            order = torch.randperm(len(self.columns), generator=generator, device=positives.device)
            values, numbers, unfinished = self.fused.nearest(self.block(top, positives, order, limit), k, order)
            if bool(unfinished.any()):
                subset = self._subset(top + unfinished.nonzero()[:, 0])
                parts = [subset.nearest(*block, k, limits) for block in subset.blocks()]
                values[unfinished], numbers[unfinished] = (torch.cat(x) for x in zip(*parts, strict=True))
            return values, numbers
        values = torch.empty((len(positives), 0), dtype=self.dtype, device=positives.device)
        numbers = positives[:, None][:, :0]
        for left, x in self.products(top):
            if limit is not None:
                x = self.masked(x, top, left, positives, value=-torch.inf)
                x = torch.where(x <= limit[:, None], x, -torch.inf)
            best, indices = _top_first(x, min(k, x.shape[1]))
            if left == 0:
                values, numbers = best, indices
                continue
            # earlier columns come first, and a stable sort keeps the order of equal products
            values, order = torch.cat([values, best], 1).sort(dim=1, descending=True, stable=True)
            numbers = torch.cat([numbers, indices + left], 1).gather(1, order)[:, :k]
            values = values[:, :k]
        return values, numbers


def _locate(positives: Tensor, left: int, x: Tensor) -> tuple[Tensor, Tensor]:
    """The index of each row's positive in a tile, and whether it is inside: (r, 1) each; no wait for the device."""
    index = (positives - left)[:, None]
    return index.clamp(0, x.shape[1] - 1), (index >= 0) & (index < x.shape[1])


def _top_first(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest values of each row in falling order, and their indices; the first of equal values comes first."""
    values, indices = x.topk(min(k + 1, x.shape[1]), dim=1)
    # a comparison with NaN is False, so NaN counts as a tie
    if not bool((values[:, 1:] < values[:, :-1]).logical_not_().any()):
        return values[:, :k], indices[:, :k]
    if values.shape[1] > k:
        # topk may return any of equal values
        is_tied = (values[:, k] < values[:, k - 1]).logical_not_()
        values, indices = values[:, :k], indices[:, :k]
        if bool(is_tied.any()):
            sorted_rows = x[is_tied].sort(dim=1, descending=True, stable=True)
            values[is_tied], indices[is_tied] = sorted_rows.values[:, :k], sorted_rows.indices[:, :k]
    indices, order = indices.sort(dim=1)
    values, order = values.gather(1, order).sort(dim=1, descending=True, stable=True)
    return values, indices.gather(1, order)


def _fused_search(rows: Tensor, columns: Tensor, k: int) -> Search | None:
    """Triton's search for the k largest dot products (0 for ranks), which stores none; None if it does not apply."""
    is_small = len(rows) < (FUSED_MIN_ROWS if k else 1)
    # 16-bit features only: float32 features would be multiplied in parts
    if rows.itemsize > 2 or is_small or 0 in columns.shape or unusable("triton", rows.device.type) is not None:
        return None
    backend = load("triton")
    search = backend.search if dtype_name(rows.dtype) in backend.dtypes else None
    if search is not None and k > 0:
        largest = [float(torch.linalg.vector_norm(x, torch.inf)) for x in (rows, columns)]
        # the fused search needs sums that are not infinite or NaN
        is_finite = rows.shape[1] * largest[0] * largest[1] < torch.finfo(torch.float32).max
        return search if is_finite and k <= search.most(columns) else None
    return search


def _at_least(name: str, number: Any, least: int) -> int:
    if isinstance(number, bool) or not isinstance(number, Integral) or number < least:
        raise ValueError(f"{name} must be an integer of at least {least}, got {number!r}; try {max(least, 10)}")
    return int(number)
