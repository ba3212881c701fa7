"""The ring (Inf-CL Alg. 1 and 3, corrected): the rows stay, the shards of the columns go from rank to rank.

At step j rank i holds the shard of rank ``(i - j) mod n``. The next shard is posted before the current block is
computed. What the ranks add up for a shard follows one step behind it: a rank waits for it only after the next block is
computed, and it returns to its owner after n hops. Memory is O(b d / n) per rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from contrastile.backends import bars
from contrastile.backends.arrays import ArrayLibrary
from contrastile.backends.contract import Array, Backend, Block, SideStatistics, Weights
from contrastile.comm.communicator import Pending
from contrastile.schedules import local
from contrastile.schedules.placement import Placement
from contrastile.schedules.problem import Problem, marks_of
from contrastile.schedules.sums import finalize_loss, gradients_over_ranks, placed, scaled_weights, summed


def visits(
    placement: Placement,
    arrays: ArrayLibrary,
    own: Sequence[Array],
    sizes: Callable[[int], Sequence[int]],
    count: int | None = None,
) -> Iterator[tuple[int, Sequence[Array]]]:
    """Each rank's arrays, with the rank that owns them: this rank's first, then its predecessor's, and so on.

    Args:
        placement: of the problem.
        arrays: their library.
        own: this rank's arrays, contiguous; not to be changed before the second step.
        sizes: a rank's number -> the leading sizes of its arrays.
        count: of how many ranks; None for all.
    """
    held, n = list(own), placement.size
    count = n if count is None else count
    for step in range(count):
        owner = (placement.rank - step) % n
        pending, following = None, held
        if step + 1 < count:
            following = _buffers(arrays, own, sizes((owner - 1) % n))
            pending = placement.communicator.shift(held, following)
        yield owner, held
        if pending is not None:
            pending.wait()
        held = following


def _buffers(arrays: ArrayLibrary, like: Sequence[Array], sizes: Sequence[int]) -> list[Array]:
    """Unwritten arrays of these leading sizes, and otherwise like those given."""
    return [arrays.empty((k, *x.shape[1:]), arrays.dtype(x), x) for k, x in zip(sizes, like, strict=True)]


class RingAccumulator:
    """Arrays that every rank adds to for each shard; they travel one step behind the shard.

    ``combine(arrived, here)`` combines an array of the earlier ranks with this rank's; one function per array, or one
    for all.
    """

    def __init__(self, placement: Placement, arrays: ArrayLibrary, *combine: Callable[[Array, Array], Array]) -> None:
        self.placement, self.arrays, self.combine = placement, arrays, combine
        self._arriving: list[Array] = []
        self._sent: Sequence[Array] = ()
        self._pending: Pending | None = None

    def send_on(self, owner: int, here: Sequence[Array], sizes: Callable[[int], Sequence[int]]) -> None:
        """Combine what has arrived for this owner's shard with what was found here, and send it to the next rank."""
        whole = self._combined(here)
        n = self.placement.size
        if n == 1 or not whole:
            self._arriving = whole
            return
        self._arriving = _buffers(self.arrays, here, sizes((owner - 1) % n))
        # kept: the message owns it until the wait
        self._sent = whole
        self._pending = self.placement.communicator.shift(whole, self._arriving)

    def _combined(self, here: Sequence[Array]) -> list[Array]:
        if self._pending is None:
            return list(here)
        self._pending.wait()
        each = self.combine * len(here) if len(self.combine) == 1 else self.combine
        return [combine(a, b) for combine, a, b in zip(each, self._arriving, here, strict=True)]

    def result(self) -> list[Array]:
        """What all ranks found for this rank's own shard, once every shard has been sent on."""
        if self._pending is not None:
            self._pending.wait()
        return self._arriving


@dataclass(frozen=True, slots=True)
class _Shard:
    """The shard that a rank holds now: its column blocks, the marks of its columns, and vectors over them."""

    owner: int
    columns: Sequence[Array]
    marks: Sequence[Array | None]
    vectors: Sequence[Array]


class _Ring:
    """What travels around the ring, and how much of it each rank has."""

    def __init__(self, problem: Problem, arrays: ArrayLibrary, vectors: Sequence[Array]) -> None:
        self.problem, self.placement, self.arrays = problem, placed(problem), arrays
        marks = [x for x in problem.marks if x is not None]
        self.own = [arrays.contiguous(x) for x in (*problem.columns, *marks, *vectors)]
        self.blocks, self.vectors = len(problem.columns), len(marks) + len(vectors)

    def sizes(self, rank: int) -> list[int]:
        """The leading sizes of what a rank sends."""
        shards = self.placement.shards
        return [*shards.columns[rank], *[shards.widths[rank]] * self.vectors]

    def __iter__(self) -> Iterator[_Shard]:
        for owner, held in visits(self.placement, self.arrays, self.own, self.sizes):
            vectors = iter(held[self.blocks :])
            marks = [None if x is None else next(vectors) for x in self.problem.marks]
            yield _Shard(owner, held[: self.blocks], marks, list(vectors))


def _blocks(problem: Problem, placement: Placement, shard: _Shard) -> Iterator[tuple[slice, Block]]:
    """The problem's rows against each block of a shard, with the block's place in that shard."""
    for where, columns in zip(placement.shards.blocks(shard.owner), shard.columns, strict=True):
        start = placement.shards.start(shard.owner) + where.start
        yield where, problem.block(columns, start, marks_of(shard.marks, where))


@local.ieee
def forward(problem: Problem, work: local.Work, *, wanted: local.Wanted | None = None) -> local.Forward:
    """The global softmax loss, the same on every rank, and the log-sum-exps of this rank's rows and columns.

    Raises:
        UnsupportedProblemError: the backend refuses one of the blocks.
        ExchangeError: a rank did not answer within the deadline.
    """
    backend, options = work
    placement, arrays = placed(problem), backend.arrays
    two_sided = problem.column_weight is not None
    rows = list(problem.beside)
    accumulator = RingAccumulator(placement, arrays, arrays.merge, arrays.merge, _added)

    def widths(rank: int) -> list[int]:
        return [placement.shards.widths[rank]] * 3

    for shard in _Ring(problem, arrays, ()):
        parts = []
        for _, block in _blocks(problem, placement, shard):
            backend.check(block, options)
            parts.append(backend.lse(block, two_sided, options))
        rows = [local.merged(arrays, [*rows, *(part.rows for part in parts)])]
        if two_sided:
            of_columns = local.joined(arrays, [part.columns for part in parts if part.columns is not None])
            accumulator.send_on(shard.owner, of_columns, widths)
    over = SideStatistics(*accumulator.result()) if two_sided else None
    loss = local.loss(problem, arrays, "float64", rows[0], over)
    return finalize_loss(problem, loss, rows[0], arrays, over)


@local.ieee
def backward(
    problem: Problem, saved: local.Forward, upstream: Array, wanted: local.Wanted, work: local.Work
) -> local.Gradients:
    """Gradients of ``upstream * loss`` for this rank's rows and columns and for the scale: see ``Placement.factor``."""
    backend, options = work
    placement, arrays = placed(problem), backend.arrays
    weighted = scaled_weights(problem, upstream)
    mine, over = local.side_weights(weighted, saved, arrays)
    # bars are formed again where they arrive
    ring = _Ring(weighted, arrays, (*over[:2], weighted.column_weight, weighted.column_target) if over else ())
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
    return gradients_over_ranks(problem.rows, problem.scale, placement, sums, None, wanted, arrays)


@local.ieee
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

    This rank computes its own block half at the start, while the first message travels, and half at the end, while the
    last one returns its sums; all of it at the start if ``whole``.
    """
    placement, m = ring.placement, ring.problem.rows.shape[0]
    half = (m + 1) // 2 if placement.size > 1 and any(wants) and not whole else m
    accumulator = RingAccumulator(placement, backend.arrays, _added)

    def sizes(rank: int) -> list[int]:
        return [k for k, want in zip(placement.shards.columns[rank], wants, strict=True) if want]

    def part(rows: slice, shard: _Shard) -> list[Array]:
        into = [local.accumulator(backend, x, want) for x, want in zip(shard.columns, wants, strict=True)]
        compute(rows, shard, into)
        return [x for x in into if x is not None]

    own = None
    for shard in ring:
        first = shard.owner == placement.rank
        own = shard if first else own
        # no name keeps what is sent: its memory is the message's
        accumulator.send_on(shard.owner, part(slice(0, half if first else m), shard), sizes)
    rest: Sequence[Array | None] = [None] * sum(wants)
    if half < m:
        assert own is not None
        rest = part(slice(half, m), own)
    found = map(_added, accumulator.result(), rest)
    return tuple(next(found) if want else None for want in wants)


def _added(x: Array, y: Array | None) -> Array:
    """X, with y added in place."""
    if y is not None:
        x += y
    return x
