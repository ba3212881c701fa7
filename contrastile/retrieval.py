"""Which columns are near a row: ranks of the positives, nearest columns and hard negatives, without the m x n matrix.

All columns are compared, a tile at a time, so the results are those of the whole matrix of dot products. These are
computed in float32, or in float64 for float64 features; products of 16-bit features are exact, and their sums are not
rounded to 16 bits. Nothing here has a gradient.
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
from contrastile.problems import ids_of_both
from contrastile.reporting import progress as bar
from contrastile.schedules.handshake import Handshake
from contrastile.schedules.sums import gathered, phase

TILE = 2048
"""Rows and columns of a tile on a CPU, of few columns found; of many a tile of as many products is wider."""
ENTRIES, WIDE = 2**26, 2**17
"""Products of a tile on a GPU, and its columns: few launches, and few lists of neighbours to merge."""
FEW = 128
"""Rows from which on neighbours are found among products as they are formed: fewer leave most of a tile empty."""
HIGH = 2**14
"""Rows that a fused search takes at once: it holds less for them than columns take, and has few launches."""


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
    """How many columns beat each row's positive: 0 where it is the nearest.

    A column beats the positive unless its dot product is smaller. So a tie counts, and embeddings that have collapsed
    to one point, or are NaN, rank last.

    Args:
        rows: (m, d) float16, bfloat16, float32 or float64.
        columns: (n, d), same dtype and device. With a group, this rank's share of them.
        positives: (m,) integers, the column of each row's positive; None means row i's is i, and n >= m. With a group
            they count over the columns of all ranks, rank by rank.
        row_ids: (m,) integers, given together with column_ids: other columns with the row's id do not count.
        column_ids: (n,) integers.
        group: see ``contrastile.plan.Settings``. Every rank holds the columns of all ranks while it searches.
        tile: rows and columns of a tile; None takes 2^22 products, and on a GPU 2^26. With Triton, products of 16-bit
            features on a GPU are not stored unless tile is given.
        progress: whether to show a progress bar on stderr.

    Returns:
        (m,) int64. ``recall`` and ``mean_reciprocal_rank`` are means of them.

    Raises:
        TypeError: wrong types or dtypes.
        ValueError: wrong shapes, devices or values.
        MismatchError: the ranks' parts do not fit together; every rank raises it.
        ExchangeError: a rank died, stalled or left.
    """
    search = _Search(rows, columns, positives, (row_ids, column_ids), group, tile, {}, {}, progress=progress)
    order = search.ordered() if search.fused is not None and row_ids is not None else None
    found = []
    for low, where in search.blocks():
        if search.fused is not None:
            found.append(search.fused.ranks(search.block(low, where)))
            continue
        own = search.own(low, where)
        count = torch.zeros(len(where), dtype=torch.int64, device=rows.device)
        for left, x in search.products(low):
            # counted as floating-point numbers, which are exact: sums of booleans take twice as long on a GPU
            smaller = search.left_out(x.lt_(own[:, None]), low, left, where, value=1.0)
            count += x.shape[1] - smaller.sum(1).long()
        found.append(count)
    whole = torch.cat(found) if found else search.positives
    return whole if order is None else torch.empty_like(whole).scatter_(0, order, whole)


def recall(ranks: Tensor, k: int) -> float:
    """recall@k: the share of positives among the k nearest columns; with k = 1 the accuracy. NaN for no rows.

    Args:
        ranks: (m,), of ``ranks``.
        k: at least 1.
    """
    return (ranks < _at_least("k", k, 1)).double().mean().item()


def mean_reciprocal_rank(ranks: Tensor) -> float:
    """MRR: the mean of 1 / (1 + rank). NaN for no rows.

    Args:
        ranks: (m,), of ``ranks``.
    """
    return (1.0 / (1.0 + ranks.double())).mean().item()


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
    """The k columns of the largest dot products with each row, in falling order; of equal ones the first comes first.

    Args:
        rows: see ``ranks``.
        columns: see ``ranks``.
        k: 1..n; with a group n counts the columns of all ranks.
        group: see ``ranks``.
        tile: see ``ranks``.
        progress: see ``ranks``.

    Returns:
        The dot products, (m, k) float32 (float64 for float64 features), and the columns' numbers, (m, k) int64, which
        count over the columns of all ranks. NaN comes before all numbers.

    Raises:
        TypeError, ValueError, MismatchError, ExchangeError: see ``ranks``.
    """
    search = _Search(rows, columns, None, (None, None), group, tile, {"k": k}, {}, paired=False, progress=progress)
    k, n = int(k), len(search.columns)
    if k > n:
        raise ValueError(f"k must be at most the number of columns, got {k} of {n}; ask for fewer")
    found = [search.nearest(low, where, k) for low, where in search.blocks()]
    empty = search.products_of(rows[:0], search.columns[:k]), search.positives[:0, None].expand(0, k)
    values, numbers = zip(*found, strict=True) if found else ((empty[0],), (empty[1],))
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
    min_score: float = -torch.inf,
    max_score: float = torch.inf,
    absolute_margin: float | None = None,
    relative_margin: float | None = None,
    group: Any = None,
    tile: int | None = None,
    progress: bool = False,
) -> Tensor:
    """The k nearest columns of each row that may be negatives: as sentence-transformers' ``mine_hard_negatives``.

    Conditions are tested on all columns, so there is no ``range_max``, which could leave too few. No dot product that
    is NaN or -inf meets them.

    Args:
        rows: see ``ranks``.
        columns: see ``ranks``.
        k: how many for each row.
        positives: see ``ranks``.
        row_ids: see ``ranks``: columns with the row's id are no negatives.
        column_ids: see ``ranks``.
        range_min: how many of the nearest to skip.
        min_score: negatives have at least this dot product.
        max_score: negatives have at most this dot product.
        absolute_margin: and at most the positive's dot product minus this.
        relative_margin: and at most s - this x |s|, s being the positive's dot product.
        group: see ``ranks``.
        tile: see ``ranks``.
        progress: see ``ranks``.

    Returns:
        (m, k) int64, the nearest first; -1 where a row has fewer. They count over the columns of all ranks.

    Raises:
        TypeError, ValueError, MismatchError, ExchangeError: see ``ranks``.
    """
    sizes = {"k": k, "range_min": range_min}
    bounds = {"min_score": min_score, "max_score": max_score}
    bounds |= {"absolute_margin": absolute_margin or 0.0, "relative_margin": relative_margin or 0.0}
    ids = row_ids, column_ids
    search = _Search(rows, columns, positives, ids, group, tile, sizes, bounds, progress=progress)
    k, range_min, found = int(k), int(range_min), []

    def limits(own: Tensor) -> Tensor:
        most = torch.full_like(own, max_score)
        if absolute_margin is not None:
            most = torch.minimum(most, own - absolute_margin)
        if relative_margin is not None:
            most = torch.minimum(most, own - relative_margin * own.abs())
        return most

    for low, where in search.blocks():
        values, numbers = search.nearest(low, where, range_min + k, limits)
        # what falls short of the least score stands behind all others
        numbers = numbers.masked_fill((values == -torch.inf) | (values < min_score), -1)[:, range_min:]
        found.append(torch.nn.functional.pad(numbers, (0, k - numbers.shape[1]), value=-1))
    return torch.cat(found) if found else search.positives[:, None].expand(0, k)


class _Search:
    """Rows and all columns, checked, in tiles.

    Attributes:
        columns: (n, d), of all ranks.
        positives: (m,) int64.
        dtype: of the products.
        fused: what compares products as they are formed, or None.
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
        self._paired, self._shown = paired, progress
        # a group has one way to search
        world = Handshake.of(group, "auto" if group is None else "gather", "mean", backend="torch")
        world.build(self._meet, rows, columns, positives, ids, {"tile": side, **sizes}, bounds)
        rows, k = self.rows, sum(map(int, sizes.values()))
        self._high = self._wide = side = int(side)
        if tile is None:
            # the more are found in a tile, the less of its time is its products'
            wide, entries = (WIDE, ENTRIES) if rows.is_cuda else (max(side, 128 * k), side * side)
            # of few rows a tile has all columns
            self._wide = max(1, min(len(self.columns), max(wide, entries // max(1, len(rows)))))
            self._high = max(1, entries // self._wide)
        # the products of one tile, by its first row and column: those of positives are needed twice
        self._kept: tuple[tuple[int, int], Tensor] | None = None
        self.dtype: torch.dtype = torch.promote_types(rows.dtype, torch.float32)
        self.fused = _fused(rows, self.columns, k) if tile is None else None
        if self.fused is not None:
            self._high = HIGH

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
        """Check what was given, and take the columns of all ranks for this rank's."""
        for name, size in sizes.items():
            _at_least(name, size, 0 if name == "range_min" else 1)
        for name, bound in bounds.items():
            validation.option(name, bound, -torch.inf, torch.inf, "none")
        # a loss takes autocast's dtype; here rounded products would be ties
        with torch.autocast(rows.device.type if isinstance(rows, Tensor) else "cpu", enabled=False):
            named = {"rows": rows, "columns": columns}
            arrays, (rows, columns) = validation.features(True, may_be_empty=named, **named)
        if arrays.name != "torch":
            raise TypeError(f"rows must be a torch tensor, got {type(rows).__name__}; use torch.from_dlpack(x)")
        m, n = len(rows), len(columns)
        if self._paired and positives is None and n < m:
            raise ValueError(f"columns must be at least as many as rows, got {n} for {m}; give positives=")
        here = [x.to(rows.device) if isinstance(x, Tensor) else x for x in ids]
        of_both = ("row_ids", here[0], m), ("column_ids", here[1], n)
        self._row_ids, of_columns = ids_of_both(validation, arrays, rows, "row", *of_both)
        where = positives.to(rows.device) if isinstance(positives, Tensor) else positives
        where = None if where is None else validation.integers("positives", where, m, "row", arrays, rows)
        met = world.meet(
            arrays, rows, (columns,), may_be_empty=True, loss="a search", column_ids=of_columns is not None
        )
        self._named, self._start = where is not None, met.start
        own = torch.arange(met.start, met.start + m, device=rows.device)
        self.rows, self.positives = rows, own if where is None else where
        world.confirm(validation.positives(where, met.columns) if self._named else None)
        if met.placement is not None:
            widths, each = met.placement.shards.widths, [columns, *([] if of_columns is None else [of_columns])]
            with phase(met.placement):
                columns, *rest = gathered(met.placement, arrays, *((arrays.detached(x), widths) for x in each))
            of_columns = rest[0] if rest else None
        self.columns, self._column_ids = columns, of_columns

    def ordered(self) -> Tensor:
        """Put rows and columns in the order of their ids, so that few tiles compare them; the rows' numbers."""
        assert self._row_ids is not None
        assert self._column_ids is not None
        rows: Tensor = self._row_ids.argsort(stable=True)
        columns: Tensor = self._column_ids.argsort(stable=True)
        self._row_ids, self._column_ids = self._row_ids[rows], self._column_ids[columns]
        places = torch.empty_like(columns).scatter_(0, columns, torch.arange(len(columns), device=columns.device))
        self.rows, self.columns, self.positives = self.rows[rows], self.columns[columns], places[self.positives[rows]]
        return rows

    def blocks(self) -> Iterator[tuple[int, Tensor]]:
        """The first row of each block of rows, and the positives of the block."""
        with bar(shown=self._shown) as report:
            for low in range(0, len(self.rows), self._high):
                report(low, len(self.rows), "rows")
                yield low, self.positives[low : low + self._high]

    def block(self, low: int, where: Tensor, numbers: Any = slice(None), limits: Tensor | None = None) -> Block:
        """Rows from ``low`` and these columns, as ``fused`` takes them."""
        part, ids = slice(low, low + len(where)), (self._row_ids, self._column_ids)
        of_rows, of_columns = (None if x is None else x[at] for x, at in zip(ids, (part, numbers), strict=True))
        pairs = Pairs(where if self._paired else None, None, of_rows, of_columns, row_limits=limits)
        return Block(self.rows[part], self.columns[numbers], torch.ones((), device=where.device), None, pairs)

    def _rest(self, at: Tensor) -> _Search:
        """Of some rows, by tiles that are stored."""
        rest = copy(self)
        rest.fused, rest._high, rest._shown, rest._named = None, max(1, ENTRIES // self._wide), False, True
        rest.rows, rest.positives = self.rows[at], self.positives[at]
        rest._row_ids = None if self._row_ids is None else self._row_ids[at]
        return rest

    def products_of(self, rows: Tensor, columns: Tensor) -> Tensor:
        """Dot products, not rounded to the features' dtype."""
        # autocast would round them, and equal ones are ties
        with torch.autocast(rows.device.type, enabled=False):
            if rows.is_cuda and rows.dtype != self.dtype and has_mixed_product():
                return torch.mm(rows, columns.T, out_dtype=self.dtype)
            return rows.to(self.dtype) @ columns.to(self.dtype).T

    def _product(self, low: int, left: int) -> Tensor:
        """The products of a tile, which the caller may change."""
        if self._kept is not None and self._kept[0] == (low, left):
            (_, x), self._kept = self._kept, None
            return x
        return self.products_of(self.rows[low : low + self._high], self.columns[left : left + self._wide])

    def products(self, low: int) -> Iterator[tuple[int, Tensor]]:
        """The first column of each tile of a block of rows, and its dot products."""
        for left in range(0, len(self.columns), self._wide):
            yield left, self._product(low, left)

    def own(self, low: int, where: Tensor) -> Tensor:
        """The positives' dot products, by the same products as all others: only so are ties equal."""
        if self.fused is not None:
            dots: Tensor = self.fused.own(self.block(low, where))
            return dots
        found = torch.empty(len(where), dtype=self.dtype, device=where.device)
        if self._named:
            homes = torch.unique(where // self._wide).tolist()
        else:
            # known without a wait for the device
            first = self._start + low
            homes = list(range(first // self._wide, (first + len(where) - 1) // self._wide + 1))
        for home in homes:
            left = home * self._wide
            x = self._product(low, left)
            at, inside = _place(where, left, x)
            found = torch.where(inside, x.gather(1, at), found[:, None])[:, 0]
            self._kept = (low, left), x
        return found

    def left_out(self, x: Tensor, low: int, left: int, where: Tensor, *, value: float) -> Tensor:
        """X (a tile) with ``value`` at the rows' positives and at columns of their ids."""
        if self._row_ids is not None and self._column_ids is not None:
            of_rows = self._row_ids[low : low + self._high, None]
            x = x.masked_fill_(of_rows == self._column_ids[left : left + self._wide], value)
        at, inside = _place(where, left, x)
        return x.scatter_(1, at, torch.where(inside, value, x.gather(1, at)))

    def nearest(
        self, low: int, where: Tensor, k: int, limits: Callable[[Tensor], Tensor] | None = None
    ) -> tuple[Tensor, Tensor]:
        """The k largest dot products of each row of a block, and their columns, fewer where there are fewer columns.

        ``limits``: of the positives' dot products, the most that a row's negative may have; others, and positives, are
        -inf.
        """
        most = None if limits is None else limits(self.own(low, where))
        if self.fused is not None:
            # in an order in which neighbours are not alike, as they often are: they would all be in a few tiles
            draw = torch.Generator(where.device).manual_seed(0)
            order = torch.randperm(len(self.columns), generator=draw, device=where.device)
            values, numbers, left = self.fused.nearest(self.block(low, where, order, most), k, order)
            if bool(left.any()):
                rest = self._rest(low + left.nonzero()[:, 0])
                parts = [rest.nearest(*block, k, limits) for block in rest.blocks()]
                values[left], numbers[left] = (torch.cat(x) for x in zip(*parts, strict=True))
            return values, numbers
        values = torch.empty((len(where), 0), dtype=self.dtype, device=where.device)
        numbers = where[:, None][:, :0]
        for left, x in self.products(low):
            if most is not None:
                x = self.left_out(x, low, left, where, value=-torch.inf)
                x = torch.where(x <= most[:, None], x, -torch.inf)
            best, at = _first(x, min(k, x.shape[1]))
            if left == 0:
                values, numbers = best, at
                continue
            # columns that came before stand first, and a stable sort leaves equal products in their order
            values, order = torch.cat([values, best], 1).sort(dim=1, descending=True, stable=True)
            numbers = torch.cat([numbers, at + left], 1).gather(1, order)[:, :k]
            values = values[:, :k]
        return values, numbers


def _place(where: Tensor, left: int, x: Tensor) -> tuple[Tensor, Tensor]:
    """Where in a tile each row's positive is, and whether it is there: (r, 1) each; the host waits for nothing."""
    at = (where - left)[:, None]
    return at.clamp(0, x.shape[1] - 1), (at >= 0) & (at < x.shape[1])


def _first(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest of each row in falling order, and where they are; of equal ones the first."""
    values, at = x.topk(min(k + 1, x.shape[1]), dim=1)
    # of NaN none is less
    if not bool((values[:, 1:] < values[:, :-1]).logical_not_().any()):
        return values[:, :k], at[:, :k]
    if values.shape[1] > k:
        # topk may take any of the equal ones
        tied = (values[:, k] < values[:, k - 1]).logical_not_()
        values, at = values[:, :k], at[:, :k]
        if bool(tied.any()):
            several = x[tied].sort(dim=1, descending=True, stable=True)
            values[tied], at[tied] = several.values[:, :k], several.indices[:, :k]
    at, order = at.sort(dim=1)
    values, order = values.gather(1, order).sort(dim=1, descending=True, stable=True)
    return values, at.gather(1, order)


def _fused(rows: Tensor, columns: Tensor, k: int) -> Search | None:
    """What compares dot products of such features as they are formed, with the k largest found; or None."""
    few = len(rows) < (FEW if k else 1)
    # float32 features would be multiplied in parts
    if rows.itemsize > 2 or few or 0 in columns.shape or unusable("triton", rows.device.type) is not None:
        return None
    backend = load("triton")
    search = backend.search if dtype_name(rows.dtype) in backend.dtypes else None
    if search is not None and k > 0:
        largest = [float(torch.linalg.vector_norm(x, torch.inf)) for x in (rows, columns)]
        # no sum is infinite, or NaN
        finite = rows.shape[1] * largest[0] * largest[1] < torch.finfo(torch.float32).max
        return search if finite and k <= search.most(columns) else None
    return search


def _at_least(name: str, number: Any, least: int) -> int:
    if isinstance(number, bool) or not isinstance(number, Integral) or number < least:
        raise ValueError(f"{name} must be an integer of at least {least}, got {number!r}; try {max(least, 10)}")
    return int(number)
