"""The schedule of a problem: a module that has these functions too.

Where the front door has not replicated a problem that may be, its parts are gathered.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import ModuleType

from contrastile.backends.arrays import ArrayLibrary
from contrastile.backends.contract import Array, Backend, Options
from contrastile.schedules import blocked, gather, local, ring, scalars, triangle, triangle_over_ranks
from contrastile.schedules.placement import Placement
from contrastile.schedules.problem import Blocking, Problem
from contrastile.schedules.sums import gradients_over_ranks


def _module(problem: Problem) -> ModuleType:
    if problem.placement is None:
        alone = local if problem.columns else triangle
        return alone if problem.blocking is None else blocked
    if not problem.columns:
        return triangle_over_ranks
    return {"ring": ring, "gather": gather, "replicate": gather}[problem.placement.exchange]


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


def _compared(problem: Problem, arrays: ArrayLibrary) -> Problem:
    """The problem with the scale and the bias that all ranks hold, or with NaN: see ``scalars``."""
    placement = problem.placement
    if placement is None or not placement.unread:
        return problem
    numbers = {name: x for name in scalars.NAMES if (x := getattr(problem, name)) is not None}
    return replace(problem, **scalars.compared(placement, arrays, numbers))


def forward(
    problem: Problem, backend: Backend, options: Options, *, wanted: local.Wanted | None = None
) -> local.Forward:
    """The softmax loss and its log-sum-exps: see ``local.forward``. A ring's blocks are too many to keep anything."""
    if problem.placement is None:
        alone: local.Forward = _module(problem).forward(problem, backend, options, wanted=wanted)
        return alone
    module = _module(problem)
    with phase(problem.placement):
        problem = _compared(problem, backend.arrays)
        if module is ring:
            return ring.forward(problem, backend, options)
        found: local.Forward = module.forward(problem, backend, options, wanted=wanted)
        return found


def backward(
    problem: Problem, saved: local.Forward, upstream: Array, wanted: local.Wanted, backend: Backend, options: Options
) -> local.Gradients:
    """Gradients of ``upstream * loss`` for the softmax loss: see ``local.backward``."""
    if problem.placement is None:
        alone: local.Gradients = _module(problem).backward(problem, saved, upstream, wanted, backend, options)
        return alone
    with phase(problem.placement, wanted):
        found: local.Gradients = _module(problem).backward(problem, saved, upstream, wanted, backend, options)
        return found


def sigmoid(
    problem: Problem, wanted: local.Wanted | None, backend: Backend, options: Options
) -> tuple[Array, local.Sums | None]:
    """The sigmoid loss and the sums behind its gradients: see ``local.sigmoid``."""
    if problem.placement is None:
        alone: tuple[Array, local.Sums | None] = _module(problem).sigmoid(problem, wanted, backend, options)
        return alone
    with phase(problem.placement):
        problem = _compared(problem, backend.arrays)
        found: tuple[Array, local.Sums | None] = _module(problem).sigmoid(problem, wanted, backend, options)
        return found


def sigmoid_gradients(
    rows: Array,
    scale: Array,
    placement: Placement | None,
    sums: local.Sums,
    upstream: Array | None,
    wanted: local.Wanted,
    arrays: ArrayLibrary,
    blocking: Blocking | None = None,
) -> local.Gradients:
    """The sigmoid loss's gradients from its sums, which carry neither ``upstream`` nor ``Placement.factor``.

    With ``upstream`` None it is 1, and the sums are consumed where no factor is left to apply.
    """
    if placement is None and blocking is None:
        return local.gradients_from_sums(rows, scale, sums, upstream, wanted, arrays)
    one = arrays.full((), 1.0, arrays.dtype(scale), scale) if upstream is None else upstream
    if blocking is not None:
        return blocked.sigmoid_gradients(rows, scale, blocking, sums, one, wanted, arrays)
    assert placement is not None
    factor = one * placement.factor
    with phase(placement, wanted):
        return gradients_over_ranks(rows, scale, placement, sums, factor, wanted, arrays)
