"""The gather (DisCo Alg. 1): every rank sees all columns, computes its own rows, and the columns' gradients are summed.

Fewer and larger messages than the ring's, for shards that are computed faster than they travel; O(b d) memory per rank.
One rank's rows give every column a part of its log-sum-exp: the parts go home and are merged there, so that one pass
over the tiles serves both directions.
"""

from __future__ import annotations

from contrastile.backends.arrays import ArrayLibrary
from contrastile.backends.contract import Array, Backend, Block, Options, Pairs, Weights
from contrastile.exchange import local
from contrastile.exchange.placement import Placement
from contrastile.exchange.problem import Problem
from contrastile.exchange.shared import finish, placed, scaled_weights, summed, together


def gathered(placement: Placement, arrays: ArrayLibrary, own: Array) -> Array:
    """Every rank's vectors or features over its columns, joined in the order of the ranks."""
    widths = placement.shards.widths
    own = arrays.contiguous(own)
    if placement.size == 1:
        return own
    whole = arrays.full((sum(widths), *own.shape[1:]), 0, arrays.dtype(own), own)
    placement.communicator.all_gather(own, whole, widths).wait()
    return whole


def _block(problem: Problem, arrays: ArrayLibrary) -> Block:
    """This rank's rows against all columns; the pairs' numbers are those of the joined columns already."""
    placement = placed(problem)
    ids = problem.column_ids
    pairs = Pairs(
        positives=problem.positives,
        excluded=problem.excluded,
        row_ids=problem.row_ids,
        column_ids=None if ids is None else gathered(placement, arrays, ids),
        match=problem.match,
    )
    columns = gathered(placement, arrays, arrays.concat(list(problem.columns)))
    return Block(problem.rows, columns, problem.scale, problem.bias, pairs)


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
    loss = local.mean_excess(arrays, found.row_lse, found.row_positive, problem.row_weight, problem.row_target)
    if not two_sided:
        return together(problem, loss, found.row_lse, None, arrays)
    parts = _home(placement, arrays, found.column_lse), _home(placement, arrays, found.column_positive)
    column_lse, positive = (part[0] for part in parts)
    for lse_part, positive_part in zip(*(part[1:] for part in parts), strict=True):
        column_lse, positive = arrays.merge(column_lse, lse_part), positive + positive_part
    loss = loss + local.mean_excess(arrays, column_lse, positive, problem.column_weight, problem.column_target)
    return together(problem, loss, found.row_lse, column_lse, arrays)


def _home(placement: Placement, arrays: ArrayLibrary, x: Array) -> list[Array]:
    """What each rank found for this rank's columns, from what this rank found for everybody's."""
    shards, n = placement.shards, placement.size
    if n == 1:
        return [x]
    parts = [x[shards.start(r) : shards.start(r) + shards.widths[r]] for r in range(n)]
    own = shards.widths[placement.rank]
    incoming = [arrays.full((own,), 0.0, arrays.dtype(x), x) for _ in range(n)]
    placement.communicator.all_to_all(parts, incoming).wait()
    return incoming


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
    block = _block(weighted, arrays)
    columns: list[Array | None] = [None] * 3
    if weighted.column_weight is not None:
        vectors = saved.column_lse, weighted.column_weight, weighted.column_target
        columns = [gathered(placement, arrays, x) for x in vectors]
    row_sum = local.accumulator(backend, problem.rows, wanted.rows or wanted.scale)
    column_sum = local.accumulator(backend, block.columns, any(wanted.columns))
    weights = Weights(saved.row_lse, weighted.row_weight, weighted.row_target, *columns)
    backend.gradients(block, weights, row_sum, column_sum, options)
    sums = local.Sums(row_sum, _scattered(placement, arrays, column_sum, wanted.columns), None)
    return finish(problem.rows, problem.scale, placement, sums, None, wanted, arrays)


def _scattered(
    placement: Placement, arrays: ArrayLibrary, whole: Array | None, wants: tuple[bool, ...]
) -> tuple[Array | None, ...]:
    """The gradient sums of this rank's column blocks, over all ranks' rows."""
    if whole is None:
        return (None,) * len(wants)
    shards, own = placement.shards, whole
    if placement.size > 1:
        width = shards.widths[placement.rank]
        own = arrays.full((width, *whole.shape[1:]), 0.0, arrays.dtype(whole), whole)
        placement.communicator.reduce_scatter(whole, own, shards.widths).wait()
    places = shards.blocks(placement.rank)
    return tuple(own[where] if want else None for where, want in zip(places, wants, strict=True))


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
