"""The blocked schedule: features stay where they are kept, as a rule on the host, and come to the device in blocks.

A block of rows stays while all blocks of columns pass, each copied while the block before it is computed. The rows'
gradient sums stay with them; those of the columns go home and come back, in the state dtype, so that they add up as
they would on the device. The device holds two blocks of rows, two of columns, three of sums, and O(m + n) numbers.

Rows against themselves are cut once, and each pair of blocks is computed once. What earlier blocks have added up for a
block of rows, as their columns, comes to the device with its last block, that against itself.

``Blocking.block`` decides which numbers are added in which order, and ``Blocking.device`` does not: every block is
copied to the same buffers wherever its features are, so that the bits are those of the same blocks of features on the
device. A problem of one block is computed there as ``local`` computes it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from contrastile.backends.arrays import ArrayLibrary, library_of, transfer
from contrastile.backends.contract import Array, Block, SideStatistics, Weights
from contrastile.schedules import local, triangle
from contrastile.schedules.beside import alongside
from contrastile.schedules.problem import Problem, marks_of


@dataclass(frozen=True, slots=True)
class _Part:
    """A block of one side.

    Attributes:
        matrix: the number of the matrix that it is cut from.
        here: which of that matrix's rows.
        side: their place among all rows, or all columns, of the problem.
    """

    matrix: int
    here: slice
    side: slice

    @property
    def length(self) -> int:
        return int(self.here.stop - self.here.start)


def _parts(matrices: Sequence[Array], most: int) -> list[_Part]:
    found, start = [], 0
    for number, x in enumerate(matrices):
        for first in range(0, x.shape[0], most):
            here = slice(first, min(first + most, x.shape[0]))
            found.append(_Part(number, here, slice(start + here.start, start + here.stop)))
        start += x.shape[0]
    return found


@dataclass(frozen=True, slots=True)
class _StagedBlock:
    """A block of rows against a block of columns, on the device; whether it is the first, and the last, of these rows.

    Attributes:
        slot: which of two buffers the columns, and their sums, are in.
        within: of a block of rows against itself, the problem; None for any other.
    """

    row: _Part
    column: _Part
    slot: int
    block: Block
    first: bool
    last: bool
    within: Problem | None


class _Blocks:
    """The blocks of a problem, and the copies that stage them on the device, for one pass.

    Of the problem the features are of the caller's library, ``source``, and all else is of the backend's, ``arrays``.
    The parts of rows against themselves are the columns' too.
    """

    def __init__(self, problem: Problem, arrays: ArrayLibrary) -> None:
        # imported when called: ``import contrastile`` imports nothing but the standard library
        from contrastile.backends.staging import Staging

        blocking, rows = problem.blocking, problem.rows
        assert blocking is not None
        self.rows, self.columns = (_parts(x, blocking.block) for x in ([rows], problem.columns or (rows,)))
        self.source, self.arrays = library_of(rows), arrays
        self.staging = Staging(blocking.device, rows.device)

    def inside(self, x: Any) -> Array:
        """A tensor on the device in the backend's library: the same memory."""
        return transfer(x, self.source, self.arrays)

    def outside(self, x: Array, dtype: str) -> Any:
        """An array of the backend's in the caller's library, rounded to a dtype."""
        return self.source.cast(transfer(x, self.arrays, self.source), dtype)

    def buffer(self, parts: Sequence[_Part], width: int, dtype: str) -> Any:
        return self.staging.buffer(max((x.length for x in parts), default=0), width, dtype)

    def staged(self, problem: Problem, sums: _Sums | None = None) -> Iterator[_StagedBlock]:
        """Every block of rows against every block of columns, while the next one's features are on their way."""
        stay, width, dtype = len(self.columns) == 1, problem.rows.shape[1], self.source.dtype(problem.rows)
        matrices, every = problem.columns or (problem.rows,), range(len(self.columns))
        order = [(i, j) for i in range(len(self.rows)) for j in (every if problem.columns else (*every[i + 1 :], i))]
        starts = [k == 0 or order[k - 1][0] != i for k, (i, _) in enumerate(order)]
        rows = [self.buffer(self.rows, width, dtype) for _ in self.rows[:2]]
        columns = [self.buffer(self.columns, width, dtype) for _ in self.columns[:2]]

        def load(k: int) -> None:
            i, j = order[k]
            row, column = self.rows[i], self.columns[j]
            if starts[k]:
                self.staging.load(problem.rows[row.here], rows[i % 2])
            if (i == 0 or not stay) and (problem.columns or i != j):
                self.staging.load(matrices[column.matrix][column.here], columns[k % len(columns)])
            if i > 0 and sums is not None:
                sums.load(column, k % len(columns))

        load(0)
        part = problem
        for k, (i, j) in enumerate(order):
            if k + 1 < len(order):
                # into the buffers of the block before this one, whose work is queued
                load(k + 1)
            row, column, slot = self.rows[i], self.columns[j], k % len(columns)
            if starts[k]:
                features = self.inside(self.staging.arrived(rows[i % 2]))
                part = replace(problem.of_rows(row.side), rows=features)
            ends = k + 1 == len(order) or starts[k + 1]
            place = row, column, slot
            if not problem.columns and i == j:
                own, whole = triangle.within(part, row.side.start), slice(0, row.length)
                yield _StagedBlock(*place, triangle.block(own, whole, whole), starts[k], ends, own)
                continue
            features = self.inside(self.staging.arrived(columns[slot]))
            marks = marks_of(problem.marks, column.side)
            given = features, column.side.start, marks
            block = part.block(*given) if problem.columns else triangle.across(part, *given)
            yield _StagedBlock(*place, block, starts[k], ends, None)


class _Sums:
    """The sums behind the gradients: on the device while they grow, at home when they are complete.

    Attributes:
        rows: the rows' gradient, or their sums, at home; None where not wanted.
        columns: the columns' likewise.
        inner: ``sum_i <row_i, (G K)_i>``, 0-d float64; None where not wanted.
    """

    def __init__(
        self, blocks: _Blocks, problem: Problem, wanted: local.Wanted, state: str, factor: Array | None
    ) -> None:
        """Sums times ``factor``, 0-d, are gradients, and are kept in the features' dtype; with None sums are kept."""
        self._blocks, self._staging, self._factor, self._wanted = blocks, blocks.staging, factor, wanted
        features, width = blocks.source.dtype(problem.rows), problem.rows.shape[1]
        self._dtype = state if factor is None else features
        self.rows = self._staging.kept(problem.rows, self._dtype) if wanted.rows else None
        self.columns = tuple(
            self._staging.kept(x, self._dtype) if want else None
            for x, want in zip(problem.columns, wanted.columns, strict=True)
        )
        # sums of a lone block of columns never leave the device
        self._travel = len(blocks.rows) > 1 and len(blocks.columns) > 1
        # where sums are kept that are not complete: of rows against themselves they are the rows' own
        growing = self.columns if problem.columns else (problem.rows if wanted.rows or wanted.scale else None,)
        homes = self.columns if problem.columns else (self.rows,)
        self._partial = tuple(
            self._staging.kept(x, state)
            if x is not None and self._travel and (home is None or self._dtype != state)
            else home
            for x, home in zip(growing, homes, strict=True)
        )
        self._start = problem.row_sums
        self._row_buffer = blocks.buffer(blocks.rows, width, state) if wanted.rows or wanted.scale else None
        count = min(2, len(blocks.columns)) if any(x is not None for x in growing) else 0
        self._column_buffers = [blocks.buffer(blocks.columns, width, state) for _ in range(count)]
        self._into: Array | None = None
        self.inner: Array | None = None

    def load(self, column: _Part, slot: int) -> None:
        """Start to fetch what earlier rows have added up for a block of columns."""
        partial = self._partial[column.matrix]
        if self._travel and partial is not None:
            self._staging.load(partial[column.here], self._column_buffers[slot])

    def of(self, staged: _StagedBlock) -> tuple[Array | None, Array | None]:
        """Where a block's rows and columns add theirs."""
        staging, blocks = self._staging, self._blocks
        if self._row_buffer is not None and staged.first:
            self._into = blocks.inside(staging.zeros(staged.row.length, self._row_buffer))
            if self._start is not None:
                start = blocks.inside(self._start[staged.row.side].to(staging.device))
                blocks.arrays.add(self._into, start, self._into)
        column, later = staged.column, staged.row.here.start > 0
        if self._partial[column.matrix] is None:
            return self._into, None
        buffer = self._column_buffers[staged.slot]
        if staged.within is not None:
            if later:
                blocks.arrays.add(self._into, blocks.inside(staging.arrived(buffer)), self._into)
            return self._into, None
        return self._into, blocks.inside(staging.arrived(buffer) if later else staging.zeros(column.length, buffer))

    def done(self, staged: _StagedBlock, columns: Array | None) -> None:
        """Send home what a block has completed, and what its columns are to add to later."""
        row, column = staged.row, staged.column
        if self._into is not None and staged.last:
            if self._wanted.scale:
                inner = self._blocks.arrays.inner(staged.block.rows, self._into)
                self.inner = inner if self.inner is None else self.inner + inner
            if self.rows is not None:
                self._send(self._into, self.rows[row.here], self._row_buffer)
        partial = self._partial[column.matrix]
        if columns is None or partial is None:
            return
        buffer = self._column_buffers[staged.slot]
        if row is self._blocks.rows[-1]:
            out: Any = self.columns[column.matrix]
            self._send(columns, out[column.here], buffer)
        elif self._travel:
            self._staging.store(buffer.memory[: column.length], partial[column.here], buffer)

    def _send(self, sums: Array, home: Any, buffer: Any) -> None:
        arrays, factor = self._blocks.arrays, self._factor
        found = sums if factor is None else arrays.scaled(sums, factor, arrays.dtype(sums), consume=True)
        self._staging.store(self._blocks.outside(found, self._dtype), home, buffer)


def forward(problem: Problem, work: local.Work, *, wanted: local.Wanted | None = None) -> local.Forward:
    """The softmax loss and its log-sum-exps, on the device: see ``local.forward``."""
    backend, options = work
    blocks = _Blocks(problem, backend.arrays)
    if _single(problem):
        alone = local.forward if problem.columns else triangle.forward
        return alone(_fetched(blocks, problem), work, wanted=wanted)
    arrays, two_sided, itself = backend.arrays, problem.column_weight is not None, not problem.columns
    rows: dict[int, SideStatistics] = {}
    columns: dict[int, SideStatistics] = rows if itself else {}
    for staged in blocks.staged(problem):
        if staged.within is not None:
            whole, most = slice(0, staged.block.rows.shape[0]), triangle.whole_up_to(staged.within, work)
            _merge(arrays, rows, staged.row, triangle.statistics(staged.within, whole, most, work))
            continue
        backend.check(staged.block, options)
        found = backend.lse(staged.block, two_sided or itself, options)
        _merge(arrays, rows, staged.row, found.rows)
        if found.columns is not None:
            _merge(arrays, columns, staged.column, found.columns)
    sides = (rows, columns) if two_sided else (rows,)
    mine, *over = (local.joined(arrays, [side[k] for k in sorted(side)]) for side in sides)
    mine = local.merged(arrays, [*problem.beside, mine])
    loss = local.loss(problem, arrays, arrays.dtype(problem.scale), mine, *over)
    return local.Forward(loss, mine[:2], over[0][:2] if over else None)


def _merge(arrays: ArrayLibrary, into: dict[int, SideStatistics], part: _Part, found: SideStatistics) -> None:
    known = [into[part.side.start]] if part.side.start in into else []
    into[part.side.start] = local.merged(arrays, [*known, found])


def backward(
    problem: Problem, saved: local.Forward, upstream: Array, wanted: local.Wanted, work: local.Work
) -> local.Gradients:
    """Gradients of ``upstream * loss`` for the softmax loss: see ``local.backward``."""
    backend, options = work
    blocks, arrays = _Blocks(problem, backend.arrays), backend.arrays
    if _single(problem):
        alone = local.backward if problem.columns else triangle.backward
        found = alone(_fetched(blocks, problem), saved, upstream, wanted, work)
        return _kept(blocks, problem, found)
    weighted, state = problem.weighted(upstream), backend.state(blocks.source.dtype(problem.rows))
    sums = _Sums(blocks, problem, wanted, state, problem.scale)
    for staged in blocks.staged(weighted, sums):
        into, columns = sums.of(staged)
        if staged.within is None:
            backend.gradients(staged.block, _weights(weighted, saved, staged, arrays), into, columns, options)
        elif into is not None:
            n, p = saved.rows
            weights = triangle.weights_within(staged.within, (n[staged.row.side], p[staged.row.side]), arrays)
            triangle.add_gradients(staged.within, *weights, into, work)
        sums.done(staged, columns)
    blocks.staging.synchronize()
    scale = None if sums.inner is None else arrays.cast(sums.inner, arrays.dtype(problem.scale))
    found = local.Gradients(sums.rows, sums.columns, scale, None)
    return found if problem.columns else triangle.counted_once(found)


def _weights(problem: Problem, saved: local.Forward, staged: _StagedBlock, arrays: ArrayLibrary) -> Weights:
    rows, columns = local.side_weights(problem, saved, arrays)
    columns = columns if problem.columns else rows
    return Weights(rows.part(staged.row.side), None if columns is None else columns.part(staged.column.side))


def _single(problem: Problem) -> bool:
    """Whether no matrix of the problem is cut: then ``local`` computes it."""
    assert problem.blocking is not None
    return all(x.shape[0] <= problem.blocking.block for x in (problem.rows, *problem.columns))


def _fetched(blocks: _Blocks, problem: Problem) -> Problem:
    found = []
    for x in (problem.rows, *problem.columns):
        buffer = blocks.staging.buffer(x.shape[0], x.shape[1], blocks.source.dtype(x))
        blocks.staging.load(x, buffer)
        found.append(blocks.inside(blocks.staging.arrived(buffer)))
    start = problem.row_sums
    start = None if start is None else blocks.inside(start.to(blocks.staging.device))
    return replace(problem, rows=found[0], columns=tuple(found[1:]), row_sums=start, blocking=None)


def _kept(blocks: _Blocks, problem: Problem, found: local.Gradients) -> local.Gradients:
    """The gradients of what was fetched, at home."""
    kept = []
    for gradient, x in zip((found.rows, *found.columns), (problem.rows, *problem.columns), strict=True):
        home, dtype = None, blocks.source.dtype(x)
        if gradient is not None:
            home = blocks.staging.kept(x, dtype)
            blocks.staging.store(blocks.outside(gradient, dtype), home)
        kept.append(home)
    blocks.staging.synchronize()
    return replace(found, rows=kept[0], columns=tuple(kept[1:]))


def sigmoid(problem: Problem, wanted: local.Wanted | None, work: local.Work) -> tuple[Array, local.Sums | None]:
    """The sigmoid loss, on the device, and the sums behind its gradients, at home: see ``local.sigmoid``.

    Behind the columns' comes what the scale's gradient is made of, on the device.
    """
    backend, options = work
    blocks, arrays = _Blocks(problem, backend.arrays), backend.arrays
    state = backend.state(blocks.source.dtype(problem.rows))
    sums = None if wanted is None else _Sums(blocks, problem, wanted, state, None)
    loss = total = None
    for staged in blocks.staged(problem, sums):
        backend.check(staged.block, options)
        into, columns = (None, None) if sums is None else sums.of(staged)
        weight = problem.row_weight[staged.row.side]
        row_loss, slope = backend.sigmoid(staged.block, weight, into, columns, options)
        part = local.weighted_total(arrays, weight, row_loss), arrays.total(slope)
        loss, total = part if loss is None else (loss + part[0], total + part[1])
        if sums is not None:
            sums.done(staged, columns)
    value = arrays.cast(loss, arrays.dtype(problem.scale))
    if sums is None:
        return value, None
    blocks.staging.synchronize()
    return value, local.Sums(sums.rows, (*sums.columns, sums.inner), total)


def sigmoid_gradients(
    problem: Problem, sums: local.Sums, upstream: Array, wanted: local.Wanted, arrays: ArrayLibrary
) -> local.Gradients:
    """The sigmoid loss's gradients from its sums: those of features at home, a block of rows at a time."""
    assert problem.blocking is not None
    rows, (*columns, inner), number = problem.rows, sums.columns, arrays.dtype(problem.scale)
    source, block = library_of(rows), problem.blocking.block
    dtype, factor = source.dtype(rows), alongside(problem.scale * upstream, rows)

    def scaled(x: Any, want: bool) -> Any:
        if x is None or not want:
            return None
        out = source.empty(tuple(x.shape), dtype, x)
        for start in range(0, x.shape[0], block):
            out[start : start + block] = source.scaled(x[start : start + block], factor, dtype, consume=False)
        return out

    of_columns = tuple(scaled(x, want) for x, want in zip(columns, wanted.columns, strict=True))
    d_scale, d_bias = (
        arrays.cast(x * upstream, number) if want else None
        for x, want in ((inner, wanted.scale), (sums.total, wanted.bias))
    )
    return local.Gradients(scaled(sums.rows, wanted.rows), of_columns, d_scale, d_bias)
