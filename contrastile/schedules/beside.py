"""What a margin and label smoothing add to a softmax loss beside its blocks: O(b d), and one small message over ranks.

A margin m lowers the positives' logits by s m, which is N + s m instead of N (``objectives.Terms``): the scale's
gradient gets m times the sum of the bars by N.

Label smoothing of e takes ``(1 - e) y + e / n`` for y: a loss of P and D (``objectives.Terms``) less what is here,

    e (sum_i u_i mean_j x_ij + sum_j v_j mean_i x_ij) = e s (<sum_i u_i q_i, mean_j k_j> + <mean_i q_i, sum_j v_j k_j>)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from contrastile.backends.arrays import ArrayLibrary, library_of, transfer
from contrastile.backends.contract import Array
from contrastile.schedules import local
from contrastile.schedules.problem import Problem
from contrastile.schedules.sums import gathered, summed

ROWS = 1024
"""Rows that are widened to float64 at a time."""


def alongside(x: Array, like: Array) -> Array:
    """X in the library and on the device of another array: blocks keep features elsewhere than vectors."""
    target = library_of(like)
    moved: Any = transfer(x, library_of(x), target)
    return moved.to(like.device) if target.name == "torch" else moved


def _weighted_sum(weight: Array, parts: Sequence[Array]) -> Array:
    """``sum_i w_i x_i`` over the rows of all parts, (d,) float64, beside the features."""
    source, weight, ends = library_of(parts[0]), alongside(weight, parts[0]), 0
    total = source.full((parts[0].shape[1],), 0.0, "float64", parts[0])
    for features in parts:
        for start in range(0, features.shape[0], ROWS):
            x = source.cast(features[start : start + ROWS], "float64")
            total = total + source.cast(weight[ends + start : ends + start + x.shape[0]], "float64") @ x
        ends += features.shape[0]
    return total


class Smoothing:
    """The linear part of label smoothing, without the factor ``-e s``."""

    def __init__(self, problem: Problem, arrays: ArrayLibrary) -> None:
        placement, blocks = problem.placement, problem.columns
        m, n = problem.rows.shape[0], sum(x.shape[0] for x in blocks)
        u: Array = arrays.cast(problem.row_weight, "float64")
        v: Array = problem.column_weight
        v = arrays.full((n,), 0.0, "float64", u) if v is None else arrays.cast(v, "float64")
        if placement is None:
            even = 1.0 / m, 1.0 / n
        else:
            even = 1.0 / sum(placement.shards.rows), 1.0 / sum(placement.shards.widths)
        # what each row, and each column, weighs in the sum and in the mean of its side
        self.weights = [(weight, 0.0 * weight + mean) for weight, mean in zip((u, v), even, strict=True)]
        source: Any = library_of(problem.rows)
        sides = zip(self.weights, ((problem.rows,), blocks), strict=True)
        found = [_weighted_sum(weight, parts) for weights, parts in sides for weight in weights]
        sums = source.module.stack(found)
        if placement is not None and placement.size > 1:
            (whole,) = gathered(placement, arrays, (sums[None], (1,) * placement.size))
            sums = whole.sum(0)
        self.sums = sums

    def value(self, scale: Array) -> Array:
        """``<sum_i u_i q_i, mean_j k_j> + <mean_i q_i, sum_j v_j k_j>``, beside the scale."""
        of_rows, mean_row, of_columns, mean_column = self.sums
        return alongside(of_rows @ mean_column + mean_row @ of_columns, scale)

    def add(self, found: Array | None, side: int, start: int, factor: Array) -> None:
        """Add ``factor`` times the derivatives to the gradient of rows (side 0), or columns from ``start`` on (1)."""
        if found is None:
            return
        arrays, (weight, even) = library_of(found), self.weights[side]
        total, mean = self.sums[2 - 2 * side], self.sums[3 - 2 * side]
        for first in range(0, found.shape[0], ROWS):
            here = slice(first, min(first + ROWS, found.shape[0]))
            w, share = (
                alongside(x[start + here.start : start + here.stop] * factor, found)[:, None] for x in (weight, even)
            )
            part = arrays.cast(found[here], "float64") + w * mean + share * total
            found[here] = arrays.cast(part, arrays.dtype(found))


def value(problem: Problem, loss: Array, arrays: ArrayLibrary) -> Array:
    """The loss with the linear part of label smoothing, 0-d, in the loss's dtype."""
    scale = arrays.cast(problem.scale, "float64")
    linear = Smoothing(problem, arrays).value(problem.scale)
    return arrays.cast(arrays.cast(loss, "float64") - problem.smoothing * scale * linear, arrays.dtype(loss))


def gradients(
    problem: Problem,
    saved: local.Forward,
    upstream: Array,
    wanted: local.Wanted,
    found: local.Gradients,
    arrays: ArrayLibrary,
) -> local.Gradients:
    """The gradients of the blocks, ``found``, which are written to, with those of what is beside them."""
    placement, ranks = problem.placement, 1 if problem.placement is None else problem.placement.size
    factor = arrays.cast(upstream, "float64") * (1.0 if placement is None else placement.factor)
    of_scale = arrays.full((), 0.0, "float64", problem.scale)
    if problem.margin is not None and wanted.scale:
        sides = local.side_weights(problem.weighted(factor), saved, arrays)
        bars: Sequence[Array] = [arrays.total(each.bars.negative) for each in sides if each is not None and each.bars]
        total = problem.margin * sum(bars)
        of_scale = of_scale + (total if placement is None else summed(placement, arrays, total)[0])
    if problem.smoothing is not None:
        smoothing = Smoothing(problem, arrays)
        times = -problem.smoothing * factor
        of_scale = of_scale + times * smoothing.value(problem.scale)
        scaled, start = times * arrays.cast(problem.scale, "float64"), 0
        smoothing.add(found.rows, 0, 0, scaled)
        for gradient, block in zip(found.columns, problem.columns, strict=True):
            smoothing.add(gradient, 1, start, scaled)
            start += int(block.shape[0])
    if not wanted.scale:
        return found
    return replace(found, scale=found.scale + arrays.cast(of_scale / ranks, arrays.dtype(found.scale)))
