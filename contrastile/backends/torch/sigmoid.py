"""The sigmoid loss of a block: additive tiles, so value and gradients come from one pass."""

from __future__ import annotations

import math

import torch

from contrastile.backends.contract import Array, Block, Options
from contrastile.backends.torch.accumulators import Accumulators
from contrastile.backends.torch.pairs import BlockPairs, cut
from contrastile.backends.torch.products import Products
from contrastile.backends.torch.tiles import Tile, primitive, tiles


class RowSums:
    """Sums over the columns, in float64 where there are several tiles of them."""

    def __init__(self, block: Block, state: torch.dtype) -> None:
        self._rows, self._columns, self._state = block.rows, block.columns, state
        self._whole: torch.Tensor | None = None

    def add(self, tile: Tile, x: torch.Tensor) -> None:
        """Add those of a tile. x: (tr, tc)."""
        part = x.sum(1)
        if part.shape[0] == self._rows.shape[0] and x.shape[1] == self._columns.shape[0]:
            self._whole = part
            return
        whole = self._whole
        if whole is None:
            self._whole = whole = self._rows.new_zeros(self._rows.shape[0], dtype=torch.float64)
        cut(whole, tile.rows).add_(part)

    def total(self) -> torch.Tensor:
        """(m,), state dtype."""
        rows, whole = self._rows, self._whole
        return rows.new_zeros(rows.shape[0], dtype=self._state) if whole is None else whole.to(self._state)


@primitive
def sigmoid(
    block: Block, row_weight: Array, row_gradient: Array | None, column_gradient: Array | None, options: Options
) -> tuple[Array, Array]:
    """``sum_j softplus(-z_ij x_ij)`` and ``sum_j G_ij`` per row, gradients added in the same pass (SigLIP's loss).

    See ``contract.Backend.sigmoid``. With both gradients None the row sums of G still are returned. Memory: one tile
    and its spare, and O(m).
    """
    products = Products(block, unit=1.0)
    weight = row_weight.to(products.state)
    none_silent = products.sync and bool(weight.all())
    silent = None if none_silent else weight == 0
    if products.bounds_gradient:
        products.bound_gradient(weight)
    row_loss, row_sum = (RowSums(block, products.state) for _ in range(2))
    threshold = 40.0 if products.state == torch.float64 else 20.0
    accumulators = Accumulators(products, row_gradient, column_gradient)
    for tile in tiles(block, BlockPairs(block, products.sync), products, options):
        y, spare = tile.x, tile.spare
        # y = -z x: a pair costs softplus(y), and one that is not admitted softplus(-inf) = 0
        tile.pairs.negate_positives(y, spare)
        tile.pairs.silence(y, -math.inf)
        # beyond the threshold the logarithm is below half an ulp of y
        cost = torch.ops.aten.softplus.out(y, 1.0, threshold, out=spare)
        row_loss.add(tile, cost)
        g = y.sigmoid_().mul_(cut(weight, tile.rows)[:, None])
        if silent is not None:
            g.masked_fill_(silent[tile.rows, None], 0.0)
        tile.pairs.negate_positives(g, spare)
        row_sum.add(tile, g)
        accumulators.add(tile, g)
    return row_loss.total(), row_sum.total()
