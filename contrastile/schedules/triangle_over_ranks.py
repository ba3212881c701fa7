"""Rows against themselves over ranks: each pair of shards is computed once, by one of the two ranks.

Rank i computes its rows against its own, as ``triangle`` does, and against those of the ranks i - 1, ..., i - n // 2,
which come around the ring; the ranks of a host likewise among themselves, and hosts among hosts. What it finds of
another rank's rows goes straight home. With an even number of ranks, or of hosts, two that lie opposite each other meet
twice, and each computes half of their block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from contrastile.backends import bars
from contrastile.backends.arrays import ArrayLibrary
from contrastile.backends.contract import Array, Block, SideStatistics, SideWeights, Weights
from contrastile.schedules import local, triangle
from contrastile.schedules.hosts import Returns, added, visits
from contrastile.schedules.placement import Placement
from contrastile.schedules.problem import Problem, marks_of
from contrastile.schedules.sums import finalize_loss, gradients_over_ranks, placed, scaled_weights


def shares(placement: Placement, rank: int, owner: int) -> tuple[slice, slice] | None:
    """Which of its own rows a rank computes against which of another's; None where the other computes their block."""
    sizes, hosts, homes = placement.shards.rows, placement.route.hosts, placement.route.homes
    (host, lane), (there, other) = homes[rank], homes[owner]
    mine, its, n = (lane, other, len(hosts[host])) if host == there else (host, there, len(hosts))
    twice = 2 * ((mine - its) % n)
    if twice > n:
        return None
    rows, columns = slice(0, sizes[rank]), slice(0, sizes[owner])
    if twice != n:
        return rows, columns
    # the half of the lower one's rows that it computes itself
    size = sizes[rank if mine < its else owner]
    half = triangle.middle(size, max(1, min(triangle.ALIGNED, size // 16)))
    return (slice(0, half), columns) if mine < its else (rows, slice(half, columns.stop))


class _ShardExchange:
    """The shards that a rank is sent, step by step, and the results that return to their owners."""

    def __init__(
        self,
        problem: Problem,
        arrays: ArrayLibrary,
        vectors: Sequence[Array],
        width: int,
        combine: Callable[[Sequence[Array], Sequence[Array]], Sequence[Array]],
        take: Callable[[slice, Sequence[Array]], None],
    ) -> None:
        """``take(rows, found)`` is called with what others have found of some of this rank's rows: ``width`` arrays."""
        self.problem, self.placement, self.arrays = problem, placed(problem), arrays
        ids = [] if problem.column_ids is None else [problem.column_ids]
        self._ids, self._own = len(ids), [arrays.contiguous(x) for x in (problem.rows, *ids, *vectors)]

        hosts = self.placement.route.hosts
        self._count, self.found = 1 + len(hosts) // 2, dict[int, Sequence[Array]]()

        def sizes(rank: int, owner: int) -> list[int] | None:
            places = shares(self.placement, rank, owner)
            return None if places is None else [places[1].stop - places[1].start] * width

        def taken(rank: int, found: Sequence[Array]) -> None:
            places = shares(self.placement, rank, self.placement.rank)
            assert places is not None
            take(places[1], found)

        self._returns = Returns(self.placement, arrays, sizes, combine, taken)

    def __iter__(self) -> Iterator[tuple[int, Block | None, slice, slice, Sequence[Array]]]:
        """Of each shard its owner, the block to compute, the rows that meet in it, as ``shares`` says, and its vectors.

        This rank's own comes first, with no block. What is found of each other one is to be put into ``found``.
        """
        place, own = self.placement, self._own
        rows = place.shards.rows

        def sizes(rank: int) -> list[int]:
            return [rows[rank]] * len(own)

        for distance, runs in visits(place, self.arrays, own, sizes, self._count):
            self.found = {}
            shards = {owner: xs for run in runs for owner, xs in run.parted(sizes).items()}
            for owner in sorted(shards, key=lambda owner: (place.rank - owner) % place.size):
                features, *rest = shards[owner]
                places, block = shares(place, place.rank, owner), None
                if places is None:
                    continue
                if owner != place.rank:
                    part, there = self.problem.of_rows(places[0]), places[1]
                    ids = rest[0] if self._ids else None
                    marks = marks_of((ids, None, None), there)
                    block = triangle.across(part, features[there], place.shards.start(owner) + there.start, marks)
                yield owner, block, *places, rest[self._ids :]
            if place.rank not in shards:
                self._returns.send(distance, self.found)
        self._returns.finish()


def forward(problem: Problem, work: local.Work, *, wanted: local.Wanted | None = None) -> local.Forward:
    """The global softmax loss, the same on every rank, and the log-sum-exps of this rank's rows. Nothing is kept.

    It raises what ``gather.forward`` raises.
    """
    backend, options = work
    arrays, whole = backend.arrays, slice(0, problem.rows.shape[0])
    mine = SideStatistics(None, None, None)

    def take(rows: slice, found: Sequence[Array]) -> None:
        for x, part in zip(mine, local.merged(arrays, ([x[rows] for x in mine], found)), strict=True):
            x[rows] = part

    exchange = _ShardExchange(problem, arrays, (), len(mine), lambda *each: local.merged(arrays, each), take)
    for owner, block, rows, _, _ in exchange:
        if block is None:
            own = triangle.within(problem, exchange.placement.start)
            most = triangle.whole_up_to(own, work)
            mine = triangle.statistics(own, whole, most, work)
            continue
        backend.check(block, options)
        found = backend.lse(block, True, options)
        assert found.columns is not None
        take(rows, found.rows)
        exchange.found[owner] = found.columns
    loss = local.loss(problem, arrays, "float64", mine)
    return finalize_loss(problem, loss, mine, arrays)


def backward(
    problem: Problem, saved: local.Forward, upstream: Array, wanted: local.Wanted, work: local.Work
) -> local.Gradients:
    """Gradients of ``upstream * loss`` for this rank's rows and for the scale: see ``Placement.factor``."""
    arrays, weighted = work.backend.arrays, scaled_weights(problem, upstream)
    sums = local.accumulator(work.backend, problem.rows, wanted.rows or wanted.scale)
    if sums is not None:
        _add_gradients(weighted, saved, sums, work)
    whole = local.Sums(sums, (), None)
    found = gradients_over_ranks(problem, whole, None, wanted, arrays)
    return triangle.counted_once(found)


def _add_gradients(problem: Problem, saved: local.Forward, sums: Array, work: local.Work) -> None:
    """Add the rows' part of ``(G + G^T) F`` over all ranks to sums, (m, d)."""
    backend, options = work
    arrays = backend.arrays

    def weighed(vectors: Sequence[Array]) -> SideWeights:
        n, p, weight, target = vectors
        return bars.side_weights(problem.terms(arrays), arrays, (n, p), weight, target)

    vectors = *saved.rows, problem.row_weight, problem.row_target
    own = weighed(vectors)

    def take(rows: slice, found: Sequence[Array]) -> None:
        sums[rows] += found[0]

    exchange = _ShardExchange(problem, arrays, vectors, 1, added, take)
    for owner, block, rows, columns, theirs in exchange:
        if block is None:
            mine = triangle.within(problem, exchange.placement.start)
            weights = triangle.weights_within(mine, saved.rows, arrays)
            triangle.add_gradients(mine, *weights, sums, work)
            continue
        there = local.accumulator(backend, block.columns, True)
        both = Weights(own.part(rows), weighed(theirs).part(columns))
        backend.gradients(block, both, sums[rows], there, options)
        exchange.found[owner] = [there]
