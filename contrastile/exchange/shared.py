"""What the schedules over several ranks have in common: sums over the ranks, and the scale of the gradients."""

from __future__ import annotations

from dataclasses import replace

from contrastile.backends.arrays import ArrayLibrary
from contrastile.backends.contract import Array
from contrastile.exchange import local
from contrastile.exchange.placement import Placement
from contrastile.exchange.problem import Problem


def placed(problem: Problem) -> Placement:
    """Where this rank's part of the problem lies."""
    assert problem.placement is not None
    return problem.placement


BESIDE = 1 << 39
"""Rows of a rank x columns of all x width from which on messages that cost the kernels nothing are worth having.

Below, the calls of kernels that compute the columns in parts cost the host more time than the messages would.
"""


def aside(placement: Placement, problem: Problem) -> bool:
    """Whether a rank's columns travel at no cost to what is computed meanwhile; every rank comes to the same.

    Asked before the columns travel, it makes the communicator ready for such messages, or has it leave them.
    """
    shards, x = placement.shards, problem.columns[0]
    largest, total, width = max(shards.widths), sum(shards.widths), int(x.shape[1])
    # where one rank has all columns none travel
    worth = largest < total and max(shards.rows) * total * width >= BESIDE
    ready = placement.communicator.prepare(x, largest * width * int(x.itemsize) if worth else 0)
    return worth and ready


def summed(placement: Placement, arrays: ArrayLibrary, x: Array) -> Array:
    """The sum of an array over the ranks, in the order of the ranks: the same bits on each of them."""
    n = placement.size
    if n == 1:
        return x
    whole = arrays.empty((n, *x.shape), arrays.dtype(x), x)
    placement.communicator.all_gather(x.reshape((1, *x.shape)), whole, [1] * n).wait()
    total = whole[0]
    for part in whole[1:]:
        total = total + part
    return total


def together(
    problem: Problem, loss: Array, row_lse: Array, column_lse: Array | None, arrays: ArrayLibrary
) -> local.Forward:
    """The global loss from this rank's part of it, with this rank's log-sum-exps."""
    whole = summed(placed(problem), arrays, loss)
    return local.Forward(arrays.cast(whole, arrays.dtype(problem.scale)), row_lse, column_lse)


def scaled_weights(problem: Problem, upstream: Array) -> Problem:
    """The problem with its weights times the gradient that arrives from above and times ``Placement.factor``."""
    return problem.weighted(upstream * placed(problem).factor)


def average(placement: Placement, arrays: ArrayLibrary, x: Array, scale: Array) -> Array:
    """The mean over the ranks of what each found for the scale or the bias, in the scale's dtype."""
    return arrays.cast(summed(placement, arrays, x) / placement.size, arrays.dtype(scale))


def finish(
    rows: Array,
    scale: Array,
    placement: Placement,
    sums: local.Sums,
    upstream: Array | None,
    wanted: local.Wanted,
    arrays: ArrayLibrary,
) -> local.Gradients:
    """This rank's gradients: ``local.finish``, and for scale and bias the mean over the ranks of what each found.

    The factor of ``Placement.factor`` is in the sums already, or in ``upstream``.
    """

    def mean(x: Array | None) -> Array | None:
        return None if x is None else average(placement, arrays, x, scale)

    # in float64 until they are whole: the ranks' parts may be large where their sum is small
    found = local.finish(rows, scale, sums, upstream, wanted, arrays, "float64")
    return replace(found, scale=mean(found.scale), bias=mean(found.bias))
