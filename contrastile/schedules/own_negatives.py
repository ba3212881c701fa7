"""Columns of one row each, beside the blocks that all rows share: O(m k) logits, and none of it travels.

They are a row's own hard negatives; and, where the keys of other rows do not count, its positive. Their statistics join
those of the blocks, whose gradients are then right as they stand: bars are derivatives by the whole N.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from types import ModuleType

from contrastile.backends.arrays import ArrayLibrary, library_of
from contrastile.backends.bars import bars_of
from contrastile.backends.contract import Array, Options, SideStatistics, state_dtype
from contrastile.backends.pairs import head, pair
from contrastile.backends.settings import workspace_bytes
from contrastile.schedules import blocked, gather, local, ring
from contrastile.schedules.beside import alongside
from contrastile.schedules.problem import Problem
from contrastile.schedules.sums import finalize_loss, gradients_over_ranks, scaled_weights

ELEMENTS = 2**22
"""Least number of features of own columns that are multiplied in the state dtype at a time."""
BYTES = 32
"""Of the workspace for each of them on a GPU, where few large operations pay: four such arrays take half of it."""


def _shared(problem: Problem) -> tuple[ModuleType, Problem, slice]:
    """The schedule and the problem of the blocks that all rows share, if any has a row, and which these are."""
    which = slice(int(problem.own_positives), -1)
    columns, placement = problem.columns[which], problem.placement
    held = [x.shape[0] for x in columns] if placement is None else placement.shards.widths
    module = local if problem.blocking is None else blocked
    if placement is not None:
        module = gather if placement.exchange == "gather" else ring
    return module, replace(problem, columns=columns if any(held) else (), own_counts=None), which


def _chunks(problem: Problem, options: Options) -> Iterator[tuple[slice, Array, list[Array], Array, Array]]:
    """Some rows at a time, where the features are, and their own columns: first, where there is one, the positive.

    Gives the rows' place; their features (h, 1, d), in the state dtype; those of the positive (h, 1, d), if there is
    one, and of the others (h, k, d); the logits, (h, c) float64, and which of them are those of negatives that count.
    What lies beyond a row's count may be anything.
    """
    own, m, first = problem.columns[-1], problem.rows.shape[0], int(problem.own_positives)
    source = library_of(own)
    state, each, width = state_dtype(source.dtype(own)), own.shape[0] // max(m, 1), own.shape[1]
    counts, scale = alongside(problem.own_counts, own), source.cast(alongside(problem.scale, own), "float64")
    limits = None if problem.row_limits is None else alongside(problem.row_limits, own)
    numbers, most = source.arange(0, each, own), ELEMENTS
    if source.device(own) != "cpu":
        most = max(most, workspace_bytes(options) // BYTES)
    rows = max(1, most // (width * max(1, first + each)))
    rows = rows if problem.blocking is None else min(rows, problem.blocking.block)
    for start in range(0, m, rows):
        here = slice(start, min(start + rows, m))
        counted = numbers[None] < counts[here][:, None]
        q = source.cast(problem.rows[here], state)[:, None]
        both = [own[start * each : here.stop * each].reshape((here.stop - start, each, width))]
        if first:
            both.insert(0, problem.columns[0][here][:, None])
            counted = source.module.concatenate(((counts[here] < 0)[:, None], counted), 1)
        # strips of a width that a sum along the others reads well
        strip = math.gcd(width, 8)
        strips = [x.reshape((*x.shape[:2], width // strip, strip)) for x in (q, *both)]
        dots = [source.in_one_kernel(_dots, (), strips[0], k).sum(-1) for k in strips[1:]]
        x = scale * source.cast(source.module.concatenate(dots, 1) if first else dots[0], "float64")
        yield here, q, both, x, counted if limits is None else counted & ~(x > limits[here][:, None])


def _dots(arrays: ArrayLibrary, q: Array, k: Array) -> Array:
    return arrays.module.sum(q * k, axis=2)


def _weighed(arrays: ArrayLibrary, counted: Array, G: Array, k: Array) -> Array:
    return arrays.module.sum(arrays.where(counted, G * k, 0.0), axis=1)


def _statistics(problem: Problem, work: local.Work) -> SideStatistics:
    """Those of the rows over their own columns, beside the scale."""
    backend, options = work
    m, source = problem.rows.shape[0], library_of(problem.rows)
    xp, dtype = source.module, source.dtype(problem.rows)
    n, p = (source.full((m, 2), -math.inf, "float64", problem.rows) for _ in range(2))
    for here, _, _, x, counted in _chunks(problem, options):
        seen = source.where(counted, x, -math.inf)
        if seen.shape[1]:
            top = xp.amax(seen, 1)
            top = source.where(xp.isfinite(top), top, 0.0)
            n[here] = pair(xp, top, xp.log(xp.exp(seen - top[:, None]).sum(1)))
        if problem.own_positives:
            p[here] = pair(xp, x[:, 0], 0.0 * x[:, 0])
    pairs = backend.compensated and backend.state(dtype) == "float64"
    n, p = (alongside(x if pairs else head(x), problem.scale) for x in (n, p))
    # of lone positives P and S are one
    return SideStatistics(n, p, p if problem.own_positives else backend.arrays.module.exp(p))


def forward(problem: Problem, work: local.Work, *, wanted: local.Wanted | None = None) -> local.Forward:
    """The softmax loss, of ranks the global one, and the log-sum-exps of all columns: see ``local.forward``."""
    arrays, rows = work.backend.arrays, _statistics(problem, work)
    module, shared, which = _shared(problem)
    if shared.columns:
        wants = None if wanted is None else replace(wanted, columns=wanted.columns[which])
        found: local.Forward = module.forward(replace(shared, beside=(rows,)), work, wanted=wants)
        return found
    loss = local.loss(problem, arrays, "float64", rows)
    if problem.placement is not None:
        return finalize_loss(problem, loss, rows, arrays)
    return local.Forward(arrays.cast(loss, arrays.dtype(problem.scale)), rows[:2])


def backward(
    problem: Problem, saved: local.Forward, upstream: Array, wanted: local.Wanted, work: local.Work
) -> local.Gradients:
    """Gradients of ``upstream * loss``. A row's sum begins with what its own columns add to it."""
    placement, rows, own, source = problem.placement, problem.rows, problem.columns[-1], library_of(problem.rows)
    xp, dtype, first = source.module, source.dtype(rows), int(problem.own_positives)
    weighted = problem.weighted(upstream) if placement is None else scaled_weights(problem, upstream)
    side, _ = local.side_weights(weighted, saved, work.backend.arrays)
    by_n, by_p, *_ = (alongside(x, own) for x in bars_of(work.backend.arrays, side))
    n = alongside(side.negative_lse, own)
    n = xp.stack((n, xp.zeros_like(n)), -1) if n.ndim == 1 else n
    factor, state = alongside(problem.scale, own), state_dtype(dtype)
    sums = source.full(tuple(rows.shape), 0.0, state, rows) if wanted.rows or wanted.scale else None
    of_key, of_own = (
        source.empty(tuple(x.shape), dtype, x) if want else None
        for x, want in zip((problem.columns[0], own), (first and wanted.columns[0], wanted.columns[-1]), strict=True)
    )
    for here, q, both, x, counted in _chunks(problem, work.options):
        bar = by_n[here][:, None]
        G = source.where(counted & (bar != 0), bar * xp.exp((x - n[here, :1]) - n[here, 1:]), 0.0)
        if first:
            # of one positive q is 1, and D has no part
            G[:, 0] = by_p[here]
        G, scaled = (source.cast(y, state)[:, :, None] for y in (G, factor * G))
        if sums is not None:
            sums[here] = source.in_one_kernel(_weighed, (), counted[:, first:, None], G[:, first:], both[-1])
            if first:
                sums[here] += G[:, 0] * both[0][:, 0]
        if of_key is not None:
            xp.multiply(scaled[:, 0], problem.rows[here], out=of_key[here])
        if of_own is not None:
            each = x.shape[1] - first
            there = of_own[here.start * each : here.stop * each].reshape((len(G), each, own.shape[1]))
            xp.multiply(scaled[:, first:], q, out=there)
    module, shared, which = _shared(problem)
    wanted = replace(wanted, columns=wanted.columns[which])
    empty = () if shared.columns else tuple(source.empty(tuple(x.shape), state, x) for x in problem.columns[which])
    alone = replace(problem, scale=factor), local.Sums(sums, empty, None), None, wanted, source
    found: local.Gradients
    if shared.columns:
        found = module.backward(replace(shared, row_sums=sums), saved, upstream, wanted, work)
    elif placement is not None:
        found = gradients_over_ranks(*alone)
    else:
        found = local.gradients_from_sums(*alone)
        found = replace(found, scale=None if found.scale is None else alongside(found.scale, problem.scale))
    return replace(found, columns=(*[of_key] * first, *found.columns, of_own))
