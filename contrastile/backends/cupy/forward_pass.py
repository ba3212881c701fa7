"""``lse``, the forward primitive: kernels are queued and nothing waits for the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import cupy

from contrastile.backends.compiling import current_call, side_by_side
from contrastile.backends.contract import Block, Options, SideStatistics, Statistics
from contrastile.backends.cupy.arguments import struct
from contrastile.backends.cupy.arrays import ARRAYS
from contrastile.backends.cupy.common import (
    FOLD,
    LINES,
    ONE_BLOCK,
    PAIRS,
    PLAN_BYTES,
    THREADS,
    element,
    matrix,
    scalars,
)
from contrastile.backends.cupy.instances import LIMITED, TARGET, instance, positives_kernel
from contrastile.backends.cupy.keeping import KeptExponentials
from contrastile.backends.cupy.launch import empty, launch, on_device, pointer, scratch
from contrastile.backends.cupy.tiles import Tiles
from contrastile.backends.passes import Chunk, ceil_div, chunks, forward_chunk, no_statistics


@side_by_side
def lse(block: Block, columns: bool, options: Options, *, keep: bool = False) -> Statistics:
    """Row (and column) log-sum-exps and sums of positive logits: see ``contract.Backend``; ``keep`` for ``keeping``."""
    if block.rows.shape[0] == 0 or block.columns.shape[0] == 0:
        return no_statistics(block, columns, ARRAYS)
    with on_device(block.rows):
        forward_pass = _ForwardPass(block, columns, options, keep)
        statistics = forward_pass.run()
        if keep and current_call.missing:
            # a call that keeps will request gradients
            forward_pass.tiles.compile_gradients(narrow=forward_pass.narrow, kept=forward_pass.kept is not None)
        return statistics


_SUMS = "sums", "references"
_BY_IDS = "dots", "dots_low", "counts", "positive_sums", "positive_references"
"""A tile's partial results for each row and column: always, and where ids name positives."""


class _SideState:
    """The running state of the rows, or of the columns, over the chunks.

    Attributes:
        length: the number of rows or columns.
        is_requested: whether their statistics are requested.
        negative_lse: (length,) float64.
        positive_lse: (length,) float64.
        positive_sum: (length,) float64.
        sizes: bytes of the three parts of ``scratch``: (length,) float64 running sums or log-sum-exps over negatives;
            (3 length,) float64 of positives that ids name: sums of dots, counts, sums of exponentials; and
            (len(names), room) float32 partials of one chunk.
    """

    def __init__(self, length: int, is_requested: bool, has_target_ids: bool, room: int) -> None:
        self.length, self.is_requested, self.room = length, is_requested, room
        self.names = _SUMS + (_BY_IDS if has_target_ids else ())
        size = length if is_requested else 0
        self.negative_lse, self.positive_lse, self.positive_sum = (empty(size, dtype="float64") for _ in range(3))
        self.sizes = 8 * size, 24 * size if has_target_ids else 0, 4 * len(self.names) * room if is_requested else 0
        self.scratch: Sequence[int] = ()

    def statistics(self) -> SideStatistics:
        """The statistics of this side."""
        return SideStatistics(self.negative_lse, self.positive_lse, self.positive_sum)

    def _part(self, name: str) -> int:
        return self.scratch[2] + 4 * self.names.index(name) * self.room

    def partials(self, length: int) -> Any:
        """The struct of a chunk's partials, which the tile kernel writes."""
        if not self.is_requested:
            return struct("Partials")()
        return struct("Partials")(stride=length, **{name: self._part(name) for name in self.names})

    def fold(self, start: int, length: int, tiles: int, terms: int, ends: tuple[bool, bool], empty: bool) -> Any:
        """The struct with which ``fold`` adds a chunk's partials to the state."""
        outputs = {"state": self.scratch[0] + 8 * start, "lse": pointer(self.negative_lse, start), "empty": empty}
        return self._fold_struct("FoldSide", _SUMS, length, ends, tiles=tiles, terms=terms, **outputs)

    def fold_positives(self, start: int, length: int, tiles: int, ends: tuple[bool, bool]) -> Any:
        """The struct with which ``fold_positives`` adds those of positives that ids name."""
        outputs: dict[str, Any] = {"state": self.scratch[1] + 8 * start, "state_stride": self.length}
        outputs |= {"lse": pointer(self.positive_lse, start), "sum": pointer(self.positive_sum, start)}
        return self._fold_struct("PositiveSide", _BY_IDS, length, ends, tiles=tiles, **outputs)

    def _fold_struct(self, kind: str, names: Sequence[str], length: int, ends: tuple[bool, bool], **fields: Any) -> Any:
        if not self.is_requested:
            return struct(kind)()
        parts = {name.removeprefix("positive_"): self._part(name) for name in names}
        return struct(kind)(**parts, part_stride=length, length=length, first=ends[0], last=ends[1], **fields)


class _ForwardPass:
    """One forward pass over one block: the fast kernels, then the safe ones; the device decides which return at once.

    float32 features use only the safe kernels: see ``passes.own_references``.
    """

    def __init__(self, block: Block, columns: bool, options: Options, keep: bool) -> None:
        self.block, self.two_sided = block, columns
        self.tiles = Tiles(block, options.precision)
        self.m, self.n = block.rows.shape[0], block.columns.shape[0]
        self.whole = Chunk(0, 0, self.m, self.n)
        self.kept = KeptExponentials.new(self.tiles, options) if keep else None
        family, has_target_ids = self.tiles.family, self.tiles.mask == TARGET
        quantities = len(_SUMS) + (len(_BY_IDS) if has_target_ids else 0)
        self.height, self.width = forward_chunk(self.m, self.n, family.shape, options, quantities, family.cluster)
        self.narrow = self.tiles.narrow and not columns and options.tile is None
        room = ceil_div(self.width, family.bn) * self.height
        if self.narrow:
            room = max(room, self.tiles.shares(self.whole).most * self.m)
        self.rows = _SideState(self.m, True, has_target_ids, room)
        self.columns = _SideState(self.n, columns, has_target_ids, ceil_div(self.height, family.bm) * self.width)
        # one allocation instead of many, because the host limits the speed of small batches
        peaks = 16 * ceil_div(max(self.m, self.n), LINES)
        sizes = peaks, PLAN_BYTES, *self.rows.sizes, *self.columns.sizes
        self.memory, (self.peaks, plan, *addresses) = scratch(*sizes)
        self.rows.scratch, self.columns.scratch = addresses[:3], addresses[3:]
        self.plan = plan if self.kept is None else pointer(self.kept.plan)

    def run(self) -> Statistics:
        """Launch all kernels, and return the statistics."""
        self._precheck()
        # no chunk crosses from rows with kept exponentials to rows without
        split = 0 if self.kept is None else self.kept.rows
        if self.narrow:
            # the fast path for the rows alone, in one launch
            self.tiles.narrow_forward(self._arguments(self.whole))
            self._fold(False, self.whole, self.tiles.shares(self.whole).most, 0)
        for safe in (True,) if self.narrow or self.tiles.exact else (False, True):
            for start, stop in ((0, split), (split, self.m)):
                for chunk in chunks(stop, self.n, self.height, self.width, start):
                    self._chunk(safe, chunk)
        self._set_positives()
        of_columns = self.columns.statistics() if self.two_sided else None
        return Statistics(self.rows.statistics(), of_columns, None if self.kept is None else self.kept.memory)

    def _precheck(self) -> None:
        """Launch the kernels that choose the path and compute the logits of positives that indices name."""
        rows, vectors, length = self.tiles.rows, self.tiles.pairs, max(self.m, self.n)
        blocks = ceil_div(length, LINES)
        sizes = {"m": self.m, "n": self.n, "depth": self.block.rows.shape[1]}
        pairs = {"rows": matrix(rows), "columns": matrix(self.tiles.columns)} | {
            "positives": pointer(vectors.positives),
            "excluded": pointer(vectors.excluded),
        }
        arguments = struct("MeasureArguments")(peaks=self.peaks, **pairs, **sizes)
        launch(instance("measure", "measure", element(rows)), blocks, THREADS, arguments)
        if vectors.positives is not None:
            dots = struct("PositiveDotsArguments")(
                row_lse=pointer(self.rows.positive_lse),
                row_sum=pointer(self.rows.positive_sum),
                column_lse=pointer(self.columns.positive_lse) if self.two_sided else None,
                column_sum=pointer(self.columns.positive_sum) if self.two_sided else None,
                **pairs,
                **sizes,
                **scalars(self.block),
            )
            kernel = positives_kernel(self.tiles.dtype, self.tiles.precision)
            launch(kernel, ceil_div(length, PAIRS), THREADS, dots)
        plan_arguments = struct("PlanForwardArguments")(
            peaks=self.peaks, plan=self.plan, exact=self.tiles.exact, **sizes, **scalars(self.block)
        )
        launch(instance("plan", "plan_forward"), 1, ONE_BLOCK, plan_arguments)

    def _arguments(self, chunk: Chunk) -> Any:
        return struct("ForwardArguments")(
            **self.tiles.common(chunk),
            plan=self.plan,
            rows=self.rows.partials(chunk.height),
            columns=self.columns.partials(chunk.width),
        )

    def _chunk(self, safe: bool, chunk: Chunk) -> None:
        row, _, height, width = chunk
        arguments = self._arguments(chunk)
        if self.kept is not None and row < self.kept.rows and not safe:
            self.tiles.run("forward_keeping", arguments, self.kept.part(chunk))
        else:
            self.tiles.run("forward", arguments, safe=safe)
        self._fold(safe, chunk, ceil_div(width, self.tiles.family.bn), ceil_div(height, self.tiles.family.bm))

    def _fold(self, safe: bool, chunk: Chunk, across: int, down: int) -> None:
        """Add up a chunk's partials: ``across`` partials for each row, ``down`` partials for each column."""
        row, column, height, width = chunk
        ends = (column == 0, column + width == self.n), (row == 0, row + height == self.m)
        blocks = ceil_div(height, FOLD) + (ceil_div(width, FOLD) if self.two_sided else 0)
        limited = self.tiles.mask in LIMITED
        fold = struct("FoldArguments")(
            rows=self.rows.fold(row, height, across, self.n, ends[0], limited),
            columns=self.columns.fold(column, width, down, self.m, ends[1], limited),
            plan=self.plan,
        )
        path = "true" if safe else "false"
        if self.tiles.mask == TARGET:
            # before ``fold``, which may abandon the fast path, and then this kernel would return at once
            positives = struct("FoldPositivesArguments")(
                rows=self.rows.fold_positives(row, height, across, ends[0]),
                columns=self.columns.fold_positives(column, width, down, ends[1]),
                plan=self.plan,
            )
            launch(instance("fold", "fold_positives", path), blocks, THREADS, positives)
        launch(instance("fold", "fold", path), blocks, THREADS, fold)

    def _set_positives(self) -> None:
        """Compute the statistics of positives that the precheck and the folds have not computed."""
        pairs = self.tiles.pairs
        if self.tiles.mask == TARGET:
            return
        if pairs.positives is None:
            for side in (self.rows, self.columns):
                length = side.positive_lse.size
                side.positive_lse, side.positive_sum = cupy.full(length, -cupy.inf), cupy.zeros(length)
        elif self.two_sided:
            arguments = struct("SumPositivesArguments")(
                plan=self.plan,
                positives=pointer(pairs.positives),
                excluded=pointer(pairs.excluded),
                row_sum=pointer(self.rows.positive_sum),
                column_lse=pointer(self.columns.positive_lse),
                column_sum=pointer(self.columns.positive_sum),
                m=self.m,
                n=self.n,
            )
            launch(instance("sum_positives", "sum_positives"), ceil_div(self.n, THREADS), THREADS, arguments)
