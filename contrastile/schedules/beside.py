"""What a margin and label smoothing add to a softmax loss beside its blocks: O(b d), and one small message over ranks.

A margin m lowers the positives' logits by s m, which is N + s m instead of N (``objectives.Terms``): the scale's
gradient gets m times the sum of the bars by N.

Label smoothing of e takes ``(1 - e) y + e / n`` for y: a loss of P and D (``objectives.Terms``) less what is here,

    e (sum_i u_i mean_j x_ij + sum_j v_j mean_i x_ij) = e s (<sum_i u_i q_i, mean_j k_j> + <mean_i q_i, sum_j v_j k_j>)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from contrastile.backends.arrays import ArrayLibrary, library_of, transfer
from contrastile.backends.contract import Array, state_dtype
from contrastile.schedules import local
from contrastile.schedules.problem import Problem
from contrastile.schedules.sums import gathered, summed

ELEMENTS = 2**24
"""Features that are multiplied in the state dtype at a time."""


def alongside(x: Array, like: Array) -> Array:
    """X in the library and on the device of another array: blocks keep features elsewhere than vectors."""
    target = library_of(like)
    moved: Any = transfer(x, library_of(x), target)
    return moved.to(like.device) if target.name == "torch" else moved


def _sums(weight: Array, even: float, parts: Sequence[Array]) -> list[Array]:
    """``sum_i w_i x_i`` and ``even sum_i x_i`` over the rows of all parts, (d,) float64 each, beside the features."""
    source, weight = library_of(parts[0]), alongside(weight, parts[0])
    state, ends = state_dtype(source.dtype(parts[0])), 0
    # no products of matrices: CuPy's cannot be captured in a graph
    sums = [source.full((parts[0].shape[1],), 0.0, "float64", parts[0]) for _ in range(2)]
    for features in parts:
        for here in _chunks(features):
            x = features[here]
            w = source.cast(weight[ends + here.start : ends + here.stop], state)[:, None]
            sums = [total + source.total(each, 0) for total, each in zip(sums, (w * x, x), strict=True)]
        ends += features.shape[0]
    return [sums[0], even * sums[1]]


def _chunks(features: Array) -> Iterator[slice]:
    """Of so many rows that a temporary of their shape is small."""
    m, width = features.shape
    rows = max(1, ELEMENTS // max(width, 1))
    for start in range(0, m, rows):
        yield slice(start, min(start + rows, m))


class Smoothing:
    """The linear part of label smoothing, without the factor ``-e s``."""

    def __init__(self, problem: Problem, arrays: ArrayLibrary, sums: Array | None = None) -> None:
        """``sums``: what an earlier one of this problem has; an operator leaves none."""
        placement, blocks = problem.placement, problem.columns
        m, n = problem.rows.shape[0], sum(x.shape[0] for x in blocks)
        u, v = problem.row_weight, problem.column_weight
        self.weights = u, arrays.full((n,), 0.0, arrays.dtype(u), u) if v is None else v
        # what each row, and each column, weighs in the mean of its side
        if placement is None:
            self.even = 1.0 / m, 1.0 / n
        else:
            self.even = 1.0 / sum(placement.shards.rows), 1.0 / sum(placement.shards.widths)
        self.sums: Any = sums
        if sums is None:
            source: Any = library_of(problem.rows)
            sides = zip(self.weights, self.even, ((problem.rows,), blocks), strict=True)
            self.sums = source.module.stack([x for side in sides for x in _sums(*side)])
            if placement is not None and placement.size > 1:
                (whole,) = gathered(placement, arrays, (self.sums[None], (1,) * placement.size))
                self.sums = whole.sum(0)

    def value(self, scale: Array) -> Array:
        """``<sum_i u_i q_i, mean_j k_j> + <mean_i q_i, sum_j v_j k_j>``, beside the scale."""
        of_rows, mean_row, of_columns, mean_column = self.sums
        return alongside((of_rows * mean_column + mean_row * of_columns).sum(), scale)

    def add(self, found: Array | None, side: int, start: int, factor: Array) -> None:
        """Add ``factor`` times the derivatives to the gradient of rows (side 0), or columns from ``start`` on (1)."""
        if found is None:
            return
        arrays = library_of(found)
        dtype, weight, times = arrays.dtype(found), alongside(self.weights[side], found), alongside(factor, found)
        state = state_dtype(dtype)
        by_even, by_weight = self.even[side] * self.sums[2 - 2 * side], self.sums[3 - 2 * side]
        share, mean = (arrays.cast(times * x, state) for x in (by_even, by_weight))
        for here in _chunks(found):
            part = arrays.cast(weight[start + here.start : start + here.stop], state)[:, None] * mean + share
            arrays.add(found[here], part, found[here])


def smoothed(problem: Problem, found: local.Forward, arrays: ArrayLibrary) -> local.Forward:
    """The loss of the blocks with the linear part of label smoothing, and the sums behind that."""
    scale, smoothing = arrays.cast(problem.scale, "float64"), Smoothing(problem, arrays)
    linear = problem.smoothing * scale * smoothing.value(problem.scale)
    loss = arrays.cast(arrays.cast(found.loss, "float64") - linear, arrays.dtype(found.loss))
    return replace(found, loss=loss, smoothed=smoothing.sums)


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
        smoothing = Smoothing(problem, arrays, saved.smoothed)
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
