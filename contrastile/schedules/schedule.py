"""A loss and its gradients by the schedule of a problem.

A softmax loss leaves its statistics, and its gradients walk the blocks again; a sigmoid loss leaves the sums behind its
gradients. A problem that is to be replicated comes here as the whole: see ``replicate``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

from contrastile.backends.arrays import ArrayLibrary
from contrastile.backends.contract import Array, Backend, Diagonal, Options
from contrastile.backends.objectives import STATISTICS
from contrastile.schedules import beside, blocked, gather, local, ring, scalars, triangle, triangle_over_ranks
from contrastile.schedules.placement import Placement
from contrastile.schedules.problem import Problem
from contrastile.schedules.sums import gradients_over_ranks

DIAGONAL = 3
"""How many arrays ``contract.Diagonal`` leaves: no schedule of a softmax loss leaves so few."""


def diagonal_of(problem: Problem, arrays: ArrayLibrary, backend: Backend, options: Options) -> Diagonal | None:
    """The backend's ``diagonal`` if it computes a problem, of this library's arrays; else None."""
    if backend.diagonal is None or not problem.diagonal:
        return None
    rows = problem.rows
    takes = backend.diagonal.takes(rows.shape[0], arrays.dtype(rows), arrays.device(rows), options)
    return backend.diagonal if takes else None


def _module(problem: Problem) -> ModuleType:
    if problem.placement is None:
        alone = local if problem.columns else triangle
        return alone if problem.blocking is None else blocked
    if not problem.columns:
        return triangle_over_ranks
    return {"ring": ring, "gather": gather}[problem.placement.exchange]


@contextmanager
def phase(placement: Placement, wanted: local.Wanted | None = None) -> Iterator[None]:
    """While open, a phase of the call: with ``wanted`` its backward, else its forward, which the handshake has begun.

    Raises:
        ExchangeError: see ``Placement.enter``.
    """
    if wanted is not None and placement.size > 1:
        flags = (wanted.scale, wanted.bias, wanted.rows, *wanted.columns)
        placement.enter("backward", sum(1 << i for i, flag in enumerate(flags) if flag))
    try:
        yield
    finally:
        placement.communicator.calls.leave()


def loss(
    problem: Problem, backend: Backend, options: Options, wanted: local.Wanted | None = None
) -> tuple[Array, local.State]:
    """The loss, 0-d, or the statistics, and what its gradients need.

    Args:
        problem: in the backend's library.
        backend: computes its blocks.
        options: how.
        wanted: the gradients that will be asked for, None for none: then a sigmoid loss leaves nothing for them, and no
            backend keeps anything.

    Raises:
        UnsupportedProblemError: the backend refuses one of the blocks.
        ExchangeError: a rank did not answer within the deadline.
    """
    placement = problem.placement
    if placement is None:
        return _loss(problem, backend, options, wanted)
    with phase(placement):
        return _loss(scalars.compared(problem, backend.arrays), backend, options, wanted)


def _loss(
    problem: Problem, backend: Backend, options: Options, wanted: local.Wanted | None
) -> tuple[Array, local.State]:
    module = _module(problem)
    if problem.kind == "softmax":
        diagonal = diagonal_of(problem, backend.arrays, backend, options)
        if diagonal is not None and problem.equal is not None:
            given = problem.rows, problem.columns[0], problem.scale, problem.equal.number
            both = diagonal.loss(*given, problem.column_weight is not None)
            if both is not None:
                return both
    if problem.kind != "sigmoid":
        found: local.Forward = module.forward(problem, backend, options, wanted=wanted)
        value = found.loss if problem.smoothing is None else beside.value(problem, found.loss, backend.arrays)
        return value, found.state
    value, sums = module.sigmoid(problem, wanted, backend, options)
    return value, () if sums is None else sums.state


def gradients(
    problem: Problem,
    state: local.State,
    upstream: Array | None,
    wanted: local.Wanted,
    backend: Backend,
    options: Options,
) -> local.Gradients:
    """Gradients of ``upstream * loss``.

    Args:
        problem: as it was given to ``loss``, or that ``for_gradients``.
        state: what ``loss`` left.
        upstream: 0-d, state dtype. None is 1, and lets the state be consumed. Of the statistics: their bars.
        wanted: which gradients to give; of a sigmoid loss at most those that ``loss`` was told.
        backend: computed the loss.
        options: how.

    Raises:
        ExchangeError: a rank did not answer within the deadline.
    """
    if problem.placement is None:
        return _gradients(problem, state, upstream, wanted, backend, options)
    with phase(problem.placement, wanted):
        return _gradients(problem, state, upstream, wanted, backend, options)


def _gradients(
    problem: Problem,
    state: local.State,
    upstream: Array | None,
    wanted: local.Wanted,
    backend: Backend,
    options: Options,
) -> local.Gradients:
    placement, arrays, rows, scale = problem.placement, backend.arrays, problem.rows, problem.scale
    if problem.kind == STATISTICS:
        problem, upstream = problem.with_bars(upstream), None
    if problem.kind == "sigmoid" and placement is None and problem.blocking is None:
        return local.gradients_from_sums(rows, scale, local.Sums.of(state), upstream, wanted, arrays)
    if problem.kind == "softmax" and len(state) == DIAGONAL:
        assert backend.diagonal is not None
        assert problem.equal is not None
        wants, given = (wanted.rows, wanted.columns[0], wanted.scale), (rows, problem.columns[0], scale)
        three = backend.diagonal.gradients(*given, problem.equal.number, state, upstream, wants)
        if three is not None:
            return local.Gradients(three[0], (three[1],), three[2], None)
        state = local.forward(problem, backend, options).state
    one = arrays.full((), 1.0, arrays.dtype(scale), scale) if upstream is None else upstream
    if problem.kind != "sigmoid":
        saved = local.Forward.of(state)
        found: local.Gradients = _module(problem).backward(problem, saved, one, wanted, backend, options)
        if problem.margin is None and problem.smoothing is None:
            return found
        return beside.gradients(problem, saved, one, wanted, found, arrays)
    sums = local.Sums.of(state)
    if placement is not None:
        return gradients_over_ranks(rows, scale, placement, sums, one * placement.factor, wanted, arrays)
    assert problem.blocking is not None
    return blocked.sigmoid_gradients(rows, scale, problem.blocking, sums, one, wanted, arrays)
