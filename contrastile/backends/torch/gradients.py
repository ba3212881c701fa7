"""Gradients of a block: G recomputed tile by tile and multiplied away at once.

A pair that is no positive has ``G_ij = u_i 2^(x_ij - L_i) + v_j 2^(x_ij - M_j)``, in base 2. With a shared reference r
that is ``2^(x_ij - r) (u_i 2^(r - L_i) + v_j 2^(r - M_j))``: one exponential per element, exact while the log-sum-exps
lie close enough together, which is known before the first tile. The positives' entries are formed apart: see
``contract.SideWeights``.
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
    O(m + n). What was kept is read, and not written to.
    """
    if row_gradient is None and column_gradient is None:
        return
    products = Products(block, unit=LOG2_E)
    rows, columns, state = weights.rows, weights.columns, products.state
    sides = [_SideShare(rows, products)]
    if columns is not None:
        # rows against themselves: what is found of one side is known of the other
        itself = all(x is y for x, y in zip(rows, columns, strict=True))
        sides.append(sides[0] if itself else _SideShare(columns, products, like=sides[0]))
    if products.sync:
        products.gain = _gain(max(side.peak for side in sides))
    if products.bounds_gradient:
        bars = [x for each in (rows, columns) if each is not None and each.bars for x in each.bars]
        products.bound_gradient(*bars, *(side.weight for side in sides), *(side.term for side in sides))
    certain = block.pairs.match == "target" and any(not products.sync or s.needs_entries for s in sides)
    # the bits that the forward pass has compared with limits are those that it has kept
    compared = None if weights.kept is None else float(weights.kept[-1])
    # entries of certain positives are made of logits
    kept = None if certain else weights.kept
    shared = None if kept is None else _shared(sides, block.pairs, state, compared)
    if shared is None:
        kept, shared = None, _shared(sides, block.pairs, state, None) if products.sync else None
    if kept is not None and block.pairs.match == "drop":
        # pairs of equal ids are 0 already
        block = replace(block, pairs=replace(block.pairs, row_ids=None, column_ids=None))
    pairs = BlockPairs(block, products.sync)
    of_positives, entries = pairs.of_positives(), None
    if of_positives is not None:
        # (m,); that of a row without a positive is not to be read
        at = None if isinstance(of_positives, slice) else (of_positives,)
        entries = _entries(sides, head(sides[0].positive), None, at).to(state)
    accumulators = Accumulators(products, row_gradient, column_gradient)
    for tile in tiles(block, pairs, products, options, kept, known=kept is not None):
        matched = tile.pairs.matched
        exact = None
        if certain and matched is not None:
            exact = _entries(sides, tile.x.double(), (tile.rows, None), (tile.columns,)).to(state)
        if shared is None:
            _from_own(tile, sides, compared)
        elif kept is None:
            _from_shared(tile, shared, compared)
        else:
            # the exponentials stay as they are
            torch.mul(tile.x, _factors(tile, shared, compared, known=True), out=tile.spare)
            tile = tile._replace(x=tile.spare, spare=tile.x if matched is None else torch.empty_like(tile.x))
        if kept is None:
            # after the exponentials: a pair that is not admitted may have overflowed, or be NaN
            tile.pairs.silence(tile.x, 0.0)
        # before any rounding of G
        if entries is not None and tile.pairs.positive is not None:
            tile.pairs.positive.write(tile.x, cut(entries, tile.rows))
        elif matched is not None and exact is not None:
            torch.where(matched, exact, tile.x, out=tile.x)
        elif matched is not None:
            column_term = cut(sides[1].term, tile.columns) if len(sides) == 2 else None
            tile.pairs.subtract_matched(tile.x, cut(sides[0].term, tile.rows), column_term, tile.spare)
        accumulators.add(tile, tile.x)


class _SideShare:
    """The rows' or the columns' share of G. Numbers in the state dtype that meet those in float64 are widened.

    What a path through the code does not read is not computed.

    Attributes:
        given: what it is made of.
        unscaled: u or v, state dtype; of a loss with bars that by N.
        target: t, state dtype.
        limits: the smallest and the largest magnitude of the weights; NaN where values are not read.
        peak: the largest magnitude of the weights and of all bars.
        silent: where the weight is 0; on the host None where none is.
        lone: whether every target is known to be 1.
        exact_lse: L in base 2, float64; of a loss with bars N.
        rest: of pairs what ``exact_lse`` lacks; otherwise 0.
        lse: L rounded to the state dtype.
        most: the largest that a logit less ``lse`` can be, for no logit exceeds L; state dtype.
        negative: N in nats, float64, without the rest of a pair.
        exact_weight: u or v, times the products' gain.
        weight: the same times ``2^(lse - exact_lse)``, which makes good the rounding of L; state dtype.
        positive: P in base 2, float64, or pairs.
        negative_share: the probability of all negatives, 1 - p of the positives, to full relative accuracy; float64.
        term: weight x target, what a positive loses; state dtype.
        extremes: ``limits`` times the gain.
        certain: where p - t cancels.
    """

    def __init__(self, given: SideWeights, products: Products, like: _SideShare | None = None) -> None:
        """``like`` may have the same weights and targets, which are then not looked at again."""
        self.given, self._products, self._state = given, products, products.state
        n, p, _, _, bars = given
        self.unscaled: torch.Tensor = given.weight if bars is None else bars.negative
        self.target: torch.Tensor = given.target
        self.negative: torch.Tensor = head(n)
        both = n if bars is not None else torch.logaddexp(n, p) if n.ndim == 1 else merged_pairs(torch, n, p)
        lses = converted(both, binary=True)
        self.exact_lse: torch.Tensor = head(lses)
        self._rest: torch.Tensor | float = 0.0 if lses.ndim == 1 else lses[:, 1]
        if like is None or any(x is not y for x, y in zip(given[2:], like.given[2:], strict=True)):
            self.limits = _extremes(self.unscaled) if products.sync else (math.nan, math.nan)
            if self.limits[0] < 0:
                self.limits = _extremes(self.unscaled.abs())
            self.peak = self.limits[1]
            if products.sync and bars is not None:
                self.peak = max(self.peak, *(_extremes(bar.abs())[1] for bar in bars))
            self.silent: torch.Tensor | None = None if self.limits[0] > 0 else self.unscaled == 0
            self.lone = products.sync and _extremes(self.target) == (1.0, 1.0)
        else:
            self.limits, self.peak, self.silent, self.lone = like.limits, like.peak, like.silent, like.lone

    @cached_property
    def exact_weight(self) -> torch.Tensor:
        gain = self._products.gain
        return self.unscaled if gain == 1.0 else self.unscaled * gain

    @property
    def extremes(self) -> tuple[float, float]:
        return self.limits[0] * self._products.gain, self.limits[1] * self._products.gain

    @cached_property
    def positive(self) -> torch.Tensor:
        return converted(self.given.positive_lse, binary=True)

    @cached_property
    def lse(self) -> torch.Tensor:
        return self.exact_lse.to(self._state)

    @cached_property
    def most(self) -> torch.Tensor:
        return (-self._low).to(self._state)

    @cached_property
    def weight(self) -> torch.Tensor:
        return (self.exact_weight * torch.exp2(self._low)).to(self._state)

    @cached_property
    def _low(self) -> torch.Tensor:
        low = -self._rest if isinstance(self._rest, torch.Tensor) else self.lse.double() - self.exact_lse
        # beyond 2^24, or 2^53, logits are integers, and what is left of L rounds its units; of infinities it is NaN
        return torch.where(low.abs() <= 1.0, low, 0.0)

    @cached_property
    def negative_share(self) -> torch.Tensor:
        return torch.sigmoid(difference(*self.given[:2]))

    def coefficients(self, reference: float) -> torch.Tensor:
        """``weight 2^(reference - L)``, 0 where the weight is; state dtype."""
        whole = isinstance(self._rest, float)
        exact = torch.exp2(reference - self.exact_lse).mul_(self.exact_weight if whole else self.weight)
        return self.zero_where_silent(exact).to(self._state)

    @cached_property
    def term(self) -> torch.Tensor:
        return self.zero_where_silent(self.exact_weight.double() * self.target).to(self._state)

    @cached_property
    def certain(self) -> torch.Tensor:
        found = (self.target > 0.5) & (self.negative_share < 2.0**-8)
        return found if self.silent is None else found & ~self.silent

    @property
    def needs_entries(self) -> bool:
        """Whether positives that ids name may not be made of p and t."""
        return self.given.bars is not None or bool(self.certain.any())

    def zero_where_silent(self, x: torch.Tensor) -> torch.Tensor:
        """X, and 0 where the weight is 0."""
        return x if self.silent is None else torch.where(self.silent, 0.0, x)

    def not_silent(self, x: torch.Tensor) -> torch.Tensor:
        """The elements of x whose weight is not 0."""
        return x if self.silent is None else x[~self.silent]

    def entries(self, x: torch.Tensor, at: tuple[slice | torch.Tensor | None, ...] | None) -> torch.Tensor:
        """This side's part of G at positives of base-2 logits x, float64: ``w ((q - t) - q negative_share)``.

        Of a loss with bars it is ``Pbar q + Dbar (q - t)``.
        """
        if self.given.bars is not None:
            by_p, by_d = (bar if at is None else bar[at] for bar in self.given.bars[1:])
            q, t = self._among_positives(x, at)
            part = torch.where(by_p == 0, 0.0, by_p * q) + torch.where(by_d == 0, 0.0, by_d * (q - t))
            return part.mul_(self._products.gain)
        members = self.exact_weight, self.negative_share
        w, share = members if at is None else (each[at] for each in members)
        # the target of a lone positive is 1: x is P, whatever a product of another shape has made of it
        if self.lone:
            part = (w * share).neg_()
        else:
            q, t = self._among_positives(x, at)
            part = w * ((q - t) - q * share)
        return part if self.silent is None else torch.where(self.silent if at is None else self.silent[at], 0.0, part)

    def _among_positives(
        self, x: torch.Tensor, at: tuple[slice | torch.Tensor | None, ...] | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``q = 2^(x - P)``, 1 of a lone positive, and t."""
        *parts, t = (*((p,) if (p := self.positive).ndim == 1 else p.unbind(1)), self.target)
        if at is not None:
            *parts, t = (each[at] for each in (*parts, t))
        for part in parts:
            x = x - part
        # no logit exceeds a log-sum-exp that it is in, but one computed again in another shape may seem to
        return x.masked_fill_(t == 1.0, 0.0).clamp_max_(0.0).exp2_(), t


def _gain(peak: float) -> float:
    """A power of two that lifts the largest weight to 2^40: G may then be as small, relative to it, as 2^-166.

    It leaves room for sums of a million entries times features of 2^60.
    """
    return 2.0 ** min(max(40 - math.frexp(peak)[1], 0), 120) if 0 < peak < math.inf else 1.0


def _extremes(x: torch.Tensor) -> tuple[float, float]:
    """The smallest and the largest element; NaN where one is NaN, or there is none."""
    if x.numel() == 0:
        return math.nan, math.nan
    least, most = torch.aminmax(x)
    return float(least), float(most)


def _entries(sides: list[_SideShare], x: torch.Tensor, *places: Any) -> torch.Tensor:
    """G at pairs of base-2 logits x as if each were positive, float64; ``places``: where they are on each side."""
    first, *second = [side.entries(x, at) for side, at in zip(sides, places, strict=False)]
    return first + second[0] if second else first


class _Shared(NamedTuple):
    """The reference r, and each side's ``weight 2^(r - lse)``, state dtype.

    With limits also the most that a logit which counts exceeds r by; None without them, where all count.
    """

    reference: float
    most: float | None
    coefficients: list[torch.Tensor]


def _shared(sides: list[_SideShare], pairs: Pairs, state: torch.dtype, kept: float | None) -> _Shared | None:
    """The reference of ``kept`` exponentials, or that of the largest logit; None where it does not serve.

    It does while every ``w 2^(r - L)`` is a normal number; while no exponential overflows, a logit being at most the
    log-sum-exp of its row and of its column, with limits of one of them, where entries of named positives are not made
    of one; while a term that is flushed costs a probability at most 2^-100; and while ``x - r`` is not rounded far
    above its x.
    """
    counting = [side for side in sides if side.silent is None or not bool(side.silent.all())]
    lses = [_extremes(side.not_silent(side.exact_lse)) for side in counting]
    low, top = min((x for x, _ in lses), default=math.nan), max((x for _, x in lses), default=math.nan)
    # a side without silent members bounds all logits; with limits each bounds those that count there
    bounding = [side for side in counting if side.silent is None or pairs.limited]
    if not bounding or not math.isfinite(low) or not math.isfinite(top):
        return None
    named = pairs.match != "target"
    bounds = [_extremes(x.not_silent(x.negative if named else x.exact_lse))[1] for x in bounding]
    largest = (max if pairs.limited else min)(bounds) * (LOG2_E if named else 1.0)
    reference = shared_reference(largest) if kept is None else kept
    weights = [
        side.extremes if side.silent is None else _extremes(side.not_silent(side.exact_weight).abs())
        for side in counting
    ]
    least, most = min(x for x, _ in weights), max(x for _, x in weights)
    info = torch.finfo(state)
    room = math.log2(info.max)
    above = room - 8
    normal = reference - top + math.log2(least) > math.log2(info.tiny) + 1
    finite = (kept is not None or largest - reference < above) and reference - low + math.log2(most) < room - 1
    if not (normal and finite and reference - low <= 26.0 and _near(counting, reference)):
        return None
    return _Shared(reference, above if pairs.limited else None, [side.coefficients(reference) for side in sides])


def _near(sides: list[_SideShare], reference: float) -> bool:
    """Whether no log-sum-exp over negatives lies so far below the reference that terms' rounding would show."""
    least = (reference - farthest(reference)) / LOG2_E
    if least == -math.inf:
        return True
    negatives = [side.not_silent(side.negative) for side in sides]
    # there may be no negatives
    return all(bool(((x >= least) | (x == -math.inf)).all()) for x in negatives)


def _from_shared(tile: Tile, shared: _Shared, compared: float | None) -> None:
    """Turn the tile's logits into probabilities times weights, one exponential per element."""
    factors = _factors(tile, shared, compared)
    if shared.reference != 0.0:
        tile.x.sub_(shared.reference)
    if shared.most is not None:
        # those that count are at most so large; 0 times what has overflowed would be NaN
        tile.x.clamp_max_(shared.most)
    tile.x.exp2_().mul_(factors)


def _factors(tile: Tile, shared: _Shared, compared: float | None, *, known: bool = False) -> torch.Tensor:
    """What the tile's exponentials are multiplied by, of shape (tr, tc) or one that broadcasts to it."""
    row = cut(shared.coefficients[0], tile.rows)[:, None]
    within = tile.pairs.within(1, tile.x, compared, tile.spare, known=known)
    row = row if within is None else within.mul_(row)
    if len(shared.coefficients) == 1:
        return row
    column = cut(shared.coefficients[1], tile.columns)
    within = tile.pairs.within(0, tile.x, compared, None, known=known)
    return torch.add(row, column if within is None else within.mul_(column), out=tile.spare)


def _from_own(tile: Tile, sides: list[_SideShare], compared: float | None) -> None:
    """The same with one exponential per element and side."""
    places = (tile.x, (tile.rows, None)), (tile.spare, (None, tile.columns))
    within = [tile.pairs.within(dim, tile.x, compared, None) for dim in (1, 0)[: len(sides)]]
    # the columns first: the rows' overwrite the logits
    for side, factor, (out, at) in reversed(list(zip(sides, within, places, strict=False))):
        _probabilities(tile.x, out, side, at)
        if factor is not None:
            # no product: the probability may be NaN
            out.masked_fill_(factor == 0.0, 0.0)
    if len(sides) == 2:
        tile.x.add_(tile.spare)


def _probabilities(x: torch.Tensor, out: torch.Tensor, side: _SideShare, at: tuple[slice | None, slice | None]) -> None:
    """``out = weight 2^(x - lse)``, and 0 wherever the weight is 0: whatever the exponential gave there.

    A product of other shape rounds logits in another way: recomputed in a part of the block, one of 1e8 may exceed its
    L by tens.
    """
    torch.sub(x, side.lse[at], out=out)
    torch.minimum(out, side.most[at], out=out).exp2_().mul_(side.weight[at])
    if side.silent is not None:
        out.masked_fill_(side.silent[at], 0.0)
