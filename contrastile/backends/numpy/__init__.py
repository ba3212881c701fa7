"""The numpy backend: every primitive on tiles, in float64. It trades speed for brevity, and is always there."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from contrastile.backends.arrays import NumpyArrays
from contrastile.backends.contract import Accuracy, Array, Backend, Block, Options, Statistics, Weights


class Tile(NamedTuple):
    """Some rows (tr, d) against some columns (tc, d): their places, features, logits and pairs (tr, tc)."""

    rows: slice
    columns: slice
    q: Array
    k: Array
    x: Array
    positive: Array
    admitted: Array


def tiles(block: Block, options: Options) -> Iterator[Tile]:
    """The tiles of a block, one at a time, in a fixed order."""
    p, (height, width) = block.pairs, options.tile or (256, 1024)
    for i in range(0, len(block.rows), height):
        for j in range(0, len(block.columns), width):
            r, c = slice(i, i + height), slice(j, j + width)
            q, k = block.rows[r].astype(np.float64), block.columns[c].astype(np.float64)
            x = float(block.scale) * (q @ k.T) + (0.0 if block.bias is None else float(block.bias))
            here, none = np.arange(j, j + len(k)), np.zeros(x.shape, np.bool_)
            equal = none if p.row_ids is None or p.column_ids is None else p.row_ids[r, None] == p.column_ids[c]
            itself = none if p.excluded is None else p.excluded[r, None] == here
            named = none if p.positives is None else p.positives[r, None] == here
            positive, dropped = (equal, none) if p.match == "target" else (named, equal)
            positive = positive & ~itself
            yield Tile(r, c, q, k, x, positive, positive | ~(dropped | itself))


def merge(state: Array, x: Array, axis: int) -> None:
    """Merge a tile's log-sum-exps along an axis into the state; -inf is the identity, and one term stays exact."""
    state[:] = np.logaddexp(state, np.logaddexp.reduce(x, axis=axis, initial=-np.inf))


@np.errstate(all="ignore")
def lse(block: Block, columns: bool, options: Options) -> Statistics:
    """Log-sum-exps over negatives and over positives, and sums of positive logits: see ``contract.Statistics``."""
    sides = [[np.full(len(x), start) for start in (-np.inf, -np.inf, 0.0)] for x in (block.rows, block.columns)]
    for t in tiles(block, options):
        for axis, where, (negatives, positives, sums) in ((1, t.rows, sides[0]), (0, t.columns, sides[1])):
            merge(negatives[where], np.where(t.admitted & ~t.positive, t.x, -np.inf), axis)
            merge(positives[where], np.where(t.positive, t.x, -np.inf), axis)
            sums[where] += np.where(t.positive, t.x, 0.0).sum(axis)
    return Statistics(*sides[0], *sides[1]) if columns else Statistics(*sides[0])


@np.errstate(all="ignore")
def gradients(
    block: Block, weights: Weights, row_gradient: Array | None, column_gradient: Array | None, options: Options
) -> None:
    """Adds G K and G^T Q: see ``contract.Weights``."""
    w = weights
    sides = [(w.row_negative_lse, w.row_positive_lse, w.row_weight, w.row_target)]
    if w.column_weight is not None:
        sides.append((w.column_negative_lse, w.column_positive_lse, w.column_weight, w.column_target))
    for t in tiles(block, options):
        x = t.x
        if block.pairs.match == "drop":
            # a named positive's logit is the one that the loss has, to the last bit
            x = np.where(t.positive, w.row_positive_lse[t.rows, None], x)
        g = np.zeros_like(x)
        for at, side in zip(((t.rows, None), t.columns), sides, strict=False):
            n, p, weight, target = (vector[at] for vector in side)
            # the target of a lone positive is 1: x is P, whatever a product of another shape has made of it
            certain = np.where(target == 1, 1.0, np.exp(x - p))
            g += np.where(
                weight == 0,
                0.0,
                # sigma(n - p) is the probability of all negatives: nothing cancels, however certain the positive is
                np.where(t.positive, (certain - target) - certain / (1 + np.exp(p - n)), np.exp(x - np.logaddexp(n, p)))
                * weight,
            )
        _add(np.where(t.admitted, g, 0.0), t, row_gradient, column_gradient)


@np.errstate(all="ignore")
def sigmoid(
    block: Block, row_weight: Array, row_gradient: Array | None, column_gradient: Array | None, options: Options
) -> tuple[Array, Array]:
    """The sigmoid loss of each row and the row sums of its G; adds the gradients: see ``contract.Backend``."""
    row_loss, row_sum = np.zeros(len(row_weight)), np.zeros(len(row_weight))
    for t in tiles(block, options):
        y = np.where(t.positive, -t.x, t.x)
        row_loss[t.rows] += np.where(t.admitted, np.logaddexp(0, y), 0.0).sum(1)
        u = row_weight[t.rows, None]
        g = np.where(t.admitted & (u != 0), np.where(t.positive, -u, u) / (1 + np.exp(-y)), 0.0)
        row_sum[t.rows] += g.sum(1)
        _add(g, t, row_gradient, column_gradient)
    return row_loss, row_sum


def _add(g: Array, t: Tile, row_gradient: Array | None, column_gradient: Array | None) -> None:
    if row_gradient is not None:
        row_gradient[t.rows] += g @ t.k
    if column_gradient is not None:
        column_gradient[t.columns] += g.T @ t.q


def accuracy(dtype: str, device: str) -> Accuracy:
    """Float64 whatever comes in; one term at a time, every addition of a log-sum-exp is a merge."""
    return Accuracy(unit=2.0**-53, accumulate_unit=2.0**-53, tile=lambda terms: 1)


backend = Backend(
    name="numpy",
    arrays=NumpyArrays(np),
    dtypes=frozenset({"float16", "float32", "float64"}),
    devices=frozenset({"cpu"}),
    accuracy=accuracy,
    lse=lse,
    gradients=gradients,
    sigmoid=sigmoid,
    state=lambda dtype: "float64",
)
