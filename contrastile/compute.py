"""Computing a plan: the loss, and its gradients, in the caller's library; for autograd and for ``value_and_grad``.

Unrequested gradients are None.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import Any

from contrastile.backends.arrays import transfer
from contrastile.plan import Plan
from contrastile.schedules import local, replicate, schedule
from contrastile.schedules.native import native, returned

Found = Sequence[Any]
"""Arrays of the caller's library; None for those that were not asked for."""


def loss(plan: Plan, wanted: local.Wanted | None = None) -> Found:
    """The loss (0-d), or the statistics, and what its gradients need: see ``schedule.loss``.

    Args:
        plan: what to compute, and how.
        wanted: the gradients that will be asked for; None for none.
    """
    backend, library = plan.backend, plan.library
    if replicate.applies(plan.problem):
        whole = replicate.gathered(plan.problem, library)
        alone, told = replace(plan, problem=whole), None if wanted is None else replicate.wanted_of_whole(wanted)
        value, *state = _from_graphs(
            alone, ("loss", told), whole.arrays(), lambda given: loss(_launched(alone).with_arrays(given), told)
        )
        return replicate.own_value(plan.problem, value), *whole.for_gradients().arrays(), *state
    with native(plan.problem, library, backend) as inside:
        value, left = schedule.loss(inside, backend, plan.options, wanted)
        return tuple(transfer(x, backend.arrays, library) for x in (value, *left))


def gradients(plan: Plan, state: Found, upstream: Any, wanted: local.Wanted) -> Found:
    """Gradients of ``upstream * loss`` for the rows, the scale, the bias and each column block.

    Args:
        plan: of which the arrays of ``Problem.for_gradients`` are read.
        state: what ``loss`` gave beside the value.
        upstream: of the loss's shape. None is 1, and lets the state be consumed.
        wanted: which gradients to give.
    """
    problem, backend, library = plan.problem, plan.backend, plan.library
    if problem.placement is not None and replicate.applies(problem):
        whole, left = replicate.parted(problem, state)
        alone, of_whole, arrays = replace(plan, problem=whole), replicate.wanted_of_whole(wanted), whole.arrays()
        one = library.full((), 1.0, library.dtype(problem.scale), problem.scale) if upstream is None else upstream

        def compute(given: Found) -> Found:
            *others, factor = given
            mine = _launched(alone).with_arrays(others[: len(arrays)])
            return gradients(mine, others[len(arrays) :], factor, of_whole)

        factor = replicate.upstream_of_whole(problem, one, wanted, library)
        rows, scale, bias, *columns = _from_graphs(alone, ("gradients", of_whole), (*arrays, *left, factor), compute)
        own = replicate.own_part(problem, local.Gradients(rows, tuple(columns), scale, bias), wanted, library)
        return own.rows, own.scale, own.bias, *own.columns
    with native(problem, library, backend) as inside:
        # sums of a problem in blocks stay where they are kept, as its features do
        stays = problem.blocking is not None and problem.kind == "sigmoid"
        # detached: the backend may write there, and autograd must not take that for a change of what it saved
        of_torch = library.name == "torch"
        given = [
            x if x is None or (stays and x.ndim) else transfer(x.data if of_torch else x, library, backend.arrays)
            for x in state
        ]
        factor = transfer(upstream, library, backend.arrays)
        found = returned(
            schedule.gradients(inside, given, factor, wanted, backend, plan.options), problem, backend.arrays, library
        )
        return found.rows, found.scale, found.bias, *found.columns


def _launched(plan: Plan) -> Plan:
    """The plan without replay of its primitives."""
    return replace(plan, replay=False)


def _from_graphs(plan: Plan, what: Hashable, arrays: Found, compute: Callable[[Found], Found]) -> Found:
    """``compute(arrays)``, from a CUDA graph where the plan, of a whole problem, may be replayed."""
    if not plan.replay:
        return compute(arrays)
    from contrastile.backends.replay import GRAPHS, can_capture

    problem = plan.problem
    if not can_capture(problem.rows) or not may_be_replayed(_launched(plan)):
        return compute(arrays)
    form = problem.kind, problem.match, problem.margin, problem.smoothing
    return GRAPHS.call((what, *form, plan.name, plan.options), arrays, compute)


def may_be_replayed(plan: Plan) -> bool:
    """Whether a whole step of torch's may come from graphs: small, of a process alone, and nothing of it is kept.

    What is kept of the forward pass would be held in the graphs' memory.
    """
    from contrastile.backends.replay import fits

    problem, backend = plan.problem, plan.backend
    rows, count = problem.rows, sum([x.shape[0] for x in problem.columns or (problem.rows,)])
    if not problem.traceable or not backend.replayable:
        return False
    if local.keeps(rows, count, plan.library, backend, plan.options):
        return False
    # rows against themselves: each pair is computed once
    return fits(rows, count if problem.columns else (count + 1) // 2)
