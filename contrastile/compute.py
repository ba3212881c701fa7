"""The loss and the gradients of a plan, in the caller's library, and of a problem, by its schedule.

A softmax loss leaves its statistics, and its gradients walk the blocks again; a sigmoid loss leaves the sums behind its
gradients. Unrequested gradients are None.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from types import ModuleType
from typing import Any

from contrastile.backends.arrays import ArrayLibrary, transfer, working_for
from contrastile.backends.contract import Array, Backend, Options, Whole
from contrastile.backends.objectives import STATISTICS
from contrastile.backends.settings import FEATURES, fits
from contrastile.plan import Plan
from contrastile.schedules import (
    beside,
    blocked,
    gather,
    local,
    own_negatives,
    replicate,
    ring,
    scalars,
    triangle,
    triangle_over_ranks,
)
from contrastile.schedules.problem import Problem, convert
from contrastile.schedules.sums import gradients_over_ranks, phase

Found = Sequence[Any]
"""Arrays of the caller's library; None for those that were not asked for."""

_WHOLE = {"softmax": (2, 3), "sigmoid": (1,)}
"""How many arrays ``contract.Whole`` leaves: no schedule of a loss of this kind leaves so few."""

_ALONE = nullcontext()


def loss(plan: Plan, wanted: local.Wanted | None = None) -> Found:
    """The loss (0-d), or the statistics, and what the gradients need that will be ``wanted``: see ``problem_loss``."""
    backend, library = plan.backend, plan.library
    if replicate.applies(plan.problem):
        whole = replicate.replicated(plan.problem, library)
        told = None if wanted is None else replicate.wanted_of_whole(wanted)
        value, *state = loss(replace(plan, problem=whole), told)
        return replicate.own_value(plan.problem, value), *whole.for_gradients().arrays(), *state
    with _native(plan.problem, library, backend) as inside:
        value, left = problem_loss(inside, local.Work(backend, plan.options), wanted)
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
        one = library.full((), 1.0, library.dtype(problem.scale), problem.scale) if upstream is None else upstream
        factor = replicate.upstream_of_whole(problem, one, wanted, library)
        found = gradients(replace(plan, problem=whole), left, factor, replicate.wanted_of_whole(wanted))
        return replicate.own_part(problem, local.Gradients.of(found), wanted, library).listed()
    with _native(problem, library, backend) as inside:
        # sums of a problem in blocks stay where they are kept, as its features do
        stays = problem.blocking is not None and problem.kind == "sigmoid"
        # detached: the backend may write there, and autograd must not take that for a change of what it saved
        of_torch = library.name == "torch"
        given = [
            x if x is None or (stays and x.ndim) else transfer(x.data if of_torch else x, library, backend.arrays)
            for x in state
        ]
        factor = transfer(upstream, library, backend.arrays)
        work = local.Work(backend, plan.options)
        found = problem_gradients(inside, given, factor, wanted, work).listed()
        if backend.arrays.name == library.name:
            return found
        features, number = library.dtype(problem.rows), library.dtype(problem.scale)
        # the second and the third are those of the scale and the bias
        dtypes = (number if i in (1, 2) else features for i in range(len(found)))
        return tuple(transfer(x, backend.arrays, library, of) for x, of in zip(found, dtypes, strict=True))


@contextmanager
def _native(problem: Problem, source: ArrayLibrary, backend: Backend) -> Iterator[Problem]:
    """The caller's problem in the backend's library, which works where the caller's does until this closes.

    Raises:
        UnsupportedProblemError: the backend does not run where the features are.
    """
    blocking = problem.blocking
    device = source.device(problem.rows) if blocking is None else blocking.device.type
    backend.check_device(device)
    torch = sys.modules["torch"] if source.name == "torch" else None
    # the features have the dtype that they are to be multiplied in: no product is narrowed
    narrowing = torch is not None and torch.is_autocast_enabled(device)
    if source.name == backend.arrays.name != "cupy" and not narrowing:
        yield convert(problem, source, backend.arrays)
        return
    wide = torch.autocast(device, enabled=False) if torch is not None and narrowing else nullcontext()
    like = problem.rows if blocking is None else problem.scale.to(blocking.device)
    with working_for(source, backend.arrays, like), wide:
        yield convert(problem, source, backend.arrays)


def may_be_replayed(plan: Plan) -> bool:
    """Whether a step of torch tensors on GPUs may come from graphs, for its size; the same on every rank."""
    problem, placement = plan.problem, plan.problem.placement
    if problem.blocking is not None or not plan.backend.replayable:
        return False
    (m, d), own = problem.rows.shape, 0 if problem.own_counts is None else problem.columns[-1].shape[0]
    # own columns meet one row each
    columns = sum(x.shape[0] for x in problem.columns) - own
    every = m
    if placement is not None:
        every, columns = sum(placement.shards.rows), sum(placement.shards.widths)
        m = every if replicate.applies(problem) else max(placement.shards.rows)
    # rows against themselves: each pair is computed once
    return own * d <= FEATURES and fits(m, columns if problem.columns else (every + 1) // 2, d)


def is_whole(problem: Problem, state: Found) -> bool:
    """Whether a loss has left what ``contract.Whole`` leaves."""
    return len(state) in _WHOLE.get(problem.kind, ())


def whole_of(problem: Problem, arrays: ArrayLibrary, backend: Backend, options: Options) -> Whole | None:
    """The backend's ``whole`` if it computes a problem, of this library's arrays; else None."""
    if backend.whole is None or problem.whole is None or not problem.traceable:
        return None
    takes = backend.whole.takes(problem, arrays.dtype(problem.rows), arrays.device(problem.rows), options)
    return backend.whole if takes else None


def _module(problem: Problem) -> ModuleType:
    if problem.own_counts is not None:
        return own_negatives
    if problem.placement is None:
        alone = local if problem.columns else triangle
        return alone if problem.blocking is None else blocked
    if not problem.columns:
        return triangle_over_ranks
    return gather if problem.placement.exchange == "gather" else ring


def problem_loss(problem: Problem, work: local.Work, wanted: local.Wanted | None = None) -> tuple[Array, local.State]:
    """The loss of a problem, 0-d, or its statistics, and what its gradients need.

    Args:
        problem: in the backend's library.
        work: computes its blocks.
        wanted: the gradients that will be asked for, None for none: then a sigmoid loss leaves nothing for them, and no
            backend keeps anything.

    Raises:
        UnsupportedProblemError: the backend refuses one of the blocks.
        ExchangeError: a rank did not answer within the deadline.
    """
    (backend, options), placement, module = work, problem.placement, _module(problem)
    with _ALONE if placement is None else phase(placement):
        # a gather compares in the message that brings the columns
        if placement is not None and module is not gather:
            problem = scalars.compared(problem, backend.arrays)
        whole = whole_of(problem, backend.arrays, backend, options)
        if whole is not None:
            both = whole.loss(problem, problem.rows, problem.others, problem.scale, problem.bias)
            if both is not None:
                return both
        with local.quiet():
            if problem.kind != "sigmoid":
                found: local.Forward = module.forward(problem, work, wanted=wanted)
                if problem.smoothing is not None:
                    found = beside.smoothed(problem, found, backend.arrays)
                return found.loss, found.state
            several = problem.row_weight.ndim == 2
            value, sums = module.sigmoid(problem, wanted, local.weighing_positives(work) if several else work)
            return value, () if sums is None else sums.state


def problem_gradients(
    problem: Problem, state: local.State, upstream: Array | None, wanted: local.Wanted, work: local.Work
) -> local.Gradients:
    """Gradients of ``upstream * loss`` of a problem.

    Args:
        problem: as it was given to ``problem_loss``, or that ``for_gradients``.
        state: what ``problem_loss`` left.
        upstream: 0-d, state dtype. None is 1, and lets the state be consumed. Of the statistics: their bars.
        wanted: which gradients to give; of a sigmoid loss at most those that ``problem_loss`` was told.
        work: computed the loss.

    Raises:
        ExchangeError: a rank did not answer within the deadline.
    """
    backend, placement, rows, scale = work.backend, problem.placement, problem.rows, problem.scale
    arrays = backend.arrays
    with _ALONE if placement is None else phase(placement, wanted):
        if problem.kind == STATISTICS:
            problem, upstream = problem.with_bars(upstream), None
        if is_whole(problem, state):
            assert backend.whole is not None
            whole = backend.whole.gradients(problem, rows, problem.others, scale, state, upstream, wanted)
            if whole is not None:
                # of rows against themselves there are none of columns
                return local.Gradients.of(whole[: 3 + len(problem.columns)])
            state = problem_loss(replace(problem, whole=None), work, wanted)[1]
        with local.quiet():
            if problem.kind == "sigmoid" and placement is None and problem.blocking is None:
                return local.gradients_from_sums(problem, local.Sums.of(state), upstream, wanted, arrays)
            one = arrays.full((), 1.0, arrays.dtype(scale), scale) if upstream is None else upstream
            if problem.kind != "sigmoid":
                saved = local.Forward.of(state)
                found: local.Gradients = _module(problem).backward(problem, saved, one, wanted, work)
                if problem.margin is None and problem.smoothing is None:
                    return found
                return beside.gradients(problem, saved, one, wanted, found, arrays)
            sums = local.Sums.of(state)
            if placement is not None:
                return gradients_over_ranks(problem, sums, one * placement.factor, wanted, arrays)
            return blocked.sigmoid_gradients(problem, sums, one, wanted, arrays)
