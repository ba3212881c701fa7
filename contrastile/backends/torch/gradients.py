"""Gradients of a block: G is formed tile by tile, and each tile is multiplied at once.

A pair that is not positive has ``G_ij = u_i 2^(x_ij - L_i) + v_j 2^(x_ij - M_j)``, in base 2. With a shared reference r
that is ``2^(x_ij - r) (u_i 2^(r - L_i) + v_j 2^(r - M_j))``: one exponential per element, exact while the log-sum-exps
are close enough to each other, which is known before the first tile. The entries of positives are formed separately:
see ``contract.SideWeights``.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cached_property
from typing import Any, NamedTuple

import torch

from contrastile.backends.contract import Array, Block, Options, Pairs, SideWeights, Weights
from contrastile.backends.pairs import difference, head, merged_pairs
from contrastile.backends.torch.accumulators import Accumulators
from contrastile.backends.torch.pairs import BlockPairs, cut
from contrastile.backends.torch.products import LOG2_E, Products, converted
from contrastile.backends.torch.statistics import farthest, shared_reference
from contrastile.backends.torch.tiles import Tile, primitive, tiles


@primitive
def gradients(
    block: Block, weights: Weights, row_gradient: Array | None, column_gradient: Array | None, options: Options
) -> None:
    """Add ``G K`` to row_gradient and ``G^T Q`` to column_gradient (Inf-CL Eq. 6-8, both ways, without the scale).

    See ``contract.Backend.gradients``. Memory: one tile and its spare, at most a chunk of columns' gradient, and
    O(m + n). Kept exponentials are only read.
    """
    if row_gradient is None and column_gradient is None:
        return
    products = Products(block, unit=LOG2_E)
    rows, columns, state = weights.rows, weights.columns, products.state
    sides = [_SideShare(rows, products)]
    if columns is not None:
        # rows against themselves: both sides have the same weights
        have_same_weights = all(x is y for x, y in zip(rows, columns, strict=True))
        sides.append(sides[0] if have_same_weights else _SideShare(columns, products, like=sides[0]))
    if products.sync:
        products.gain = _gain(max(side.peak for side in sides))
    if products.bounds_gradient:
        bars = [bar for side in (rows, columns) if side is not None and side.bars for bar in side.bars]
        products.bound_gradient(*bars, *(side.weight for side in sides), *(side.term for side in sides))
    needs_logits = block.pairs.match == "target" and any(not products.sync or s.needs_entries for s in sides)
    # the forward pass compared its limits with the exponentials that it kept, against this reference
    limit_reference = None if weights.kept is None else float(weights.kept[-1])
    # exact entries of positives need logits, not kept exponentials
    kept = None if needs_logits else weights.kept
    shared = None if kept is None else _find_reference(sides, block.pairs, state, limit_reference)
    if shared is None:
        kept, shared = None, _find_reference(sides, block.pairs, state, None) if products.sync else None
    if kept is not None and block.pairs.match == "drop":
        # kept exponentials are already 0 at pairs of equal ids
        block = replace(block, pairs=replace(block.pairs, row_ids=None, column_ids=None))
    pairs = BlockPairs(block, products.sync)
    positive_index, entries = pairs.positive_index(), None
    if positive_index is not None:
        # (m,); the entry of a row without a positive is never read
        at = None if isinstance(positive_index, slice) else (positive_index,)
        entries = _positive_entries(sides, head(sides[0].positive), None, at).to(state)
    accumulators = Accumulators(products, row_gradient, column_gradient)
    for tile in tiles(block, pairs, products, options, kept, is_filled=kept is not None):
        matched = tile.pairs.matched
        exact_entries = None
        if needs_logits and matched is not None:
            exact_entries = _positive_entries(sides, tile.x.double(), (tile.rows, None), (tile.columns,)).to(state)
        if shared is None:
            _apply_own_references(tile, sides, limit_reference)
        elif kept is None:
            _apply_shared_reference(tile, shared, limit_reference)
        else:
            # kept exponentials must not be overwritten
            torch.mul(tile.x, _shared_factors(tile, shared, limit_reference, is_exp=True), out=tile.spare)
            tile = tile._replace(x=tile.spare, spare=tile.x if matched is None else torch.empty_like(tile.x))
        if kept is None:
            # after the exponentials: a pair that is not admitted may have overflowed, or be NaN
            tile.pairs.silence(tile.x, 0.0)
        # positives must be complete before G is rounded
        if entries is not None and tile.pairs.positive is not None:
            tile.pairs.positive.write(tile.x, cut(entries, tile.rows))
        elif matched is not None and exact_entries is not None:
            torch.where(matched, exact_entries, tile.x, out=tile.x)
        elif matched is not None:
            column_term = cut(sides[1].term, tile.columns) if len(sides) == 2 else None
            tile.pairs.subtract_matched(tile.x, cut(sides[0].term, tile.rows), column_term, tile.spare)
        accumulators.add(tile, tile.x)


class _SideShare:
    """The rows' or the columns' share of G. Most attributes are computed when they are first read.

    Attributes:
        weights: the side's weights.
        unscaled: u or v, state dtype; for a loss with bars, the bar by N.
        target: t, state dtype.
        magnitudes: the smallest and the largest magnitude of the weights; NaN where values are not read.
        peak: the largest magnitude of the weights and of all bars.
        silent: where the weight is 0; None on the host where no weight is 0.
        single: whether every target is known to be 1.
        exact_lse: L in base 2, float64; for a loss with bars, N.
        lse: L rounded to the state dtype.
        bound: the upper bound of a logit minus ``lse``, as no logit exceeds L; state dtype.
        negative: N in nats, float64, without the second number of a pair.
        exact_weight: u or v, times the products' gain.
        weight: ``exact_weight`` times ``2^(lse - exact_lse)``, which corrects for the rounding of L; state dtype.
        positive: P in base 2, float64, or pairs.
        negative_share: the probability of all negatives, 1 - p of the positives, to full relative accuracy; float64.
        term: weight x target, which G of a positive subtracts; state dtype.
        scaled_magnitudes: ``magnitudes`` times the gain.
        is_certain: where p - t cancels.
    """

    def __init__(self, weights: SideWeights, products: Products, like: _SideShare | None = None) -> None:
        """If ``like`` has the same weights and targets, their facts are copied from it."""
        self.weights, self._products, self._state = weights, products, products.state
        n, p, _, _, bars = weights
        self.unscaled: torch.Tensor = weights.weight if bars is None else bars.negative
        self.target: torch.Tensor = weights.target
        self.negative: torch.Tensor = head(n)
        natural_lse = n if bars is not None else torch.logaddexp(n, p) if n.ndim == 1 else merged_pairs(torch, n, p)
        binary_lse = converted(natural_lse, binary=True)
        self.exact_lse: torch.Tensor = head(binary_lse)
        self._remainder: torch.Tensor | float = 0.0 if binary_lse.ndim == 1 else binary_lse[:, 1]
        if like is None or any(x is not y for x, y in zip(weights[2:], like.weights[2:], strict=True)):
            self.magnitudes = _extremes(self.unscaled) if products.sync else (math.nan, math.nan)
            if self.magnitudes[0] < 0:
                self.magnitudes = _extremes(self.unscaled.abs())
            self.peak = self.magnitudes[1]
            if products.sync and bars is not None:
                self.peak = max(self.peak, *(_extremes(bar.abs())[1] for bar in bars))
            self.silent: torch.Tensor | None = None if self.magnitudes[0] > 0 else self.unscaled == 0
            self.single = products.sync and _extremes(self.target) == (1.0, 1.0)
        else:
            self.magnitudes, self.peak, self.silent, self.single = like.magnitudes, like.peak, like.silent, like.single

    @cached_property
    def exact_weight(self) -> torch.Tensor:
        gain = self._products.gain
        return self.unscaled if gain == 1.0 else self.unscaled * gain

    @property
    def scaled_magnitudes(self) -> tuple[float, float]:
        return self.magnitudes[0] * self._products.gain, self.magnitudes[1] * self._products.gain

    @cached_property
    def positive(self) -> torch.Tensor:
        return converted(self.weights.positive_lse, binary=True)

    @cached_property
    def lse(self) -> torch.Tensor:
        return self.exact_lse.to(self._state)

    @cached_property
    def bound(self) -> torch.Tensor:
        return (-self._lse_rounding).to(self._state)

    @cached_property
    def weight(self) -> torch.Tensor:
        return (self.exact_weight * torch.exp2(self._lse_rounding)).to(self._state)

    @cached_property
    def _lse_rounding(self) -> torch.Tensor:
        rounding = -self._remainder if isinstance(self._remainder, torch.Tensor) else self.lse.double() - self.exact_lse
        # beyond 2^24, or 2^53, logits are integers, and rounding changes L by units; for infinities it is NaN
        return torch.where(rounding.abs() <= 1.0, rounding, 0.0)

    @cached_property
    def negative_share(self) -> torch.Tensor:
        return torch.sigmoid(difference(*self.weights[:2]))

    def coefficients(self, reference: float) -> torch.Tensor:
        """``weight 2^(reference - L)``, 0 where the weight is 0; state dtype."""
        is_exact = isinstance(self._remainder, float)
        coefficients = torch.exp2(reference - self.exact_lse).mul_(self.exact_weight if is_exact else self.weight)
        return self.zero_where_silent(coefficients).to(self._state)

    @cached_property
    def term(self) -> torch.Tensor:
        return self.zero_where_silent(self.exact_weight.double() * self.target).to(self._state)

    @cached_property
    def is_certain(self) -> torch.Tensor:
        is_certain = (self.target > 0.5) & (self.negative_share < 2.0**-8)
        return is_certain if self.silent is None else is_certain & ~self.silent

    @property
    def needs_entries(self) -> bool:
        """Whether entries of positives that ids name cannot be formed as p - t."""
        return self.weights.bars is not None or bool(self.is_certain.any())

    def zero_where_silent(self, x: torch.Tensor) -> torch.Tensor:
        """X, with 0 where the weight is 0."""
        return x if self.silent is None else torch.where(self.silent, 0.0, x)

    def not_silent(self, x: torch.Tensor) -> torch.Tensor:
        """The elements of x whose weight is not 0."""
        return x if self.silent is None else x[~self.silent]

    def entries(self, x: torch.Tensor, at: tuple[slice | torch.Tensor | None, ...] | None) -> torch.Tensor:
        """This side's part of G at positives of base-2 logits x, float64: ``w ((q - t) - q negative_share)``.

        For a loss with bars it is ``Pbar q + Dbar (q - t)``.
        """
        if self.weights.bars is not None:
            by_p, by_d = (bar if at is None else bar[at] for bar in self.weights.bars[1:])
            q, t = self._positive_ratios(x, at)
            part = torch.where(by_p == 0, 0.0, by_p * q) + torch.where(by_d == 0, 0.0, by_d * (q - t))
            return part.mul_(self._products.gain)
        factors = self.exact_weight, self.negative_share
        weight, share = factors if at is None else (vector[at] for vector in factors)
        # a single positive has target 1 and x = P, though a product of another shape may round x otherwise
        if self.single:
            part = (weight * share).neg_()
        else:
            q, t = self._positive_ratios(x, at)
            part = weight * ((q - t) - q * share)
        return part if self.silent is None else torch.where(self.silent if at is None else self.silent[at], 0.0, part)

    def _positive_ratios(
        self, x: torch.Tensor, at: tuple[slice | torch.Tensor | None, ...] | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``q = 2^(x - P)``, 1 for a single positive, and t."""
        *parts, t = (*((p,) if (p := self.positive).ndim == 1 else p.unbind(1)), self.target)
        if at is not None:
            *parts, t = (vector[at] for vector in (*parts, t))
        for part in parts:
            x = x - part
        # no logit exceeds its log-sum-exp, but a logit computed again in another shape may round above it
        return x.masked_fill_(t == 1.0, 0.0).clamp_max_(0.0).exp2_(), t


def _gain(peak: float) -> float:
    """A power of two that lifts the largest weight to 2^40: then G may be 2^-166 of that weight without underflow.

    Sums of a million entries times features of 2^60 do not overflow.
    """
    return 2.0 ** min(max(40 - math.frexp(peak)[1], 0), 120) if 0 < peak < math.inf else 1.0


def _extremes(x: torch.Tensor) -> tuple[float, float]:
    """The smallest and the largest element; NaN where an element is NaN, or x is empty."""
    if x.numel() == 0:
        return math.nan, math.nan
    smallest, largest = torch.aminmax(x)
    return float(smallest), float(largest)


def _positive_entries(sides: list[_SideShare], x: torch.Tensor, *indices: Any) -> torch.Tensor:
    """G at pairs of base-2 logits x as if each were positive, float64; ``indices``: of the pairs on each side."""
    first, *second = [side.entries(x, at) for side, at in zip(sides, indices, strict=False)]
    return first + second[0] if second else first


class _Reference(NamedTuple):
    """The reference r, and each side's ``weight 2^(r - lse)``, state dtype.

    ``bound``, which there is with limits, bounds x - r of the pairs within them.
    """

    reference: float
    bound: float | None
    coefficients: list[torch.Tensor]


def _find_reference(sides: list[_SideShare], pairs: Pairs, state: torch.dtype, kept: float | None) -> _Reference | None:
    """The reference of ``kept`` exponentials, or that of the largest logit; None where it would not be exact.

    It is exact while every ``w 2^(r - L)`` is a normal number; while no exponential overflows; while a flushed term
    costs a probability at most 2^-100; and while the rounding of ``x - r`` is not much larger than that of x. A logit
    is at most the log-sum-exp of its row and of its column; with limits, of one of them. Named positives do not count.
    """
    counting = [side for side in sides if side.silent is None or not bool(side.silent.all())]
    lses = [_extremes(side.not_silent(side.exact_lse)) for side in counting]
    low, high = min((x for x, _ in lses), default=math.nan), max((x for _, x in lses), default=math.nan)
    # a side without weights of 0 bounds all logits; with limits each side bounds the logits within its limits
    bounding = [side for side in counting if side.silent is None or pairs.limited]
    if not bounding or not math.isfinite(low) or not math.isfinite(high):
        return None
    are_named = pairs.match != "target"
    bounds = [_extremes(side.not_silent(side.negative if are_named else side.exact_lse))[1] for side in bounding]
    largest = (max if pairs.limited else min)(bounds) * (LOG2_E if are_named else 1.0)
    reference = shared_reference(largest) if kept is None else kept
    weights = [
        side.scaled_magnitudes if side.silent is None else _extremes(side.not_silent(side.exact_weight).abs())
        for side in counting
    ]
    smallest, most = min(x for x, _ in weights), max(x for _, x in weights)
    info = torch.finfo(state)
    limit = math.log2(info.max)
    bound = limit - 8
    is_normal = reference - high + math.log2(smallest) > math.log2(info.tiny) + 1
    is_finite = (kept is not None or largest - reference < bound) and reference - low + math.log2(most) < limit - 1
    if not (is_normal and is_finite and reference - low <= 26.0 and _are_near(counting, reference)):
        return None
    return _Reference(reference, bound if pairs.limited else None, [side.coefficients(reference) for side in sides])


def _are_near(sides: list[_SideShare], reference: float) -> bool:
    """Whether every N is near enough to the reference that the rounding of x - r does not matter."""
    lowest = (reference - farthest(reference)) / LOG2_E
    if lowest == -math.inf:
        return True
    negatives = [side.not_silent(side.negative) for side in sides]
    # N of a row without negatives is -inf
    return all(bool(((n >= lowest) | (n == -math.inf)).all()) for n in negatives)


def _apply_shared_reference(tile: Tile, shared: _Reference, limit_reference: float | None) -> None:
    """Turn the tile's logits into probabilities times weights, one exponential per element."""
    factors = _shared_factors(tile, shared, limit_reference)
    if shared.reference != 0.0:
        tile.x.sub_(shared.reference)
    if shared.bound is not None:
        # pairs within their limits are below; 0 times an overflowed exponential would be NaN
        tile.x.clamp_max_(shared.bound)
    tile.x.exp2_().mul_(factors)


def _shared_factors(
    tile: Tile, shared: _Reference, limit_reference: float | None, *, is_exp: bool = False
) -> torch.Tensor:
    """The factors of the tile's exponentials, of shape (tr, tc) or one that broadcasts to it."""
    row = cut(shared.coefficients[0], tile.rows)[:, None]
    within = tile.pairs.within_limits(1, tile.x, limit_reference, tile.spare, is_exp=is_exp)
    row = row if within is None else within.mul_(row)
    if len(shared.coefficients) == 1:
        return row
    column = cut(shared.coefficients[1], tile.columns)
    within = tile.pairs.within_limits(0, tile.x, limit_reference, None, is_exp=is_exp)
    return torch.add(row, column if within is None else within.mul_(column), out=tile.spare)


def _apply_own_references(tile: Tile, sides: list[_SideShare], limit_reference: float | None) -> None:
    """Turn the tile's logits into probabilities times weights, one exponential per element and side."""
    outputs = (tile.x, (tile.rows, None)), (tile.spare, (None, tile.columns))
    factors = [tile.pairs.within_limits(dim, tile.x, limit_reference, None) for dim in (1, 0)[: len(sides)]]
    # columns first, because the rows' probabilities overwrite the logits
    for side, factor, (out, at) in reversed(list(zip(sides, factors, outputs, strict=False))):
        _probabilities(tile.x, out, side, at)
        if factor is not None:
            # a fill, not a product: the probability may be NaN
            out.masked_fill_(factor == 0.0, 0.0)
    if len(sides) == 2:
        tile.x.add_(tile.spare)


def _probabilities(x: torch.Tensor, out: torch.Tensor, side: _SideShare, at: tuple[slice | None, slice | None]) -> None:
    """``out = weight 2^(x - lse)``, and 0 wherever the weight is 0, even where the exponential is NaN.

    A product of another shape rounds logits differently: a logit of 1e8, computed again in a part of the block, may
    exceed its L by tens.
    """
    torch.sub(x, side.lse[at], out=out)
    torch.minimum(out, side.bound[at], out=out).exp2_().mul_(side.weight[at])
    if side.silent is not None:
        out.masked_fill_(side.silent[at], 0.0)
