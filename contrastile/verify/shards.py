"""Cuts a problem into parts of ranks, computes the parts, and compares the joined outcomes with the whole's oracle.

Columns are numbered rank by rank in a world, but block by block in one process: see ``Cut.order``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, TypeVar, cast

import numpy as np

from contrastile.backends.contract import Options
from contrastile.comm.communicator import Communicator, Hosts
from contrastile.oracle.arrays import IntArray
from contrastile.schedules.placement import Placement, Reduction, Shards
from contrastile.schedules.problem import Problem
from contrastile.verify import rearrange
from contrastile.verify.arithmetic import Spread
from contrastile.verify.bounds import bounds
from contrastile.verify.comparison import Worst, compare
from contrastile.verify.rearrange import COLUMN_VECTORS, POINTERS, ROW_VECTORS, redirected, take
from contrastile.verify.trial import Subject
from contrastile.verify.truth import Outcome, Truth

EXCHANGES = {"ring": "over a ring", "two-level": "over a ring of hosts", "gather": "with gathered columns"}


def shares(total: int, weights: Sequence[int]) -> list[int]:
    """Integer shares of ``total`` in proportion to the weights, in order; weights that are all 0 mean equal shares."""
    parts_per_rank = list(weights) if any(weights) else [1] * len(weights)
    ends = [total * part // sum(parts_per_rank) for part in accumulate(parts_per_rank)]
    return [end - start for start, end in zip([0, *ends], ends, strict=False)]


R = TypeVar("R", bound=Outcome)


class Parts:
    """The parts of a whole that the ranks have.

    Attributes:
        shards: the number of rows of each rank, and of columns in each block; ranks follow each other in the whole.
    """

    shards: Shards

    def rows(self, rank: int) -> slice:
        """The slice of a rank's rows in the whole."""
        start = sum(self.shards.rows[:rank])
        return slice(start, start + self.shards.rows[rank])

    def columns(self, rank: int, block: int) -> slice:
        """The slice of a rank's columns in a block of the whole."""
        start = sum(blocks[block] for blocks in self.shards.columns[:rank])
        return slice(start, start + self.shards.columns[rank][block])

    def order(self) -> IntArray:
        """(n,) the whole's column number for each column number of the world."""
        starts = np.cumsum([0, *map(sum, zip(*self.shards.columns, strict=True))])
        numbers = np.arange(starts[-1])
        columns = [
            numbers[start:][self.columns(rank, block)]
            for rank in range(len(self.shards.rows))
            for block, start in enumerate(starts[:-1])
        ]
        return np.concatenate(columns)

    def own(self, rank: int) -> IntArray:
        """The whole's numbers of a rank's columns."""
        start = self.shards.start(rank)
        return self.order()[start : start + self.shards.widths[rank]]

    def spread(self, exchange: str, hosts: Hosts, times: int = 1) -> Spread:
        """How this world computes its sums, if each row and column counts ``times``."""
        rows, widths = (tuple(times * x for x in counts) for counts in (self.shards.rows, self.shards.widths))
        if exchange == "gather":
            return Spread(rows, (sum(widths),))
        if exchange == "two-level":
            # in its own host a rank has at most three blocks: its own shard, the shards before it, and those after it
            return Spread(rows, (*(sum(widths[rank] for rank in ranks) for ranks in hosts), *widths))
        return Spread(rows, tuple(times * size for blocks in self.shards.columns for size in blocks), halved=True)

    def joined(self, parts: Sequence[R], factor: float) -> R:
        """Join the ranks' outcomes, in the order of the whole.

        Args:
            parts: the outcomes, by rank.
            factor: ``Placement.factor``, by which gradients are divided. Loss, scale and bias are rank 0's; the latter
                two are multiplied as a sum over the ranks, or a mean, would do.
        """
        first, parameter_factor = parts[0], len(parts) / factor

        def concatenated(arrays: Sequence[Any]) -> Any:
            return None if any(x is None for x in arrays) else np.concatenate(arrays) / factor

        return replace(
            first,
            rows=concatenated([part.rows for part in parts]),
            columns=tuple(map(concatenated, zip(*(part.columns for part in parts), strict=True))),
            scale=None if first.scale is None else first.scale * parameter_factor,
            bias=None if first.bias is None else first.bias * parameter_factor,
        )


@dataclass(frozen=True)
class Cut(Parts):
    """A problem, and the parts that ranks have of it.

    Attributes:
        problem: the whole, NumPy.
        shards: see ``Parts``.
        itself: whether the ranks have only rows, which are the columns too.
    """

    problem: Problem
    shards: Shards
    itself: bool = False

    @staticmethod
    def of(problem: Problem, rows: Sequence[int], columns: Sequence[int]) -> Cut:
        """A cut in proportion to these weights, one weight per rank."""
        blocks = [shares(size, columns) for size in rearrange.sizes(problem)]
        columns_of_ranks = tuple(tuple(block[rank] for block in blocks) for rank in range(len(rows)))
        return Cut(problem, Shards(tuple(shares(len(problem.rows), rows)), columns_of_ranks))

    @staticmethod
    def of_itself(problem: Problem, rows: Sequence[int]) -> Cut:
        """A cut of rows against themselves; the problem also has them as its only block of columns."""
        return replace(Cut.of(problem, rows, rows), itself=True)

    def part(self, rank: int, placement: Placement | None = None) -> Problem:
        """A rank's part of the problem."""
        whole, rows, columns, order = self.problem, self.rows(rank), self.own(rank), self.order()
        return replace(
            whole,
            rows=whole.rows[rows],
            columns=() if self.itself else tuple(x[self.columns(rank, block)] for block, x in enumerate(whole.columns)),
            placement=placement,
            **{name: take(getattr(whole, name), rows) for name in ROW_VECTORS},
            **{name: take(getattr(whole, name), columns) for name in COLUMN_VECTORS},
            **{name: take(redirected(getattr(whole, name), order), rows) for name in POINTERS},
        )


def outcomes(
    subject: Subject,
    cut: Cut,
    exchange: str,
    *,
    reduction: str = "mean",
    upstream: float = 1.0,
    late: bool = False,
    options: Options | None = None,
) -> list[Outcome]:
    """Each rank's outcome for its part."""

    def program(communicator: Communicator) -> Outcome:
        place = Placement(communicator, exchange, cast("Reduction", reduction), cut.shards)  # type: ignore[arg-type]
        return subject.run(cut.part(communicator.rank, place), options=options, upstream=upstream)

    return subject.ranks.run(program, late=late)


def compared(
    subject: Subject,
    cut: Cut,
    parts: list[Outcome],
    exchange: str,
    oracle: Truth,
    *,
    reduction: str = "mean",
    upstream: float = 1.0,
    options: Options | None = None,
) -> Worst:
    """Compare the joined outcomes of the ranks with the oracle's outcome of the whole."""
    spread, expected = cut.spread(exchange, subject.ranks.hosts), oracle.outcome
    bound = bounds(cut.problem, oracle, subject.accuracy, subject.dtype, upstream, options, spread)
    if cut.itself:
        expected, bound = rearrange.folded(expected), rearrange.folded(bound)
    return compare(cut.joined(parts, len(parts) if reduction == "mean" else 1.0), expected, bound)
