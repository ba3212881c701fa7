"""Gradients of a block: G recomputed tile by tile and multiplied away at once.

``G_ij = [admitted] (u_i 2^(x_ij - L_i) + v_j 2^(x_ij - M_j)) - [positive] (u_i t_i + v_j t'_j)`` in base 2. With a
shared reference r that is ``2^(x_ij - r) (u_i 2^(r - L_i) + v_j 2^(r - M_j))``: one exponential per element, exact
while the log-sum-exps lie close enough together, which is known before the first tile.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from contrastile.backends.contract import Array, Block, Options, Weights
from contrastile.backends.torch.accumulators import Accumulators
from contrastile.backends.torch.products import LOG2_E, Products
from contrastile.backends.torch.statistics import shared_reference, smallest_sum
from contrastile.backends.torch.tiles import Tile, primitive, tiles


@primitive
def gradients(
    block: Block, weights: Weights, row_gradient: Array | None, column_gradient: Array | None, options: Options
) -> None:
    """Add ``G K`` to row_gradient and ``G^T Q`` to column_gradient (Inf-CL Eq. 6-8, both ways, without the scale).

    See ``contract.Backend.gradients``. Memory: one tile and its spare, at most a chunk of columns' gradient, and
    O(m + n).
    """
    if row_gradient is None and column_gradient is None:
        return
    products = Products(block, unit=LOG2_E)
    sides = [_Side(weights.row_lse, weights.row_weight, weights.row_target, products.state)]
    if weights.column_lse is not None:
        sides.append(_Side(weights.column_lse, weights.column_weight, weights.column_target, products.state))
    products.weigh(*(side.weight for side in sides), *(side.term for side in sides))
    shared = _shared(block, sides, products.state) if products.sync else None
    accumulators = Accumulators(products, row_gradient, column_gradient)
    for tile in tiles(block, products, options):
        if shared is not None:
            _from_shared(tile, shared)
        else:
            _from_own(tile, sides, products.sync)
        # after the exponentials: a pair that is not admitted may have overflowed, or be NaN
        tile.pairs.silence(tile.x, 0.0)
        # before any rounding of G: the positive's probability is near 1 for a trained model
        column_term = sides[1].term[tile.columns] if len(sides) == 2 else None
        tile.pairs.subtract_targets(tile.x, sides[0].term[tile.rows], column_term, tile.spare)
        accumulators.add(tile, tile.x)


class _Side:
    """The rows' or the columns' share of G.

    Attributes:
        lse: base 2, state dtype.
        weight: u or v.
        term: weight x target, what a positive loses.
        silent: where the weight is 0.
    """

    def __init__(self, lse: Array, weight: Array, target: Array, state: torch.dtype) -> None:
        self.exact_lse: torch.Tensor = lse.double() * LOG2_E
        self.lse = self.exact_lse.to(state)
        self.weight: torch.Tensor = weight.to(state)
        self.silent = self.weight == 0
        self.term = torch.where(self.silent, 0.0, self.weight * target)


class _Shared(NamedTuple):
    """The reference r, and each side's ``weight 2^(r - lse)``, state dtype."""

    reference: float
    coefficients: list[torch.Tensor]


def _shared(block: Block, sides: list[_Side], state: torch.dtype) -> _Shared | None:
    """A reference against which no exponential overflows and none that matters is flushed; None if there is none."""
    heard = [side.exact_lse[~side.silent] for side in sides]
    # a log-sum-exp is at least each of its logits, so a side without silent members bounds them all
    bounds = [float(x.max()) for x, side in zip(heard, sides, strict=True) if x.numel() == side.lse.numel() > 0]
    if not bounds:
        return None
    reference = shared_reference(min(bounds))
    counts = (block.columns.shape[0], block.rows.shape[0])
    info = torch.finfo(state)
    coefficients = []
    for side, lse, count in zip(sides, heard, counts, strict=False):
        # written so that NaN is refused
        if not bool((lse - reference >= math.log2(smallest_sum(max(1, count), state))).all()):
            return None
        exact = side.weight.double() * torch.exp2(reference - side.exact_lse)
        size = exact[~side.silent].abs()
        if not bool(((size >= info.tiny) & (size <= info.max)).all()):
            return None
        coefficients.append(torch.where(side.silent, 0.0, exact).to(state))
    return _Shared(reference, coefficients)


def _from_shared(tile: Tile, shared: _Shared) -> None:
    """Turn the tile's logits into probabilities times weights, one exponential per element."""
    if shared.reference != 0.0:
        tile.x.sub_(shared.reference)
    tile.x.exp2_()
    row = shared.coefficients[0][tile.rows, None]
    if len(shared.coefficients) == 1:
        tile.x.mul_(row)
    else:
        tile.x.mul_(torch.add(row, shared.coefficients[1][tile.columns], out=tile.spare))


def _from_own(tile: Tile, sides: list[_Side], sync: bool) -> None:
    """Turn the tile's logits into probabilities times weights, one exponential per element and side."""
    if len(sides) == 2:
        _probabilities(tile.x, tile.spare, sides[1], (None, tile.columns), sync)
    _probabilities(tile.x, tile.x, sides[0], (tile.rows, None), sync)
    if len(sides) == 2:
        tile.x.add_(tile.spare)


def _probabilities(
    x: torch.Tensor, out: torch.Tensor, side: _Side, at: tuple[slice | None, slice | None], sync: bool
) -> None:
    """``out = weight 2^(x - lse)``, and 0 wherever the weight is 0: whatever the exponential gave there."""
    torch.sub(x, side.lse[at], out=out).exp2_().mul_(side.weight[at])
    silent = side.silent[at]
    if not sync or bool(silent.any()):
        out.masked_fill_(silent, 0.0)
