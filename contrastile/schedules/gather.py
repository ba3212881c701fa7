"""The gather (DisCo Alg. 1): every rank sees all columns, computes its own rows, and the columns' gradients are summed.

Fewer and larger messages than the ring's, for shards that are computed faster than they travel; O(b d) memory per rank.
Each rank's rows give every column a part of its log-sum-exp. Every rank receives all parts and merges them, so that one
pass over the tiles serves both directions.
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
from contrastile.schedules.sums import finalize_loss, gathered, mean, placed, scaled_weights, summed


def _block(problem: Problem, arrays: ArrayLibrary, kept: Array | None = None) -> Block:
    """This rank's rows against the columns of all ranks; ``kept`` are these, where an earlier pass gathered them.

    One message, in which the forward pass compares the scale and the bias too: see ``scalars``.
    """
    placement = placed(problem)
    widths, numbers = placement.shards.widths, scalars.parts(problem, arrays) if kept is None else []
    columns = [] if kept is not None else [arrays.concat(list(problem.columns))]
    parts = [(x, widths) for x in (*columns, *problem.marks) if x is not None]
    found = gathered(placement, arrays, *parts, *numbers) if parts else []
    problem = scalars.checked(problem, arrays, found[len(parts) :])
    each = iter(found)
    kept = next(each) if kept is None else kept
    marks = [None if x is None else next(each) for x in problem.marks]
    # the pairs' numbers are those of the joined columns already
    return problem.block(kept, 0, marks)


def forward(problem: Problem, work: local.Work, *, wanted: local.Wanted | None = None) -> local.Forward:
    """The global softmax loss, the same on every rank, and the log-sum-exps of this rank's rows and columns.

    Raises:
        UnsupportedProblemError: the backend refuses a block.
        ExchangeError: a rank did not answer within the deadline.
    """
    backend, options = work
    placement, arrays = placed(problem), backend.arrays
    two_sided = problem.column_weight is not None
    block = _block(problem, arrays)
    backend.check(block, options)
    single = not problem.beside
    lse = local.lse_function(block.rows, block.columns.shape[0], wanted, work, single=single)
    found = lse(block, two_sided, options)
    rows = local.merged(arrays, [*problem.beside, found.rows])
    kept = local.kept_by([found.kept])
    # what the backward pass need not gather again
    columns = block.columns if placement.size > 1 else None
    if found.columns is None:
        loss = local.loss(problem, arrays, "float64", rows)
        return replace(finalize_loss(problem, loss, rows, arrays), gathered=columns, kept=kept)
    value, own, known = _over_columns(problem, arrays, rows, found.columns)
    return local.Forward(value, rows[:2], own, columns, known, kept=kept)


def _over_columns(
    problem: Problem, arrays: ArrayLibrary, rows: SideStatistics, state: SideStatistics
) -> tuple[Array, local.Lses, tuple[Array, ...] | None]:
    """The loss of all ranks, N and P of this rank's columns, and ``local.Forward.global_columns``.

    Every rank receives what every rank's rows give every column, and merges it itself: few bytes beside the columns'
    features, and one message fewer than if each column's owner merged its own and sent the result. ``state`` are the
    statistics of all columns over this rank's rows, (N,) each.
    """
    placement = placed(problem)
    n, widths = placement.size, placement.shards.widths
    weight, target, dtype = problem.column_weight, problem.column_target, arrays.dtype(problem.scale)
    if n == 1:
        return local.loss(problem, arrays, dtype, rows, state), state[:2], None
    own = [] if problem.kind == STATISTICS else [local.loss(problem, arrays, "float64", rows)]
    # all are float64: one array travels
    flat = [x.reshape((-1,)) for x in (*state, *own)]
    size, packed = flat[0].shape[0], arrays.concat(flat)
    part = packed, (packed.shape[0],) * n
    if problem.whole is None:
        every, weight, target = gathered(placement, arrays, part, (weight, widths), (target, widths))
    else:
        # all weigh the same
        (every,), of = gathered(placement, arrays, part), arrays.dtype(weight)
        weight, target = (arrays.full((sum(widths),), x, of, packed) for x in (problem.whole, 1.0))
    every = every.reshape((n, packed.shape[0]))
    places = [slice(i * size, (i + 1) * size) for i in range(len(state))]
    found = [[one[at].reshape(state[0].shape) for at in places] for one in every]
    merged = local.merged(arrays, found)
    start, stop = placement.start, placement.start + widths[placement.rank]
    if own:
        of_columns = objectives.loss(problem.terms(arrays), arrays, "float64", [(*merged, weight, target)])
        value = arrays.cast(arrays.total(every[:, -1]) + of_columns, dtype)
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
    block = _block(problem, arrays, saved.gathered)
    at_once = backend.finished is not None and wanted.rows and problem.row_sums is None
    # the weights carry the factor unless the backend multiplies by it
    weighted = problem if at_once else scaled_weights(problem, upstream)
    weights = Weights(*local.side_weights(weighted, saved, arrays), local.kept_of(saved, 0))
    row_sum = row_gradient = None
    if at_once and backend.finished is not None:
        # this rank's rows are complete here; the columns' sums still lack the other ranks' parts
        form: ColumnForm | None = "sums" if any(wanted.columns) else None
        factor = upstream * placement.factor
        found = backend.finished(block, weights, factor, form, options)
        row_gradient, column_sum, inner = found.rows, found.columns, found.inner
    else:
        row_sum = local.row_accumulator(backend, problem, wanted)
        column_sum = local.accumulator(backend, block.columns, any(wanted.columns))
        backend.gradients(block, weights, row_sum, column_sum, options)
        inner = arrays.inner(problem.rows, row_sum) if wanted.scale else None
    sums, totals = _returned(placement, arrays, column_sum, wanted.columns, [inner] if wanted.scale else [])
    features = local.Wanted(wanted.rows, wanted.columns, scale=False)
    rest = local.gradients_from_sums(problem, local.Sums(row_sum, sums, None), None, features, arrays)
    scale = mean(placement, arrays, totals[0], problem.scale) if wanted.scale else None
    return local.Gradients(rest.rows if row_gradient is None else row_gradient, rest.columns, scale, None)


def _returned(
    placement: Placement,
    arrays: ArrayLibrary,
    whole: Array | None,
    wants: tuple[bool, ...],
    numbers: Sequence[Array],
) -> tuple[tuple[Array | None, ...], Sequence[Array]]:
    """The gradient sums of this rank's column blocks, and the sums of numbers, over all ranks: one message for both."""
    n, me, widths = placement.size, placement.rank, placement.shards.widths
    if n == 1 or whole is None:
        found = by_block(placement, whole, wants)
        return found, summed(placement, arrays, *numbers)
    parts = buffers.split(whole, widths)
    others, shape, dtype = [r for r in range(n) if r != me], tuple(parts[me].shape), arrays.dtype(whole)
    arriving = {r: arrays.empty(shape, dtype, whole) for r in others}
    own, totals = [x.reshape((1,)) for x in numbers], [arrays.empty((n,), arrays.dtype(x), x) for x in numbers]
    outgoing = {r: own if r == me else [parts[r], *own] for r in range(n)}
    incoming = {r: [x[r : r + 1] for x in totals] for r in range(n)}
    for r in others:
        incoming[r].insert(0, arriving[r])
    placement.communicator.exchange(outgoing, incoming).wait()
    # into what arrived first or second, which is not needed once it has been added
    into = arriving[1 if me == 0 else 0]
    buffers.add_up([parts[r] if r == me else arriving[r] for r in range(n)], into)
    return by_block(placement, into, wants), [arrays.total(x) for x in totals]


def by_block(placement: Placement, own: Array | None, wants: tuple[bool, ...]) -> tuple[Array | None, ...]:
    """The wanted gradients, or their sums, of this rank's columns, block by block; None where there are none."""
    if own is None:
        return (None,) * len(wants)
    places = placement.shards.blocks(placement.rank)
    parts = [own[where] if want else None for where, want in zip(places, wants, strict=True)]
    # gradients of several blocks must not share memory: an operator's results may not
    return tuple(parts if len(parts) == 1 else [None if x is None else buffers.copied(x) for x in parts])


def sigmoid(problem: Problem, wanted: local.Wanted | None, work: local.Work) -> tuple[Array, local.Sums | None]:
    """The global sigmoid loss and, in the same pass, the sums behind this rank's gradients."""
    backend, options = work
    placement, arrays = placed(problem), backend.arrays
    block = _block(problem, arrays)
    backend.check(block, options)
    wants = (False,) * len(problem.columns) if wanted is None else wanted.columns
    row_sum = local.accumulator(backend, problem.rows, wanted is not None and (wanted.rows or wanted.scale))
    column_sum = local.accumulator(backend, block.columns, any(wants))
    row_loss, slope = backend.sigmoid(block, problem.row_weight, row_sum, column_sum, options)
    loss = local.weighted_total(arrays, problem.row_weight, row_loss)
    columns, (total,) = _returned(placement, arrays, column_sum, wants, [loss])
    value = arrays.cast(total, arrays.dtype(problem.scale))
    return value, None if wanted is None else local.Sums(row_sum, columns, arrays.total(slope))
