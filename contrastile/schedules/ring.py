"""The ring (Inf-CL Alg. 1 and 3, corrected), and the ring of hosts: the rows stay, the shards of the columns travel.

At step j rank i holds the shard of rank ``(i - j) mod n``; on two levels it holds the shards of the host j behind its
own: see ``hosts``. The next shard is posted before the current block is computed. A shard's results follow one step
behind it: a rank waits for them after it has computed the next block, and they return to the owner after n hops.
Memory is O(b d / n) per rank, or O(b d / hosts).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from contrastile.backends import bars
from contrastile.backends.arrays import ArrayLibrary
from contrastile.backends.contract import Array, Backend, Block, SideStatistics, Weights
from contrastile.schedules import local
from contrastile.schedules.gather import split_by_block
from contrastile.schedules.hosts import Returns, Run, add_in_place, visits
from contrastile.schedules.placement import Placement, Shards
from contrastile.schedules.problem import Problem, slice_marks
from contrastile.schedules.sums import all_reduce, finalize_loss, gradients_over_ranks, placed, scaled_weights


@dataclass(frozen=True, slots=True)
class _Shard:
    """A run that a rank holds: its column blocks, the marks of its columns, and the vectors over them."""

    run: Run
    columns: Sequence[Array]
    marks: Sequence[Array | None]
    vectors: Sequence[Array]


class _Ring:
    """The arrays that travel around the ring, and their sizes on each rank.

    Attributes:
        blockwise: the problem's placement. In ``placement`` each rank's columns are one block if a host has several
            ranks, so that a host's columns are one block too.
    """

    def __init__(self, problem: Problem, arrays: ArrayLibrary, vectors: Sequence[Array]) -> None:
        self.problem, self.placement, self.arrays, columns = problem, placed(problem), arrays, problem.columns
        self.blockwise = self.placement
        if not self.placement.route.flat and len(columns) > 1:
            columns = (arrays.concat(list(columns)),)
            shards = Shards(self.blockwise.shards.rows, tuple((width,) for width in self.blockwise.shards.widths))
            self.placement = replace(self.blockwise, shards=shards)
        marks = [x for x in problem.marks if x is not None]
        self.own = [arrays.contiguous(x) for x in (*columns, *marks, *vectors)]
        self.blocks, self.vectors = len(columns), len(marks) + len(vectors)

    def sizes(self, rank: int) -> list[int]:
        """The leading sizes of the arrays that a rank sends."""
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
    """The problem's rows against each block of a shard, with the block's span in that shard."""
    start, span = placement.shards.start(shard.run.owners[0]), slice(0, 0)
    for columns in shard.columns:
        span = slice(span.stop, span.stop + columns.shape[0])
        yield span, problem.block(columns, start + span.start, slice_marks(shard.marks, span))


def forward(problem: Problem, work: local.Work, *, wanted: local.Wanted | None = None) -> local.Forward:
    """The global softmax loss, the same on every rank, and the log-sum-exps of this rank's rows and columns.

    It raises the errors of ``gather.forward``.
    """
    backend, options = work
    placement, arrays = placed(problem), backend.arrays
    two_sided = problem.column_weight is not None
    rows = list(problem.beside)

    def widths(rank: int) -> list[int]:
        return [placement.shards.widths[rank]] * 3

    returns = Returns(placement, arrays, lambda _, owner: widths(owner), lambda *xs: local.merge_parts(arrays, xs))
    for distance, shards in _Ring(problem, arrays, ()):
        results: dict[int, Sequence[Array]] = {}
        for shard in shards:
            parts = []
            for _, block in _blocks(problem, placement, shard):
                backend.check(block, options)
                parts.append(backend.lse(block, two_sided, options))
            rows = [local.merge_parts(arrays, [*rows, *(part.rows for part in parts)])]
            if two_sided:
                columns = local.join_parts(arrays, [part.columns for part in parts if part.columns is not None])
                results |= shard.run.parted(widths, columns)
        if two_sided:
            returns.send(distance, results)
    column_side = SideStatistics(*returns.finish()[placement.rank]) if two_sided else None
    loss = local.loss(problem, arrays, "float64", rows[0], column_side)
    return finalize_loss(problem, loss, rows[0], arrays, column_side)


def backward(
    problem: Problem, saved: local.Forward, upstream: Array, wanted: local.Wanted, work: local.Work
) -> local.Gradients:
    """Gradients of ``upstream * loss`` for this rank's rows and columns and for the scale: see ``Placement.factor``."""
    backend, options = work
    placement, arrays = placed(problem), backend.arrays
    weighted = scaled_weights(problem, upstream)
    by_row, by_column = local.side_weights(weighted, saved, arrays)
    # each rank computes the bars of a shard from the vectors that arrive with it
    vectors = (*by_column[:2], weighted.column_weight, weighted.column_target) if by_column else ()
    ring = _Ring(weighted, arrays, vectors)
    row_sum = local.row_accumulator(backend, problem, wanted)

    def compute(rows: slice, shard: _Shard, column_sums: Sequence[Array | None]) -> None:
        row_problem = weighted.of_rows(rows)
        for (span, block), column_sum in zip(_blocks(row_problem, placement, shard), column_sums, strict=True):
            side = None
            if shard.vectors:
                n, p, weight, target = shard.vectors
                side = bars.side_weights(problem.terms(arrays), arrays, (n, p), weight, target).part(span)
            backend.gradients(
                block, Weights(by_row.part(rows), side), None if row_sum is None else row_sum[rows], column_sum, options
            )

    # the forward pass computed the own block whole. Blocks of another shape may round logits differently, which shows
    # in float64, and where limits are compared again
    has_limits = problem.row_limits is not None or problem.column_limits is not None
    is_whole = arrays.dtype(problem.rows) == "float64" or has_limits
    sums = local.Sums(row_sum, _gradient_sums(ring, wanted.columns, backend, compute, is_whole=is_whole), None)
    return gradients_over_ranks(problem, sums, None, wanted, arrays)


def sigmoid(problem: Problem, wanted: local.Wanted | None, work: local.Work) -> tuple[Array, local.Sums | None]:
    """The global sigmoid loss and, from the same pass, the sums that give this rank's gradients."""
    backend, options = work
    placement, arrays = placed(problem), backend.arrays
    ring = _Ring(problem, arrays, ())
    row_sum = local.accumulator(backend, problem.rows, wanted is not None and (wanted.rows or wanted.scale))
    losses: list[Array] = []
    slopes: list[Array] = []

    def compute(rows: slice, shard: _Shard, column_sums: Sequence[Array | None]) -> None:
        row_problem = problem.of_rows(rows)
        for (_, block), column_sum in zip(_blocks(row_problem, placement, shard), column_sums, strict=True):
            backend.check(block, options)
            row_part = None if row_sum is None else row_sum[rows]
            row_loss, slope = backend.sigmoid(block, row_problem.row_weight, row_part, column_sum, options)
            losses.append(local.weighted_total(arrays, row_problem.row_weight, row_loss))
            slopes.append(arrays.total(slope))

    wanted_columns = (False,) * len(problem.columns) if wanted is None else wanted.columns
    columns = _gradient_sums(ring, wanted_columns, backend, compute)
    (total,) = all_reduce(placement, arrays, sum(losses[1:], losses[0]))
    loss = arrays.cast(total, arrays.dtype(problem.scale))
    return loss, None if wanted is None else local.Sums(row_sum, columns, sum(slopes[1:], slopes[0]))


def _gradient_sums(
    ring: _Ring,
    wanted_columns: Sequence[bool],
    backend: Backend,
    compute: Callable[[slice, _Shard, Sequence[Array | None]], None],
    *,
    is_whole: bool = False,
) -> tuple[Array | None, ...]:
    """Gradient sums of this rank's columns, over all ranks' rows; ``compute(rows, shard, column_sums)`` adds to them.

    On a ring this rank computes half of its own block at the start, while the first message travels, and half at the
    end, while the last message returns its sums; if ``is_whole``, it computes all of it at the start.
    """
    placement, m = ring.placement, ring.problem.rows.shape[0]
    flags = tuple(wanted_columns) if ring.blocks == len(wanted_columns) else (any(wanted_columns),)
    is_halved = placement.size > 1 and placement.route.flat and any(wanted_columns) and not is_whole
    half = (m + 1) // 2 if is_halved else m

    def sizes(rank: int) -> list[int]:
        return [k for k, is_wanted in zip(placement.shards.columns[rank], flags, strict=True) if is_wanted]

    def compute_part(rows: slice, shard: _Shard) -> dict[int, Sequence[Array]]:
        sums = [local.accumulator(backend, x, is_wanted) for x, is_wanted in zip(shard.columns, flags, strict=True)]
        compute(rows, shard, sums)
        return shard.run.parted(sizes, [x for x in sums if x is not None])

    own_shard = None
    returns = Returns(placement, backend.arrays, lambda _, owner: sizes(owner), add_in_place)
    for distance, shards in ring:
        rows = slice(0, half if own_shard is None else m)
        own_shard = own_shard or shards[0]
        # no variable refers to the sums that are sent, so their memory is freed with the message
        results = {owner: xs for shard in shards for owner, xs in compute_part(rows, shard).items()}
        if any(wanted_columns):
            returns.send(distance, results)
    if not any(wanted_columns):
        return (None,) * len(wanted_columns)
    second_half: Sequence[Array] = ()
    if half < m:
        assert own_shard is not None
        second_half = compute_part(slice(half, m), own_shard)[placement.rank]
    sums = returns.finish()[placement.rank]
    sums = add_in_place(sums, second_half) if second_half else sums
    if ring.blocks < len(wanted_columns):
        return split_by_block(ring.blockwise, sums[0], tuple(wanted_columns))
    remaining = iter(sums)
    return tuple(next(remaining) if is_wanted else None for is_wanted in wanted_columns)
