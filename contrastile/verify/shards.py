"""A problem cut into the parts of several ranks, what the ranks make of them, and the comparison with the whole.

Columns are numbered rank by rank in a world, and block by block in one process: see ``Cut.order``.
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
    """Whole shares of ``total`` in proportion to the weights, as they come; all weights 0 stand for equal ones."""
    among = list(weights) if any(weights) else [1] * len(weights)
    ends = [total * part // sum(among) for part in accumulate(among)]
    return [end - start for start, end in zip([0, *ends], ends, strict=False)]


R = TypeVar("R", bound=Outcome)


class Parts:
    """What each rank has of a whole.

    Attributes:
        shards: the ranks' rows, which follow each other, and their share of each column block, likewise.
    """

    shards: Shards

    def rows(self, rank: int) -> slice:
        """The place of a rank's rows."""
        start = sum(self.shards.rows[:rank])
        return slice(start, start + self.shards.rows[rank])

    def columns(self, rank: int, block: int) -> slice:
        """The place of a rank's columns in a block of the whole."""
        start = sum(each[block] for each in self.shards.columns[:rank])
        return slice(start, start + self.shards.columns[rank][block])

    def order(self) -> IntArray:
        """(n,) the column of the whole that stands at each number of the world."""
        starts = np.cumsum([0, *map(sum, zip(*self.shards.columns, strict=True))])
        numbers = np.arange(starts[-1])
        found = [
            numbers[start:][self.columns(rank, block)]
            for rank in range(len(self.shards.rows))
            for block, start in enumerate(starts[:-1])
        ]
        return np.concatenate(found)

    def own(self, rank: int) -> IntArray:
        """A rank's columns, by their numbers in the whole."""
        start = self.shards.start(rank)
        return self.order()[start : start + self.shards.widths[rank]]

    def spread(self, exchange: str, hosts: Hosts, times: int = 1) -> Spread:
        """How this world takes its sums, of so many rows and columns for each."""
        rows, widths = (tuple(times * x for x in each) for each in (self.shards.rows, self.shards.widths))
        if exchange == "gather":
            return Spread(rows, (sum(widths),))
        if exchange == "two-level":
            # of its own host a rank has its own shard, what comes before it and what comes after: those at most
            return Spread(rows, (*(sum(widths[rank] for rank in ranks) for ranks in hosts), *widths))
        return Spread(rows, tuple(times * size for blocks in self.shards.columns for size in blocks), halved=True)

    def joined(self, parts: Sequence[R], factor: float) -> R:
        """The ranks' outcomes as one, in the order of the whole.

        Args:
            parts: by rank.
            factor: ``Placement.factor``, which is taken away again. Loss, scale and bias are rank 0's, the latter two
                times what a sum over the ranks, or a mean, would make of them.
        """
        first, times = parts[0], len(parts) / factor

        def along(each: Sequence[Any]) -> Any:
            return None if any(x is None for x in each) else np.concatenate(each) / factor

        return replace(
            first,
            rows=along([part.rows for part in parts]),
            columns=tuple(map(along, zip(*(part.columns for part in parts), strict=True))),
            scale=None if first.scale is None else first.scale * times,
            bias=None if first.bias is None else first.bias * times,
        )


@dataclass(frozen=True)
class Cut(Parts):
    """A problem and how much of it each rank has.

    Attributes:
        problem: the whole, NumPy.
        shards: see ``Parts``.
        itself: whether the ranks have the rows alone, which are the columns.
    """

    problem: Problem
    shards: Shards
    itself: bool = False

    @staticmethod
    def of(problem: Problem, rows: Sequence[int], columns: Sequence[int]) -> Cut:
        """A cut in proportion to these weights, one for each rank."""
        blocks = [shares(size, columns) for size in rearrange.sizes(problem)]
        each = tuple(tuple(block[rank] for block in blocks) for rank in range(len(rows)))
        return Cut(problem, Shards(tuple(shares(len(problem.rows), rows)), each))

    @staticmethod
    def of_itself(problem: Problem, rows: Sequence[int]) -> Cut:
        """A cut of rows against themselves, which the problem has as its one block of columns too."""
        return replace(Cut.of(problem, rows, rows), itself=True)

    def part(self, rank: int, placement: Placement | None = None) -> Problem:
        """What a rank has of the problem."""
        p, rows, own, order = self.problem, self.rows(rank), self.own(rank), self.order()
        return replace(
            p,
            rows=p.rows[rows],
            columns=() if self.itself else tuple(x[self.columns(rank, block)] for block, x in enumerate(p.columns)),
            placement=placement,
            **{name: take(getattr(p, name), rows) for name in ROW_VECTORS},
            **{name: take(getattr(p, name), own) for name in COLUMN_VECTORS},
            **{name: take(redirected(getattr(p, name), order), rows) for name in POINTERS},
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
    """What each rank makes of its part."""

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
    """The ranks' outcomes, joined, compared with the oracle's of the whole."""
    spread, expected = cut.spread(exchange, subject.ranks.hosts), oracle.outcome
    bound = bounds(cut.problem, oracle, subject.accuracy, subject.dtype, upstream, options, spread)
    if cut.itself:
        expected, bound = rearrange.folded(expected), rearrange.folded(bound)
    return compare(cut.joined(parts, len(parts) if reduction == "mean" else 1.0), expected, bound)
