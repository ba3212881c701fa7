"""Rows against themselves, as in NT-Xent: the logits are symmetric, and each pair of rows is computed once.

The first half of the rows against the second half is a block of two directions: one pass over it gives statistics of
both halves, and gradients of both. What is left are the pairs within either half, which are halved in turn, down to
blocks on the diagonal, which are computed whole. With the gradient of the logits G + G^T, formed once, that is
``4 n^2 d`` FLOPs and ``2 n d`` for each row of a block on the diagonal.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from contrastile.backends import bars
from contrastile.backends.arrays import ArrayLibrary
from contrastile.backends.contract import Array, Block, LseFunction, SideStatistics, SideWeights, Weights
from contrastile.schedules import local
from contrastile.schedules.problem import Problem, marks_of

WORK, TWICE, CPU_ROWS = 1 << 35, 1 << 41, 512
"""On a GPU rows x rows x width up to which nothing is halved, and from which halves are halved again: to compute half
of a block takes less time, and to launch three blocks instead takes more. On a CPU the rows of a whole block."""

ALIGNED = 128
"""Halves begin at multiples of this: whole tiles of every kernel, and vectors that begin where 16 bytes do."""


def whole_up_to(problem: Problem, work: local.Work) -> int:
    """The most rows of a block on the diagonal; where a tile was asked for, it is such a block."""
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
    # as ``halves`` aligns them
    smallest = -(-n // (ALIGNED << halvings)) * ALIGNED
    return max(ALIGNED, smallest, math.isqrt(WORK // max(1, width)))


def halves(rows: slice, most: int) -> tuple[slice, slice] | None:
    """The first and the second half of some rows; None where they are no more than ``most``."""
    length = rows.stop - rows.start
    if length <= most:
        return None
    end = rows.start + middle(length, min(most, ALIGNED))
    return slice(rows.start, end), slice(end, rows.stop)


def middle(length: int, step: int) -> int:
    return -(-length // (2 * step)) * step


def places(rows: slice, most: int) -> Iterator[tuple[slice, slice]]:
    parts = halves(rows, most)
    if parts is None:
        yield rows, rows
        return
    yield parts
    for part in parts:
        yield from places(part, most)


def block(problem: Problem, rows: slice, columns: slice) -> Block:
    """Some of the rows against others, or against themselves."""
    part, features = problem.of_rows(rows), problem.rows[columns]
    marks = marks_of(problem.marks, columns)
    if rows != columns:
        return across(part, features, columns.start, marks)
    return replace(part.block(features, columns.start, marks), symmetric=True)


def across(problem: Problem, others: Array, start: int, marks: Sequence[Array | None]) -> Block:
    """The rows against others, of which the first has the number ``start``: a row is excluded from itself alone."""
    return replace(problem, excluded=None).block(others, start, marks)


def statistics(
    problem: Problem,
    rows: slice,
    most: int,
    work: local.Work,
    lse: LseFunction | None = None,
    kept: list[Array | None] | None = None,
) -> SideStatistics:
    """Of some rows over each other; the blocks are computed in the order of ``places``.

    Args:
        problem: rows against themselves.
        rows: some of them.
        most: see ``halves``.
        work: computes the blocks.
        lse: the backend's ``lse`` or ``keeping``; None for the first.
        kept: what is kept of each block is appended to it.
    """
    backend, options = work
    arrays, parts = backend.arrays, halves(rows, most)
    here = block(problem, *(parts or (rows, rows)))
    backend.check(here, options)
    found = (lse or backend.lse)(here, parts is not None, options)
    if kept is not None:
        kept.append(found.kept)
    if found.columns is None or parts is None:
        return found.rows
    first, second = (statistics(problem, part, most, work, lse, kept) for part in parts)
    whole = [local.merged(arrays, x) for x in ((found.rows, first), (found.columns, second))]
    return local.joined(arrays, whole)


def add_gradients(
    problem: Problem,
    rows: SideWeights,
    columns: SideWeights,
    sums: Array,
    work: local.Work,
    kept: Sequence[Array | None] = (),
) -> None:
    """Add ``(G + G^T) F`` to sums, (n, d), where F are the rows; the weights are those of ``weights_of``.

    ``kept`` is of each block, or empty.
    """
    backend, options = work
    every = slice(0, problem.rows.shape[0])
    for number, (mine, others) in enumerate(places(every, whole_up_to(problem, work))):
        below = None if mine == others else sums[others]
        here = Weights(rows.part(mine), columns.part(others), kept[number] if kept else None)
        backend.gradients(block(problem, mine, others), here, sums[mine], below, options)


def weights_of(problem: Problem, lses: local.Lses, arrays: ArrayLibrary) -> tuple[SideWeights, SideWeights]:
    """Of the whole loss, the same on both sides."""
    rows = bars.side_weights(problem.terms(arrays), arrays, lses, problem.row_weight, problem.row_target)
    p = rows.positive_lse
    # one logit, whichever of the two has it: that of row i is read at (i, j), its column's must be the same number
    return rows, rows._replace(positive_lse=p if problem.positives is None else p[problem.positives])


def within(problem: Problem, start: int) -> Problem:
    """Rows of a larger problem, the first of which has the number ``start``, against themselves."""
    positives, excluded = (None if x is None else x - start for x in (problem.positives, problem.excluded))
    ids = problem.row_ids
    return replace(problem, positives=positives, excluded=excluded, column_ids=ids, placement=None, blocking=None)


def weights_within(problem: Problem, lses: local.Lses, arrays: ArrayLibrary) -> tuple[SideWeights, SideWeights]:
    """``weights_of`` rows of a larger problem; a positive outside them is in no block here."""
    m, positives = problem.rows.shape[0], problem.positives
    if positives is not None:
        inside = (positives >= 0) & (positives < m)
        problem = replace(problem, positives=arrays.where(inside, positives, arrays.arange(0, m, problem.rows)))
    return weights_of(problem, lses, arrays)


def forward(problem: Problem, work: local.Work, *, wanted: local.Wanted | None = None) -> local.Forward:
    """The softmax loss and its log-sum-exps: see ``local.forward``."""
    arrays, rows = work.backend.arrays, slice(0, problem.rows.shape[0])
    lse = local.lse_function(problem.rows, rows.stop, wanted, work, single=False)
    kept = list[Array | None]()
    mine = statistics(problem, rows, whole_up_to(problem, work), work, lse, kept)
    loss = local.loss(problem, arrays, arrays.dtype(problem.scale), mine)
    return local.Forward(loss, mine[:2], kept=local.kept_by(kept))


def backward(
    problem: Problem, saved: local.Forward, upstream: Array, wanted: local.Wanted, work: local.Work
) -> local.Gradients:
    """Gradients of ``upstream * loss`` for the softmax loss; that of the rows is the features', as rows and columns."""
    backend, options = work
    arrays, rows = backend.arrays, slice(0, problem.rows.shape[0])
    if backend.finished is not None and wanted.rows and halves(rows, whole_up_to(problem, work)) is None:
        weights = Weights(*weights_of(problem, saved.rows, arrays))
        done = backend.finished(block(problem, rows, rows), weights, upstream, None, options)
        inner = arrays.cast(done.inner, arrays.dtype(problem.scale)) if wanted.scale else None
        return counted_once(local.Gradients(done.rows, (), inner, None))
    problem = problem.weighted(upstream)
    sums = local.accumulator(backend, problem.rows, wanted.rows or wanted.scale)
    if sums is not None:
        add_gradients(problem, *weights_of(problem, saved.rows, arrays), sums, work, saved.kept)
    whole = local.Sums(sums, (), None)
    return counted_once(local.gradients_from_sums(problem, whole, None, wanted, arrays))


def counted_once(found: local.Gradients) -> local.Gradients:
    """The gradient of the scale halved: in the rows' sums each pair has counted twice."""
    return replace(found, scale=None if found.scale is None else found.scale / 2)
