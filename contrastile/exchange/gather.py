"""The gather (DisCo Alg. 1): every rank sees all columns, computes its own rows, and the columns' gradients are summed.

Fewer and larger messages than the ring's, for shards that are computed faster than they travel; O(b d) memory per rank.
One rank's rows give every column a part of its log-sum-exp: the parts go home and are merged there, so that one pass
over the tiles serves both directions.

Where messages take nothing from the kernels beside which they travel, the columns are taken in two parts: the others'
columns arrive while this rank's own are computed, and their gradient sums go home likewise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from contrastile.backends.arrays import ArrayLibrary
from contrastile.backends.contract import Array, Backend, Block, ColumnForm, Options, Weights
from contrastile.exchange import buffers, local
from contrastile.exchange.communicator import Pending
from contrastile.exchange.placement import Placement, Shards
from contrastile.exchange.problem import Problem
from contrastile.exchange.shared import aside, average, finish, placed, scaled_weights, summed, together


def gathered(placement: Placement, arrays: ArrayLibrary, own: Array) -> Array:
    """Every rank's vectors or features over its columns, joined in the order of the ranks."""
    widths = placement.shards.widths
    own = arrays.contiguous(own)
    if placement.size == 1:
        return own
    whole = arrays.empty((sum(widths), *own.shape[1:]), arrays.dtype(own), own)
    placement.communicator.all_gather(own, whole, widths).wait()
    return whole


@dataclass(frozen=True, slots=True)
class _Part:
    """This rank's rows against the columns of some ranks, joined in the order of the ranks."""

    ranks: tuple[int, ...]
    block: Block

    def whole(self, shards: Shards) -> bool:
        """Whether these are the columns of all ranks."""
        return len(self.ranks) == len(shards.rows)

    def along(self, shards: Shards, x: Array | None, arrays: ArrayLibrary) -> Array | None:
        """These ranks' part of a vector over all columns."""
        if x is None or self.whole(shards):
            return x
        parts = buffers.split(x, shards.widths)
        return arrays.concat([parts[r] for r in self.ranks])

    def by_rank(self, shards: Shards, x: Array) -> dict[int, Array]:
        """A vector over these columns, cut at the ranks' borders."""
        return dict(zip(self.ranks, buffers.split(x, [shards.widths[r] for r in self.ranks]), strict=True))


def _parts(problem: Problem, arrays: ArrayLibrary, kept: Array | None = None) -> Iterator[_Part]:
    """All columns at once; or this rank's own, and then the others', which travel meanwhile.

    ``kept`` is what an earlier pass gathered: the columns of the last part.
    """
    placement = placed(problem)
    ids = problem.column_ids
    if ids is not None:
        ids = gathered(placement, arrays, ids)
    if not aside(placement, problem):
        columns = gathered(placement, arrays, arrays.concat(list(problem.columns))) if kept is None else kept
        # the pairs' numbers are those of the joined columns already
        yield _Part(tuple(range(placement.size)), problem.block(columns, 0, ids))
        return
    me, pending = placement.rank, None
    own = arrays.contiguous(arrays.concat(list(problem.columns)))
    if kept is None:
        pending, kept = _others(placement, arrays, own)
    mine = slice(placement.start, placement.start + own.shape[0])
    yield _Part((me,), problem.block(own, mine.start, None if ids is None else ids[mine]))
    if pending is not None:
        pending.wait()
    rest = replace(
        problem,
        positives=_without(mine, problem.positives, arrays),
        excluded=_without(mine, problem.excluded, arrays),
    )
    there = None if ids is None else arrays.concat([ids[: mine.start], ids[mine.stop :]])
    yield _Part(tuple(r for r in range(placement.size) if r != me), rest.block(kept, 0, there))


def _others(placement: Placement, arrays: ArrayLibrary, own: Array) -> tuple[Pending, Array]:
    """Every other rank's columns, joined in the order of the ranks once they have arrived."""
    n, me, widths = placement.size, placement.rank, list(placement.shards.widths)
    widths[me] = 0
    whole = arrays.empty((sum(widths), *own.shape[1:]), arrays.dtype(own), own)
    outgoing = [own[:0] if r == me else own for r in range(n)]
    return placement.communicator.all_to_all(outgoing, buffers.split(whole, widths)), whole


def _without(mine: slice, index: Array | None, arrays: ArrayLibrary) -> Array | None:
    """Numbers of columns as they are once those in ``mine`` are left out, and -1 for these."""
    if index is None:
        return None
    later = arrays.where(index >= mine.stop, index - (mine.stop - mine.start), -1)
    return arrays.where(index < mine.start, index, later)


@local.ieee
def forward(problem: Problem, backend: Backend, options: Options, *, keep: bool = False) -> local.Forward:
    """The global softmax loss, the same on every rank, and the log-sum-exps of this rank's rows and columns.

    Args:
        problem: this rank's part of it.
        backend: computes its blocks.
        options: how.
        keep: see ``local.forward``; of columns that are taken at once.

    Raises:
        UnsupportedProblemError: the backend refuses a block.
        ExchangeError: a rank did not answer within the deadline.
    """
    placement, arrays = placed(problem), backend.arrays
    two_sided = problem.column_weight is not None
    row_lse = row_positive = columns = kept = None
    state: dict[int, list[Array]] = {}
    for part in _parts(problem, arrays):
        backend.check(part.block, options)
        lse = local.survey(backend, keep and part.whole(placement.shards))
        found = lse(part.block, two_sided, options)
        row_lse = found.row_lse if row_lse is None else arrays.merge(row_lse, found.row_lse)
        row_positive = found.row_positive if row_positive is None else row_positive + found.row_positive
        if two_sided:
            logs, positive = (part.by_rank(placement.shards, x) for x in (found.column_lse, found.column_positive))
            state |= {r: [logs[r], positive[r]] for r in part.ranks}
        # what the backward pass need not gather again, and what it need not compute again
        columns = part.block.columns if placement.size > 1 else None
        kept = found.kept
    loss = arrays.mean_excess(row_lse, row_positive, problem.row_weight, problem.row_target)
    column_lse = positives = None
    if two_sided:
        for lse_part, positive_part in _home(placement, arrays, state):
            column_lse = lse_part if column_lse is None else arrays.merge(column_lse, lse_part)
            positives = positive_part if positives is None else positives + positive_part
        loss = loss + arrays.mean_excess(column_lse, positives, problem.column_weight, problem.column_target)
    return replace(together(problem, loss, row_lse, column_lse, arrays), gathered=columns, kept=kept)


def _home(
    placement: Placement, arrays: ArrayLibrary, state: Mapping[int, Sequence[Array]]
) -> Iterator[Sequence[Array]]:
    """What each rank found for this rank's columns, from what this rank found for everybody's."""
    n = placement.size
    if n == 1:
        yield state[0]
        return
    # one message for all of it
    outgoing = [arrays.concat(list(state[rank])) for rank in range(n)]
    own, vectors = placement.shards.widths[placement.rank], len(state[0])
    incoming = [arrays.empty((vectors * own,), arrays.dtype(outgoing[0]), outgoing[0]) for _ in range(n)]
    placement.communicator.all_to_all(outgoing, incoming).wait()
    for found in incoming:
        yield [found[i * own : (i + 1) * own] for i in range(vectors)]


@local.ieee
def backward(
    problem: Problem,
    saved: local.Forward,
    upstream: Array,
    wanted: local.Wanted,
    backend: Backend,
    options: Options,
) -> local.Gradients:
    """Gradients of ``upstream * loss`` for this rank's rows and columns and for the scale: see ``Placement.factor``."""
    placement, arrays = placed(problem), backend.arrays
    weighted = scaled_weights(problem, upstream)
    own, *others = _parts(weighted, arrays, saved.gathered)
    columns: Sequence[Array | None] = [None] * 3
    if weighted.column_weight is not None:
        columns = _over_columns(placement, arrays, (saved.column_lse, weighted.column_weight, weighted.column_target))

    def weights(part: _Part) -> Weights:
        side = [part.along(placement.shards, x, arrays) for x in columns]
        return Weights(saved.row_lse, weighted.row_weight, weighted.row_target, *side)

    if backend.finished is not None and wanted.rows and not others:
        # this rank's rows meet every column here: only the columns' sums have other ranks' parts to come
        form: ColumnForm | None = "sums" if any(wanted.columns) else None
        found = backend.finished(own.block, replace(weights(own), kept=saved.kept), None, form, options)
        sums = local.Sums(None, _scattered(placement, arrays, found.columns, wanted.columns), None)
        missing = replace(wanted, rows=False, scale=False)
        rest = finish(problem.rows, problem.scale, placement, sums, None, missing, arrays)
        d_scale = average(placement, arrays, found.inner, problem.scale) if wanted.scale else None
        return replace(rest, rows=found.rows, scale=d_scale)
    row_sum = local.accumulator(backend, problem.rows, wanted.rows or wanted.scale)

    def add(part: _Part, column_sum: Array | None) -> None:
        backend.gradients(part.block, weights(part), row_sum, column_sum, options)

    sums = local.Sums(row_sum, _swept(placement, backend, (own, *others), wanted.columns, add), None)
    return finish(problem.rows, problem.scale, placement, sums, None, wanted, arrays)


def _over_columns(placement: Placement, arrays: ArrayLibrary, vectors: Sequence[Array]) -> Sequence[Array]:
    """Every rank's vectors over its columns, joined; one message for all of them."""
    if placement.size == 1:
        return vectors
    own = arrays.concat(list(vectors)).reshape((len(vectors), -1))
    whole = gathered(placement, arrays, own.T)
    return [arrays.contiguous(whole[:, i]) for i in range(len(vectors))]


def _swept(
    placement: Placement,
    backend: Backend,
    parts: Sequence[_Part],
    wants: tuple[bool, ...],
    add: Callable[[_Part, Array | None], None],
) -> tuple[Array | None, ...]:
    """The gradient sums of this rank's column blocks, over all ranks' rows; ``add(part, into)`` computes one part.

    This rank's own part is the last: meanwhile the others' sums go home.
    """
    arrays, me = backend.arrays, placement.rank
    *mine, last = parts
    found = local.accumulator(backend, last.block.columns, any(wants))
    add(last, found)
    if not mine:
        return _scattered(placement, arrays, found, wants)
    (own,) = mine
    if found is None:
        add(own, None)
        return (None,) * len(wants)
    total = local.accumulator(backend, own.block.columns, True)
    outgoing = {me: total[:0]} | last.by_rank(placement.shards, found)  # type: ignore[index]
    arriving = buffers.like(total, placement.size - 1)
    arriving.insert(me, total[:0])  # type: ignore[index]
    pending = placement.communicator.all_to_all([outgoing[r] for r in range(placement.size)], arriving)
    add(own, total)
    pending.wait()
    arriving[me] = total
    # in the order of the ranks, whose first part is not needed any more
    buffers.add_up(arriving, arriving[0])
    return _by_block(placement, arrays, arriving[0], wants)


def _scattered(
    placement: Placement, arrays: ArrayLibrary, whole: Array | None, wants: tuple[bool, ...]
) -> tuple[Array | None, ...]:
    """The gradient sums of this rank's column blocks, over all ranks' rows."""
    if whole is None:
        return (None,) * len(wants)
    shards, own = placement.shards, whole
    if placement.size > 1:
        width = shards.widths[placement.rank]
        own = arrays.empty((width, *whole.shape[1:]), arrays.dtype(whole), whole)
        placement.communicator.reduce_scatter(whole, own, shards.widths).wait()
    return _by_block(placement, arrays, own, wants)


def _by_block(
    placement: Placement, arrays: ArrayLibrary, own: Array, wants: tuple[bool, ...]
) -> tuple[Array | None, ...]:
    """What is wanted of this rank's columns, block by block."""
    places = placement.shards.blocks(placement.rank)
    parts = [own[where] if want else None for where, want in zip(places, wants, strict=True)]
    # gradients of several blocks must not share memory: an operator's results may not
    return tuple(parts if len(parts) == 1 else [_copied(arrays, x) for x in parts])


def _copied(arrays: ArrayLibrary, x: Array | None) -> Array | None:
    if x is None:
        return None
    copy = arrays.empty(tuple(x.shape), arrays.dtype(x), x)
    copy[...] = x
    return copy


@local.ieee
def sigmoid(
    problem: Problem, wanted: local.Wanted | None, backend: Backend, options: Options
) -> tuple[Array, local.Sums | None]:
    """The global sigmoid loss and, in the same pass, the sums behind this rank's gradients."""
    placement, arrays = placed(problem), backend.arrays
    row_sum = local.accumulator(backend, problem.rows, wanted is not None and (wanted.rows or wanted.scale))
    wants = (False,) * len(problem.columns) if wanted is None else wanted.columns
    losses: list[Array] = []
    slopes: list[Array] = []

    def add(part: _Part, column_sum: Array | None) -> None:
        backend.check(part.block, options)
        row_loss, slope = backend.sigmoid(part.block, problem.row_weight, row_sum, column_sum, options)
        losses.append(local.weighted_total(arrays, problem.row_weight, row_loss))
        slopes.append(slope)

    columns = _swept(placement, backend, tuple(_parts(problem, arrays)), wants, add)
    loss = summed(placement, arrays, sum(losses[1:], losses[0]))
    value = arrays.cast(loss, arrays.dtype(problem.scale))
    if wanted is None:
        return value, None
    totals = [arrays.total(x) for x in slopes]
    return value, local.Sums(row_sum, columns, sum(totals[1:], totals[0]))
