"""Columns of one row each, beside the blocks that all rows share: O(m k) logits, and none of it travels.

They are a row's own hard negatives; and, where the keys of other rows do not count, its positive. Their statistics are
merged with those of the blocks, whose gradients are then right as they stand: bars are derivatives by the whole N.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NamedTuple

from contrastile.backends.arrays import ArrayLibrary, library_of
from contrastile.backends.bars import bars_of
from contrastile.backends.contract import Array, Backend, SideStatistics, state_dtype
from contrastile.backends.pairs import head, pair
from contrastile.schedules import local
from contrastile.schedules.beside import alongside
from contrastile.schedules.problem import Problem
from contrastile.schedules.sums import finalize_loss, gradients_over_ranks, scaled_weights

ELEMENTS = 2**22
"""Features of own columns that are widened to the state dtype at a time."""


def shared(problem: Problem, backend: Backend | None = None) -> Problem:
    """The problem of the blocks that all rows share, which may be none; with a backend, and the others' statistics."""
    found = () if backend is None else (_statistics(problem, backend),)
    return replace(problem, columns=problem.shared_columns, own_counts=None, beside=found)


class _Chunk(NamedTuple):
    """Some rows and their own columns; first, where there is one, the positive.

    Attributes:
        rows: their place.
        q: (h, d) state dtype.
        k: (h, c, d) state dtype; 0 where there is no column.
        x: (h, c) logits, float64.
        counted: (h, c) whether it is a negative that counts.
    """

    rows: slice
    q: Array
    k: Array
    x: Array
    counted: Array


def _chunks(problem: Problem) -> Iterator[_Chunk]:
    """All rows, where the features are, which of a problem in blocks is elsewhere than the vectors."""
    own, m, first = problem.columns[-1], problem.rows.shape[0], int(problem.own_positives)
    source = library_of(own)
    state, each, width = state_dtype(source.dtype(own)), own.shape[0] // max(m, 1), own.shape[1]
    counts, scale = alongside(problem.own_counts, own), source.cast(alongside(problem.scale, own), "float64")
    limits = None if problem.row_limits is None else alongside(problem.row_limits, own)
    numbers, rows = source.arange(0, each, own), max(1, ELEMENTS // (width * max(1, first + each)))
    for start in range(0, m, rows):
        here = slice(start, min(start + rows, m))
        counted = numbers[None] < counts[here][:, None]
        k = source.cast(own[start * each : here.stop * each], state).reshape((here.stop - start, each, width))
        # what lies beyond a row's count may be anything
        k, q = source.where(counted[:, :, None], k, 0.0), source.cast(problem.rows[here], state)
        if first:
            positive = source.cast(problem.columns[0][here], state)[:, None]
            none = (counts[here] != counts[here])[:, None]
            k, counted = (source.module.concatenate(x, 1) for x in ((positive, k), (none, counted)))
        x = scale * source.cast((q[:, None] * k).sum(-1), "float64")
        yield _Chunk(here, q, k, x, counted if limits is None else counted & ~(x > limits[here][:, None]))


@local.ieee
def _statistics(problem: Problem, backend: Backend) -> SideStatistics:
    """Those of the rows over their own columns, beside the scale."""
    m, source = problem.rows.shape[0], library_of(problem.rows)
    xp, dtype = source.module, source.dtype(problem.rows)
    n, p = (source.full((m, 2), -math.inf, "float64", problem.rows) for _ in range(2))
    for rows, _, _, x, counted in _chunks(problem):
        seen = source.where(counted, x, -math.inf)
        if seen.shape[1]:
            top = xp.amax(seen, 1)
            top = source.where(xp.isfinite(top), top, 0.0)
            n[rows] = pair(xp, top, xp.log(xp.exp(seen - top[:, None]).sum(1)))
        if problem.own_positives:
            p[rows] = pair(xp, x[:, 0], 0.0 * x[:, 0])
    s = p if problem.own_positives else source.full((m, 2), 0.0, "float64", problem.rows)
    pairs = backend.compensated and backend.state(dtype) == "float64"
    given = {id(x): alongside(x if pairs else head(x), problem.scale) for x in (n, p, s)}
    # of lone positives P and S are one
    return SideStatistics(*(given[id(x)] for x in (n, p, s)))


@local.ieee
def loss(problem: Problem, arrays: ArrayLibrary) -> local.Forward:
    """The softmax loss of a problem that has no other columns, of ranks the global one."""
    (rows,) = problem.beside
    found = local.loss(problem, arrays, "float64", rows)
    if problem.placement is not None:
        return finalize_loss(problem, found, rows, arrays)
    return local.Forward(arrays.cast(found, arrays.dtype(problem.scale)), rows[:2])


@local.ieee
def gradients(
    problem: Problem,
    saved: local.Forward,
    upstream: Array,
    wanted: local.Wanted,
    blocks: Callable[[Problem, local.Wanted], local.Gradients],
    arrays: ArrayLibrary,
) -> local.Gradients:
    """Gradients of ``upstream * loss``. What own columns add to a row's sum is where that of the blocks begins.

    Args:
        problem: with own columns.
        saved: what its forward pass left: N and P of all columns.
        upstream: 0-d.
        wanted: which gradients to give.
        blocks: gives the gradients of the shared columns.
        arrays: the backend's library.
    """
    placement, rows, own, source = problem.placement, problem.rows, problem.columns[-1], library_of(problem.rows)
    xp, dtype, first = source.module, source.dtype(rows), int(problem.own_positives)
    weighted = problem.weighted(upstream) if placement is None else scaled_weights(problem, upstream)
    side, _ = local.side_weights(weighted, saved, arrays)
    by_n, by_p, *_ = (alongside(x, own) for x in bars_of(arrays, side))
    n = alongside(side.negative_lse, own)
    n = xp.stack((n, xp.zeros_like(n)), -1) if n.ndim == 1 else n
    factor, state = alongside(problem.scale, own), state_dtype(dtype)
    scale = source.cast(factor, "float64")
    sums = source.full(tuple(rows.shape), 0.0, state, rows) if wanted.rows or wanted.scale else None
    of_key, of_own = (
        source.empty(tuple(x.shape), dtype, x) if want else None
        for x, want in zip((problem.columns[0], own), (first and wanted.columns[0], wanted.columns[-1]), strict=True)
    )
    for here, q, k, x, counted in _chunks(problem):
        bar = by_n[here][:, None]
        G = source.where(counted & (bar != 0), bar * xp.exp((x - n[here, :1]) - n[here, 1:]), 0.0)
        if first:
            # of one positive q is 1, and D has no part
            G[:, 0] = by_p[here]
        if sums is not None:
            sums[here] = (source.cast(G, state)[:, :, None] * k).sum(1)
        part = source.cast(source.cast(scale * G, state)[:, :, None] * q[:, None], dtype)
        if of_key is not None:
            of_key[here] = part[:, 0]
        if of_own is not None:
            each = part.shape[1] - first
            of_own[here.start * each : here.stop * each] = part[:, first:].reshape((-1, own.shape[1]))
    of_shared = replace(wanted, columns=wanted.columns[first:-1])
    others = replace(shared(problem), row_sums=sums)
    alone = local.Sums(sums, (), None), None, of_shared, source
    if others.columns:
        found = blocks(others, of_shared)
    elif placement is not None:
        found = gradients_over_ranks(rows, factor, placement, *alone)
    else:
        found = local.gradients_from_sums(rows, factor, *alone)
        found = replace(found, scale=None if found.scale is None else alongside(found.scale, problem.scale))
    return replace(found, columns=(*[of_key] * first, *found.columns, of_own))
