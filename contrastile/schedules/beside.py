"""The terms that a margin and label smoothing add beside the blocks of a softmax loss: O(b d), and one small message.

A margin m lowers the positives' logits by s m, so N + s m replaces N (``objectives.Terms``), and m times the sum of the
bars of N is added to the scale's gradient.

Label smoothing of e replaces y by ``(1 - e) y + e / n``. The loss is a function of P and D (``objectives.Terms``) minus

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
from contrastile.schedules.sums import all_reduce, gathered

ELEMENTS = 2**24
"""The number of features that are multiplied in the state dtype at a time."""


def alongside(x: Array, like: Array) -> Array:
    """The array x in the library and on the device of ``like``: in blocks, features and vectors may lie apart."""
    target = library_of(like)
    converted: Any = transfer(x, library_of(x), target)
    return converted.to(like.device) if target.name == "torch" else converted


def _sums(weight: Array, even: float, parts: Sequence[Array]) -> list[Array]:
    """``sum_i w_i x_i`` and ``even sum_i x_i`` over the rows of all parts, (d,) float64 each, on their device."""
    source, weight = library_of(parts[0]), alongside(weight, parts[0])
    state, start = state_dtype(source.dtype(parts[0])), 0
    # use no matrix products, because CuPy's cannot be captured in a graph
    sums = [source.full((parts[0].shape[1],), 0.0, "float64", parts[0]) for _ in range(2)]
    for features in parts:
        for span in _chunks(features):
            x = features[span]
            w = source.cast(weight[start + span.start : start + span.stop], state)[:, None]
            sums = [total + source.total(term, 0) for total, term in zip(sums, (w * x, x), strict=True)]
        start += features.shape[0]
    return [sums[0], even * sums[1]]


def _chunks(features: Array) -> Iterator[slice]:
    """Spans of rows, so short that a temporary array of their features is small."""
    m, width = features.shape
    rows = max(1, ELEMENTS // max(width, 1))
    for start in range(0, m, rows):
        yield slice(start, min(start + rows, m))


class Smoothing:
    """The linear part of label smoothing, without the factor ``-e s``."""

    def __init__(self, problem: Problem, arrays: ArrayLibrary, sums: Array | None = None) -> None:
        """``sums`` are those of an earlier ``Smoothing`` of this problem; None to compute them."""
        placement, blocks = problem.placement, problem.columns
        m, n = problem.rows.shape[0], sum(x.shape[0] for x in blocks)
        u, v = problem.row_weight, problem.column_weight
        self.weights = u, arrays.full((n,), 0.0, arrays.dtype(u), u) if v is None else v
        # the weight of each row, and of each column, in the mean of its side
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
        """``<sum_i u_i q_i, mean_j k_j> + <mean_i q_i, sum_j v_j k_j>``, on the scale's device."""
        row_sum, mean_row, column_sum, mean_column = self.sums
        return alongside((row_sum * mean_column + mean_row * column_sum).sum(), scale)

    def add(self, grad: Array | None, side: int, start: int, factor: Array) -> None:
        """Add ``factor`` times the derivatives to a gradient, of rows (side 0) or of columns from ``start`` on (1)."""
        if grad is None:
            return
        arrays = library_of(grad)
        dtype, weight, factor = arrays.dtype(grad), alongside(self.weights[side], grad), alongside(factor, grad)
        state = state_dtype(dtype)
        by_even, by_weight = self.even[side] * self.sums[2 - 2 * side], self.sums[3 - 2 * side]
        share, mean = (arrays.cast(factor * x, state) for x in (by_even, by_weight))
        for span in _chunks(grad):
            part = arrays.cast(weight[start + span.start : start + span.stop], state)[:, None] * mean + share
            arrays.add(grad[span], part, grad[span])


def smoothed(problem: Problem, forward: local.Forward, arrays: ArrayLibrary) -> local.Forward:
    """The loss of the blocks, minus the linear part of label smoothing, and the sums of that part."""
    scale, smoothing = arrays.cast(problem.scale, "float64"), Smoothing(problem, arrays)
    linear = problem.smoothing * scale * smoothing.value(problem.scale)
    loss = arrays.cast(arrays.cast(forward.loss, "float64") - linear, arrays.dtype(forward.loss))
    return replace(forward, loss=loss, smoothed=smoothing.sums)


def gradients(
    problem: Problem,
    saved: local.Forward,
    upstream: Array,
    wanted: local.Wanted,
    grads: local.Gradients,
    arrays: ArrayLibrary,
) -> local.Gradients:
    """The blocks' gradients, ``grads``, plus those of the margin and of label smoothing; may write to ``grads``."""
    placement, ranks = problem.placement, 1 if problem.placement is None else problem.placement.size
    factor = arrays.cast(upstream, "float64") * (1.0 if placement is None else placement.factor)
    scale_gradient = arrays.full((), 0.0, "float64", problem.scale)
    if problem.margin is not None and wanted.scale:
        sides = local.side_weights(problem.weighted(factor), saved, arrays)
        bars: Sequence[Array] = [arrays.total(side.bars.negative) for side in sides if side is not None and side.bars]
        total = problem.margin * sum(bars)
        scale_gradient = scale_gradient + (total if placement is None else all_reduce(placement, arrays, total)[0])
    if problem.smoothing is not None:
        smoothing = Smoothing(problem, arrays, saved.smoothed)
        smoothing_factor = -problem.smoothing * factor
        scale_gradient = scale_gradient + smoothing_factor * smoothing.value(problem.scale)
        scaled, start = smoothing_factor * arrays.cast(problem.scale, "float64"), 0
        smoothing.add(grads.rows, 0, 0, scaled)
        for gradient, block in zip(grads.columns, problem.columns, strict=True):
            smoothing.add(gradient, 1, start, scaled)
            start += int(block.shape[0])
    if not wanted.scale:
        return grads
    return replace(grads, scale=grads.scale + arrays.cast(scale_gradient / ranks, arrays.dtype(grads.scale)))
