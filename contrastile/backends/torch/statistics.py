"""Row and column log-sum-exps of a block, over negatives and over positives, from one pass over its tiles.

Two methods give the same numbers. With a *shared* reference r, one exponential per element serves its row and its
column: ``N_i = r + log2 sum_j 2^(x_ij - r)``. It is exact only while no sum overflows and no sum is so small that
flushed terms could matter. The sums are checked for that, which costs nothing on a CPU and a trip to the host
elsewhere. Otherwise every row and every column of a tile has its *own* maximum as reference.

Named positives never enter a sum: their logits are copied out of the tiles (``_BlockSums.reduce_named``).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from contrastile.backends.contract import Block, Options, SideStatistics, Statistics
from contrastile.backends.pairs import merged_pairs, pair
from contrastile.backends.torch.kept import kept_buffer
from contrastile.backends.torch.pairs import BlockPairs, cut
from contrastile.backends.torch.products import LOG2_E, Products, converted, paired, state_of
from contrastile.backends.torch.tiles import Tile, primitive, tiles

# an exponential up to 2^ROOM needs no reference, and leaves room for larger exponentials in later tiles
ROOM = 80.0
# with references so far apart, the forward and the backward pass usually choose the same one, and roundings cancel
_STEP = 64.0


@primitive
def lse(block: Block, columns: bool, options: Options) -> Statistics:
    """Row and column LSE over the admitted pairs, and the sums of positive logits (Inf-CL Eq. 3-5, both directions).

    See ``contract.Backend.lse``. Memory beyond the result: one tile and its spare, and O(m + n) in float64.
    """
    return _statistics(block, columns, options, None)


@primitive
def keeping(block: Block, columns: bool, options: Options) -> Statistics:
    """``lse``, which also keeps the exponentials where they have a shared reference.

    See ``contract.Backend.keeping``. Memory beyond the result: a tile, and O(m + n) in float64.
    """
    return _statistics(block, columns, options, kept_buffer(block.rows, block.columns, state_of(block.rows)))


def _statistics(block: Block, columns: bool, options: Options, kept: torch.Tensor | None) -> Statistics:
    products = Products(block, unit=LOG2_E)
    block_sums = _shared_sums(block, columns, options, products, kept) if products.sync else None
    if block_sums is None:
        block_sums, kept = _own_sums(block, columns, options, products), None
    rows, *columns_statistics = [side.statistics() for side in block_sums.sides]
    return Statistics(rows, columns_statistics[0] if columns_statistics else None, kept)


def smallest_sum(terms: int, state: torch.dtype, reference: float = 0.0) -> float:
    """The least sum of ``terms`` exponentials 2^(x - r) that is as exact as a sum against its own largest term.

    Such a sum loses less than one rounding to terms flushed below the normal range, and x - r, which is rounded at its
    own magnitude, is not much larger than x.
    """
    info = torch.finfo(state)
    return max(terms * info.tiny / (info.eps / 2), math.pow(2.0, -farthest(reference)))


def farthest(reference: float) -> float:
    """How far below a reference, in binary orders, a sum may be: any distance for a reference of at most 16."""
    return (16.0 + 2.0 * reference) / 3.0 if reference > 16.0 else math.inf


class SideSums(dict[str, torch.Tensor]):
    """Sums over the rows, or the columns: float64, which is cheap for O(m + n) numbers; base 2 in ``lse``.

    Log-sum-exps of float64 features become pairs: see ``contract.SideStatistics``.

    The vectors by name; each is created when it is first read or added to:

    * negative: sums, or log-sum-exps, over negatives;
    * positive: likewise over the positives; where indices name them, ``_BlockSums.reduce_named`` sets it;
    * total: sums of positive logits; likewise;
    * count: numbers of positives; only where ids name them.

    Attributes:
        dim: the dimension along which a tile is reduced.
        has_counts: whether ids name the positives, which are then counted.
    """

    def __init__(self, size: int, dim: int, block: Block, identity: float) -> None:
        self.dim, self.has_counts = dim, block.pairs.match == "target"
        self._size, self._identity, self._like = size, identity, block.rows

    def __missing__(self, name: str) -> torch.Tensor:
        initial = self._identity if name in ("negative", "positive") else 0.0
        vector: torch.Tensor = self._like.new_full((self._size,), initial, dtype=torch.float64)
        if initial == -math.inf and self._like.dtype == torch.float64:
            vector = paired(vector)
        self[name] = vector
        return vector

    def add(self, name: str, tile: Tile, x: torch.Tensor, dtype: torch.dtype | None = None) -> None:
        """Add a tile's sums to one of the vectors. x: (tr, tc), summed in ``dtype``, or in its own."""
        sums, where = x.sum(self.dim, dtype=dtype), self.range_of(tile)
        if name not in self and where.stop - where.start == self._size:
            self[name] = sums.double()
        else:
            cut(self[name], where).add_(sums)

    def range_of(self, tile: Tile) -> slice:
        """The tile's range of rows, or of columns."""
        return tile.rows if self.dim == 1 else tile.columns

    def statistics(self) -> SideStatistics:
        """The statistics in nats. The log-sum-exp of a single positive is its logit, to the last bit."""
        vectors = negative, positive, total = self["negative"], self["positive"], self["total"]
        if self._like.dtype == torch.float64:
            negative, positive, total = map(paired, vectors)
        if self.has_counts:
            is_single = self["count"] == 1
            positive = torch.where(is_single if positive.ndim == 1 else is_single[:, None], total, positive)
        positive_lse = converted(positive, binary=False)
        # one tensor for P and S of named positives tells callers that both are equal
        sums = positive_lse if vectors[1] is vectors[2] and not self.has_counts else converted(total, binary=False)
        return SideStatistics(converted(negative, binary=False), positive_lse, sums)


_Selection = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def _select(x: torch.Tensor, matched: torch.Tensor, ones: torch.Tensor) -> torch.Tensor:
    """X at the matched pairs and 0 at all others, in the memory of ``ones``, which has 1 at the matched pairs."""
    return ones.copy_(x).masked_fill_(~matched, 0.0)


def _select_by_product(x: torch.Tensor, matched: torch.Tensor, ones: torch.Tensor) -> torch.Tensor:
    """``_select`` in a fraction of its time, but NaN where x is not finite at an unmatched pair."""
    return ones.mul_(x)


class _BlockSums:
    """The sums of both sides, and the logits of the rows' named positives."""

    def __init__(self, block: Block, columns: bool, identity: float, sync: bool) -> None:
        m, n = block.rows.shape[0], block.columns.shape[0]
        self.block, self.pairs = block, BlockPairs(block, sync)
        self.sides = [SideSums(m, 1, block, identity)] + ([SideSums(n, 0, block, identity)] if columns else [])
        # logits of the rows' named positives in base 2; -inf for a row without one
        self.logits = block.rows.new_full((m,), -math.inf, dtype=torch.float64)

    def store_named(self, tile: Tile) -> None:
        """Copy the tile's logits of named positives; the tile must not have been silenced or shifted yet."""
        if tile.pairs.positive is not None:
            tile.pairs.positive.copy_to(tile.x, cut(self.logits, tile.rows))

    def add_matched(self, tile: Tile, select: _Selection, dtype: torch.dtype | None) -> None:
        """Add up the tile's logits of positives that ids name, in ``dtype``; the tile must not have been shifted yet.

        The spread ``P - t S`` is most of a row's loss. With logits near 1e7, a sum in float32 would lose all of it.
        """
        matched = tile.pairs.matched
        if matched is None:
            return
        mask = tile.spare.copy_(matched)
        for side in self.sides:
            side.add("count", tile, mask)
        logits = select(tile.x, matched, mask)
        # where the tile has been silenced, -inf x 0 is NaN
        tile.pairs.silence(logits, 0.0)
        for side in self.sides:
            side.add("total", tile, logits, dtype)

    def reduce_named(self) -> None:
        """Set the positives' statistics, where indices name them: a column's positives are summed over its rows."""
        if self.block.pairs.match == "target":
            return
        rows, *columns = self.sides
        index, positives, n = self.pairs.positive_index(), self.pairs.positives, self.block.columns.shape[0]
        rows["positive"] = rows["total"] = self.logits
        if positives is None:
            rows["total"] = torch.zeros_like(self.logits)
        elif not isinstance(index, slice):
            rows["total"] = torch.where((positives >= 0) & (positives < n), self.logits, 0.0)
        for side in columns:
            if isinstance(index, slice):
                side["positive"], side["total"] = rows["positive"], rows["total"]
                continue
            largest, total = (self.logits.new_full((n,), value) for value in (-math.inf, 0.0))
            side["positive"], side["total"] = largest, total
            if index is None:
                continue
            # a row without a positive adds 0 to some column
            total.index_put_((index,), rows["total"], accumulate=True)
            largest.scatter_reduce_(0, index, self.logits, "amax")
            largest = torch.where(largest.isfinite(), largest, 0.0)
            terms = torch.exp2(self.logits - largest[index])
            sums = torch.zeros_like(largest).index_put_((index,), terms, accumulate=True)
            side["positive"] = _log2_sums(sums, largest, state_of(self.block.rows))


def _shared_sums(
    block: Block, columns: bool, options: Options, products: Products, kept: torch.Tensor | None
) -> _BlockSums | None:
    """The sums from one exponential per element; None when the sums show that this was not exact."""
    block_sums = _BlockSums(block, columns, 0.0, products.sync)
    term_counts = block.columns.shape[0], block.rows.shape[0]
    reference: float | None = None
    for tile in tiles(block, block_sums.pairs, products, options, kept):
        block_sums.store_named(tile)
        # limits are compared as in the gradients: with exponentials where they are kept, else with logits
        factors = [
            None if kept is not None else tile.pairs.within_limits(side.dim, tile.x, None, None)
            for side in block_sums.sides
        ]
        tile.pairs.silence(tile.x, -math.inf)
        if tile.pairs.matched is None:
            tile.pairs.hide_positives(tile.x, -math.inf)
        if reference is None:
            reference = shared_reference(float(tile.x.amax()))
        # without a reference no logit exceeds ROOM by much, and float32 is accurate enough
        block_sums.add_matched(tile, _select_by_product, torch.float64 if reference != 0.0 else None)
        if reference != 0.0:
            tile.x.sub_(reference)
        negatives = tile.x.exp2_()
        if tile.pairs.matched is not None:
            positives = _select_by_product(tile.x, tile.pairs.matched, tile.spare.copy_(tile.pairs.matched))
            for side in block_sums.sides:
                side.add("positive", tile, positives)
            # an infinite exponential is NaN here, and its sum counts as not exact
            negatives = torch.sub(tile.x, positives, out=positives)
        for side, terms, factor in zip(block_sums.sides, term_counts, factors, strict=False):
            if kept is not None:
                spare = tile.spare if tile.pairs.matched is None else None
                factor = tile.pairs.within_limits(side.dim, tile.x, reference, spare, is_exp=True)
            side.add("negative", tile, negatives if factor is None else factor.mul_(negatives))
            # the last rows complete the tile's columns: fail here, because failing at the end wastes more
            complete = side.dim == 0 and tile.last_rows
            if complete and not _is_exact(cut(side["negative"], tile.columns), terms, products.state, reference):
                return None
    for side, terms in zip(block_sums.sides, term_counts, strict=False):
        # the columns' sums were checked after their last tile
        if side.dim == 1 and not _is_exact(side["negative"], terms, products.state, reference or 0.0):
            return None
        # P of a single positive is its logit; digits of other P matter only where P exceeds N
        if side.has_counts and not _is_exact(side["positive"][side["count"] > 1], terms, products.state, 0.0):
            return None
        if side.has_counts and not math.isfinite(float(side["total"].sum())):
            return None
        for name in ("negative", "positive") if side.has_counts else ("negative",):
            if products.state != torch.float64:
                side[name].log2_().add_(reference or 0.0)
                continue
            # a logarithm is rounded at its own magnitude: the exponent is exact, and log2 of the mantissa is near 0
            mantissa, exponent = torch.frexp(side[name])
            side[name] = _log2_sums(mantissa, exponent.double().add_(reference or 0.0), products.state)
    # not exact where a named positive's logit is +inf or NaN
    if block_sums.logits.shape[0] > 0 and not float(block_sums.logits.amax()) < math.inf:
        return None
    block_sums.reduce_named()
    if kept is not None:
        kept[-1] = reference or 0.0
    return block_sums


def shared_reference(largest: float) -> float:
    """A reference r with ``|largest - r| <= ROOM``; 0, which needs no subtraction, wherever 0 is one.

    It is an integer that float32 holds exactly, so that float32 subtracts the number that float64 adds back.
    """
    if abs(largest) <= ROOM or not abs(largest) <= 2.0**24:
        return 0.0
    return math.copysign(_STEP * round((abs(largest) - ROOM + _STEP / 2) / _STEP), largest)


def _is_exact(sums: torch.Tensor, terms: int, state: torch.dtype, reference: float) -> bool:
    """Whether no sum of ``terms`` exponentials overflowed or may have lost significant terms; NaN is not exact."""
    if sums.shape[0] == 0:
        return True
    smallest, largest = map(float, torch.aminmax(sums))
    return smallest >= smallest_sum(terms, state, reference) and largest < math.inf


def _own_sums(block: Block, columns: bool, options: Options, products: Products) -> _BlockSums:
    """The sums with every row and every column of a tile against its own maximum, merged over the tiles."""
    block_sums = _BlockSums(block, columns, -math.inf, products.sync)
    for tile in tiles(block, block_sums.pairs, products, options):
        block_sums.store_named(tile)
        block_sums.add_matched(tile, _select, torch.float64)
        factors = [tile.pairs.within_limits(side.dim, tile.x, None, None) for side in block_sums.sides]
        matched = tile.pairs.matched
        if matched is not None:
            tile.spare.copy_(tile.x).masked_fill_(~matched, -math.inf)
            for side in block_sums.sides:
                merge(cut(side["positive"], side.range_of(tile)), _tile_lse(tile.spare, side.dim))
        # -inf before the maximum: a pair that is not a negative must never be the reference
        tile.pairs.silence(tile.x, -math.inf)
        tile.pairs.hide_positives(tile.x, -math.inf)
        for side, factor in zip(block_sums.sides, factors, strict=False):
            x = tile.x if factor is None else tile.x.masked_fill(factor == 0.0, -math.inf)
            merge(cut(side["negative"], side.range_of(tile)), _tile_lse(x, side.dim, out=tile.spare))
    if block.pairs.match != "target":
        # +inf has no softmax
        block_sums.logits.masked_fill_(block_sums.logits == math.inf, math.nan)
    block_sums.reduce_named()
    return block_sums


def _tile_lse(x: torch.Tensor, dim: int, out: torch.Tensor | None = None) -> torch.Tensor:
    """Base-2 log-sum-exp of a tile along a dimension, float64: -inf where nothing is admitted, NaN of NaN or +inf."""
    largest = x.amax(dim, keepdim=True)
    # -inf - (-inf) would be NaN; +inf has no softmax and must give NaN, and NaN stays NaN
    reference = torch.where(largest > -math.inf, largest, 0.0)
    sums = torch.sub(x, reference, out=out).exp2_().sum(dim)
    return _log2_sums(sums.double(), reference.squeeze(dim), x.dtype)


def _log2_sums(sums: torch.Tensor, reference: torch.Tensor, state: torch.dtype) -> torch.Tensor:
    """``reference + log2 sums``, float64, as pairs for a float64 state. Overwrites the sums."""
    logs = sums.log2_()
    return pair(torch, reference, logs) if state == torch.float64 else logs.add_(reference)


def merge(total: torch.Tensor, part: torch.Tensor) -> None:
    """``total = log2(2^total + 2^part)`` in place, guarded: (-inf, -inf) gives -inf (Inf-CL Eq. 4)."""
    if total.ndim == 1:
        total.copy_(torch.logaddexp2(total, part))
    else:
        natural = (converted(x, binary=False) for x in (total, part))
        total.copy_(converted(merged_pairs(torch, *natural), binary=True))
