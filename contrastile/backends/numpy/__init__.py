"""The numpy backend: every primitive on tiles, in float64.

It trades speed for brevity, and is always available.
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
    """Rows (tr, d) against columns (tc, d): ranges, factors q, k of G, logits, pairs.

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
    pairs, (height, width) = block.pairs, options.tile or (256, 1024)
    for i in range(0, len(block.rows), height):
        for j in range(0, len(block.columns), width):
            rows, columns = slice(i, i + height), slice(j, j + width)
            q = block.rows[rows].astype(np.float64)
            k = block.columns[columns].astype(np.float64)
            bias = 0.0 if block.bias is None else float(block.bias)
            x = float(block.scale) * (q @ k.T) + bias
            index, nowhere = np.arange(j, j + len(k)), np.zeros(x.shape, np.bool_)
            equal = excluded = named = nowhere
            if pairs.row_ids is not None and pairs.column_ids is not None:
                equal = pairs.row_ids[rows, None] == pairs.column_ids[columns]
            if pairs.excluded is not None:
                excluded = pairs.excluded[rows, None] == index
            if pairs.positives is not None:
                named = pairs.positives[rows, None] == index
            is_target = pairs.match == "target"
            positive, dropped = (equal, nowhere) if is_target else (named, equal)
            positive = positive & ~excluded
            compared = x
            if pairs.row_guide is not None and pairs.column_guide is not None:
                guides = pairs.row_guide[rows], pairs.column_guide[columns]
                compared = np.matmul(guides[0], guides[1].T, dtype=np.float64)
            beyond_row = beyond_column = nowhere
            if pairs.row_limits is not None:
                beyond_row = compared > pairs.row_limits[rows, None]
            if pairs.column_limits is not None:
                beyond_column = compared > pairs.column_limits[columns]
            beyond = beyond_row, beyond_column
            admitted = positive | ~(dropped | excluded)
            if block.values is not None:
                row_values, column_values = block.values
                q = row_values[rows].astype(np.float64)
                k = column_values[columns].astype(np.float64)
            yield Tile(rows, columns, q, k, x, positive, admitted, beyond)


def merge(state: Array, x: Array, axis: int) -> None:
    """Merge the log-sum-exps of x along an axis into the state, (.., 2)."""
    largest = x.max(axis, keepdims=True, initial=-np.inf)
    # -inf - (-inf) would be NaN; +inf has no softmax and must give NaN
    reference = np.where(largest == -np.inf, 0.0, largest)
    log = np.log(np.exp(x - reference).sum(axis))
    state[:] = merged_pairs(np, state, pair(np, reference.squeeze(axis), log))


@np.errstate(all="ignore")
def lse(block: Block, columns: bool, options: Options) -> Statistics:
    """Log-sum-exps of negatives and of positives: see ``contract.SideStatistics``."""
    identities = (-np.inf, 0.0), (-np.inf, 0.0), (0.0, 0.0)
    shapes = (len(block.rows), 2), (len(block.columns), 2)
    sides = [[np.full(shape, start) for start in identities] for shape in shapes]
    for tile in tiles(block, options):
        for axis, place in ((1, tile.rows), (0, tile.columns)):
            negatives, positives, sums = sides[1 - axis]
            is_negative = tile.admitted & ~tile.positive & ~tile.beyond[1 - axis]
            negative_logits = np.where(is_negative, tile.x, -np.inf)
            merge(negatives[place], negative_logits, axis)
            merge(positives[place], np.where(tile.positive, tile.x, -np.inf), axis)
            sums[place, 0] += np.where(tile.positive, tile.x, 0.0).sum(axis)
    row_statistics, column_statistics = (SideStatistics(*side) for side in sides)
    return Statistics(row_statistics, column_statistics if columns else None)


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
    for tile in tiles(block, options):
        x = tile.x
        if block.pairs.match == "drop":
            # a named positive's logit must be the one in the loss, to the last bit
            logits = weights.rows.positive_lse[tile.rows, None, 0]
            x = np.where(tile.positive, logits, x)
        g = np.zeros_like(x)
        places = (tile.rows, None), tile.columns
        parts = zip(places, sides, bars, tile.beyond, strict=False)
        for place, side, side_bars, beyond in parts:
            n, p = side.negative_lse[place], side.positive_lse[place]
            target = side.target[place]
            by_n, by_p, by_d = (bar[place] for bar in side_bars)
            negatives, q = (np.exp((x - lse[..., 0]) - lse[..., 1]) for lse in (n, p))
            # a single positive has target 1 and x = P, however the product rounds x
            q = np.where(target == 1, 1.0, q)
            positive = _multiply_bar(by_p, q) + _multiply_bar(by_d, q - target)
            negative = np.where(beyond, 0.0, _multiply_bar(by_n, negatives))
            g += np.where(tile.positive, positive, negative)
        g = np.where(tile.admitted, g, 0.0)
        _add_gradients(g, tile, row_gradient, column_gradient)


def _multiply_bar(bar: Array, x: Array) -> Array:
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
    for tile in tiles(block, options):
        y = np.where(tile.positive, -tile.x, tile.x)
        row_loss[tile.rows] += np.where(tile.admitted, np.logaddexp(0, y), 0.0).sum(1)
        u = row_weight[tile.rows, None]
        slope = np.where(tile.positive, -u, u) / (1 + np.exp(-y))
        g = np.where(tile.admitted & (u != 0), slope, 0.0)
        row_sum[tile.rows] += g.sum(1)
        _add_gradients(g, tile, row_gradient, column_gradient)
    return row_loss, row_sum


def _add_gradients(
    g: Array,
    tile: Tile,
    row_gradient: Array | None,
    column_gradient: Array | None,
) -> None:
    if row_gradient is not None:
        row_gradient[tile.rows] += g @ tile.k
    if column_gradient is not None:
        column_gradient[tile.columns] += g.T @ tile.q


def accuracy(dtype: str, device: str) -> Accuracy:
    """Float64 for all features; every addition to a log-sum-exp is a merge."""
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
