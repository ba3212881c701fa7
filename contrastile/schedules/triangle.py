"""Rows against themselves, as in NT-Xent: the logits are symmetric, and each pair of rows is computed once.

The first half of the rows against the second half is a block of two directions: one pass over it gives the statistics
and the gradients of both halves. Each half against itself is halved in turn, down to blocks on the diagonal, which are
computed whole. The gradient of the logits, G + G^T, is formed once, so the cost is ``4 n^2 d`` FLOPs, and ``2 n d`` for
each row of a block on the diagonal.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from contrastile.backends import bars
from contrastile.backends.arrays import ArrayLibrary
from contrastile.backends.contract import Array, Block, LseFunction, SideStatistics, SideWeights, Weights
from contrastile.schedules import local
from contrastile.schedules.problem import Problem, slice_marks

WORK, TWICE, CPU_ROWS = 1 << 35, 1 << 41, 512
"""On a GPU rows are halved if rows x rows x width exceeds WORK, and halves are halved again from TWICE: half a block
takes less time to compute, and three blocks take longer to launch. On a CPU a whole block has up to CPU_ROWS rows."""

ALIGNED = 128
"""Halves begin at multiples of this, so that every kernel's tiles are whole and vectors are aligned to 16 bytes."""


def diagonal_rows(problem: Problem, work: local.Work) -> int:
    """The most rows of a block on the diagonal; if the options set a tile, its shorter side."""
    backend, options = work
    if options.tile is not None:
        return max(1, min(options.tile))
    arrays = backend.arrays
    if arrays.device(problem.rows) == "cpu":
        return CPU_ROWS
    n, width = int(problem.rows.shape[0]), int(problem.rows.shape[1])
    if backend.rows_alone is not None and backend.rows_alone(width, arrays.dtype(problem.rows), options):
        return max(1, n)
    halvings = 2 if n * n * width >= TWICE else 1
    # aligned as by ``halves``
    smallest = -(-n // (ALIGNED << halvings)) * ALIGNED
    return max(ALIGNED, smallest, math.isqrt(WORK // max(1, width)))


def halves(rows: slice, most: int) -> tuple[slice, slice] | None:
    """The first and the second half of some rows; None if there are at most ``most`` rows."""
    length = rows.stop - rows.start
    if length <= most:
        return None
    end = rows.start + half_length(length, min(most, ALIGNED))
    return slice(rows.start, end), slice(end, rows.stop)


def half_length(length: int, step: int) -> int:
    return -(-length // (2 * step)) * step


def block_spans(rows: slice, most: int) -> Iterator[tuple[slice, slice]]:
    split = halves(rows, most)
    if split is None:
        yield rows, rows
        return
    yield split
    for half in split:
        yield from block_spans(half, most)


def block(problem: Problem, rows: slice, columns: slice) -> Block:
    """Some of the rows against others, or against themselves."""
    row_problem, features = problem.of_rows(rows), problem.rows[columns]
    marks = slice_marks(problem.marks, columns)
    if rows != columns:
        return cross_block(row_problem, features, columns.start, marks)
    return replace(row_problem.block(features, columns.start, marks), symmetric=True)


def cross_block(problem: Problem, others: Array, start: int, marks: Sequence[Array | None]) -> Block:
    """The rows against others, of which ``start`` is the first index; no row meets itself, so none is excluded."""
    return replace(problem, excluded=None).block(others, start, marks)


def statistics(
    problem: Problem,
    rows: slice,
    most: int,
    work: local.Work,
    lse: LseFunction | None = None,
    kept: list[Array | None] | None = None,
) -> SideStatistics:
    """The statistics of some rows over each other; the blocks are computed in the order of ``block_spans``.

    Args:
        problem: rows against themselves.
        rows: the span of some of its rows.
        most: see ``halves``.
        work: the backend and its options.
        lse: the backend's ``lse`` or ``keeping``; None for ``lse``.
        kept: each block's kept array is appended to it.
    """
    backend, options = work
    arrays, split = backend.arrays, halves(rows, most)
    current = block(problem, *(split or (rows, rows)))
    backend.check(current, options)
    result = (lse or backend.lse)(current, split is not None, options)
    if kept is not None:
        kept.append(result.kept)
    if result.columns is None or split is None:
        return result.rows
    first, second = (statistics(problem, half, most, work, lse, kept) for half in split)
    sides = [local.merge_parts(arrays, x) for x in ((result.rows, first), (result.columns, second))]
    return local.join_parts(arrays, sides)


def add_gradients(
    problem: Problem,
    rows: SideWeights,
    columns: SideWeights,
    sums: Array,
    work: local.Work,
    kept: Sequence[Array | None] = (),
) -> None:
    """Add ``(G + G^T) F`` to sums, (n, d), where F are the rows; ``symmetric_weights`` gives both weights.

    ``kept`` has each block's kept array, or is empty.
    """
    backend, options = work
    all_rows = slice(0, problem.rows.shape[0])
    for index, (row_span, column_span) in enumerate(block_spans(all_rows, diagonal_rows(problem, work))):
        column_sums = None if row_span == column_span else sums[column_span]
        weights = Weights(rows.part(row_span), columns.part(column_span), kept[index] if kept else None)
        backend.gradients(block(problem, row_span, column_span), weights, sums[row_span], column_sums, options)


def symmetric_weights(problem: Problem, lses: local.Lses, arrays: ArrayLibrary) -> tuple[SideWeights, SideWeights]:
    """The weights of the whole loss, for the rows and for the columns, which are equal."""
    rows = bars.side_weights(problem.terms(arrays), arrays, lses, problem.row_weight, problem.row_target)
    p = rows.positive_lse
    # row i reads its positive's logit at (i, j); column j must read the same number
    return rows, rows._replace(positive_lse=p if problem.positives is None else p[problem.positives])


def subproblem(problem: Problem, start: int) -> Problem:
    """Rows of a larger problem against themselves; ``start`` is the index of the first."""
    positives, excluded = (None if x is None else x - start for x in (problem.positives, problem.excluded))
    ids = problem.row_ids
    return replace(problem, positives=positives, excluded=excluded, column_ids=ids, placement=None, blocking=None)


def subproblem_weights(problem: Problem, lses: local.Lses, arrays: ArrayLibrary) -> tuple[SideWeights, SideWeights]:
    """``symmetric_weights`` of a ``subproblem``; a positive outside its rows is replaced: no block has it."""
    m, positives = problem.rows.shape[0], problem.positives
    if positives is not None:
        inside = (positives >= 0) & (positives < m)
        problem = replace(problem, positives=arrays.where(inside, positives, arrays.arange(0, m, problem.rows)))
    return symmetric_weights(problem, lses, arrays)


def forward(problem: Problem, work: local.Work, *, wanted: local.Wanted | None = None) -> local.Forward:
    """The softmax loss and its log-sum-exps: see ``local.forward``."""
    arrays, rows = work.backend.arrays, slice(0, problem.rows.shape[0])
    lse = local.lse_function(problem.rows, rows.stop, wanted, work, is_single=False)
    kept = list[Array | None]()
    row_statistics = statistics(problem, rows, diagonal_rows(problem, work), work, lse, kept)
    loss = local.loss(problem, arrays, arrays.dtype(problem.scale), row_statistics)
    return local.Forward(loss, row_statistics[:2], kept=local.pack_kept(kept))


def backward(
    problem: Problem, saved: local.Forward, upstream: Array, wanted: local.Wanted, work: local.Work
) -> local.Gradients:
    """Gradients of ``upstream * loss`` for the softmax loss; the rows' gradient includes their part as columns."""
    backend, options = work
    arrays, rows = backend.arrays, slice(0, problem.rows.shape[0])
    if backend.finished is not None and wanted.rows and halves(rows, diagonal_rows(problem, work)) is None:
        weights = Weights(*symmetric_weights(problem, saved.rows, arrays))
        finished = backend.finished(block(problem, rows, rows), weights, upstream, None, options)
        scale = arrays.cast(finished.inner, arrays.dtype(problem.scale)) if wanted.scale else None
        return halve_scale_gradient(local.Gradients(finished.rows, (), scale, None))
    problem = problem.weighted(upstream)
    sums = local.accumulator(backend, problem.rows, wanted.rows or wanted.scale)
    if sums is not None:
        add_gradients(problem, *symmetric_weights(problem, saved.rows, arrays), sums, work, saved.kept)
    gradient_sums = local.Sums(sums, (), None)
    return halve_scale_gradient(local.gradients_from_sums(problem, gradient_sums, None, wanted, arrays))


def halve_scale_gradient(gradients: local.Gradients) -> local.Gradients:
    """The gradients with the scale's halved, because the rows' sums count each pair twice."""
    return replace(gradients, scale=None if gradients.scale is None else gradients.scale / 2)
