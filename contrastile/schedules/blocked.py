"""The blocked schedule: features stay at home, in the caller's memory, and are copied to the device block by block.

A block of rows stays on the device while all blocks of columns pass. Each is copied while the previous one is computed.
The rows' gradient sums stay on the device too. The columns' sums go home and come back in the state dtype, so that they
add up as on the device. The device holds two blocks of rows, two of columns, three of sums, and O(m + n) numbers.

Rows against themselves are cut once, and each pair of blocks is computed once. A block of rows against itself is
computed last, and then the device loads the sums that earlier blocks have added for these rows as their columns.

``Blocking.block`` determines which numbers are added in which order; ``Blocking.device`` does not. Every block is
copied to the same buffers wherever its features are, so the bits are those of features on the device. ``local`` or
``triangle`` computes a problem of one block.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from contrastile.backends.arrays import ArrayLibrary, library_of, transfer
from contrastile.backends.contract import Array, Block, SideStatistics, Weights
from contrastile.schedules import local, triangle
from contrastile.schedules.beside import alongside
from contrastile.schedules.problem import Problem, slice_marks


@dataclass(frozen=True, slots=True)
class _Part:
    """A block of rows, or of columns.

    Attributes:
        matrix: the index of the matrix that contains it.
        span: its rows of that matrix.
        side: its rows among all rows, or all columns, of the problem.
    """

    matrix: int
    span: slice
    side: slice

    @property
    def length(self) -> int:
        return int(self.span.stop - self.span.start)


def _cut(matrices: Sequence[Array], length: int) -> list[_Part]:
    parts, start = [], 0
    for index, matrix in enumerate(matrices):
        for begin in range(0, matrix.shape[0], length):
            span = slice(begin, min(begin + length, matrix.shape[0]))
            parts.append(_Part(index, span, slice(start + span.start, start + span.stop)))
        start += matrix.shape[0]
    return parts


@dataclass(frozen=True, slots=True)
class _StagedBlock:
    """A block of rows against a block of columns, on the device; ``first`` or ``last`` of the blocks of these rows.

    Attributes:
        slot: the index of the buffer that holds the columns, and of the one that holds their sums.
        subproblem: the problem of a block of rows against itself; None for any other block.
    """

    row: _Part
    column: _Part
    slot: int
    block: Block
    first: bool
    last: bool
    subproblem: Problem | None


class _Blocks:
    """The blocks of a problem, and the copies that stage them on the device, for one pass.

    The features are in the caller's library, ``source``, and all other arrays in the backend's, ``arrays``. For rows
    against themselves ``columns`` equals ``rows``.
    """

    def __init__(self, problem: Problem, arrays: ArrayLibrary) -> None:
        # imported when called: ``import contrastile`` imports nothing but the standard library
        from contrastile.backends.staging import Staging

        blocking, rows = problem.blocking, problem.rows
        assert blocking is not None
        self.rows, self.columns = (_cut(x, blocking.block) for x in ([rows], problem.columns or (rows,)))
        self.source, self.arrays = library_of(rows), arrays
        self.staging = Staging(blocking.device, rows.device)

    def native(self, x: Any) -> Array:
        """A tensor on the device as an array of the backend's library, sharing its memory."""
        return transfer(x, self.source, self.arrays)

    def exported(self, x: Array, dtype: str) -> Any:
        """An array of the backend's library as one of the caller's, rounded to a dtype."""
        return self.source.cast(transfer(x, self.arrays, self.source), dtype)

    def buffer(self, parts: Sequence[_Part], width: int, dtype: str) -> Any:
        return self.staging.buffer(max((x.length for x in parts), default=0), width, dtype)

    def staged_blocks(self, problem: Problem, sums: _Sums | None = None) -> Iterator[_StagedBlock]:
        """Every block of rows against every block of columns. The next block's features are copied in the meantime."""
        columns_stay, width, dtype = len(self.columns) == 1, problem.rows.shape[1], self.source.dtype(problem.rows)
        matrices, js = problem.columns or (problem.rows,), range(len(self.columns))
        order = [(i, j) for i in range(len(self.rows)) for j in (js if problem.columns else (*js[i + 1 :], i))]
        is_first = [k == 0 or order[k - 1][0] != i for k, (i, _) in enumerate(order)]
        rows = [self.buffer(self.rows, width, dtype) for _ in self.rows[:2]]
        columns = [self.buffer(self.columns, width, dtype) for _ in self.columns[:2]]

        def load(k: int) -> None:
            i, j = order[k]
            row, column = self.rows[i], self.columns[j]
            if is_first[k]:
                self.staging.load(problem.rows[row.span], rows[i % 2])
            if (i == 0 or not columns_stay) and (problem.columns or i != j):
                self.staging.load(matrices[column.matrix][column.span], columns[k % len(columns)])
            if i > 0 and sums is not None:
                sums.load(column, k % len(columns))

        load(0)
        row_problem = problem
        for k, (i, j) in enumerate(order):
            if k + 1 < len(order):
                # into the buffers of the previous block, whose work is queued
                load(k + 1)
            row, column, slot = self.rows[i], self.columns[j], k % len(columns)
            if is_first[k]:
                features = self.native(self.staging.arrived(rows[i % 2]))
                row_problem = replace(problem.of_rows(row.side), rows=features)
            is_last = k + 1 == len(order) or is_first[k + 1]
            parts = row, column, slot
            if not problem.columns and i == j:
                subproblem, every = triangle.subproblem(row_problem, row.side.start), slice(0, row.length)
                yield _StagedBlock(*parts, triangle.block(subproblem, every, every), is_first[k], is_last, subproblem)
                continue
            features = self.native(self.staging.arrived(columns[slot]))
            marks = slice_marks(problem.marks, column.side)
            operands = features, column.side.start, marks
            block = row_problem.block(*operands) if problem.columns else triangle.cross_block(row_problem, *operands)
            yield _StagedBlock(*parts, block, is_first[k], is_last, None)


class _Sums:
    """The sums that give the gradients: on the device while blocks add to them, at home when they are complete.

    Attributes:
        rows: the rows' gradient, or their sums, at home; None if unwanted.
        columns: the gradient, or the sums, of each matrix of columns, at home; None if unwanted.
        inner: ``sum_i <row_i, (G K)_i>``, 0-d float64; None if unwanted.
    """

    def __init__(
        self, blocks: _Blocks, problem: Problem, wanted: local.Wanted, state: str, factor: Array | None
    ) -> None:
        """With ``factor``, 0-d, keep ``factor * sums`` in the features' dtype; with None keep the sums."""
        self._blocks, self._staging, self._factor, self._wanted = blocks, blocks.staging, factor, wanted
        features, width = blocks.source.dtype(problem.rows), problem.rows.shape[1]
        self._dtype = state if factor is None else features
        self.rows = self._staging.kept(problem.rows, self._dtype) if wanted.rows else None
        self.columns = tuple(
            self._staging.kept(x, self._dtype) if is_wanted else None
            for x, is_wanted in zip(problem.columns, wanted.columns, strict=True)
        )
        # the sums of a single block of columns never leave the device
        self._columns_travel = len(blocks.rows) > 1 and len(blocks.columns) > 1
        # the memory of incomplete sums at home; rows against themselves are their own columns
        accumulated = self.columns if problem.columns else (problem.rows if wanted.rows or wanted.scale else None,)
        homes = self.columns if problem.columns else (self.rows,)
        self._partial_sums = tuple(
            self._staging.kept(x, state)
            if x is not None and self._columns_travel and (home is None or self._dtype != state)
            else home
            for x, home in zip(accumulated, homes, strict=True)
        )
        self._initial_row_sums = problem.row_sums
        self._row_buffer = blocks.buffer(blocks.rows, width, state) if wanted.rows or wanted.scale else None
        count = min(2, len(blocks.columns)) if any(x is not None for x in accumulated) else 0
        self._column_buffers = [blocks.buffer(blocks.columns, width, state) for _ in range(count)]
        self._row_sums: Array | None = None
        self.inner: Array | None = None

    def load(self, column: _Part, slot: int) -> None:
        """Start to copy to the device the sums that earlier rows have added for a block of columns."""
        sums = self._partial_sums[column.matrix]
        if self._columns_travel and sums is not None:
            self._staging.load(sums[column.span], self._column_buffers[slot])

    def accumulators(self, staged: _StagedBlock) -> tuple[Array | None, Array | None]:
        """The sums to which a block adds, of its rows and of its columns."""
        staging, blocks = self._staging, self._blocks
        if self._row_buffer is not None and staged.first:
            self._row_sums = blocks.native(staging.zeros(staged.row.length, self._row_buffer))
            if self._initial_row_sums is not None:
                initial = blocks.native(self._initial_row_sums[staged.row.side].to(staging.device))
                blocks.arrays.add(self._row_sums, initial, self._row_sums)
        column, begun = staged.column, staged.row.span.start > 0
        if self._partial_sums[column.matrix] is None:
            return self._row_sums, None
        buffer = self._column_buffers[staged.slot]
        if staged.subproblem is not None:
            if begun:
                blocks.arrays.add(self._row_sums, blocks.native(staging.arrived(buffer)), self._row_sums)
            return self._row_sums, None
        return self._row_sums, blocks.native(staging.arrived(buffer) if begun else staging.zeros(column.length, buffer))

    def store(self, staged: _StagedBlock, column_sums: Array | None) -> None:
        """Copy home the sums that a block has completed, and the column sums to which later blocks add."""
        row, column = staged.row, staged.column
        if self._row_sums is not None and staged.last:
            if self._wanted.scale:
                inner = self._blocks.arrays.inner(staged.block.rows, self._row_sums)
                self.inner = inner if self.inner is None else self.inner + inner
            if self.rows is not None:
                self._store_gradient(self._row_sums, self.rows[row.span], self._row_buffer)
        partial_sums = self._partial_sums[column.matrix]
        if column_sums is None or partial_sums is None:
            return
        buffer = self._column_buffers[staged.slot]
        if row is self._blocks.rows[-1]:
            gradient: Any = self.columns[column.matrix]
            self._store_gradient(column_sums, gradient[column.span], buffer)
        elif self._columns_travel:
            self._staging.store(buffer.memory[: column.length], partial_sums[column.span], buffer)

    def _store_gradient(self, sums: Array, home: Any, buffer: Any) -> None:
        arrays, factor = self._blocks.arrays, self._factor
        gradient = sums if factor is None else arrays.scaled(sums, factor, arrays.dtype(sums), consume=True)
        self._staging.store(self._blocks.exported(gradient, self._dtype), home, buffer)


def forward(problem: Problem, work: local.Work, *, wanted: local.Wanted | None = None) -> local.Forward:
    """The softmax loss and its log-sum-exps, on the device: see ``local.forward``."""
    backend, options = work
    blocks = _Blocks(problem, backend.arrays)
    if _is_single_block(problem):
        schedule = local.forward if problem.columns else triangle.forward
        return schedule(_fetch(blocks, problem), work, wanted=wanted)
    arrays, two_sided, is_symmetric = backend.arrays, problem.column_weight is not None, not problem.columns
    rows: dict[int, SideStatistics] = {}
    columns: dict[int, SideStatistics] = rows if is_symmetric else {}
    for staged in blocks.staged_blocks(problem):
        if staged.subproblem is not None:
            every, most = slice(0, staged.block.rows.shape[0]), triangle.diagonal_rows(staged.subproblem, work)
            _merge(arrays, rows, staged.row, triangle.statistics(staged.subproblem, every, most, work))
            continue
        backend.check(staged.block, options)
        statistics = backend.lse(staged.block, two_sided or is_symmetric, options)
        _merge(arrays, rows, staged.row, statistics.rows)
        if statistics.columns is not None:
            _merge(arrays, columns, staged.column, statistics.columns)
    sides = (rows, columns) if two_sided else (rows,)
    row_side, *column_side = (local.join_parts(arrays, [side[k] for k in sorted(side)]) for side in sides)
    row_side = local.merge_parts(arrays, [*problem.beside, row_side])
    loss = local.loss(problem, arrays, arrays.dtype(problem.scale), row_side, *column_side)
    return local.Forward(loss, row_side[:2], column_side[0][:2] if column_side else None)


def _merge(arrays: ArrayLibrary, merged: dict[int, SideStatistics], part: _Part, statistics: SideStatistics) -> None:
    earlier = [merged[part.side.start]] if part.side.start in merged else []
    merged[part.side.start] = local.merge_parts(arrays, [*earlier, statistics])


def backward(
    problem: Problem, saved: local.Forward, upstream: Array, wanted: local.Wanted, work: local.Work
) -> local.Gradients:
    """Gradients of ``upstream * loss`` for the softmax loss: see ``local.backward``."""
    backend, options = work
    blocks, arrays = _Blocks(problem, backend.arrays), backend.arrays
    if _is_single_block(problem) and not problem.gives_sums:
        schedule = local.backward if problem.columns else triangle.backward
        gradients = schedule(_fetch(blocks, problem), saved, upstream, wanted, work)
        return _store_gradients(blocks, problem, gradients)
    weighted, state = problem.weighted(upstream), backend.state(blocks.source.dtype(problem.rows))
    sums = _Sums(blocks, problem, wanted, state, None if problem.gives_sums else problem.scale)
    for staged in blocks.staged_blocks(weighted, sums):
        row_sums, column_sums = sums.accumulators(staged)
        if staged.subproblem is None:
            backend.gradients(staged.block, _weights(weighted, saved, staged, arrays), row_sums, column_sums, options)
        elif row_sums is not None:
            n, p = saved.rows
            weights = triangle.subproblem_weights(staged.subproblem, (n[staged.row.side], p[staged.row.side]), arrays)
            triangle.add_gradients(staged.subproblem, *weights, row_sums, work)
        sums.store(staged, column_sums)
    blocks.staging.synchronize()
    scale = None if sums.inner is None else arrays.cast(sums.inner, arrays.dtype(problem.scale))
    gradients = local.Gradients(sums.rows, sums.columns, scale, None)
    return gradients if problem.columns else triangle.halve_scale_gradient(gradients)


def _weights(problem: Problem, saved: local.Forward, staged: _StagedBlock, arrays: ArrayLibrary) -> Weights:
    rows, columns = local.side_weights(problem, saved, arrays)
    columns = columns if problem.columns else rows
    return Weights(rows.part(staged.row.side), None if columns is None else columns.part(staged.column.side))


def _is_single_block(problem: Problem) -> bool:
    """Whether no matrix of the problem is cut."""
    assert problem.blocking is not None
    return all(x.shape[0] <= problem.blocking.block for x in (problem.rows, *problem.columns))


def _fetch(blocks: _Blocks, problem: Problem) -> Problem:
    features = []
    for x in (problem.rows, *problem.columns):
        buffer = blocks.staging.buffer(x.shape[0], x.shape[1], blocks.source.dtype(x))
        blocks.staging.load(x, buffer)
        features.append(blocks.native(blocks.staging.arrived(buffer)))
    row_sums = problem.row_sums
    row_sums = None if row_sums is None else blocks.native(row_sums.to(blocks.staging.device))
    return replace(problem, rows=features[0], columns=tuple(features[1:]), row_sums=row_sums, blocking=None)


def _store_gradients(blocks: _Blocks, problem: Problem, gradients: local.Gradients) -> local.Gradients:
    """The gradients of a fetched problem, copied home."""
    stored = []
    for gradient, x in zip((gradients.rows, *gradients.columns), (problem.rows, *problem.columns), strict=True):
        home, dtype = None, blocks.source.dtype(x)
        if gradient is not None:
            home = blocks.staging.kept(x, dtype)
            blocks.staging.store(blocks.exported(gradient, dtype), home)
        stored.append(home)
    blocks.staging.synchronize()
    return replace(gradients, rows=stored[0], columns=tuple(stored[1:]))


def sigmoid(problem: Problem, wanted: local.Wanted | None, work: local.Work) -> tuple[Array, local.Sums | None]:
    """The sigmoid loss, on the device, and the sums that give its gradients, at home: see ``local.sigmoid``.

    The last of the column sums is ``_Sums.inner``, on the device, which gives the gradient of the scale.
    """
    backend, options = work
    blocks, arrays = _Blocks(problem, backend.arrays), backend.arrays
    state = backend.state(blocks.source.dtype(problem.rows))
    sums = None if wanted is None else _Sums(blocks, problem, wanted, state, None)
    loss = total = None
    for staged in blocks.staged_blocks(problem, sums):
        backend.check(staged.block, options)
        row_sums, column_sums = (None, None) if sums is None else sums.accumulators(staged)
        weight = problem.row_weight[staged.row.side]
        row_loss, slope = backend.sigmoid(staged.block, weight, row_sums, column_sums, options)
        block_sums = local.weighted_total(arrays, weight, row_loss), arrays.total(slope)
        loss, total = block_sums if loss is None else (loss + block_sums[0], total + block_sums[1])
        if sums is not None:
            sums.store(staged, column_sums)
    value = arrays.cast(loss, arrays.dtype(problem.scale))
    if sums is None:
        return value, None
    blocks.staging.synchronize()
    return value, local.Sums(sums.rows, (*sums.columns, sums.inner), total)


def sigmoid_gradients(
    problem: Problem, sums: local.Sums, upstream: Array, wanted: local.Wanted, arrays: ArrayLibrary
) -> local.Gradients:
    """The sigmoid loss's gradients from its sums; gradients of features are computed at home, block by block."""
    assert problem.blocking is not None
    rows, (*columns, inner), scalar_dtype = problem.rows, sums.columns, arrays.dtype(problem.scale)
    source, length = library_of(rows), problem.blocking.block
    dtype, factor = source.dtype(rows), alongside(problem.scale * upstream, rows)

    def scaled(x: Any, is_wanted: bool) -> Any:
        if x is None or not is_wanted:
            return None
        out = source.empty(tuple(x.shape), dtype, x)
        for start in range(0, x.shape[0], length):
            out[start : start + length] = source.scaled(x[start : start + length], factor, dtype, consume=False)
        return out

    column_gradients = tuple(scaled(x, is_wanted) for x, is_wanted in zip(columns, wanted.columns, strict=True))
    d_scale, d_bias = (
        arrays.cast(x * upstream, scalar_dtype) if is_wanted else None
        for x, is_wanted in ((inner, wanted.scale), (sums.total, wanted.bias))
    )
    return local.Gradients(scaled(sums.rows, wanted.rows), column_gradients, d_scale, d_bias)
