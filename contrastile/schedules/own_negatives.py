"""Own columns, which belong to one row each, beside the blocks that all rows share: O(m k) logits; no rank sends any.

Own columns are a row's hard negatives and, if the keys of other rows do not count, its positive. Their statistics are
merged with those of the blocks. The blocks' gradients need no change, because bars are derivatives by the whole N.
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
"""The least number of features of own columns that are multiplied in the state dtype at a time."""
BYTES = 32
"""Bytes of workspace for each such feature on a GPU, where few large operations are faster: four arrays take half."""


def _shared(problem: Problem) -> tuple[ModuleType, Problem, slice]:
    """The schedule and the problem of the blocks that all rows share, and their span; no blocks if all are empty."""
    span = slice(int(problem.has_own_positives), -1)
    columns, placement = problem.columns[span], problem.placement
    counts = [x.shape[0] for x in columns] if placement is None else placement.shards.widths
    module = local if problem.blocking is None else blocked
    if placement is not None:
        module = gather if placement.exchange == "gather" else ring
    return module, replace(problem, columns=columns if any(counts) else (), own_counts=None), span


def _chunks(problem: Problem, options: Options) -> Iterator[tuple[slice, Array, list[Array], Array, Array]]:
    """Chunks of h rows with their own columns, on the features' device: the positive first, if there is one.

    Yields the span of the rows; their features (h, 1, d), in the state dtype; the features of the positives (h, 1, d),
    if there are any, and of the negatives (h, k, d); the logits (h, c), float64; and which of these are of negatives
    that count. Columns beyond a row's count may hold any values.
    """
    own, m, first = problem.columns[-1], problem.rows.shape[0], int(problem.has_own_positives)
    source = library_of(own)
    state, k, width = state_dtype(source.dtype(own)), own.shape[0] // max(m, 1), own.shape[1]
    counts, scale = alongside(problem.own_counts, own), source.cast(alongside(problem.scale, own), "float64")
    limits = None if problem.row_limits is None else alongside(problem.row_limits, own)
    indices, count = source.arange(0, k, own), ELEMENTS
    if source.device(own) != "cpu":
        count = max(count, workspace_bytes(options) // BYTES)
    rows = max(1, count // (width * max(1, first + k)))
    rows = rows if problem.blocking is None else min(rows, problem.blocking.block)
    for start in range(0, m, rows):
        span = slice(start, min(start + rows, m))
        is_negative = indices[None] < counts[span][:, None]
        q = source.cast(problem.rows[span], state)[:, None]
        keys = [own[start * k : span.stop * k].reshape((span.stop - start, k, width))]
        if first:
            keys.insert(0, problem.columns[0][span][:, None])
            is_negative = source.module.concatenate(((counts[span] < 0)[:, None], is_negative), 1)
        # a sum over strips of this width reads memory efficiently
        strip = math.gcd(width, 8)
        strips = [x.reshape((*x.shape[:2], width // strip, strip)) for x in (q, *keys)]
        dots = [source.in_one_kernel(_dots, (), strips[0], key).sum(-1) for key in strips[1:]]
        x = scale * source.cast(source.module.concatenate(dots, 1) if first else dots[0], "float64")
        yield span, q, keys, x, is_negative if limits is None else is_negative & ~(x > limits[span][:, None])


def _dots(arrays: ArrayLibrary, q: Array, k: Array) -> Array:
    return arrays.module.sum(q * k, axis=2)


def _weighed(arrays: ArrayLibrary, is_negative: Array, G: Array, k: Array) -> Array:
    return arrays.module.sum(arrays.where(is_negative, G * k, 0.0), axis=1)


def _statistics(problem: Problem, work: local.Work) -> SideStatistics:
    """The statistics of the rows over their own columns, on the scale's device."""
    backend, options = work
    m, source = problem.rows.shape[0], library_of(problem.rows)
    xp, dtype = source.module, source.dtype(problem.rows)
    n, p = (source.full((m, 2), -math.inf, "float64", problem.rows) for _ in range(2))
    for span, _, _, x, is_negative in _chunks(problem, options):
        logits = source.where(is_negative, x, -math.inf)
        if logits.shape[1]:
            maximum = xp.amax(logits, 1)
            maximum = source.where(xp.isfinite(maximum), maximum, 0.0)
            n[span] = pair(xp, maximum, xp.log(xp.exp(logits - maximum[:, None]).sum(1)))
        if problem.has_own_positives:
            p[span] = pair(xp, x[:, 0], 0.0 * x[:, 0])
    is_compensated = backend.compensated and backend.state(dtype) == "float64"
    n, p = (alongside(x if is_compensated else head(x), problem.scale) for x in (n, p))
    # with one positive per row P equals S; without any S is 0
    return SideStatistics(n, p, p if problem.has_own_positives else backend.arrays.module.exp(p))


def forward(problem: Problem, work: local.Work, *, wanted: local.Wanted | None = None) -> local.Forward:
    """The softmax loss, over ranks the global loss, and the log-sum-exps of all columns: see ``local.forward``."""
    arrays, own_side = work.backend.arrays, _statistics(problem, work)
    module, shared, blocks = _shared(problem)
    if shared.columns:
        shared_wanted = None if wanted is None else replace(wanted, columns=wanted.columns[blocks])
        shared_forward: local.Forward = module.forward(replace(shared, beside=(own_side,)), work, wanted=shared_wanted)
        return shared_forward
    loss = local.loss(problem, arrays, "float64", own_side)
    if problem.placement is not None:
        return finalize_loss(problem, loss, own_side, arrays)
    return local.Forward(arrays.cast(loss, arrays.dtype(problem.scale)), own_side[:2])


def backward(
    problem: Problem, saved: local.Forward, upstream: Array, wanted: local.Wanted, work: local.Work
) -> local.Gradients:
    """Gradients of ``upstream * loss``. The terms of a row's own columns are added to its sum first."""
    placement, rows, own, source = problem.placement, problem.rows, problem.columns[-1], library_of(problem.rows)
    xp, dtype, first = source.module, source.dtype(rows), int(problem.has_own_positives)
    weighted = problem.weighted(upstream) if placement is None else scaled_weights(problem, upstream)
    side, _ = local.side_weights(weighted, saved, work.backend.arrays)
    by_n, by_p, *_ = (alongside(x, own) for x in bars_of(work.backend.arrays, side))
    n = alongside(side.negative_lse, own)
    n = xp.stack((n, xp.zeros_like(n)), -1) if n.ndim == 1 else n
    factor, state = alongside(problem.scale, own), state_dtype(dtype)
    sums = source.full(tuple(rows.shape), 0.0, state, rows) if wanted.rows or wanted.scale else None
    d_positive, d_own = (
        source.empty(tuple(x.shape), dtype, x) if needed else None
        for x, needed in zip((problem.columns[0], own), (first and wanted.columns[0], wanted.columns[-1]), strict=True)
    )
    for span, q, keys, x, is_negative in _chunks(problem, work.options):
        bar = by_n[span][:, None]
        G = source.where(is_negative & (bar != 0), bar * xp.exp((x - n[span, :1]) - n[span, 1:]), 0.0)
        if first:
            # of one positive q is 1, and the term of D is 0
            G[:, 0] = by_p[span]
        G, scaled = (source.cast(y, state)[:, :, None] for y in (G, factor * G))
        if sums is not None:
            sums[span] = source.in_one_kernel(_weighed, (), is_negative[:, first:, None], G[:, first:], keys[-1])
            if first:
                sums[span] += G[:, 0] * keys[0][:, 0]
        if d_positive is not None:
            xp.multiply(scaled[:, 0], problem.rows[span], out=d_positive[span])
        if d_own is not None:
            k = x.shape[1] - first
            target = d_own[span.start * k : span.stop * k].reshape((len(G), k, own.shape[1]))
            xp.multiply(scaled[:, first:], q, out=target)
    module, shared, blocks = _shared(problem)
    wanted = replace(wanted, columns=wanted.columns[blocks])
    empty = () if shared.columns else tuple(source.empty(tuple(x.shape), state, x) for x in problem.columns[blocks])
    arguments = replace(problem, scale=factor), local.Sums(sums, empty, None), None, wanted, source
    grads: local.Gradients
    if shared.columns:
        grads = module.backward(replace(shared, row_sums=sums), saved, upstream, wanted, work)
    elif placement is not None:
        grads = gradients_over_ranks(*arguments)
    else:
        grads = local.gradients_from_sums(*arguments)
        grads = replace(grads, scale=None if grads.scale is None else alongside(grads.scale, problem.scale))
    return replace(grads, columns=(*[d_positive] * first, *grads.columns, d_own))
