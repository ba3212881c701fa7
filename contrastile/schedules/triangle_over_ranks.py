"""Rows against themselves over ranks: each pair of shards is computed once, by one of the two ranks.

Rank i computes its rows against themselves, as ``triangle`` does, and against the rows of the ranks i - 1, ...,
i - n // 2, which travel around the ring. The ranks of a host do so among themselves, and the hosts among each other.
The results for another rank's rows are sent straight to that rank. With an even number of ranks, or of hosts, two
opposite ones meet twice, and each computes half of their block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from contrastile.backends import bars
from contrastile.backends.arrays import ArrayLibrary
from contrastile.backends.contract import Array, Block, SideStatistics, SideWeights, Weights
from contrastile.schedules import local, triangle
from contrastile.schedules.hosts import Returns, add_in_place, visits
from contrastile.schedules.placement import Placement
from contrastile.schedules.problem import Problem, slice_marks
from contrastile.schedules.sums import finalize_loss, gradients_over_ranks, placed, scaled_weights


def shares(placement: Placement, rank: int, owner: int) -> tuple[slice, slice] | None:
    """The spans of a rank's rows and of an owner's rows that the rank computes; None if the owner computes them."""
    sizes, hosts, homes = placement.shards.rows, placement.route.hosts, placement.route.homes
    (host, lane), (owner_host, owner_lane) = homes[rank], homes[owner]
    i, j, n = (lane, owner_lane, len(hosts[host])) if host == owner_host else (host, owner_host, len(hosts))
    doubled = 2 * ((i - j) % n)
    if doubled > n:
        return None
    rows, columns = slice(0, sizes[rank]), slice(0, sizes[owner])
    if doubled != n:
        return rows, columns
    # the lower one computes this first half of its own rows
    size = sizes[rank if i < j else owner]
    half = triangle.half_length(size, max(1, min(triangle.ALIGNED, size // 16)))
    return (slice(0, half), columns) if i < j else (rows, slice(half, columns.stop))


class _ShardExchange:
    """The shards that a rank receives, step by step; the caller puts its results, by owner, into ``results``."""

    def __init__(
        self,
        problem: Problem,
        arrays: ArrayLibrary,
        vectors: Sequence[Array],
        width: int,
        combine: Callable[[Sequence[Array], Sequence[Array]], Sequence[Array]],
        take: Callable[[slice, Sequence[Array]], None],
    ) -> None:
        """``take(rows, results)`` is called with another rank's ``width`` results for some of this rank's rows."""
        self.problem, self.placement, self.arrays = problem, placed(problem), arrays
        ids = [] if problem.column_ids is None else [problem.column_ids]
        self._id_count, self._sent = len(ids), [arrays.contiguous(x) for x in (problem.rows, *ids, *vectors)]
        hosts = self.placement.route.hosts
        self._count, self.results = 1 + len(hosts) // 2, dict[int, Sequence[Array]]()

        def sizes(rank: int, owner: int) -> list[int] | None:
            spans = shares(self.placement, rank, owner)
            return None if spans is None else [spans[1].stop - spans[1].start] * width

        def take_results(rank: int, results: Sequence[Array]) -> None:
            spans = shares(self.placement, rank, self.placement.rank)
            assert spans is not None
            take(spans[1], results)

        self._returns = Returns(self.placement, arrays, sizes, combine, take_results)

    def __iter__(self) -> Iterator[tuple[int, Block | None, slice, slice, Sequence[Array]]]:
        """For each shard: its owner, the block to compute, its spans of rows and columns (``shares``), and its vectors.

        This rank's own shard comes first, without a block and without results.
        """
        placement, sent = self.placement, self._sent
        rows = placement.shards.rows

        def sizes(rank: int) -> list[int]:
            return [rows[rank]] * len(sent)

        for distance, runs in visits(placement, self.arrays, sent, sizes, self._count):
            self.results = {}
            shards = {owner: arrays for run in runs for owner, arrays in run.parted(sizes).items()}
            for owner in sorted(shards, key=lambda owner: (placement.rank - owner) % placement.size):
                features, *vectors = shards[owner]
                spans, block = shares(placement, placement.rank, owner), None
                if spans is None:
                    continue
                if owner != placement.rank:
                    part, span = self.problem.of_rows(spans[0]), spans[1]
                    ids = vectors[0] if self._id_count else None
                    marks = slice_marks((ids, None, None), span)
                    block = triangle.cross_block(
                        part, features[span], placement.shards.start(owner) + span.start, marks
                    )
                yield owner, block, *spans, vectors[self._id_count :]
            if placement.rank not in shards:
                self._returns.send(distance, self.results)
        self._returns.finish()


def forward(problem: Problem, work: local.Work, *, wanted: local.Wanted | None = None) -> local.Forward:
    """The global softmax loss, the same on every rank, and the log-sum-exps of this rank's rows; no kept arrays.

    It raises the errors of ``gather.forward``.
    """
    backend, options = work
    arrays, all_rows = backend.arrays, slice(0, problem.rows.shape[0])
    row_side = SideStatistics(None, None, None)

    def take(rows: slice, results: Sequence[Array]) -> None:
        for x, merged in zip(row_side, local.merge_parts(arrays, ([x[rows] for x in row_side], results)), strict=True):
            x[rows] = merged

    exchange = _ShardExchange(problem, arrays, (), len(row_side), lambda *xs: local.merge_parts(arrays, xs), take)
    for owner, block, rows, _, _ in exchange:
        if block is None:
            subproblem = triangle.subproblem(problem, exchange.placement.start)
            diagonal_rows = triangle.diagonal_rows(subproblem, work)
            row_side = triangle.statistics(subproblem, all_rows, diagonal_rows, work)
            continue
        backend.check(block, options)
        results = backend.lse(block, True, options)
        assert results.columns is not None
        take(rows, results.rows)
        exchange.results[owner] = results.columns
    loss = local.loss(problem, arrays, "float64", row_side)
    return finalize_loss(problem, loss, row_side, arrays)


def backward(
    problem: Problem, saved: local.Forward, upstream: Array, wanted: local.Wanted, work: local.Work
) -> local.Gradients:
    """Gradients of ``upstream * loss`` for this rank's rows and for the scale: see ``Placement.factor``."""
    arrays, weighted = work.backend.arrays, scaled_weights(problem, upstream)
    sums = local.accumulator(work.backend, problem.rows, wanted.rows or wanted.scale)
    if sums is not None:
        _add_gradients(weighted, saved, sums, work)
    gradient_sums = local.Sums(sums, (), None)
    gradients = gradients_over_ranks(problem, gradient_sums, None, wanted, arrays)
    return triangle.halve_scale_gradient(gradients)


def _add_gradients(problem: Problem, saved: local.Forward, sums: Array, work: local.Work) -> None:
    """Add the rows' part of ``(G + G^T) F`` over all ranks to sums, (m, d)."""
    backend, options = work
    arrays = backend.arrays

    def shard_weights(vectors: Sequence[Array]) -> SideWeights:
        n, p, weight, target = vectors
        return bars.side_weights(problem.terms(arrays), arrays, (n, p), weight, target)

    vectors = *saved.rows, problem.row_weight, problem.row_target
    own_weights = shard_weights(vectors)

    def take(rows: slice, results: Sequence[Array]) -> None:
        sums[rows] += results[0]

    exchange = _ShardExchange(problem, arrays, vectors, 1, add_in_place, take)
    for owner, block, rows, columns, shard_vectors in exchange:
        if block is None:
            subproblem = triangle.subproblem(problem, exchange.placement.start)
            pair_weights = triangle.subproblem_weights(subproblem, saved.rows, arrays)
            triangle.add_gradients(subproblem, *pair_weights, sums, work)
            continue
        column_sum = local.accumulator(backend, block.columns, True)
        weights = Weights(own_weights.part(rows), shard_weights(shard_vectors).part(columns))
        backend.gradients(block, weights, sums[rows], column_sum, options)
        exchange.results[owner] = [column_sum]
