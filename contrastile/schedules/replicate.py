"""The replicated schedule: every rank gathers the whole problem and computes all of it, as a process alone does.

The forward pass sends one message. The backward pass sends none, because each rank takes its own rows of the whole
gradient; for the statistics it sends each rank's bars. Every rank computes all pairs, which suits problems that take
less time than the messages of a gather or a ring. The messages carry arrays of the caller's library. The call on the
whole problem is then that of a process alone, whose kernels may come from CUDA graphs.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from contrastile.backends.arrays import ArrayLibrary, library_of, working_for
from contrastile.backends.contract import Array
from contrastile.backends.objectives import STATISTICS
from contrastile.schedules import scalars
from contrastile.schedules.gather import split_by_block
from contrastile.schedules.local import Gradients, State, Wanted
from contrastile.schedules.problem import COLUMN_VECTORS, VECTORS, Problem
from contrastile.schedules.sums import gathered, phase, placed, rank_mean


def applies(problem: Problem) -> bool:
    return problem.placement is not None and problem.placement.exchange == "replicate"


def replicated(problem: Problem, arrays: ArrayLibrary) -> Problem:
    """The whole problem, for a process alone: the ranks' parts, gathered in one message and joined in their order.

    Scale and bias are compared if they lie on a device: see ``scalars.checked``.

    Raises:
        ExchangeError: a rank did not answer within the deadline.
    """
    placement = placed(problem)
    rows, columns = placement.shards.rows, placement.shards.widths
    # the pairs index the joined columns already
    joined = (arrays.concat(list(problem.columns)),) if problem.columns else ()
    # if all rows have the same weight, and column i is the positive of row i, no vector needs to travel
    row_weight = problem.whole if len(problem.columns) == 1 else None
    vectors = problem.vectors if row_weight is None else (None,) * len(VECTORS)
    sent = problem.rows, None, None, *vectors, *joined
    counts = rows, (), (), *(columns if name in COLUMN_VECTORS else rows for name in VECTORS), *[columns] * len(joined)
    # both directions may share a weight and a target, which then travel once: these are ``problems``' arrays, so all
    # ranks share them or none does. A caller's arrays may be shared on some ranks only, so each of them travels
    source = list(range(len(sent)))
    for column, row in zip((5, 6), (3, 4), strict=True):
        if sent[column] is sent[row]:
            source[column] = row
    parts = {
        i: (x, count) for i, (x, count) in enumerate(zip(sent, counts, strict=True)) if source[i] == i and x is not None
    }
    with working_for(arrays, arrays, problem.rows), phase(placement):
        wholes = gathered(placement, arrays, *parts.values(), *scalars.parts(problem, arrays))
    gathered_arrays = dict(zip(parts, wholes, strict=False))
    whole = problem.with_arrays([gathered_arrays.get(i) for i in source])
    checked = scalars.checked(problem, arrays, wholes[len(parts) :])
    changes: dict[str, Any] = {"scale": checked.scale, "bias": checked.bias}
    if row_weight is not None:
        m, dtype = whole.rows.shape[0], arrays.dtype(problem.scale)
        weight, target = (arrays.full((m,), value, dtype, whole.rows) for value in (row_weight, 1.0))
        changes |= {"row_weight": weight, "row_target": target, "positives": arrays.arange(0, m, whole.rows)}
        if problem.column_weight is not None:
            changes |= {"column_weight": weight, "column_target": target}
    return replace(whole, placement=None, whole=None, **changes)


def own_value(problem: Problem, value: Array) -> Array:
    """The value of the whole problem; for statistics, those of this rank's rows and columns."""
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
    """The upstream gradient times ``Placement.factor``; for statistics, all ranks' bars, gathered in one message."""
    placement = placed(problem)
    if problem.kind != STATISTICS:
        return upstream * placement.factor
    m, shards = problem.rows.shape[0], placement.shards
    sent = [(upstream[:, :m].T, shards.rows), (upstream[:, m:].T, shards.widths)][: 1 + len(problem.columns[:1])]
    with working_for(arrays, arrays, problem.rows), phase(placement, wanted):
        wholes = gathered(placement, arrays, *sent)
    return arrays.concat(wholes).T


def wanted_of_whole(wanted: Wanted) -> Wanted:
    """The gradients of the whole problem that this rank needs to compute its own wanted ones."""
    return replace(wanted, columns=(any(wanted.columns),) if wanted.columns else ())


def parted(problem: Problem, state: State) -> tuple[Problem, State]:
    """The whole problem, for the gradients, and the state of its loss, from a rank's problem and state.

    The rank's state is ``Problem.for_gradients().arrays()`` of the whole problem, then the state of its loss.
    """
    own = problem.for_gradients()
    whole = replace(own, placement=None, columns=own.columns[:1])
    count = len(whole.arrays())
    return whole.with_arrays(state[:count]), state[count:]


def own_part(problem: Problem, gradients: Gradients, wanted: Wanted, arrays: ArrayLibrary) -> Gradients:
    """This rank's part of the whole problem's gradients, which include ``Placement.factor``."""
    placement = placed(problem)
    start, width = sum(placement.shards.rows[: placement.rank]), placement.shards.widths[placement.rank]
    rows = None if gradients.rows is None else gradients.rows[start : start + placement.shards.rows[placement.rank]]
    columns = tuple(None if x is None else x[placement.start : placement.start + width] for x in gradients.columns)
    if len(wanted.columns) > 1:
        columns = split_by_block(placement, columns[0], wanted.columns)
    scale, bias = (None if x is None else rank_mean(placement, arrays, x, x) for x in (gradients.scale, gradients.bias))
    return Gradients(rows, columns, scale, bias)
