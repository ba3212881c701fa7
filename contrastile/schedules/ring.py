"""The ring (Inf-CL Alg. 1 and 3, corrected), and the ring of hosts: the rows stay, the shards of the columns travel.

At step j rank i holds the shard of rank ``(i - j) mod n``; of two levels, those of the host j behind its own: see
``hosts``. The next shard is posted before the current block is computed. What the ranks add up for a shard follows one
step behind it: a rank waits for it only after the next block is computed, and it returns to its owner after n hops.
Memory is O(b d / n) per rank, or O(b d / hosts).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from contrastile.backends import bars
from contrastile.backends.arrays import ArrayLibrary
from contrastile.backends.contract import Array, Backend, Block, SideStatistics, Weights
from contrastile.schedules import local
from contrastile.schedules.gather import by_block
from contrastile.schedules.hosts import Returns, Run, added, visits
from contrastile.schedules.placement import Placement, Shards
from contrastile.schedules.problem import Problem, marks_of
from contrastile.schedules.sums import finalize_loss, gradients_over_ranks, placed, scaled_weights, summed


@dataclass(frozen=True, slots=True)
class _Shard:
    """What a rank holds now: a run's column blocks, the marks of its columns, and vectors over them."""

    run: Run
    columns: Sequence[Array]
    marks: Sequence[Array | None]
    vectors: Sequence[Array]


class _Ring:
    """What travels around the ring, and how much of it each rank has.

    Attributes:
        parted: where this rank's columns lie, block by block. With hosts of several ranks each rank's columns are one
            block in ``placement``, so that those of a host are one too.
    """

    def __init__(self, problem: Problem, arrays: ArrayLibrary, vectors: Sequence[Array]) -> None:
        self.problem, self.placement, self.arrays, columns = problem, placed(problem), arrays, problem.columns
        self.parted = self.placement
        if not self.placement.route.flat and len(columns) > 1:
            columns = (arrays.concat(list(columns)),)
            shards = Shards(self.parted.shards.rows, tuple((width,) for width in self.parted.shards.widths))
            self.placement = replace(self.parted, shards=shards)
        marks = [x for x in problem.marks if x is not None]
        self.own = [arrays.contiguous(x) for x in (*columns, *marks, *vectors)]
        self.blocks, self.vectors = len(columns), len(marks) + len(vectors)

    def sizes(self, rank: int) -> list[int]:
        """The leading sizes of what a rank sends."""
        shards = self.placement.shards
        return [*shards.columns[rank], *[shards.widths[rank]] * self.vectors]

    def __iter__(self) -> Iterator[tuple[int, Sequence[_Shard]]]:
        for distance, runs in visits(self.placement, self.arrays, self.own, self.sizes):
            shards = []
            for run in runs:
                vectors = iter(run.arrays[self.blocks :])
                marks = [None if x is None else next(vectors) for x in self.problem.marks]
                shards.append(_Shard(run, run.arrays[: self.blocks], marks, list(vectors)))
            yield distance, shards


def _blocks(problem: Problem, placement: Placement, shard: _Shard) -> Iterator[tuple[slice, Block]]:
    """The problem's rows against each block of a shard, with the block's place in that shard."""
    start, where = placement.shards.start(shard.run.owners[0]), slice(0, 0)
    for columns in shard.columns:
        where = slice(where.stop, where.stop + columns.shape[0])
        yield where, problem.block(columns, start + where.start, marks_of(shard.marks, where))


def forward(problem: Problem, work: local.Work, *, wanted: local.Wanted | None = None) -> local.Forward:
    """The global softmax loss, the same on every rank, and the log-sum-exps of this rank's rows and columns.

    It raises what ``gather.forward`` raises.
    """
    backend, options = work
    placement, arrays = placed(problem), backend.arrays
    two_sided = problem.column_weight is not None
    rows = list(problem.beside)

    def widths(rank: int) -> list[int]:
        return [placement.shards.widths[rank]] * 3

    returns = Returns(placement, arrays, lambda _, owner: widths(owner), lambda *each: local.merged(arrays, each))
    for distance, shards in _Ring(problem, arrays, ()):
        found: dict[int, Sequence[Array]] = {}
        for shard in shards:
            parts = []
            for _, block in _blocks(problem, placement, shard):
                backend.check(block, options)
                parts.append(backend.lse(block, two_sided, options))
            rows = [local.merged(arrays, [*rows, *(part.rows for part in parts)])]
            if two_sided:
                of_columns = local.joined(arrays, [part.columns for part in parts if part.columns is not None])
                found |= shard.run.parted(widths, of_columns)
        if two_sided:
            returns.send(distance, found)
    over = SideStatistics(*returns.finish()[placement.rank]) if two_sided else None
    loss = local.loss(problem, arrays, "float64", rows[0], over)
    return finalize_loss(problem, loss, rows[0], arrays, over)


def backward(
    problem: Problem, saved: local.Forward, upstream: Array, wanted: local.Wanted, work: local.Work
) -> local.Gradients:
    """Gradients of ``upstream * loss`` for this rank's rows and columns and for the scale: see ``Placement.factor``."""
    backend, options = work
    placement, arrays = placed(problem), backend.arrays
    weighted = scaled_weights(problem, upstream)
    mine, over = local.side_weights(weighted, saved, arrays)
    # bars are formed again where they arrive
    vectors = (*over[:2], weighted.column_weight, weighted.column_target) if over else ()
    ring = _Ring(weighted, arrays, vectors)
    row_sum = local.row_accumulator(backend, problem, wanted)

    def compute(rows: slice, shard: _Shard, into: Sequence[Array | None]) -> None:
        part = weighted.of_rows(rows)
        for (where, block), target in zip(_blocks(part, placement, shard), into, strict=True):
            columns = None
            if shard.vectors:
                n, p, weight, goal = shard.vectors
                columns = bars.side_weights(problem.terms(arrays), arrays, (n, p), weight, goal).part(where)
            backend.gradients(
                block, Weights(mine.part(rows), columns), None if row_sum is None else row_sum[rows], target, options
            )

    # the forward pass had the own block whole: of other shapes logits are rounded in another way, which float64 shows
    # and limits, which are compared again
    limited = problem.row_limits is not None or problem.column_limits is not None
    whole = arrays.dtype(problem.rows) == "float64" or limited
    sums = local.Sums(row_sum, _gradient_sums(ring, wanted.columns, backend, compute, whole=whole), None)
    return gradients_over_ranks(problem, sums, None, wanted, arrays)


def sigmoid(problem: Problem, wanted: local.Wanted | None, work: local.Work) -> tuple[Array, local.Sums | None]:
    """The global sigmoid loss and, in the same pass, the sums behind this rank's gradients."""
    backend, options = work
    placement, arrays = placed(problem), backend.arrays
    ring = _Ring(problem, arrays, ())
    row_sum = local.accumulator(backend, problem.rows, wanted is not None and (wanted.rows or wanted.scale))
    losses: list[Array] = []
    slopes: list[Array] = []

    def compute(rows: slice, shard: _Shard, into: Sequence[Array | None]) -> None:
        part = problem.of_rows(rows)
        for (_, block), target in zip(_blocks(part, placement, shard), into, strict=True):
            backend.check(block, options)
            rows_into = None if row_sum is None else row_sum[rows]
            row_loss, slope = backend.sigmoid(block, part.row_weight, rows_into, target, options)
            losses.append(local.weighted_total(arrays, part.row_weight, row_loss))
            slopes.append(arrays.total(slope))

    wants = (False,) * len(problem.columns) if wanted is None else wanted.columns
    columns = _gradient_sums(ring, wants, backend, compute)
    (total,) = summed(placement, arrays, sum(losses[1:], losses[0]))
    loss = arrays.cast(total, arrays.dtype(problem.scale))
    return loss, None if wanted is None else local.Sums(row_sum, columns, sum(slopes[1:], slopes[0]))


def _gradient_sums(
    ring: _Ring,
    wants: Sequence[bool],
    backend: Backend,
    compute: Callable[[slice, _Shard, Sequence[Array | None]], None],
    *,
    whole: bool = False,
) -> tuple[Array | None, ...]:
    """Gradient sums of this rank's columns, over all ranks' rows; ``compute(rows, shard, into)`` adds one rank's part.

    On a ring this rank computes its own block half at the start, while the first message travels, and half at the end,
    while the last one returns its sums; all of it at the start if ``whole``.
    """
    placement, m = ring.placement, ring.problem.rows.shape[0]
    travels = tuple(wants) if ring.blocks == len(wants) else (any(wants),)
    halved = placement.size > 1 and placement.route.flat and any(wants) and not whole
    half = (m + 1) // 2 if halved else m

    def sizes(rank: int) -> list[int]:
        return [k for k, want in zip(placement.shards.columns[rank], travels, strict=True) if want]

    def part(rows: slice, shard: _Shard) -> dict[int, Sequence[Array]]:
        into = [local.accumulator(backend, x, want) for x, want in zip(shard.columns, travels, strict=True)]
        compute(rows, shard, into)
        return shard.run.parted(sizes, [x for x in into if x is not None])

    own = None
    returns = Returns(placement, backend.arrays, lambda _, owner: sizes(owner), added)
    for distance, shards in ring:
        rows = slice(0, half if own is None else m)
        own = own or shards[0]
        # no name keeps what is sent: its memory is the message's
        found = {owner: xs for shard in shards for owner, xs in part(rows, shard).items()}
        if any(wants):
            returns.send(distance, found)
    if not any(wants):
        return (None,) * len(wants)
    rest: Sequence[Array] = ()
    if half < m:
        assert own is not None
        rest = part(slice(half, m), own)[placement.rank]
    sums = returns.finish()[placement.rank]
    sums = added(sums, rest) if rest else sums
    if ring.blocks < len(wants):
        return by_block(ring.parted, sums[0], tuple(wants))
    each = iter(sums)
    return tuple(next(each) if want else None for want in wants)
