"""The gather (DisCo Alg. 1): every rank sees all columns, computes its own rows, and the columns' gradients are summed.

Fewer and larger messages than the ring's, for shards that are computed faster than they travel; O(b d) memory per rank.
One rank's rows give every column a part of its log-sum-exp: the parts go home and are merged there, so that one pass
over the tiles serves both directions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from contrastile.backends.arrays import ArrayLibrary
from contrastile.backends.contract import Array, Backend, Block, Options, Weights
from contrastile.exchange import local
from contrastile.exchange.placement import Placement
from contrastile.exchange.problem import Problem
from contrastile.exchange.shared import average, finish, placed, scaled_weights, summed, together


def gathered(placement: Placement, arrays: ArrayLibrary, own: Array) -> Array:
    """Every rank's vectors or features over its columns, joined in the order of the ranks."""
    widths = placement.shards.widths
    own = arrays.contiguous(own)
    if placement.size == 1:
        return own
    whole = arrays.empty((sum(widths), *own.shape[1:]), arrays.dtype(own), own)
    placement.communicator.all_gather(own, whole, widths).wait()
    return whole


def _block(problem: Problem, arrays: ArrayLibrary, columns: Array | None = None) -> Block:
    """This rank's rows against all columns; the pairs' numbers are those of the joined columns already.

    ``columns`` are those that an earlier pass gathered.
    """
    placement = placed(problem)
    ids = problem.column_ids
    if ids is not None:
        ids = gathered(placement, arrays, ids)
    if columns is None:
        columns = gathered(placement, arrays, arrays.concat(list(problem.columns)))
    return problem.block(columns, 0, ids)


@local.ieee
def forward(problem: Problem, backend: Backend, options: Options) -> local.Forward:
    """The global softmax loss, the same on every rank, and the log-sum-exps of this rank's rows and columns.

    Raises:
        UnsupportedProblemError: the backend refuses the block.
        ExchangeError: a rank did not answer within the deadline.
    """
    placement, arrays = placed(problem), backend.arrays
    two_sided = problem.column_weight is not None
    block = _block(problem, arrays)
    backend.check(block, options)
    found = backend.lse(block, two_sided, options)
    loss = arrays.mean_excess(found.row_lse, found.row_positive, problem.row_weight, problem.row_target)
    column_lse = positive = None
    if two_sided:
        for lse_part, positive_part in _home(placement, arrays, (found.column_lse, found.column_positive)):
            column_lse = lse_part if column_lse is None else arrays.merge(column_lse, lse_part)
            positive = positive_part if positive is None else positive + positive_part
        loss = loss + arrays.mean_excess(column_lse, positive, problem.column_weight, problem.column_target)
    # what the backward pass need not gather again
    kept = block.columns if placement.size > 1 else None
    return replace(together(problem, loss, found.row_lse, column_lse, arrays), gathered=kept)


def _home(placement: Placement, arrays: ArrayLibrary, state: Sequence[Array]) -> Iterator[Sequence[Array]]:
    """What each rank found for this rank's columns, from what this rank found for everybody's."""
    shards, n = placement.shards, placement.size
    if n == 1:
        yield state
        return
    # one message for all of it
    outgoing = []
    for rank in range(n):
        where = slice(shards.start(rank), shards.start(rank) + shards.widths[rank])
        outgoing.append(arrays.concat([x[where] for x in state]))
    own = shards.widths[placement.rank]
    incoming = [arrays.empty((len(state) * own,), arrays.dtype(state[0]), state[0]) for _ in range(n)]
    placement.communicator.all_to_all(outgoing, incoming).wait()
    for found in incoming:
        yield [found[i * own : (i + 1) * own] for i in range(len(state))]


@local.ieee
def backward(
    problem: Problem,
    saved: local.Forward,
    upstream: Array,
    wanted: local.Wanted,
    backend: Backend,
    options: Options,
) -> local.Gradients:
    """Gradients of ``upstream * loss`` for this rank's rows and columns and for the scale: see ``Placement.factor``."""
    placement, arrays = placed(problem), backend.arrays
    weighted = scaled_weights(problem, upstream)
    block = _block(weighted, arrays, saved.gathered)
    columns: Sequence[Array | None] = [None] * 3
    if weighted.column_weight is not None:
        columns = _over_columns(placement, arrays, (saved.column_lse, weighted.column_weight, weighted.column_target))
    weights = Weights(saved.row_lse, weighted.row_weight, weighted.row_target, *columns)
    if backend.finished is not None and wanted.rows:
        # this rank's rows meet every column here: only the columns' sums have other ranks' parts to come
        found = backend.finished(block, weights, None, "sums" if any(wanted.columns) else None, options)
        sums = local.Sums(None, _scattered(placement, arrays, found.columns, wanted.columns), None)
        others = replace(wanted, rows=False, scale=False)
        rest = finish(problem.rows, problem.scale, placement, sums, None, others, arrays)
        d_scale = average(placement, arrays, found.inner, problem.scale) if wanted.scale else None
        return replace(rest, rows=found.rows, scale=d_scale)
    row_sum = local.accumulator(backend, problem.rows, wanted.rows or wanted.scale)
    column_sum = local.accumulator(backend, block.columns, any(wanted.columns))
    backend.gradients(block, weights, row_sum, column_sum, options)
    sums = local.Sums(row_sum, _scattered(placement, arrays, column_sum, wanted.columns), None)
    return finish(problem.rows, problem.scale, placement, sums, None, wanted, arrays)


def _over_columns(placement: Placement, arrays: ArrayLibrary, vectors: Sequence[Array]) -> Sequence[Array]:
    """Every rank's vectors over its columns, joined; one message for all of them."""
    if placement.size == 1:
        return vectors
    own = arrays.concat(list(vectors)).reshape((len(vectors), -1))
    whole = gathered(placement, arrays, own.T)
    return [arrays.contiguous(whole[:, i]) for i in range(len(vectors))]


def _scattered(
    placement: Placement, arrays: ArrayLibrary, whole: Array | None, wants: tuple[bool, ...]
) -> tuple[Array | None, ...]:
    """The gradient sums of this rank's column blocks, over all ranks' rows."""
    if whole is None:
        return (None,) * len(wants)
    shards, own = placement.shards, whole
    if placement.size > 1:
        width = shards.widths[placement.rank]
        own = arrays.empty((width, *whole.shape[1:]), arrays.dtype(whole), whole)
        placement.communicator.reduce_scatter(whole, own, shards.widths).wait()
    places = shards.blocks(placement.rank)
    parts = [own[where] if want else None for where, want in zip(places, wants, strict=True)]
    # gradients of several blocks must not share memory: an operator's results may not
    return tuple(parts if len(parts) == 1 else [_copied(arrays, x) for x in parts])


def _copied(arrays: ArrayLibrary, x: Array | None) -> Array | None:
    if x is None:
        return None
    copy = arrays.empty(tuple(x.shape), arrays.dtype(x), x)
    copy[...] = x
    return copy


@local.ieee
def sigmoid(
    problem: Problem, wanted: local.Wanted | None, backend: Backend, options: Options
) -> tuple[Array, local.Sums | None]:
    """The global sigmoid loss and, in the same pass, the sums behind this rank's gradients."""
    placement, arrays = placed(problem), backend.arrays
    block = _block(problem, arrays)
    backend.check(block, options)
    row_sum = local.accumulator(backend, problem.rows, wanted is not None and (wanted.rows or wanted.scale))
    wants = (False,) * len(problem.columns) if wanted is None else wanted.columns
    column_sum = local.accumulator(backend, block.columns, any(wants))
    row_loss, slope = backend.sigmoid(block, problem.row_weight, row_sum, column_sum, options)
    loss = summed(placement, arrays, local.weighted_total(arrays, problem.row_weight, row_loss))
    value = arrays.cast(loss, arrays.dtype(problem.scale))
    if wanted is None:
        return value, None
    return value, local.Sums(row_sum, _scattered(placement, arrays, column_sum, wants), arrays.total(slope))
