"""Rows against themselves over ranks: each pair of shards is computed once, by one of the two ranks.

Rank i computes its rows against its own, as ``triangle`` does, and against those of the ranks i - 1, ..., i - n // 2,
which come around the ring or are gathered. What it finds of another rank's rows goes straight home. With an even number
of ranks two that lie opposite each other meet twice, and each computes half of their block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from contrastile.backends import bars
from contrastile.backends.arrays import ArrayLibrary
from contrastile.backends.contract import Array, Block, SideStatistics, SideWeights, Weights
from contrastile.comm import buffers
from contrastile.comm.communicator import Pending
from contrastile.schedules import local, triangle
from contrastile.schedules.placement import Placement
from contrastile.schedules.problem import Problem, marks_of
from contrastile.schedules.ring import visits
from contrastile.schedules.sums import finalize_loss, gathered, gradients_over_ranks, placed, scaled_weights


def shares(placement: Placement, rank: int, owner: int) -> tuple[slice, slice]:
    """Which of its own rows a rank computes against which of the owner's, one of the n // 2 ranks behind it."""
    n, sizes = placement.size, placement.shards.rows
    rows, columns = slice(0, sizes[rank]), slice(0, sizes[owner])
    if 2 * ((rank - owner) % n) != n:
        return rows, columns
    # the half of the lower one's rows that it computes itself
    size = sizes[min(rank, owner)]
    half = triangle.middle(size, max(1, min(triangle.ALIGNED, size // 16)))
    return (slice(0, half), columns) if rank < owner else (rows, slice(half, columns.stop))


@dataclass(frozen=True, slots=True)
class _PeerBlock:
    """What this rank computes with a rank's shard: whose, its arrays, and which rows meet which, as ``shares`` says."""

    owner: int
    features: Array
    ids: Array | None
    vectors: Sequence[Array]
    rows: slice
    columns: slice


class _ShardExchange:
    """The shards that a rank is sent, block by block, and the results that return to their owners.

    Attributes:
        gathered: the features of all ranks; None on a ring.
    """

    def __init__(
        self,
        problem: Problem,
        arrays: ArrayLibrary,
        vectors: Sequence[Array],
        take: Callable[[slice, Sequence[Array]], None],
        gathered: Array | None = None,
    ) -> None:
        """``take(rows, found)`` is called with what other ranks have found of some of this rank's rows."""
        self.problem, self.placement, self.arrays, self.take = problem, placed(problem), arrays, take
        ids = [] if problem.column_ids is None else [problem.column_ids]
        self._ids, self._own = len(ids), [arrays.contiguous(x) for x in (problem.rows, *ids, *vectors)]
        self.gathered, self._sizes = gathered, self.placement.shards.rows
        # with one rank nothing is gathered
        self._ring = self.placement.exchange == "ring" or self.placement.size == 1
        # to whom, what, and from whom, of which rows, where; kept until the wait: the message owns it
        self._home: list[tuple[int, Sequence[Array], int, slice, Sequence[Array]]] = []
        self._pending: Pending | None = None

    def __iter__(self) -> Iterator[_PeerBlock]:
        """This rank's own shard first."""
        me, n = self.placement.rank, self.placement.size
        for owner, (features, *rest) in self._shards(1 + n // 2):
            places = shares(self.placement, me, owner)
            yield _PeerBlock(owner, features, rest[0] if self._ids else None, rest[self._ids :], *places)
        self._settle()

    def _shards(self, count: int) -> Iterator[tuple[int, Sequence[Array]]]:
        place, own = self.placement, self._own
        if self._ring:
            yield from visits(place, self.arrays, own, lambda rank: [self._sizes[rank]] * len(own), count)
            return
        held = [] if self.gathered is None else [self.gathered]
        held += gathered(place, self.arrays, *((x, self._sizes) for x in own[len(held) :]))
        parts = [buffers.split(x, self._sizes) for x in held]
        self.gathered = held[0]
        for step in range(count):
            owner = (place.rank - step) % place.size
            yield owner, [part[owner] for part in parts]

    def _room(self, length: int, like: Array) -> Array:
        return self.arrays.empty((length, *like.shape[1:]), self.arrays.dtype(like), like)

    def block(self, peer: _PeerBlock) -> Block:
        """Rows of this rank against rows of another."""
        part, features = self.problem.of_rows(peer.rows), peer.features[peer.columns]
        start = self.placement.shards.start(peer.owner) + peer.columns.start
        return triangle.across(part, features, start, marks_of((peer.ids, None, None), peer.columns))

    def send_home(self, peer: _PeerBlock, found: Sequence[Array]) -> None:
        """Send what was found of another's rows to it, and take what the rank as far ahead has found of this one's.

        On a ring at once; of gathered shards all in one message, at the end.
        """
        if self._ring:
            self._settle()
        me, n = self.placement.rank, self.placement.size
        ahead = (me + (me - peer.owner)) % n
        mine = shares(self.placement, ahead, me)[1]
        arriving = [self._room(mine.stop - mine.start, x) for x in found]
        self._home.append((peer.owner, found, ahead, mine, arriving))
        if self._ring:
            self._post()

    def _post(self) -> None:
        outgoing = {owner: found for owner, found, *_ in self._home}
        incoming = {ahead: arriving for *_, ahead, _, arriving in self._home}
        self._pending = self.placement.communicator.exchange(outgoing, incoming)

    def _settle(self) -> None:
        """Take what has been found elsewhere, in the order of the ranks' distance."""
        if self._home and not self._ring:
            self._post()
        if self._pending is not None:
            self._pending.wait()
            for *_, mine, arriving in self._home:
                self.take(mine, arriving)
        self._pending, self._home = None, []


@local.ieee
def forward(problem: Problem, work: local.Work, *, wanted: local.Wanted | None = None) -> local.Forward:
    """The global softmax loss, the same on every rank, and the log-sum-exps of this rank's rows. Nothing is kept.

    Raises:
        UnsupportedProblemError: the backend refuses one of the blocks.
        ExchangeError: a rank did not answer within the deadline.
    """
    backend, options = work
    arrays, whole = backend.arrays, slice(0, problem.rows.shape[0])
    mine = SideStatistics(None, None, None)

    def take(rows: slice, found: Sequence[Array]) -> None:
        merged = local.merged(arrays, [SideStatistics(*(x[rows] for x in mine)), SideStatistics(*found)])
        for x, part in zip(mine, merged, strict=True):
            x[rows] = part

    exchange = _ShardExchange(problem, arrays, (), take)
    for peer in exchange:
        if peer.owner == exchange.placement.rank:
            own = triangle.within(problem, exchange.placement.start)
            most = triangle.whole_up_to(own, work)
            mine = triangle.statistics(own, whole, most, work)
            continue
        block = exchange.block(peer)
        backend.check(block, options)
        found = backend.lse(block, True, options)
        assert found.columns is not None
        take(peer.rows, found.rows)
        exchange.send_home(peer, found.columns)
    loss = local.loss(problem, arrays, "float64", mine)
    return replace(finalize_loss(problem, loss, mine, arrays), gathered=exchange.gathered)


@local.ieee
def backward(
    problem: Problem, saved: local.Forward, upstream: Array, wanted: local.Wanted, work: local.Work
) -> local.Gradients:
    """Gradients of ``upstream * loss`` for this rank's rows and for the scale: see ``Placement.factor``."""
    arrays, weighted = work.backend.arrays, scaled_weights(problem, upstream)
    sums = local.accumulator(work.backend, problem.rows, wanted.rows or wanted.scale)
    if sums is not None:
        _add_gradients(weighted, saved, sums, work)
    whole = local.Sums(sums, (), None)
    found = gradients_over_ranks(problem.rows, problem.scale, placed(problem), whole, None, wanted, arrays)
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

    exchange = _ShardExchange(problem, arrays, vectors, take, saved.gathered)
    for peer in exchange:
        if peer.owner == exchange.placement.rank:
            mine = triangle.within(problem, exchange.placement.start)
            weights = triangle.weights_within(mine, saved.rows, arrays)
            triangle.add_gradients(mine, *weights, sums, work)
            continue
        there = local.accumulator(backend, peer.features[peer.columns], True)
        there_weights = weighed(peer.vectors).part(peer.columns)
        backend.gradients(
            exchange.block(peer), Weights(own.part(peer.rows), there_weights), sums[peer.rows], there, options
        )
        exchange.send_home(peer, [there])
