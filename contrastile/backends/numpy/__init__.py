"""The numpy backend: every primitive on tiles, in float64.

It trades speed for brevity, and is always there.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from contrastile.backends.arrays import ArrayLibrary
from contrastile.backends.bars import bars_of
from contrastile.backends.contract import (
    Accuracy,
    Array,
    Backend,
    Block,
    Options,
    SideStatistics,
    Statistics,
    Weights,
)
from contrastile.backends.pairs import merged_pairs, pair


class Tile(NamedTuple):
    """Rows (tr, d) against columns (tc, d): places, factors of G, logits and pairs.

    ``beyond``: which pairs exceed their rows' limits, and which their columns'.
    """

    rows: slice
    columns: slice
    q: Array
    k: Array
    x: Array
    positive: Array
    admitted: Array
    beyond: tuple[Array, Array]


def tiles(block: Block, options: Options) -> Iterator[Tile]:
    """The tiles of a block, one at a time, in a fixed order."""
    p, (height, width) = block.pairs, options.tile or (256, 1024)
    for i in range(0, len(block.rows), height):
        for j in range(0, len(block.columns), width):
            r, c = slice(i, i + height), slice(j, j + width)
            q, k = block.rows[r].astype(np.float64), block.columns[c].astype(np.float64)
            bias = 0.0 if block.bias is None else float(block.bias)
            x = float(block.scale) * (q @ k.T) + bias
            here, none = np.arange(j, j + len(k)), np.zeros(x.shape, np.bool_)
            equal = none
            if p.row_ids is not None and p.column_ids is not None:
                equal = p.row_ids[r, None] == p.column_ids[c]
            itself = none if p.excluded is None else p.excluded[r, None] == here
            named = none if p.positives is None else p.positives[r, None] == here
            positive, dropped = (equal, none) if p.match == "target" else (named, equal)
            positive = positive & ~itself
            seen = x
            if p.row_guide is not None and p.column_guide is not None:
                of_guide = p.row_guide[r], p.column_guide[c]
                seen = np.matmul(of_guide[0], of_guide[1].T, dtype=np.float64)
            over_row = none if p.row_limits is None else seen > p.row_limits[r, None]
            over_column = none if p.column_limits is None else seen > p.column_limits[c]
            admitted, beyond = positive | ~(dropped | itself), (over_row, over_column)
            if block.values is not None:
                by_rows, by_columns = block.values
                q, k = by_rows[r].astype(np.float64), by_columns[c].astype(np.float64)
            yield Tile(r, c, q, k, x, positive, admitted, beyond)


def merge(state: Array, x: Array, axis: int) -> None:
    """Merge log-sum-exps along an axis into the state, pairs: -inf changes nothing."""
    top = x.max(axis, keepdims=True, initial=-np.inf)
    # -inf less -inf would be NaN; of +inf, which has no softmax, it is to be NaN
    shift = np.where(top == -np.inf, 0.0, top)
    part = pair(np, shift.squeeze(axis), np.log(np.exp(x - shift).sum(axis)))
    state[:] = merged_pairs(np, state, part)


@np.errstate(all="ignore")
def lse(block: Block, columns: bool, options: Options) -> Statistics:
    """Log-sum-exps of negatives and of positives: see ``contract.SideStatistics``."""
    starts = (-np.inf, 0.0), (-np.inf, 0.0), (0.0, 0.0)
    shapes = (len(block.rows), 2), (len(block.columns), 2)
    sides = [[np.full(shape, start) for start in starts] for shape in shapes]
    for t in tiles(block, options):
        for axis, where in ((1, t.rows), (0, t.columns)):
            negatives, positives, sums = sides[1 - axis]
            counts = t.admitted & ~t.positive & ~t.beyond[1 - axis]
            others = np.where(counts, t.x, -np.inf)
            merge(negatives[where], others, axis)
            merge(positives[where], np.where(t.positive, t.x, -np.inf), axis)
            sums[where, 0] += np.where(t.positive, t.x, 0.0).sum(axis)
    rows, over = (SideStatistics(*side) for side in sides)
    return Statistics(rows, over if columns else None)


@np.errstate(all="ignore")
def gradients(
    block: Block,
    weights: Weights,
    row_gradient: Array | None,
    column_gradient: Array | None,
    options: Options,
) -> None:
    """Adds G K and G^T Q: see ``contract.SideWeights``."""
    sides = [side for side in (weights.rows, weights.columns) if side is not None]
    bars = [bars_of(backend.arrays, side) for side in sides]
    for t in tiles(block, options):
        x = t.x
        if block.pairs.match == "drop":
            # a named positive's logit is the one that the loss has, to the last bit
            x = np.where(t.positive, weights.rows.positive_lse[t.rows, None, 0], x)
        g = np.zeros_like(x)
        places = (t.rows, None), t.columns
        for at, side, each, beyond in zip(places, sides, bars, t.beyond, strict=False):
            n, p, target = side.negative_lse[at], side.positive_lse[at], side.target[at]
            by_n, by_p, by_d = (bar[at] for bar in each)
            negatives, q = (np.exp((x - lse[..., 0]) - lse[..., 1]) for lse in (n, p))
            # a lone positive has the target 1: x is P, whatever a product made of it
            q = np.where(target == 1, 1.0, q)
            positive = _product(by_p, q) + _product(by_d, q - target)
            negative = np.where(beyond, 0.0, _product(by_n, negatives))
            g += np.where(t.positive, positive, negative)
        _add(np.where(t.admitted, g, 0.0), t, row_gradient, column_gradient)


def _product(bar: Array, x: Array) -> Array:
    """``bar x``, and 0 where the bar is 0, whatever x is."""
    return np.where(bar == 0, 0.0, bar * x)


@np.errstate(all="ignore")
def sigmoid(
    block: Block,
    row_weight: Array,
    row_gradient: Array | None,
    column_gradient: Array | None,
    options: Options,
) -> tuple[Array, Array]:
    """Each row's sigmoid loss and row sum of G: see ``contract.Backend``."""
    row_loss, row_sum = np.zeros(len(row_weight)), np.zeros(len(row_weight))
    for t in tiles(block, options):
        y = np.where(t.positive, -t.x, t.x)
        row_loss[t.rows] += np.where(t.admitted, np.logaddexp(0, y), 0.0).sum(1)
        u = row_weight[t.rows, None]
        slope = np.where(t.positive, -u, u) / (1 + np.exp(-y))
        g = np.where(t.admitted & (u != 0), slope, 0.0)
        row_sum[t.rows] += g.sum(1)
        _add(g, t, row_gradient, column_gradient)
    return row_loss, row_sum


def _add(
    g: Array,
    t: Tile,
    row_gradient: Array | None,
    column_gradient: Array | None,
) -> None:
    if row_gradient is not None:
        row_gradient[t.rows] += g @ t.k
    if column_gradient is not None:
        column_gradient[t.columns] += g.T @ t.q


def accuracy(dtype: str, device: str) -> Accuracy:
    """Float64 whatever comes in; every addition of a log-sum-exp is a merge."""
    return Accuracy(unit=2.0**-53, accumulate_unit=2.0**-53, tile=lambda terms: 1)


_DTYPES = frozenset({"float16", "float32", "float64"})
backend = Backend(
    name="numpy",
    arrays=ArrayLibrary(np),
    dtypes=_DTYPES,
    devices=frozenset({"cpu"}),
    accuracy=accuracy,
    lse=lse,
    gradients=gradients,
    sigmoid=sigmoid,
    state=lambda dtype: "float64",
    contract=2,
    compensated=True,
    limits=True,
    guides=_DTYPES,
    values=True,
)
