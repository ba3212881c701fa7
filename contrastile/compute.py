"""The loss and the gradients of a plan, in the caller's library, and of a problem, by its schedule.

The state of a softmax loss is its statistics, from which the gradients recompute each block. The state of a sigmoid
loss, and of a teacher's part, is the sums from which its gradients follow. Unrequested gradients are None.
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
from contrastile.backends.objectives import STATISTICS, TEACHER
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
    teacher,
    triangle,
    triangle_over_ranks,
)
from contrastile.schedules.problem import Problem, convert
from contrastile.schedules.sums import gradients_over_ranks, phase

Arrays = Sequence[Any]
"""Arrays of the caller's library; None for arrays that were not requested."""

_WHOLE = {"softmax": (2, 3), "sigmoid": (1,)}
"""The numbers of arrays in the state of ``contract.Whole``, by kind of loss; a schedule's state has more."""

_ALONE = nullcontext()


def loss(plan: Plan, wanted: local.Wanted | None = None) -> Arrays:
    """The loss (0-d) or the statistics, and the state for the ``wanted`` gradients: see ``problem_loss``."""
    backend, library = plan.backend, plan.library
    if replicate.applies(plan.problem):
        whole = replicate.replicated(plan.problem, library)
        whole_wanted = None if wanted is None else replicate.wanted_of_whole(wanted)
        value, *state = loss(replace(plan, problem=whole), whole_wanted)
        return replicate.own_value(plan.problem, value), *whole.for_gradients().arrays(), *state
    with _native(plan.problem, library, backend) as native:
        value, native_state = problem_loss(native, local.Work(backend, plan.options), wanted)
        return tuple(transfer(x, backend.arrays, library) for x in (value, *native_state))


def gradients(plan: Plan, state: Arrays, upstream: Any, wanted: local.Wanted) -> Arrays:
    """Gradients of ``upstream * loss`` for the rows, the scale, the bias and each column block.

    Args:
        plan: the plan of the loss; only the arrays of ``Problem.for_gradients`` are read.
        state: the state that ``loss`` returned after the value.
        upstream: an array of the loss's shape. None means 1, and allows to overwrite the state.
        wanted: which gradients to compute.
    """
    problem, backend, library = plan.problem, plan.backend, plan.library
    if problem.placement is not None and replicate.applies(problem):
        whole, whole_state = replicate.parted(problem, state)
        seed = library.full((), 1.0, library.dtype(problem.scale), problem.scale) if upstream is None else upstream
        factor = replicate.upstream_of_whole(problem, seed, wanted, library)
        results = gradients(replace(plan, problem=whole), whole_state, factor, replicate.wanted_of_whole(wanted))
        return replicate.own_part(problem, local.Gradients.of(results), wanted, library).listed()
    with _native(problem, library, backend) as native:
        # the sums of a problem in blocks stay where the features are
        keeps_sums = problem.blocking is not None and problem.keeps_sums
        # ``data``: if the backend writes to the state, autograd must not report a change of saved tensors
        is_torch = library.name == "torch"
        native_state = [
            x if x is None or (keeps_sums and x.ndim) else transfer(x.data if is_torch else x, library, backend.arrays)
            for x in state
        ]
        factor = transfer(upstream, library, backend.arrays)
        work = local.Work(backend, plan.options)
        results = problem_gradients(native, native_state, factor, wanted, work).listed()
        if backend.arrays.name == library.name:
            return results
        feature_dtype, scale_dtype = library.dtype(problem.rows), library.dtype(problem.scale)
        # the second and the third gradient are those of the scale and the bias
        dtypes = (scale_dtype if i in (1, 2) else feature_dtype for i in range(len(results)))
        return tuple(transfer(x, backend.arrays, library, dtype) for x, dtype in zip(results, dtypes, strict=True))


@contextmanager
def _native(problem: Problem, source: ArrayLibrary, backend: Backend) -> Iterator[Problem]:
    """The caller's problem in the backend's library, which until exit uses the caller's device and stream.

    Raises:
        UnsupportedProblemError: the backend does not run on the features' device.
    """
    blocking = problem.blocking
    device = source.device(problem.rows) if blocking is None else blocking.device.type
    backend.check_device(device)
    torch = sys.modules["torch"] if source.name == "torch" else None
    # the features already have their final dtype: autocast must not narrow the products
    is_autocast = torch is not None and torch.is_autocast_enabled(device)
    if source.name == backend.arrays.name != "cupy" and not is_autocast:
        yield convert(problem, source, backend.arrays)
        return
    without_autocast = torch.autocast(device, enabled=False) if torch is not None and is_autocast else nullcontext()
    like = problem.rows if blocking is None else problem.scale.to(blocking.device)
    with working_for(source, backend.arrays, like), without_autocast:
        yield convert(problem, source, backend.arrays)


def may_be_replayed(plan: Plan) -> bool:
    """Whether a step of torch tensors on GPUs is small enough to replay from CUDA graphs; equal on all ranks."""
    problem, placement = plan.problem, plan.problem.placement
    if problem.blocking is not None or not plan.backend.replayable:
        return False
    (m, d), own_columns = problem.rows.shape, 0 if problem.own_counts is None else problem.columns[-1].shape[0]
    # own columns are compared with one row each
    columns = sum(x.shape[0] for x in problem.columns) - own_columns
    all_rows = m
    if placement is not None:
        all_rows, columns = sum(placement.shards.rows), sum(placement.shards.widths)
        m = all_rows if replicate.applies(problem) else max(placement.shards.rows)
    # without columns, rows are compared with themselves, and each pair is computed once
    return own_columns * d <= FEATURES and fits(m, columns if problem.columns else (all_rows + 1) // 2, d)


def is_whole(problem: Problem, state: Arrays) -> bool:
    """Whether ``contract.Whole`` has computed the loss of this state."""
    return len(state) in _WHOLE.get(problem.kind, ())


def whole_of(problem: Problem, arrays: ArrayLibrary, backend: Backend, options: Options) -> Whole | None:
    """The backend's ``whole`` if it computes this problem, whose arrays are of the library ``arrays``; else None."""
    if backend.whole is None or problem.whole is None or not problem.traceable:
        return None
    is_taken = backend.whole.takes(problem, arrays.dtype(problem.rows), arrays.device(problem.rows), options)
    return backend.whole if is_taken else None


def _schedule(problem: Problem) -> ModuleType:
    if problem.own_counts is not None:
        return own_negatives
    if problem.placement is None:
        schedule = local if problem.columns else triangle
        return schedule if problem.blocking is None else blocked
    if not problem.columns:
        return triangle_over_ranks
    return gather if problem.placement.exchange == "gather" else ring


def problem_loss(problem: Problem, work: local.Work, wanted: local.Wanted | None = None) -> tuple[Array, local.State]:
    """The loss of a problem, 0-d, or its statistics, and the state for its gradients.

    Args:
        problem: the problem, in the backend's library.
        work: the backend and its options.
        wanted: the gradients that will be requested, None for no gradients: then a state of sums is empty, and no
            backend keeps exponentials.

    Raises:
        UnsupportedProblemError: the backend refuses one of the blocks.
        ExchangeError: a rank did not answer within the deadline.
    """
    (backend, options), placement, schedule = work, problem.placement, _schedule(problem)
    with _ALONE if placement is None else phase(placement):
        # "gather" compares the ranks' scalars in the message of its columns
        if placement is not None and schedule is not gather:
            problem = scalars.compared(problem, backend.arrays)
        whole = whole_of(problem, backend.arrays, backend, options)
        if whole is not None:
            result = whole.loss(problem, problem.rows, problem.others, problem.scale, problem.bias)
            if result is not None:
                return result
        with local.quiet():
            if problem.kind == TEACHER:
                value, sums = teacher.loss(problem, wanted, work, schedule)
                return value, () if sums is None else sums.state
            if problem.kind != "sigmoid":
                forward: local.Forward = schedule.forward(problem, work, wanted=wanted)
                if problem.smoothing is not None:
                    forward = beside.smoothed(problem, forward, backend.arrays)
                return forward.loss, forward.state
            is_weighted = problem.row_weight.ndim == 2
            value, sums = schedule.sigmoid(problem, wanted, local.weighing_positives(work) if is_weighted else work)
            return value, () if sums is None else sums.state


def problem_gradients(
    problem: Problem, state: local.State, upstream: Array | None, wanted: local.Wanted, work: local.Work
) -> local.Gradients:
    """Gradients of ``upstream * loss`` of a problem.

    Args:
        problem: the argument of ``problem_loss``, or its ``for_gradients()``.
        state: the state that ``problem_loss`` returned.
        upstream: 0-d, state dtype. None means 1, and allows to overwrite the state. For statistics: their bars.
        wanted: which gradients to compute; for a sigmoid loss at most those that ``problem_loss`` was asked for.
        work: the backend and options that computed the loss.

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
                # rows against themselves have no gradients of columns
                return local.Gradients.of(whole[: 3 + len(problem.columns)])
            state = problem_loss(replace(problem, whole=None), work, wanted)[1]
        with local.quiet():
            if problem.keeps_sums and placement is None and problem.blocking is None:
                return local.gradients_from_sums(problem, local.Sums.of(state), upstream, wanted, arrays)
            seed = arrays.full((), 1.0, arrays.dtype(scale), scale) if upstream is None else upstream
            if not problem.keeps_sums:
                forward = local.Forward.of(state)
                results: local.Gradients = _schedule(problem).backward(problem, forward, seed, wanted, work)
                if problem.margin is None and problem.smoothing is None:
                    return results
                return beside.gradients(problem, forward, seed, wanted, results, arrays)
            sums = local.Sums.of(state)
            if placement is not None:
                return gradients_over_ranks(problem, sums, seed * placement.factor, wanted, arrays)
            return blocked.sigmoid_gradients(problem, sums, seed, wanted, arrays)
