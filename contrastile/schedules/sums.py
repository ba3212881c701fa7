"""Sums over the ranks, the scale of the gradients, and the phases of a call: what the schedules of ranks share."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from contrastile.backends.arrays import ArrayLibrary
from contrastile.backends.contract import Array, SideStatistics
from contrastile.backends.objectives import STATISTICS
from contrastile.comm import buffers
from contrastile.comm.calls import Label
from contrastile.schedules import local
from contrastile.schedules.placement import Placement
from contrastile.schedules.problem import Problem


def placed(problem: Problem) -> Placement:
    """Where this rank's part of the problem lies."""
    assert problem.placement is not None
    return problem.placement


@contextmanager
def phase(placement: Placement, wanted: local.Wanted | None = None) -> Iterator[None]:
    """While open, a phase of the call: with ``wanted`` its backward, else its forward, which the handshake has begun.

    Raises:
        ExchangeError: a rank is at another call or phase, or wants other gradients, or did not answer within the
            deadline; on every rank.
    """
    if wanted is not None and placement.size > 1 and not placement.agreed:
        flags = (wanted.scale, wanted.bias, wanted.rows, *wanted.columns)
        # imported when called: ``import contrastile`` imports nothing but the standard library
        import numpy as np

        wants = sum(1 << i for i, flag in enumerate(flags) if flag)
        label = Label(placement.call.serial, "backward", placement.call.loss, wants)
        placement.communicator.agree(np.empty(0, np.int64), label)
    try:
        yield
    finally:
        placement.communicator.calls.leave()


def summed(placement: Placement, arrays: ArrayLibrary, *numbers: Array) -> Sequence[Array]:
    """The sum of each number, 0-d in float64, over the ranks: the same bits on each of them. One message for all."""
    if placement.size == 1 or not numbers:
        return numbers
    parts = ((x.reshape((1,)), (1,) * placement.size) for x in numbers)
    return [arrays.total(x) for x in gathered(placement, arrays, *parts)]


def gathered(placement: Placement, arrays: ArrayLibrary, *parts: tuple[Array, Sequence[int]]) -> list[Array]:
    """Every rank's arrays, joined in the order of the ranks. One message for all, and none in a world of one.

    The parts are this rank's arrays, each with the rows that each rank has of it.
    """
    own, ranks = [arrays.contiguous(x) for x, _ in parts], range(placement.size)
    if placement.size == 1:
        return own
    wholes = [arrays.empty((sum(counts), *x.shape[1:]), arrays.dtype(x), x) for x, counts in parts]
    split = [buffers.split(whole, counts) for whole, (_, counts) in zip(wholes, parts, strict=True)]
    incoming = {r: [each[r] for each in split] for r in ranks}
    placement.communicator.exchange(dict.fromkeys(ranks, own), incoming).wait()
    return wholes


def finalize_loss(
    problem: Problem, loss: Array, rows: SideStatistics, arrays: ArrayLibrary, columns: SideStatistics | None = None
) -> local.Forward:
    """The global loss from this rank's part of it, or its statistics as they are, with this rank's log-sum-exps."""
    if problem.kind == STATISTICS:
        value = loss
    else:
        value = arrays.cast(summed(placed(problem), arrays, loss)[0], arrays.dtype(problem.scale))
    return local.Forward(value, rows[:2], None if columns is None else columns[:2])


def scaled_weights(problem: Problem, upstream: Array) -> Problem:
    """The problem with its weights times the gradient that arrives from above and times ``Placement.factor``."""
    return problem.weighted(upstream * placed(problem).factor)


def mean(placement: Placement, arrays: ArrayLibrary, total: Array, scale: Array) -> Array:
    """The mean over the ranks, from their sum, of the gradient of scale or bias; in the scale's dtype."""
    return arrays.cast(total / placement.size, arrays.dtype(scale))


def gradients_over_ranks(
    problem: Problem, sums: local.Sums, upstream: Array | None, wanted: local.Wanted, arrays: ArrayLibrary
) -> local.Gradients:
    """This rank's gradients: ``local.gradients_from_sums``, with scale and bias averaged over the ranks.

    ``Placement.factor`` is in the sums already, or in ``upstream``.
    """
    # in float64 until they are whole: the ranks' parts may be large where their sum is small
    found = local.gradients_from_sums(problem, sums, upstream, wanted, arrays, "float64")
    parts = {name: x for name, x in (("scale", found.scale), ("bias", found.bias)) if x is not None}
    totals = summed(placed(problem), arrays, *parts.values())
    of_all = zip(parts, totals, strict=True)
    return replace(found, **{name: mean(placed(problem), arrays, x, problem.scale) for name, x in of_all})
