"""What is computed for torch tensors, forward and backward, from a plan: no autograd and no operator here.

Unrequested gradients are None.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from contrastile.backends.arrays import transfer
from contrastile.backends.replay import fits
from contrastile.plan import Plan
from contrastile.schedules import local, schedule
from contrastile.schedules.native import native, returned

Found = Sequence[Tensor | None]


def loss(plan: Plan, wanted: local.Wanted | None = None) -> Found:
    """The loss (0-d), and what its gradients need: see ``schedule.loss``.

    Args:
        plan: over tensors.
        wanted: the gradients that will be asked for; None for none.
    """
    backend, library = plan.backend, plan.library
    with native(plan.problem, library, backend) as inside:
        value, state = schedule.loss(inside, backend, plan.options, wanted)
        value = transfer(value, backend.arrays, library, library.dtype(plan.problem.scale))
        return value, *(transfer(x, backend.arrays, library) for x in state)


def gradients(plan: Plan, state: Found, upstream: Tensor, wanted: local.Wanted) -> Found:
    """Gradients of ``upstream * loss`` for the rows, the scale, the bias and each column block.

    Args:
        plan: over tensors, of which those of ``Problem.for_gradients`` are read.
        state: what ``loss`` gave beside the value.
        upstream: 0-d.
        wanted: which gradients to give.
    """
    problem, backend, library = plan.problem, plan.backend, plan.library
    with native(problem, library, backend) as inside:
        # sums of a problem in blocks stay where they are kept, as its features do
        stays = problem.blocking is not None and problem.kind == "sigmoid"
        # .data: the backend may write there, and autograd must not take that for a change of what it saved
        given = [x if x is None or (stays and x.ndim) else transfer(x.data, library, backend.arrays) for x in state]
        factor = transfer(upstream, library, backend.arrays)
        found = schedule.gradients(inside, given, factor, wanted, backend, plan.options)
        found = returned(found, problem, backend.arrays, library)
        return found.rows, found.scale, found.bias, *found.columns


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
