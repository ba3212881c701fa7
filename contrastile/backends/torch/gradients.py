"""Gradients of a block: G recomputed tile by tile and multiplied away at once.

A pair that is no positive has ``G_ij = u_i 2^(x_ij - L_i) + v_j 2^(x_ij - M_j)``, in base 2. With a shared reference r
that is ``2^(x_ij - r) (u_i 2^(r - L_i) + v_j 2^(r - M_j))``: one exponential per element, exact while the log-sum-exps
lie close enough together, which is known before the first tile. The positives' entries are formed apart: see
``contract.Weights``.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from contrastile.backends.contract import Array, Block, Options, Weights
from contrastile.backends.torch.accumulators import Accumulators
from contrastile.backends.torch.products import LOG2_E, Products
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
    w, state = weights, products.state
    sides = [_Side(w.row_negative_lse, w.row_positive_lse, w.row_weight, w.row_target, state)]
    if w.column_weight is not None:
        sides.append(_Side(w.column_negative_lse, w.column_positive_lse, w.column_weight, w.column_target, state))
    products.bound_gradient(*(side.weight for side in sides), *(side.term for side in sides))
    shared = _shared(sides, state) if products.sync else None
    named = _named_entries(block, sides, state)
    certain = block.pairs.match == "target" and (not products.sync or any(bool(s.certain.any()) for s in sides))
    accumulators = Accumulators(products, row_gradient, column_gradient)
    for tile in tiles(block, products, options):
        matched = tile.pairs.matched
        exact = _matched_entries(tile, sides) if certain and matched is not None else None
        if shared is not None:
            _from_shared(tile, shared)
        else:
            _from_own(tile, sides, products.sync)
        # after the exponentials: a pair that is not admitted may have overflowed, or be NaN
        tile.pairs.silence(tile.x, 0.0)
        # before any rounding of G
        if named is not None:
            tile.pairs.set_named(tile.x, named[tile.rows])
        elif matched is not None and exact is not None:
            torch.where(matched, exact, tile.x, out=tile.x)
        else:
            column_term = sides[1].term[tile.columns] if len(sides) == 2 else None
            tile.pairs.subtract_matched(tile.x, sides[0].term[tile.rows], column_term, tile.spare)
        accumulators.add(tile, tile.x)


class _Side:
    """The rows' or the columns' share of G.

    Attributes:
        exact_lse: L in base 2, float64.
        lse: L rounded to the state dtype.
        most: the largest that a logit less ``lse`` can be, for no logit exceeds L; state dtype.
        exact_weight: u or v, float64.
        weight: the same times ``2^(lse - exact_lse)``, which makes good the rounding of L; state dtype.
        positive: P in base 2, float64.
        negative_share: the probability of all negatives, 1 - p of the positives, to full relative accuracy; float64.
        target: t, float64.
        term: weight x target, what a positive loses.
        silent: where the weight is 0.
        certain: where p - t cancels.
    """

    def __init__(self, negative: Array, positive: Array, weight: Array, target: Array, state: torch.dtype) -> None:
        self.exact_lse: torch.Tensor = torch.logaddexp(negative, positive) * LOG2_E
        self.lse = self.exact_lse.to(state)
        self.exact_weight: torch.Tensor = weight.double()
        self.silent = weight == 0
        low = torch.where(self.lse.isfinite(), self.lse.double() - self.exact_lse, 0.0)
        self.most = (-low).to(state)
        self.weight = (self.exact_weight * torch.exp2(low)).to(state)
        self.positive: torch.Tensor = positive * LOG2_E
        self.negative_share = torch.sigmoid(negative - positive)
        self.target: torch.Tensor = target.double()
        self.term = torch.where(self.silent, 0.0, self.exact_weight * self.target).to(state)
        self.certain = ~self.silent & (self.target > 0.5) & (self.negative_share < 2.0**-8)

    def entries(self, x: torch.Tensor, at: tuple[slice | torch.Tensor | None, ...]) -> torch.Tensor:
        """This side's part of G at positives of base-2 logits x, float64: ``w ((q - t) - q negative_share)``."""
        # the target of a lone positive is 1: x is P, whatever a product of another shape has made of it
        q = torch.exp2(torch.where(self.target[at] == 1.0, 0.0, x - self.positive[at]))
        part = self.exact_weight[at] * ((q - self.target[at]) - q * self.negative_share[at])
        return torch.where(self.silent[at], 0.0, part)


def _named_entries(block: Block, sides: list[_Side], state: torch.dtype) -> torch.Tensor | None:
    """G at each row's named positive, (m,) in the state dtype; of a row without one it is not to be read."""
    positives, n = block.pairs.positives, block.columns.shape[0]
    if block.pairs.match == "target" or positives is None or n == 0:
        return None
    x = sides[0].positive
    found = sides[0].entries(x, (slice(None),))
    if len(sides) == 2:
        found = found + sides[1].entries(x, (positives.clamp(0, n - 1),))
    return found.to(state)


def _matched_entries(tile: Tile, sides: list[_Side]) -> torch.Tensor:
    """G at every pair of the tile as if it were positive, where rows may be certain of theirs; (tr, tc)."""
    x = tile.x.double()
    found = sides[0].entries(x, (tile.rows, None))
    if len(sides) == 2:
        found += sides[1].entries(x, (tile.columns,))
    return found.to(tile.x.dtype)


class _Shared(NamedTuple):
    """The reference r, and each side's ``weight 2^(r - lse)``, state dtype."""

    reference: float
    coefficients: list[torch.Tensor]


def _shared(sides: list[_Side], state: torch.dtype) -> _Shared | None:
    """A reference against which no exponential overflows and none that matters is flushed; None if there is none.

    An admitted logit is at most its row's and its column's log-sum-exp, so that with ``r >= max L - 120`` none
    overflows. With ``r <= L + 26`` a term that is flushed costs a probability at most 2^-100. Of the r between, the one
    nearest 0 is taken for which every ``|w| 2^(r - L)`` is a normal number.
    """
    counted = torch.cat([side.exact_lse[~side.silent] for side in sides])
    # a side without silent members bounds all logits
    bounds = [float(side.exact_lse.max()) for side in sides if side.lse.numel() > 0 and not bool(side.silent.any())]
    if not bounds or not bool(counted.isfinite().all()):
        return None
    low, high, info = float(counted.min()), min(bounds), torch.finfo(state)
    least = min(float(side.exact_weight[~side.silent].abs().min()) for side in sides if not bool(side.silent.all()))
    reference = max(high - 120.0, float(counted.max()) - math.log2(least) + math.log2(info.tiny) + 1, min(low, 0.0))
    # beyond 2^24 it would be rounded where it is subtracted
    if reference > low + 26.0 or abs(reference) > 2.0**24:
        return None
    reference = float(math.ceil(reference))
    exact = [side.exact_weight * torch.exp2(reference - side.exact_lse) for side in sides]
    if any(bool((x[~side.silent].abs() > info.max).any()) for x, side in zip(exact, sides, strict=True)):
        return None
    return _Shared(
        reference, [torch.where(side.silent, 0.0, x).to(state) for x, side in zip(exact, sides, strict=True)]
    )


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
    """``out = weight 2^(x - lse)``, and 0 wherever the weight is 0: whatever the exponential gave there.

    A product of other shape rounds logits in another way: recomputed in a part of the block, one of 1e8 may exceed its
    L by tens.
    """
    torch.sub(x, side.lse[at], out=out)
    torch.minimum(out, side.most[at], out=out).exp2_().mul_(side.weight[at])
    silent = side.silent[at]
    if not sync or bool(silent.any()):
        out.masked_fill_(silent, 0.0)
