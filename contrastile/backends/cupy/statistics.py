"""``lse``, the forward primitive: kernels are queued and nothing waits for the device."""

from __future__ import annotations

from typing import Any

import cupy

from contrastile.backends.contract import Block, Options, Statistics
from contrastile.backends.cupy.arguments import struct
from contrastile.backends.cupy.common import (
    FOLD,
    LINES,
    ONE_BLOCK,
    PAIRS,
    THREADS,
    ceil_div,
    chunks,
    element,
    matrix,
    new_plan,
    scalars,
)
from contrastile.backends.cupy.configs import DEFAULT, Way, forward_chunk
from contrastile.backends.cupy.instances import TARGET, instance, positives_kernel
from contrastile.backends.cupy.keeping import Kept
from contrastile.backends.cupy.launch import empty, launch, on_device, pointer
from contrastile.backends.cupy.tiles import Tiles


def lse(block: Block, columns: bool, options: Options, way: Way = DEFAULT, *, keep: bool = False) -> Statistics:
    """Row (and column) log-sum-exp and sums of positive logits: see ``contract.Backend``; ``keep`` for ``keeping``."""
    m, n = block.rows.shape[0], block.columns.shape[0]
    with on_device(block.rows):
        if m == 0 or n == 0:
            return _nothing(m, n if columns else None)
        return _Pass(block, columns, options, way, keep).run()


def _nothing(m: int, n: int | None) -> Statistics:
    """The statistics of a block without pairs."""
    sides = [(cupy.full(size, -cupy.inf, "float32"), cupy.zeros(size, "float32")) for size in (m, n or 0)]
    return Statistics(*sides[0]) if n is None else Statistics(*sides[0], *sides[1])


class _Side:
    """What is kept of the rows, or of the columns, from chunk to chunk.

    Attributes:
        length: how many there are.
        wanted: whether their statistics are.
        lse: (length,) float32.
        positive: (length,) float32 sums of positive logits.
        state: (length,) float64, running sums or log-sum-exps.
        counted: (2 length,) float64, running sums and then running counts of positives that ids name.
        parts: (3, room) float32 partials of one chunk: sums, and where ids name positives their dots and counts.
    """

    def __init__(self, length: int, wanted: bool, target: bool, room: int) -> None:
        self.length, self.wanted, self.target, self.room = length, wanted, target, room
        self.lse, self.positive = (empty(length if wanted else 0) for _ in range(2))
        self.state = empty(length if wanted else 0, dtype="float64")
        self.counted = empty(2 * length if wanted and target else 0, dtype="float64")
        self.parts = empty((3 if target else 1) * room if wanted else 0)

    def partials(self, length: int) -> Any:
        """Where the tile kernel leaves a chunk's partials."""
        if not self.wanted:
            return struct("Partials")()
        places = {"positives": pointer(self.parts, self.room), "counts": pointer(self.parts, 2 * self.room)}
        return struct("Partials")(sums=pointer(self.parts), stride=length, **(places if self.target else {}))

    def fold(self, start: int, length: int, tiles: int, terms: int, ends: tuple[bool, bool]) -> Any:
        """How a chunk's partials join the state."""
        if not self.wanted:
            return struct("FoldSide")()
        return struct("FoldSide")(
            parts=pointer(self.parts),
            part_stride=length,
            tiles=tiles,
            state=pointer(self.state, start),
            lse=pointer(self.lse, start),
            length=length,
            terms=terms,
            first=ends[0],
            last=ends[1],
        )

    def fold_positives(self, start: int, length: int, tiles: int, ends: tuple[bool, bool]) -> Any:
        """Likewise for the positives that ids name."""
        if not self.wanted:
            return struct("PositiveSide")()
        return struct("PositiveSide")(
            dots=pointer(self.parts, self.room),
            counts=pointer(self.parts, 2 * self.room),
            part_stride=length,
            tiles=tiles,
            state=pointer(self.counted, start),
            state_stride=self.length,
            out=pointer(self.positive, start),
            length=length,
            first=ends[0],
            last=ends[1],
        )


class _Pass:
    """One forward pass over one block: the fast kernels, then the safe ones, of which one kind returns at once."""

    def __init__(self, block: Block, columns: bool, options: Options, way: Way, keep: bool) -> None:
        self.block, self.two_sided = block, columns
        self.tiles = Tiles(block, options.precision, way.hopper)
        self.m, self.n = block.rows.shape[0], block.columns.shape[0]
        self.kept = Kept.new(self.tiles, columns, options, way) if keep else None
        self.plan = new_plan() if self.kept is None else self.kept.plan
        family, target = self.tiles.family, self.tiles.masks.mask == TARGET
        self.height, self.width = forward_chunk(self.m, self.n, family, options.tile)
        self.rows = _Side(self.m, True, target, ceil_div(self.width, family.bn) * self.height)
        self.columns = _Side(self.n, columns, target, ceil_div(self.height, family.bm) * self.width)

    def run(self) -> Statistics:
        """Launch everything."""
        self._survey()
        # no chunk has rows whose exponentials are kept and others
        split = 0 if self.kept is None else self.kept.rows
        for safe in (False, True):
            for start, stop in ((0, split), (split, self.m)):
                for chunk in chunks(stop, self.n, self.height, self.width, start):
                    self._chunk(safe, chunk)
        self._positives()
        if not self.two_sided:
            return Statistics(self.rows.lse, self.rows.positive)
        kept = None if self.kept is None else self.kept.memory
        return Statistics(self.rows.lse, self.rows.positive, self.columns.lse, self.columns.positive, kept)

    def _survey(self) -> None:
        """Decide on the path, and take the logits of the positives that indices name."""
        rows, masks, most = self.tiles.rows, self.tiles.masks, max(self.m, self.n)
        blocks = ceil_div(most, LINES)
        peaks, sizes = empty(4 * blocks), {"m": self.m, "n": self.n, "depth": self.block.rows.shape[1]}
        pairs = {"rows": matrix(rows), "columns": matrix(self.tiles.columns)} | {
            "positives": pointer(masks.positives),
            "excluded": pointer(masks.excluded),
        }
        arguments = struct("MeasureArguments")(peaks=pointer(peaks), **pairs, **sizes)
        launch(instance("measure", "measure", element(rows)), blocks, THREADS, arguments)
        if masks.positives is not None and masks.mask != TARGET:
            dots = struct("PositiveDotsArguments")(
                row_positive=pointer(self.rows.positive),
                column_positive=pointer(self.columns.positive) if self.two_sided else None,
                **pairs,
                **sizes,
                **scalars(self.block),
            )
            kernel = positives_kernel(rows.dtype.name, self.tiles.precision)
            launch(kernel, ceil_div(most, PAIRS), THREADS, dots)
        decide = struct("PlanForwardArguments")(
            peaks=pointer(peaks), plan=pointer(self.plan), **sizes, **scalars(self.block)
        )
        launch(instance("plan", "plan_forward"), 1, ONE_BLOCK, decide)

    def _chunk(self, safe: bool, chunk: tuple[int, int, int, int]) -> None:
        row, column, high, wide = chunk
        arguments = struct("ForwardArguments")(
            **self.tiles.common(chunk),
            plan=pointer(self.plan),
            rows=self.rows.partials(high),
            columns=self.columns.partials(wide),
        )
        if self.kept is not None and row < self.kept.rows and not safe:
            arguments.positives = pointer(self.kept.positives)
            self.tiles.run("forward_keeping", arguments, self.kept.part(chunk))
        else:
            self.tiles.run("forward", arguments, safe=safe)
        across, down = ceil_div(wide, self.tiles.family.bn), ceil_div(high, self.tiles.family.bm)
        ends = (column == 0, column + wide == self.n), (row == 0, row + high == self.m)
        blocks = ceil_div(high, FOLD) + (ceil_div(wide, FOLD) if self.two_sided else 0)
        fold = struct("FoldArguments")(
            rows=self.rows.fold(row, high, across, self.n, ends[0]),
            columns=self.columns.fold(column, wide, down, self.m, ends[1]),
            plan=pointer(self.plan),
        )
        path = "true" if safe else "false"
        if self.tiles.masks.mask == TARGET:
            # first: the fold may give the fast path up, and then this one would return at once
            positives = struct("FoldPositivesArguments")(
                rows=self.rows.fold_positives(row, high, across, ends[0]),
                columns=self.columns.fold_positives(column, wide, down, ends[1]),
                plan=pointer(self.plan),
            )
            launch(instance("fold_positives", "fold_positives", path), blocks, THREADS, positives)
        launch(instance("fold", "fold", path), blocks, THREADS, fold)

    def _positives(self) -> None:
        """The sums of positive logits, where the survey and the folds have not left them."""
        masks = self.tiles.masks
        if masks.mask == TARGET:
            return
        if masks.positives is None:
            for side in (self.rows, self.columns):
                side.positive.fill(0.0)
        elif self.two_sided:
            arguments = struct("SumPositivesArguments")(
                plan=pointer(self.plan),
                positives=pointer(masks.positives),
                excluded=pointer(masks.excluded),
                row_positive=pointer(self.rows.positive),
                column_positive=pointer(self.columns.positive),
                m=self.m,
                n=self.n,
            )
            launch(instance("sum_positives", "sum_positives"), ceil_div(self.n, THREADS), THREADS, arguments)
