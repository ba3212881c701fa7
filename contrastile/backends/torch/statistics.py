"""Row and column log-sum-exps of a block, from one pass over its tiles.

Two ways give the same numbers. With a *shared* reference r, one exponential per element serves its row and its
column: ``L_i = r + log2 sum_j 2^(x_ij - r)``. It is exact only while no sum overflows and no sum is so small that
flushed terms could matter: that is checked on the sums, which costs nothing on a CPU and a trip to the host elsewhere.
Otherwise every row and every column of a tile has its *own* maximum for a reference.
"""

from __future__ import annotations

import math

import torch

from contrastile.backends.contract import Block, Options, Statistics
from contrastile.backends.torch.products import LOG2_E, Products
from contrastile.backends.torch.tiles import Tile, primitive, tiles

# binary orders between a shared reference and the largest logit: room for others to be larger, or a sum smaller
ROOM = 40.0


@primitive
def lse(block: Block, columns: bool, options: Options) -> Statistics:
    """Row and column LSE over the admitted pairs, and the sums of positive logits (Inf-CL Eq. 3-5, both ways).

    See ``contract.Backend.lse``. Memory beyond the result: one tile and its spare, and O(m + n) in float64.
    """
    products = Products(block, unit=LOG2_E)
    found = _shared(block, columns, options, products) if products.sync else None
    if found is None:
        found = _own(block, columns, options, products)
    return Statistics(*(None if x is None else (x * math.log(2.0)).to(products.state) for x in found.vectors()))


def smallest_sum(count: int, state: torch.dtype) -> float:
    """A sum of ``count`` terms from here up loses less than one rounding to terms flushed below the normal range."""
    info = torch.finfo(state)
    return count * info.tiny / (info.eps / 2)


class _Found:
    """Base-2 statistics of a block, in float64: it is O(m + n), so the accuracy is free."""

    def __init__(self, block: Block, columns: bool, identity: float) -> None:
        def full(count: int, value: float) -> torch.Tensor:
            return torch.full((count,), value, dtype=torch.float64, device=block.rows.device)

        m, n = block.rows.shape[0], block.columns.shape[0]
        self.row, self.row_positive = full(m, identity), full(m, 0.0)
        self.column = full(n, identity) if columns else None
        self.column_positive = full(n, 0.0) if columns else None

    def add_positives(self, tile: Tile) -> None:
        """Add the tile's positive logits; the tile must not have been silenced or shifted yet."""
        sums = tile.pairs.positive_sums(tile.x, tile.spare)
        if sums is not None:
            self.row_positive[tile.rows] += sums[0]
            if self.column_positive is not None:
                self.column_positive[tile.columns] += sums[1]

    def vectors(self) -> tuple[torch.Tensor | None, ...]:
        """In the order of ``contract.Statistics``."""
        return self.row, self.row_positive, self.column, self.column_positive


def _shared(block: Block, columns: bool, options: Options, products: Products) -> _Found | None:
    """One exponential per element; None when the sums show that it was not exact."""
    m, n = block.rows.shape[0], block.columns.shape[0]
    found = _Found(block, columns, 0.0)
    reference: float | None = None
    for tile in tiles(block, products, options):
        found.add_positives(tile)
        tile.pairs.silence(tile.x, -math.inf)
        if reference is None:
            reference = shared_reference(float(tile.x.max()))
        if reference != 0.0:
            tile.x.sub_(reference)
        tile.x.exp2_()
        found.row[tile.rows] += tile.x.sum(1)
        if found.column is not None:
            found.column[tile.columns] += tile.x.sum(0)
            # the last rows complete these columns: failing here, not at the end, wastes least
            if tile.last_rows and not _exact(found.column[tile.columns], m, products.state):
                return None
    if not _exact(found.row, n, products.state):
        return None
    for sums in (found.row, found.column):
        if sums is not None:
            sums.log2_().add_(reference or 0.0)
    return found


def shared_reference(largest: float) -> float:
    """A reference that leaves ``largest`` within ROOM of 1; 0, which needs no subtraction, wherever that does."""
    return largest - min(max(largest, -ROOM), ROOM) if math.isfinite(largest) else 0.0


def _exact(sums: torch.Tensor, count: int, state: torch.dtype) -> bool:
    """Whether no sum of ``count`` exponentials overflowed or may have lost a term that matters; NaN is not exact."""
    return bool(((sums >= smallest_sum(count, state)) & (sums < math.inf)).all())


def _own(block: Block, columns: bool, options: Options, products: Products) -> _Found:
    """Every row and every column of a tile against its own maximum, merged over the tiles."""
    found = _Found(block, columns, -math.inf)
    for tile in tiles(block, products, options):
        found.add_positives(tile)
        # -inf before the maximum: a pair that is not admitted must never be the reference
        tile.pairs.silence(tile.x, -math.inf)
        _merge(found.row[tile.rows], _tile_lse(tile, dim=1))
        if found.column is not None:
            _merge(found.column[tile.columns], _tile_lse(tile, dim=0))
    return found


def _tile_lse(tile: Tile, dim: int) -> torch.Tensor:
    """Base-2 log-sum-exp of a tile along a dimension, float64; -inf where nothing is admitted, NaN where a logit is."""
    largest = tile.x.amax(dim, keepdim=True)
    # an infinite maximum cannot be subtracted; against 0 it gives log 0 or log inf, and NaN stays NaN
    reference = torch.where(largest.isfinite(), largest, 0.0)
    sums = torch.sub(tile.x, reference, out=tile.spare).exp2_().sum(dim)
    return sums.double().log2_().add_(reference.squeeze(dim))


def _merge(total: torch.Tensor, part: torch.Tensor) -> None:
    """``total = log2(2^total + 2^part)`` in place, guarded: (-inf, -inf) gives -inf, +inf stays +inf (Inf-CL Eq. 4)."""
    high, low = torch.maximum(total, part), torch.minimum(total, part)
    merged = high + torch.log1p(torch.exp2(low - high)) / math.log(2.0)
    total.copy_(torch.where(high.isfinite(), merged, high))
