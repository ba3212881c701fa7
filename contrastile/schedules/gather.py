"""The gather (DisCo Alg. 1): every rank sees all columns, computes its own rows, and the columns' gradients are summed.

It sends fewer and larger messages than the ring, which suits shards that are computed faster than they travel. It takes
O(b d) memory per rank. Each rank computes every column's statistics over its own rows. Every rank receives and merges
them all, so one pass over the tiles serves both directions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from contrastile.backends import objectives
from contrastile.backends.arrays import ArrayLibrary
from contrastile.backends.contract import Array, Block, ColumnForm, SideStatistics, Weights
from contrastile.backends.objectives import STATISTICS
from contrastile.comm import buffers
from contrastile.schedules import local, scalars
from contrastile.schedules.placement import Placement
from contrastile.schedules.problem import Problem
from contrastile.schedules.sums import all_reduce, finalize_loss, gathered, placed, rank_mean, scaled_weights


def _gathered_block(problem: Problem, arrays: ArrayLibrary, gathered_columns: Array | None = None) -> Block:
    """This rank's rows against the columns of all ranks, which an earlier pass may have gathered.

    It sends one message, with which the forward pass also compares the scale and the bias: see ``scalars``.
    """
    placement = placed(problem)
    widths, scalar_parts = placement.shards.widths, scalars.parts(problem, arrays) if gathered_columns is None else []
    columns = [] if gathered_columns is not None else [arrays.concat(list(problem.columns))]
    parts = [(x, widths) for x in (*columns, *problem.marks) if x is not None]
    arrived = gathered(placement, arrays, *parts, *scalar_parts) if parts else []
    problem = scalars.checked(problem, arrays, arrived[len(parts) :])
    remaining = iter(arrived)
    gathered_columns = next(remaining) if gathered_columns is None else gathered_columns
    marks = [None if x is None else next(remaining) for x in problem.marks]
    # the pairs index the joined columns already
    return problem.block(gathered_columns, 0, marks)


def forward(problem: Problem, work: local.Work, *, wanted: local.Wanted | None = None) -> local.Forward:
    """The global softmax loss, the same on every rank, and the log-sum-exps of this rank's rows and columns.

    Raises:
        UnsupportedProblemError: the backend refuses a block.
        ExchangeError: a rank did not answer within the deadline.
    """
    backend, options = work
    placement, arrays = placed(problem), backend.arrays
    two_sided = problem.column_weight is not None
    block = _gathered_block(problem, arrays)
    backend.check(block, options)
    is_single = not problem.beside
    lse = local.lse_function(block.rows, block.columns.shape[0], wanted, work, is_single=is_single)
    statistics = lse(block, two_sided, options)
    rows = local.merge_parts(arrays, [*problem.beside, statistics.rows])
    kept = local.pack_kept([statistics.kept])
    # the backward pass reuses these gathered columns
    columns = block.columns if placement.size > 1 else None
    if statistics.columns is None:
        loss = local.loss(problem, arrays, "float64", rows)
        return replace(finalize_loss(problem, loss, rows, arrays), gathered=columns, kept=kept)
    loss_value, own_lses, global_columns = _merge_columns(problem, arrays, rows, statistics.columns)
    return local.Forward(loss_value, rows[:2], own_lses, columns, global_columns, kept=kept)


def _merge_columns(
    problem: Problem, arrays: ArrayLibrary, rows: SideStatistics, column_statistics: SideStatistics
) -> tuple[Array, local.Lses, tuple[Array, ...] | None]:
    """The loss of all ranks, N and P of this rank's columns, and ``local.Forward.global_columns``.

    Every rank receives every rank's column statistics and merges them itself. They are few bytes beside the columns'
    features, and if each column's owner merged and sent the result, that would be one more message.
    ``column_statistics`` are those of all columns over this rank's rows, (N,) each.
    """
    placement = placed(problem)
    n, widths = placement.size, placement.shards.widths
    weight, target, dtype = problem.column_weight, problem.column_target, arrays.dtype(problem.scale)
    if n == 1:
        return local.loss(problem, arrays, dtype, rows, column_statistics), column_statistics[:2], None
    row_loss = [] if problem.kind == STATISTICS else [local.loss(problem, arrays, "float64", rows)]
    # all are float64, so one array holds them
    flat = [x.reshape((-1,)) for x in (*column_statistics, *row_loss)]
    length, packed = flat[0].shape[0], arrays.concat(flat)
    packed_part = packed, (packed.shape[0],) * n
    if problem.whole is None:
        packed_by_rank, weight, target = gathered(placement, arrays, packed_part, (weight, widths), (target, widths))
    else:
        # all columns have the same weight
        (packed_by_rank,), weight_dtype = gathered(placement, arrays, packed_part), arrays.dtype(weight)
        weight, target = (arrays.full((sum(widths),), x, weight_dtype, packed) for x in (problem.whole, 1.0))
    packed_by_rank = packed_by_rank.reshape((n, packed.shape[0]))
    spans = [slice(i * length, (i + 1) * length) for i in range(len(column_statistics))]
    parts = [[row[span].reshape(column_statistics[0].shape) for span in spans] for row in packed_by_rank]
    merged = local.merge_parts(arrays, parts)
    start, stop = placement.start, placement.start + widths[placement.rank]
    if row_loss:
        column_loss = objectives.loss(problem.terms(arrays), arrays, "float64", [(*merged, weight, target)])
        value = arrays.cast(arrays.total(packed_by_rank[:, -1]) + column_loss, dtype)
    else:
        value = local.loss(problem, arrays, dtype, rows, SideStatistics(*(x[start:stop] for x in merged)))
    lses = merged[:2]
    return value, (lses[0][start:stop], lses[1][start:stop]), (*lses, weight, target)


def backward(
    problem: Problem, saved: local.Forward, upstream: Array, wanted: local.Wanted, work: local.Work
) -> local.Gradients:
    """Gradients of ``upstream * loss`` for this rank's rows and columns and for the scale: see ``Placement.factor``."""
    backend, options = work
    placement, arrays = placed(problem), backend.arrays
    if saved.global_columns is not None:
        negative, positive, column_weight, column_target = saved.global_columns
        saved = replace(saved, columns=(negative, positive))
        if problem.kind == STATISTICS:
            (column_weight,) = gathered(placement, arrays, (problem.column_weight, placement.shards.widths))
        problem = replace(problem, column_weight=column_weight, column_target=column_target)
    block = _gathered_block(problem, arrays, saved.gathered)
    uses_finished = backend.finished is not None and wanted.rows and problem.row_sums is None
    # the weights include the upstream gradient, unless ``finished`` multiplies by it
    weighted = problem if uses_finished else scaled_weights(problem, upstream)
    weights = Weights(*local.side_weights(weighted, saved, arrays), local.kept_array(saved, 0))
    row_sum = row_gradient = None
    if uses_finished and backend.finished is not None:
        # the rows' gradient is complete; the columns' sums lack the other ranks' parts
        column_form: ColumnForm | None = "sums" if any(wanted.columns) else None
        factor = upstream * placement.factor
        finished = backend.finished(block, weights, factor, column_form, options)
        row_gradient, column_sum, inner = finished.rows, finished.columns, finished.inner
    else:
        row_sum = local.row_accumulator(backend, problem, wanted)
        column_sum = local.accumulator(backend, block.columns, any(wanted.columns))
        backend.gradients(block, weights, row_sum, column_sum, options)
        inner = arrays.inner(problem.rows, row_sum) if wanted.scale else None
    sums, totals = _return_sums(placement, arrays, column_sum, wanted.columns, [inner] if wanted.scale else [])
    features = local.Wanted(wanted.rows, wanted.columns, scale=False)
    gradients = local.gradients_from_sums(problem, local.Sums(row_sum, sums, None), None, features, arrays)
    scale = rank_mean(placement, arrays, totals[0], problem.scale) if wanted.scale else None
    return local.Gradients(gradients.rows if row_gradient is None else row_gradient, gradients.columns, scale, None)


def _return_sums(
    placement: Placement,
    arrays: ArrayLibrary,
    column_sum: Array | None,
    wanted_columns: tuple[bool, ...],
    numbers: Sequence[Array],
) -> tuple[tuple[Array | None, ...], Sequence[Array]]:
    """The gradient sums of this rank's column blocks, and the sums of numbers, over all ranks, in one message."""
    n, rank, widths = placement.size, placement.rank, placement.shards.widths
    if n == 1 or column_sum is None:
        sums = split_by_block(placement, column_sum, wanted_columns)
        return sums, all_reduce(placement, arrays, *numbers)
    parts = buffers.split(column_sum, widths)
    others, shape, dtype = [r for r in range(n) if r != rank], tuple(parts[rank].shape), arrays.dtype(column_sum)
    received = {r: arrays.empty(shape, dtype, column_sum) for r in others}
    sent, totals = [x.reshape((1,)) for x in numbers], [arrays.empty((n,), arrays.dtype(x), x) for x in numbers]
    outgoing = {r: sent if r == rank else [parts[r], *sent] for r in range(n)}
    incoming = {r: [x[r : r + 1] for x in totals] for r in range(n)}
    for r in others:
        incoming[r].insert(0, received[r])
    placement.communicator.exchange(outgoing, incoming).wait()
    # accumulate in a received array that is the first or second summand, and so is read before it is overwritten
    total_sum = received[1 if rank == 0 else 0]
    buffers.add_up([parts[r] if r == rank else received[r] for r in range(n)], total_sum)
    return split_by_block(placement, total_sum, wanted_columns), [arrays.total(x) for x in totals]


def split_by_block(placement: Placement, columns: Array | None, flags: tuple[bool, ...]) -> tuple[Array | None, ...]:
    """The gradients, or their sums, of this rank's columns, block by block; unwanted ones, by ``flags``, are None."""
    if columns is None:
        return (None,) * len(flags)
    spans = placement.shards.blocks(placement.rank)
    parts = [columns[span] if is_wanted else None for span, is_wanted in zip(spans, flags, strict=True)]
    # copy several blocks, because the results of an operator must not share memory
    return tuple(parts if len(parts) == 1 else [None if x is None else buffers.copied(x) for x in parts])


def sigmoid(problem: Problem, wanted: local.Wanted | None, work: local.Work) -> tuple[Array, local.Sums | None]:
    """The global sigmoid loss and, from the same pass, the sums that give this rank's gradients."""
    backend, options = work
    placement, arrays = placed(problem), backend.arrays
    block = _gathered_block(problem, arrays)
    backend.check(block, options)
    wanted_columns = (False,) * len(problem.columns) if wanted is None else wanted.columns
    row_sum = local.accumulator(backend, problem.rows, wanted is not None and (wanted.rows or wanted.scale))
    column_sum = local.accumulator(backend, block.columns, any(wanted_columns))
    row_loss, slope = backend.sigmoid(block, problem.row_weight, row_sum, column_sum, options)
    loss = local.weighted_total(arrays, problem.row_weight, row_loss)
    columns, (total_loss,) = _return_sums(placement, arrays, column_sum, wanted_columns, [loss])
    value = arrays.cast(total_loss, arrays.dtype(problem.scale))
    return value, None if wanted is None else local.Sums(row_sum, columns, arrays.total(slope))
