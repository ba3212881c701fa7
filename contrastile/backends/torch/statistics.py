"""Row and column log-sum-exps of a block, over negatives and over positives, from one pass over its tiles.

Two methods give the same numbers. With a *shared* reference r, one exponential per element serves its row and its
column: ``N_i = r + log2 sum_j 2^(x_ij - r)``. It is exact only while no sum overflows and no sum is so small that
flushed terms could matter: that is checked on the sums, which costs nothing on a CPU and a trip to the host elsewhere.
Otherwise every row and every column of a tile has its *own* maximum for a reference.

Named positives never enter a sum. Their logits are picked out of the tiles; ``_Named`` makes the statistics of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from contrastile.backends.contract import Block, Options, SideStatistics, Statistics
from contrastile.backends.pairs import merged_pairs, pair
from contrastile.backends.torch.kept import room
from contrastile.backends.torch.pairs import BlockPairs, cut
from contrastile.backends.torch.products import LOG2_E, Products, converted, paired, state_of
from contrastile.backends.torch.tiles import Tile, primitive, tiles

# binary orders between 1 and an exponential that needs no reference, which leaves room for larger ones in later tiles
ROOM = 80.0
# apart so far, references are the same going forward and backward as a rule, and their roundings cancel
_STEP = 64.0


@primitive
def lse(block: Block, columns: bool, options: Options) -> Statistics:
    """Row and column LSE over the admitted pairs, and the sums of positive logits (Inf-CL Eq. 3-5, both directions).

    See ``contract.Backend.lse``. Memory beyond the result: one tile and its spare, and O(m + n) in float64.
    """
    return _statistics(block, columns, options, None)


@primitive
def keeping(block: Block, columns: bool, options: Options) -> Statistics:
    """The same, and the exponentials where they have a shared reference.

    See ``contract.Backend.keeping``. Memory beyond the result: a tile, and O(m + n) in float64.
    """
    return _statistics(block, columns, options, room(block.rows, block.columns, state_of(block.rows)))


def _statistics(block: Block, columns: bool, options: Options, kept: torch.Tensor | None) -> Statistics:
    products = Products(block, unit=LOG2_E)
    found = _shared(block, columns, options, products, kept) if products.sync else None
    if found is None:
        found, kept = _own(block, columns, options, products), None
    rows, *others = [side.statistics() for side in found.sides]
    return Statistics(rows, others[0] if others else None, kept)


def smallest_sum(count: int, state: torch.dtype, reference: float = 0.0) -> float:
    """A sum of ``count`` terms from here up, times 2^-reference, is as exact as one against its own largest term.

    It loses less than one rounding to terms flushed below the normal range, and its terms' x - r, which are rounded at
    their own size, are not far above x.
    """
    info = torch.finfo(state)
    return max(count * info.tiny / (info.eps / 2), math.pow(2.0, -farthest(reference)))


def farthest(reference: float) -> float:
    """How far below a reference, in binary orders, a sum may be: 16 and two times its own size; nearer 0, anything."""
    return (16.0 + 2.0 * reference) / 3.0 if reference > 16.0 else math.inf


class SideSums(dict[str, torch.Tensor]):
    """Sums over the rows, or the columns, in float64: they are O(m + n), so the accuracy is free. Of ``lse`` in base 2.

    Of float64 features log-sum-exps become pairs: see ``contract.SideStatistics``.

    Its vectors by name, which come to be when something is added to them or they are asked for:

    * negative: sums, or log-sum-exps, over negatives;
    * positive: likewise over the positives; where indices name them, ``_Found.reduce_named`` sets it;
    * total: sums of positive logits; likewise;
    * count: of positives; only where ids name them.

    Attributes:
        dim: along which a tile is reduced.
        counts: whether ids name the positives.
    """

    def __init__(self, size: int, dim: int, block: Block, identity: float) -> None:
        self.dim, self.counts = dim, block.pairs.match == "target"
        self._size, self._identity, self._like = size, identity, block.rows

    def __missing__(self, name: str) -> torch.Tensor:
        value = self._identity if name in ("negative", "positive") else 0.0
        found: torch.Tensor = self._like.new_full((self._size,), value, dtype=torch.float64)
        if value == -math.inf and self._like.dtype == torch.float64:
            found = paired(found)
        self[name] = found
        return found

    def add(self, name: str, tile: Tile, x: torch.Tensor, dtype: torch.dtype | None = None) -> None:
        """Add a tile's sums to one of the vectors. x: (tr, tc), summed in ``dtype``, or in its own."""
        part, where = x.sum(self.dim, dtype=dtype), self.of(tile)
        if name not in self and where.stop - where.start == self._size:
            self[name] = part.double()
        else:
            cut(self[name], where).add_(part)

    def of(self, tile: Tile) -> slice:
        """Where the tile lies on this side."""
        return tile.rows if self.dim == 1 else tile.columns

    def statistics(self) -> SideStatistics:
        """In nats. Of one positive the log-sum-exp is its logit, to the last bit."""
        found = negative, positive, total = self["negative"], self["positive"], self["total"]
        if self._like.dtype == torch.float64:
            negative, positive, total = map(paired, found)
        if self.counts:
            lone = self["count"] == 1
            positive = torch.where(lone if positive.ndim == 1 else lone[:, None], total, positive)
        natural = converted(positive, binary=False)
        # of named positives P is S
        sums = natural if found[1] is found[2] and not self.counts else converted(total, binary=False)
        return SideStatistics(converted(negative, binary=False), natural, sums)


_Among = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def _selection(x: torch.Tensor, matched: torch.Tensor, ones: torch.Tensor) -> torch.Tensor:
    """X at the matched pairs and 0 at all others, in the memory of ``ones``, which has 1 at the matched pairs."""
    return ones.copy_(x).masked_fill_(~matched, 0.0)


def _product(x: torch.Tensor, matched: torch.Tensor, ones: torch.Tensor) -> torch.Tensor:
    """The same in a fraction of the time, but NaN where x is not finite at another pair."""
    return ones.mul_(x)


class _Found:
    """What is known of both sides, and of each row's named positive."""

    def __init__(self, block: Block, columns: bool, identity: float, sync: bool) -> None:
        m, n = block.rows.shape[0], block.columns.shape[0]
        self.block, self.pairs = block, BlockPairs(block, sync)
        self.sides = [SideSums(m, 1, block, identity)] + ([SideSums(n, 0, block, identity)] if columns else [])
        # those of the rows' named positives in base 2; -inf of a row without one
        self.logits = block.rows.new_full((m,), -math.inf, dtype=torch.float64)

    def take_named(self, tile: Tile) -> None:
        """Note the tile's logits of named positives; the tile must not have been silenced or shifted yet."""
        if tile.pairs.positive is not None:
            tile.pairs.positive.note(tile.x, cut(self.logits, tile.rows))

    def take_matched(self, tile: Tile, among: _Among, dtype: torch.dtype | None) -> None:
        """Add up the tile's logits of positives that ids name, in ``dtype``; the tile must not have been shifted yet.

        A row's loss is ``P - t S`` and little more: of logits near 1e7 a sum in float32 would leave nothing of it.
        """
        matched = tile.pairs.matched
        if matched is None:
            return
        count = tile.spare.copy_(matched)
        for side in self.sides:
            side.add("count", tile, count)
        total = among(tile.x, matched, count)
        # where the tile has been silenced, -inf x 0 is NaN
        tile.pairs.silence(total, 0.0)
        for side in self.sides:
            side.add("total", tile, total, dtype)

    def reduce_named(self) -> None:
        """The positives' statistics, where indices name them: a column's positives are summed over its rows."""
        if self.block.pairs.match == "target":
            return
        rows, *columns = self.sides
        own, positives, n = self.pairs.of_positives(), self.pairs.positives, self.block.columns.shape[0]
        rows["positive"] = rows["total"] = self.logits
        if positives is None:
            rows["total"] = torch.zeros_like(self.logits)
        elif not isinstance(own, slice):
            rows["total"] = torch.where((positives >= 0) & (positives < n), self.logits, 0.0)
        for side in columns:
            if isinstance(own, slice):
                side["positive"], side["total"] = rows["positive"], rows["total"]
                continue
            top, total = (self.logits.new_full((n,), value) for value in (-math.inf, 0.0))
            side["positive"], side["total"] = top, total
            if own is None:
                continue
            # a row without a positive adds 0 to some column
            total.index_put_((own,), rows["total"], accumulate=True)
            top.scatter_reduce_(0, own, self.logits, "amax")
            top = torch.where(top.isfinite(), top, 0.0)
            terms = torch.exp2(self.logits - top[own])
            sums = torch.zeros_like(top).index_put_((own,), terms, accumulate=True)
            side["positive"] = _log2(sums, top, state_of(self.block.rows))


def _shared(
    block: Block, columns: bool, options: Options, products: Products, kept: torch.Tensor | None
) -> _Found | None:
    """One exponential per element; None when the sums show that it was not exact."""
    found = _Found(block, columns, 0.0, products.sync)
    counts = block.columns.shape[0], block.rows.shape[0]
    reference: float | None = None
    for tile in tiles(block, found.pairs, products, options, kept):
        found.take_named(tile)
        # what the gradients will have: exponentials where they are kept, else logits
        within = [None if kept is not None else tile.pairs.within(side.dim, tile.x, None, None) for side in found.sides]
        tile.pairs.silence(tile.x, -math.inf)
        if tile.pairs.matched is None:
            tile.pairs.hide_positives(tile.x, -math.inf)
        if reference is None:
            reference = shared_reference(float(tile.x.amax()))
        # without a reference no logit exceeds ROOM by much, and float32 will do
        found.take_matched(tile, _product, torch.float64 if reference != 0.0 else None)
        if reference != 0.0:
            tile.x.sub_(reference)
        negatives = tile.x.exp2_()
        if tile.pairs.matched is not None:
            positives = _product(tile.x, tile.pairs.matched, tile.spare.copy_(tile.pairs.matched))
            for side in found.sides:
                side.add("positive", tile, positives)
            # what was infinite is NaN now, and its sum is not exact
            negatives = torch.sub(tile.x, positives, out=positives)
        for side, count, factor in zip(found.sides, counts, within, strict=False):
            if kept is not None:
                spare = tile.spare if tile.pairs.matched is None else None
                factor = tile.pairs.within(side.dim, tile.x, reference, spare, known=True)
            side.add("negative", tile, negatives if factor is None else factor.mul_(negatives))
            # the last rows complete these columns: failing here, not at the end, wastes least
            complete = side.dim == 0 and tile.last_rows
            if complete and not _exact(cut(side["negative"], tile.columns), count, products.state, reference):
                return None
    for side, count in zip(found.sides, counts, strict=False):
        # the columns' were looked at when their last tile was done
        if side.dim == 1 and not _exact(side["negative"], count, products.state, reference or 0.0):
            return None
        # a lone positive's is its logit; digits of others matter only where P exceeds N
        if side.counts and not _exact(side["positive"][side["count"] > 1], count, products.state, 0.0):
            return None
        if side.counts and not math.isfinite(float(side["total"].sum())):
            return None
        for name in ("negative", "positive") if side.counts else ("negative",):
            if products.state != torch.float64:
                side[name].log2_().add_(reference or 0.0)
                continue
            # a logarithm is rounded at its own size: an integer is exact, and what it leaves is near 0
            mantissa, exponent = torch.frexp(side[name])
            side[name] = _log2(mantissa, exponent.double().add_(reference or 0.0), products.state)
    # a named positive's logit is +inf or NaN
    if found.logits.shape[0] > 0 and not float(found.logits.amax()) < math.inf:
        return None
    found.reduce_named()
    if kept is not None:
        kept[-1] = reference or 0.0
    return found


def shared_reference(largest: float) -> float:
    """A reference that leaves ``largest`` within ROOM of 1; 0, which needs no subtraction, wherever that does.

    It is an integer, which float32 holds: subtracted there and added back in float64 it is the same number.
    """
    if abs(largest) <= ROOM or not abs(largest) <= 2.0**24:
        return 0.0
    return math.copysign(_STEP * round((abs(largest) - ROOM + _STEP / 2) / _STEP), largest)


def _exact(sums: torch.Tensor, count: int, state: torch.dtype, reference: float) -> bool:
    """Whether no sum of ``count`` exponentials overflowed or may have lost what matters; NaN is not exact."""
    if sums.shape[0] == 0:
        return True
    least, most = map(float, torch.aminmax(sums))
    return least >= smallest_sum(count, state, reference) and most < math.inf


def _own(block: Block, columns: bool, options: Options, products: Products) -> _Found:
    """Every row and every column of a tile against its own maximum, merged over the tiles."""
    found = _Found(block, columns, -math.inf, products.sync)
    for tile in tiles(block, found.pairs, products, options):
        found.take_named(tile)
        found.take_matched(tile, _selection, torch.float64)
        within = [tile.pairs.within(side.dim, tile.x, None, None) for side in found.sides]
        matched = tile.pairs.matched
        if matched is not None:
            tile.spare.copy_(tile.x).masked_fill_(~matched, -math.inf)
            for side in found.sides:
                merge(cut(side["positive"], side.of(tile)), _tile_lse(tile.spare, side.dim))
        # -inf before the maximum: a pair that is not a negative must never be the reference
        tile.pairs.silence(tile.x, -math.inf)
        tile.pairs.hide_positives(tile.x, -math.inf)
        for side, factor in zip(found.sides, within, strict=False):
            x = tile.x if factor is None else tile.x.masked_fill(factor == 0.0, -math.inf)
            merge(cut(side["negative"], side.of(tile)), _tile_lse(x, side.dim, out=tile.spare))
    if block.pairs.match != "target":
        # +inf has no softmax
        found.logits.masked_fill_(found.logits == math.inf, math.nan)
    found.reduce_named()
    return found


def _tile_lse(x: torch.Tensor, dim: int, out: torch.Tensor | None = None) -> torch.Tensor:
    """Base-2 log-sum-exp of a tile along a dimension, float64: -inf where nothing is admitted, NaN of NaN or +inf."""
    largest = x.amax(dim, keepdim=True)
    # -inf less -inf would be NaN; of +inf, which has no softmax, it is to be NaN, and NaN stays NaN
    reference = torch.where(largest > -math.inf, largest, 0.0)
    sums = torch.sub(x, reference, out=out).exp2_().sum(dim)
    return _log2(sums.double(), reference.squeeze(dim), x.dtype)


def _log2(sums: torch.Tensor, reference: torch.Tensor, state: torch.dtype) -> torch.Tensor:
    """``reference + log2 sums``, float64; of a float64 state pairs. Overwrites the sums."""
    logs = sums.log2_()
    return pair(torch, reference, logs) if state == torch.float64 else logs.add_(reference)


def merge(total: torch.Tensor, part: torch.Tensor) -> None:
    """``total = log2(2^total + 2^part)`` in place, guarded: (-inf, -inf) gives -inf (Inf-CL Eq. 4)."""
    if total.ndim == 1:
        total.copy_(torch.logaddexp2(total, part))
    else:
        natural = (converted(x, binary=False) for x in (total, part))
        total.copy_(converted(merged_pairs(torch, *natural), binary=True))
