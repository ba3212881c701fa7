"""The replicated schedule: every rank gathers the whole problem and computes all of it, as a process alone does.

One message in the forward pass, none in the backward pass, but that of the statistics, where each rank has the bars of
its own rows and columns: each rank takes its own rows of the whole gradient. Every
rank computes all pairs, so it is for problems that take less time than the messages of a gather or a ring. What travels
are arrays of the caller's library: what follows is a call of a process alone, whose kernels may come from CUDA graphs.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from contrastile.backends.arrays import ArrayLibrary, library_of, working_for
from contrastile.backends.contract import Array
from contrastile.backends.objectives import STATISTICS
from contrastile.schedules import scalars
from contrastile.schedules.gather import by_block
from contrastile.schedules.local import Gradients, State, Wanted
from contrastile.schedules.problem import OF_COLUMNS, VECTORS, Problem
from contrastile.schedules.sums import gathered, mean, phase, placed


def applies(problem: Problem) -> bool:
    return problem.placement is not None and problem.placement.exchange == "replicate"


def replicated(problem: Problem, arrays: ArrayLibrary) -> Problem:
    """The whole problem, of a process alone: every rank's part, joined in the order of the ranks, in one message.

    The scale and the bias, where they lie on a device, are compared: see ``scalars.checked``.

    Raises:
        ExchangeError: a rank did not answer within the deadline.
    """
    placement = placed(problem)
    rows, columns = placement.shards.rows, placement.shards.widths
    # pairs are numbered over the joined columns already
    joined = (arrays.concat(list(problem.columns)),) if problem.columns else ()
    # each row's weight where no vector need travel: all rows weigh the same, and row i has column i
    known = problem.whole if len(problem.columns) == 1 else None
    vectors = problem.vectors if known is None else (None,) * len(VECTORS)
    own = problem.rows, None, None, *vectors, *joined
    counts = rows, (), (), *(columns if name in OF_COLUMNS else rows for name in VECTORS), *[columns] * len(joined)
    # weights and targets are the builders', so every rank has one of both directions, or two, and one travels once.
    # A caller's arrays may be one on some ranks and two on others: each of those travels
    homes = list(range(len(own)))
    for column, row in zip((5, 6), (3, 4), strict=True):
        if own[column] is own[row]:
            homes[column] = row
    parts = {
        i: (x, each) for i, (x, each) in enumerate(zip(own, counts, strict=True)) if homes[i] == i and x is not None
    }
    with working_for(arrays, arrays, problem.rows), phase(placement):
        wholes = gathered(placement, arrays, *parts.values(), *scalars.parts(problem, arrays))
    found = dict(zip(parts, wholes, strict=False))
    whole = problem.with_arrays([found.get(i) for i in homes])
    own_numbers = scalars.checked(problem, arrays, wholes[len(parts) :])
    more: dict[str, Any] = {"scale": own_numbers.scale, "bias": own_numbers.bias}
    if known is not None:
        m, dtype = whole.rows.shape[0], arrays.dtype(problem.scale)
        weight, target = (arrays.full((m,), value, dtype, whole.rows) for value in (known, 1.0))
        more |= {"row_weight": weight, "row_target": target, "positives": arrays.arange(0, m, whole.rows)}
        if problem.column_weight is not None:
            more |= {"column_weight": weight, "column_target": target}
    return replace(whole, placement=None, whole=None, **more)


def own_value(problem: Problem, value: Array) -> Array:
    """The whole's value; of its statistics those of this rank's rows and columns."""
    if problem.kind != STATISTICS:
        return value
    placement = placed(problem)
    rows, widths = placement.shards.rows, placement.shards.widths
    start, columns = sum(rows[: placement.rank]), sum(rows) + placement.start
    parts = [value[:, start : start + rows[placement.rank]].T]
    if problem.columns:
        parts.append(value[:, columns : columns + widths[placement.rank]].T)
    return library_of(value).concat(parts).T


def upstream_of_whole(problem: Problem, upstream: Array, wanted: Wanted, arrays: ArrayLibrary) -> Array:
    """What arrives from above, times ``Placement.factor``; of the statistics every rank's, in one message."""
    placement = placed(problem)
    if problem.kind != STATISTICS:
        return upstream * placement.factor
    m, shards = problem.rows.shape[0], placement.shards
    own = [(upstream[:, :m].T, shards.rows), (upstream[:, m:].T, shards.widths)][: 1 + len(problem.columns[:1])]
    with working_for(arrays, arrays, problem.rows), phase(placement, wanted):
        wholes = gathered(placement, arrays, *own)
    return arrays.concat(wholes).T


def wanted_of_whole(wanted: Wanted) -> Wanted:
    """Which gradients of the whole problem this rank needs for those that it wants."""
    return replace(wanted, columns=(any(wanted.columns),) if wanted.columns else ())


def parted(problem: Problem, state: State) -> tuple[Problem, State]:
    """The whole problem of a rank's part, and the state of its loss, from both in one row.

    That is ``Problem.for_gradients().arrays()`` of the whole, and what its loss left.
    """
    mine = problem.for_gradients()
    joined = replace(mine, placement=None, columns=mine.columns[:1])
    count = len(joined.arrays())
    return joined.with_arrays(state[:count]), state[count:]


def own_part(problem: Problem, found: Gradients, wanted: Wanted, arrays: ArrayLibrary) -> Gradients:
    """This rank's rows and columns of the whole problem's gradients, which carry ``Placement.factor``."""
    placement = placed(problem)
    first, width = sum(placement.shards.rows[: placement.rank]), placement.shards.widths[placement.rank]
    rows = None if found.rows is None else found.rows[first : first + placement.shards.rows[placement.rank]]
    columns = tuple(None if x is None else x[placement.start : placement.start + width] for x in found.columns)
    if len(wanted.columns) > 1:
        columns = by_block(placement, columns[0], wanted.columns)
    scale, bias = (None if x is None else mean(placement, arrays, x, x) for x in (found.scale, found.bias))
    return Gradients(rows, columns, scale, bias)
