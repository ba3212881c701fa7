"""What is computed for torch tensors, forward and backward, from a plan: no autograd and no operator here.

Unrequested gradients are None.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from contrastile.backends.arrays import transfer, working_for
from contrastile.backends.replay import fits
from contrastile.plan import Plan
from contrastile.schedules import local, schedule
from contrastile.schedules.native import native

Found = Sequence[Tensor | None]

LSES = 4
"""What the softmax loss of a process alone leaves for its gradients, beside what is kept: log-sum-exps."""

STATE = LSES + 3
"""And of several ranks: the fields of ``local.Forward`` between ``loss`` and ``kept``."""


def softmax_loss(plan: Plan, *, wanted: local.Wanted | None = None) -> Found:
    """The softmax loss (0-d), and what its gradients need: the other fields of ``local.Forward``, in their order.

    Args:
        plan: over tensors.
        wanted: see ``local.forward``.
    """
    problem, backend, library = plan.problem, plan.backend, plan.library
    with native(problem, library, backend) as inside:
        saved = schedule.forward(inside, backend, plan.options, wanted=wanted)
        lses = saved.row_negative_lse, saved.row_positive_lse, saved.column_negative_lse, saved.column_positive_lse
        others = saved.global_lses, saved.global_weights, *saved.kept
        found = saved.loss, *lses, saved.gathered, *others
        if library.name == backend.arrays.name:
            return found
        dtypes = library.dtype(problem.scale), *[None] * LSES, library.dtype(problem.rows), *[None] * len(others)
        return [transfer(x, backend.arrays, library, dtype) for x, dtype in zip(found, dtypes, strict=True)]


def softmax_gradients(plan: Plan, state: Found, upstream: Tensor, wanted: local.Wanted) -> Found:
    """Gradients of ``upstream * loss`` for the rows, the scale and each column block.

    Args:
        plan: over tensors.
        state: what ``softmax_loss`` gave beside the loss; of a process alone the first ``LSES`` will do.
        upstream: 0-d.
        wanted: which gradients to give.
    """
    problem, backend, library = plan.problem, plan.backend, plan.library
    with native(problem, library, backend) as inside:
        # .data: the backend may write there, and autograd must not take that for a change of what it saved
        given = [upstream, *state[:STATE], *(None if x is None else x.data for x in state[STATE:])]
        factor, *moved = (transfer(x, library, backend.arrays) for x in given)
        forward = local.Forward(factor, *moved[:STATE], kept=tuple(moved[STATE:]))
        found = schedule.backward(inside, forward, factor, wanted, backend, plan.options)
        return _outside(plan, (found.rows, found.scale), found.columns, problem.rows, problem.scale)


def sigmoid_loss(plan: Plan, wanted: local.Wanted | None) -> Found:
    """The sigmoid loss (0-d) and the ``local.Sums`` behind its gradients, in one pass: total, rows, column blocks."""
    problem, backend, library = plan.problem, plan.backend, plan.library
    with native(problem, library, backend) as inside:
        value, sums = schedule.sigmoid(inside, wanted, backend, plan.options)
        found = local.Sums(None, (None,) * len(problem.columns), None) if sums is None else sums
        dtype = library.dtype(problem.scale)
        return [transfer(x, backend.arrays, library, dtype) for x in (value, found.total, found.rows, *found.columns)]


def sigmoid_gradients(
    plan: Plan, rows: Tensor, scale: Tensor, sums: Found, upstream: Tensor, wanted: local.Wanted
) -> Found:
    """Gradients of ``upstream * loss`` for the rows, the scale, the bias and each column block.

    Args:
        plan: of which no array is read.
        rows: (m, d) features.
        scale: 0-d.
        sums: what ``sigmoid_loss`` gave beside the loss.
        upstream: 0-d.
        wanted: which gradients to give.
    """
    backend, library, blocking = plan.backend, plan.library, plan.problem.blocking
    whole, *matrices = sums
    # the backend's arrays have passes over a whole matrix fused
    with working_for(library, backend.arrays, rows if blocking is None else upstream):
        number = scale if blocking is None else scale.to(blocking.device)
        factor, by, total = (transfer(x, library, backend.arrays) for x in (upstream, number, whole))
        # of a problem in blocks they stay where they are kept
        given = [x if blocking is not None else transfer(x, library, backend.arrays) for x in (rows, *matrices)]
        features, row_sum, *column_sums = given
        parts = local.Sums(row_sum, tuple(column_sums), total)
        found = schedule.sigmoid_gradients(
            features, by, plan.problem.placement, parts, factor, wanted, backend.arrays, blocking
        )
        return _outside(plan, (found.rows, found.scale, found.bias), found.columns, rows, scale)


def _outside(plan: Plan, first: Found, columns: Found, rows: Tensor, scale: Tensor) -> Found:
    """Gradients in the caller's library: the rows' and the numbers', then the columns', in the dtypes of theirs."""
    found, source, target = [*first, *columns], plan.backend.arrays, plan.library
    if source.name == target.name:
        return found
    features, number = target.dtype(rows), target.dtype(scale)
    dtypes = [features, *[number] * (len(first) - 1), *[features] * len(columns)]
    return [transfer(x, source, target, dtype) for x, dtype in zip(found, dtypes, strict=True)]


def may_be_replayed(plan: Plan) -> bool:
    """Whether a whole step may come from graphs: small, of a process alone, and nothing is kept of its forward.

    What is kept would be held in the graphs' memory.
    """
    problem, backend = plan.problem, plan.backend
    rows, count = problem.rows, sum([x.shape[0] for x in problem.columns or (problem.rows,)])
    if not problem.traceable or not backend.replayable:
        return False
    if local.keeps(rows, count, plan.library, backend, plan.options):
        return False
    # rows against themselves: each pair is computed once
    return fits(rows, count if problem.columns else (count + 1) // 2)
