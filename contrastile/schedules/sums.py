"""Functions that the schedules of ranks share: sums over ranks, scaled gradients, and the phases of a call."""

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
    """The placement of a problem of several ranks."""
    assert problem.placement is not None
    return problem.placement


@contextmanager
def phase(placement: Placement, wanted: local.Wanted | None = None) -> Iterator[None]:
    """A context for a phase of a call: its backward if ``wanted`` is given, else its forward, begun by the handshake.

    Raises:
        ExchangeError: a rank is at another call or phase, or wants other gradients, or did not answer within the
            deadline; on every rank.
    """
    if wanted is not None and placement.size > 1 and not placement.agreed:
        flags = (wanted.scale, wanted.bias, wanted.rows, *wanted.columns)
        # imported when called: ``import contrastile`` imports nothing but the standard library
        import numpy as np

        bits = sum(1 << i for i, flag in enumerate(flags) if flag)
        label = Label(placement.call.serial, "backward", placement.call.loss, bits)
        placement.communicator.agree(np.empty(0, np.int64), label)
    try:
        yield
    finally:
        placement.communicator.calls.leave()


def all_reduce(placement: Placement, arrays: ArrayLibrary, *numbers: Array) -> Sequence[Array]:
    """The sum of each number, 0-d in float64, over the ranks, with the same bits on each; in one message."""
    if placement.size == 1 or not numbers:
        return numbers
    parts = ((x.reshape((1,)), (1,) * placement.size) for x in numbers)
    return [arrays.total(x) for x in gathered(placement, arrays, *parts)]


def gathered(placement: Placement, arrays: ArrayLibrary, *parts: tuple[Array, Sequence[int]]) -> list[Array]:
    """All ranks' arrays, joined in the order of the ranks, in one message; a world of one sends none.

    Each part is an array of this rank, and the number of rows that each rank has of it.
    """
    sent, ranks = [arrays.contiguous(x) for x, _ in parts], range(placement.size)
    if placement.size == 1:
        return sent
    wholes = [arrays.empty((sum(counts), *x.shape[1:]), arrays.dtype(x), x) for x, counts in parts]
    splits = [buffers.split(whole, counts) for whole, (_, counts) in zip(wholes, parts, strict=True)]
    incoming = {r: [split[r] for split in splits] for r in ranks}
    placement.communicator.exchange(dict.fromkeys(ranks, sent), incoming).wait()
    return wholes


def finalize_loss(
    problem: Problem, loss: Array, rows: SideStatistics, arrays: ArrayLibrary, columns: SideStatistics | None = None
) -> local.Forward:
    """The global loss from this rank's part of it, and this rank's log-sum-exps; statistics stay as they are."""
    if problem.kind == STATISTICS:
        total = loss
    else:
        total = arrays.cast(all_reduce(placed(problem), arrays, loss)[0], arrays.dtype(problem.scale))
    return local.Forward(total, rows[:2], None if columns is None else columns[:2])


def scaled_weights(problem: Problem, upstream: Array) -> Problem:
    """The problem with its weights multiplied by the upstream gradient and by ``Placement.factor``."""
    return problem.weighted(upstream * placed(problem).factor)


def rank_mean(placement: Placement, arrays: ArrayLibrary, total: Array, scale: Array) -> Array:
    """The mean over the ranks of the gradient of scale or bias, from its total; in the scale's dtype."""
    return arrays.cast(total / placement.size, arrays.dtype(scale))


def gradients_over_ranks(
    problem: Problem, sums: local.Sums, upstream: Array | None, wanted: local.Wanted, arrays: ArrayLibrary
) -> local.Gradients:
    """This rank's gradients: ``local.gradients_from_sums``, with scale and bias averaged over the ranks.

    The sums, or ``upstream``, include ``Placement.factor`` already.
    """
    # sum in float64, because the ranks' parts may be large and their sum small
    gradients = local.gradients_from_sums(problem, sums, upstream, wanted, arrays, "float64")
    numbers = {name: x for name, x in (("scale", gradients.scale), ("bias", gradients.bias)) if x is not None}
    totals = all_reduce(placed(problem), arrays, *numbers.values())
    named = zip(numbers, totals, strict=True)
    return replace(gradients, **{name: rank_mean(placed(problem), arrays, x, problem.scale) for name, x in named})
