"""What is computed for torch tensors, forward and backward, from a plan: no autograd and no operator here.

Unrequested gradients are None.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor

from contrastile.backends.arrays import transfer
from contrastile.backends.replay import GRAPHS, fits, may_be_captured
from contrastile.plan import Plan
from contrastile.schedules import local, replicate, schedule
from contrastile.schedules.native import native, returned

Found = Sequence[Tensor | None]


def loss(plan: Plan, wanted: local.Wanted | None = None) -> Found:
    """The loss (0-d), or the statistics, and what its gradients need: see ``schedule.loss``.

    Args:
        plan: over tensors.
        wanted: the gradients that will be asked for; None for none.
    """
    if not replicate.applies(plan.problem):
        return _loss(plan, wanted)
    whole = replicate.gathered(plan.problem, plan.library)
    alone, told = replace(plan, problem=whole), None if wanted is None else replicate.wanted_of_whole(wanted)
    value, *state = _from_graphs(
        alone, ("loss", told), whole.arrays(), lambda given: _loss(_launched(alone).with_arrays(given), told)
    )
    return replicate.own_value(plan.problem, value), *whole.for_gradients().arrays(), *state


def gradients(plan: Plan, state: Found, upstream: Tensor, wanted: local.Wanted) -> Found:
    """Gradients of ``upstream * loss`` for the rows, the scale, the bias and each column block.

    Args:
        plan: over tensors, of which those of ``Problem.for_gradients`` are read.
        state: what ``loss`` gave beside the value.
        upstream: of the loss's shape.
        wanted: which gradients to give.
    """
    problem = plan.problem
    if problem.placement is None or not replicate.applies(problem):
        return _gradients(plan, state, upstream, wanted)
    whole, left = replicate.parted(problem, state)
    alone, of_whole, arrays = replace(plan, problem=whole), replicate.wanted_of_whole(wanted), whole.arrays()

    def compute(given: Found) -> Found:
        *others, factor = given
        mine = _launched(alone).with_arrays(others[: len(arrays)])
        return _gradients(mine, others[len(arrays) :], cast("Tensor", factor), of_whole)

    factor = replicate.upstream_of_whole(problem, upstream, wanted, plan.library)
    rows, scale, bias, *columns = _from_graphs(alone, ("gradients", of_whole), (*arrays, *left, factor), compute)
    found = local.Gradients(rows, tuple(columns), scale, bias)
    return _flat(replicate.own_part(problem, found, wanted, plan.library))


def _loss(plan: Plan, wanted: local.Wanted | None) -> Found:
    backend, library = plan.backend, plan.library
    with native(plan.problem, library, backend) as inside:
        value, state = schedule.loss(inside, backend, plan.options, wanted)
        return tuple(transfer(x, backend.arrays, library) for x in (value, *state))


def _gradients(plan: Plan, state: Found, upstream: Tensor, wanted: local.Wanted) -> Found:
    problem, backend, library = plan.problem, plan.backend, plan.library
    with native(problem, library, backend) as inside:
        # sums of a problem in blocks stay where they are kept, as its features do
        stays = problem.blocking is not None and problem.kind == "sigmoid"
        # .data: the backend may write there, and autograd must not take that for a change of what it saved
        given = [x if x is None or (stays and x.ndim) else transfer(x.data, library, backend.arrays) for x in state]
        factor = transfer(upstream, library, backend.arrays)
        found = schedule.gradients(inside, given, factor, wanted, backend, plan.options)
        return _flat(returned(found, problem, backend.arrays, library))


def _flat(found: local.Gradients) -> Found:
    return found.rows, found.scale, found.bias, *found.columns


def _launched(plan: Plan) -> Plan:
    """The plan without replay of its primitives."""
    return replace(plan, replay=False)


def _from_graphs(plan: Plan, what: Hashable, arrays: Found, compute: Callable[[Found], Found]) -> Found:
    """``compute(arrays)``, from a CUDA graph where the plan, of a whole problem, may be replayed."""
    problem, device = plan.problem, plan.problem.rows.get_device()
    if not plan.replay or device < 0 or not may_be_captured() or device != torch.cuda.current_device():
        return compute(arrays)
    if not may_be_replayed(_launched(plan)):
        return compute(arrays)
    form = problem.kind, problem.match, problem.margin, problem.smoothing
    return GRAPHS.call((what, *form, plan.name, plan.options), arrays, compute)


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
