"""The sigmoid loss of a block: additive tiles, so value and gradients come from one pass."""

from __future__ import annotations

import math

import torch

from contrastile.backends.contract import Array, Block, Options
from contrastile.backends.torch.accumulators import Accumulators
from contrastile.backends.torch.pairs import BlockPairs, cut
from contrastile.backends.torch.products import Products
from contrastile.backends.torch.statistics import SideSums
from contrastile.backends.torch.tiles import primitive, tiles


@primitive
def sigmoid(
    block: Block, row_weight: Array, row_gradient: Array | None, column_gradient: Array | None, options: Options
) -> tuple[Array, Array]:
    """``sum_j softplus(-z_ij x_ij)`` and ``sum_j G_ij`` per row, gradients added in the same pass (SigLIP's loss).

    See ``contract.Backend.sigmoid``. The row sums of G are also returned when both gradients are None. Memory: one tile
    and its spare, and O(m).
    """
    products = Products(block, unit=1.0)
    weight = row_weight.to(products.state)
    all_count = products.sync and bool(weight.all())
    silent = None if all_count else weight == 0
    if products.bounds_gradient:
        products.bound_gradient(weight)
    sums = SideSums(block.rows.shape[0], 1, block, 0.0)
    threshold = 40.0 if products.state == torch.float64 else 20.0
    accumulators = Accumulators(products, row_gradient, column_gradient)
    for tile in tiles(block, BlockPairs(block, products.sync), products, options):
        y, spare = tile.x, tile.spare
        # y = -z x: the loss of a pair is softplus(y), which is 0 for -inf, where the pair is not admitted
        tile.pairs.negate_positives(y, spare)
        tile.pairs.silence(y, -math.inf)
        # beyond the threshold the logarithm is below half an ulp of y
        losses = torch.ops.aten.softplus.out(y, 1.0, threshold, out=spare)
        sums.add("loss", tile, losses)
        g = y.sigmoid_().mul_(cut(weight, tile.rows)[:, None])
        if silent is not None:
            g.masked_fill_(silent[tile.rows, None], 0.0)
        tile.pairs.negate_positives(g, spare)
        sums.add("slope", tile, g)
        accumulators.add(tile, g)
    return sums["loss"].to(products.state), sums["slope"].to(products.state)
