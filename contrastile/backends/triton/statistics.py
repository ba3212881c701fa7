# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
"""``lse``, the forward primitive: kernels are queued and nothing waits for the device."""

from __future__ import annotations

from typing import Any

import torch

from contrastile.backends import replay
from contrastile.backends.contract import Block, Options, Statistics
from contrastile.backends.triton import forward, positives, survey
from contrastile.backends.triton.common import BLOCK, DEPTH, LANES, LINES, Masks, ceil_div, chunks, empty, step
from contrastile.backends.triton.configs import INTERPRETED, choose, forward_chunk
from contrastile.backends.triton.launch import architecture, descriptor, grid, on_device
from contrastile.backends.triton.operands import Scheme, Side, positive_dots
from contrastile.backends.triton.tiles import DROP, PLAN_SIZE


def lse(block: Block, columns: bool, options: Options) -> Statistics:
    """Row (and column) log-sum-exp and sums of positive logits: see ``contract.Backend``."""
    m, n = block.rows.shape[0], block.columns.shape[0]
    with on_device(block.rows):
        if m == 0 or n == 0:
            return _nothing(block.rows, m, n if columns else None)
        if not options.replay or not replay.fits(block.rows, n):
            return _Pass(block, columns, options).run()

        def compute(arrays: replay.Tensors) -> replay.Tensors:
            found = _Pass(replay.rebuilt(arrays, block), columns, options).run()
            return found.row_lse, found.row_positive, found.column_lse, found.column_positive

        what = "lse", columns, options, block.pairs.match
        return Statistics(*replay.GRAPHS.call(what, replay.arrays_of(block), compute))


def _nothing(like: Any, m: int, n: int | None) -> Statistics:
    """The statistics of a block without pairs."""
    lse_, positive = (empty(like, m).fill_(value) for value in (float("-inf"), 0.0))
    if n is None:
        return Statistics(lse_, positive)
    return Statistics(lse_, positive, *(empty(like, n).fill_(value) for value in (float("-inf"), 0.0)))


class _Pass:
    """One forward pass over one block: the fast kernels, then the safe ones, of which one kind returns at once."""

    def __init__(self, block: Block, columns: bool, options: Options) -> None:
        self.block, self.two_sided, self.options = block, columns, options
        self.scheme = Scheme.of(block.rows, options)
        self.sides = Side(block.rows, self.scheme), Side(block.columns, self.scheme)
        self.rows, self.columns = (side.x for side in self.sides)
        self.m, self.n = self.rows.shape[0], self.columns.shape[0]
        self.masks = Masks.of(block.pairs)
        self.plan = empty(self.rows, PLAN_SIZE)
        self.status = torch.empty(2, dtype=torch.int32, device=self.rows.device)
        sizes = self.m, self.n if columns else 0
        self.lse = [empty(self.rows, size) for size in sizes]
        self.state = [torch.empty(size, dtype=torch.float64, device=self.rows.device) for size in sizes]
        # sums and counts of positive logits, where ids name the positives
        self.positive = [empty(self.rows, 2, size) for size in sizes] if self.masks.ids_only else []
        # what both sweeps use: the second follows the first on the stream
        self._parts: dict[tuple[int, int], list[Any]] = {}
        self._descriptors: dict[tuple[int, ...], Any] = {}

    def run(self) -> Statistics:
        """Launch everything."""
        self._survey()
        for safe in (False, True):
            self._sweep(safe)
        row_positive, column_positive = self._positives()
        if not self.two_sided:
            return Statistics(self.lse[0], row_positive)
        return Statistics(self.lse[0], row_positive, self.lse[1], column_positive)

    def _survey(self) -> None:
        """Decide on the path."""
        row_programs = ceil_div(self.m, LINES)
        peaks = empty(self.rows, row_programs + ceil_div(self.n, LINES), survey.PEAKS)
        width = self.rows.shape[1]
        survey.measure[(peaks.shape[0],)](
            self.rows,
            self.columns,
            self.rows.stride(0),
            self.columns.stride(0),
            self.m,
            self.n,
            self.masks.positives,
            peaks,
            depth=width,
            LINES=LINES,
            BD=step(width),
        )
        survey.plan_forward[(1,)](
            peaks,
            self.block.scale,
            self.block.bias,
            self.plan,
            self.status,
            row_programs,
            peaks.shape[0],
            # with terms up to 2^room the longer side's sum stays under 2^125
            float(124 - max(self.m, self.n).bit_length()),
            depth=width,
            BLOCK=BLOCK,
        )

    def _sweep(self, safe: bool) -> None:
        kernel = "safe" if safe else "lse"
        if self.masks.masked:
            kernel = "matched" if self.masks.ids_only else "masked"
        scheme = self.scheme
        config = choose(kernel, scheme.dtype, architecture(self.rows), self.rows.shape[1], scheme.precision)
        height, width = forward_chunk(self.m, self.n, config, self.options.tile)
        row_tiles, column_tiles = ceil_div(height, config.bm), ceil_div(width, config.bn)
        parts, positive = self._room(column_tiles * height, row_tiles * width if self.two_sided else 0)
        for row, column, high, wide in chunks(self.m, self.n, height, width):
            self._tiles(safe, config, parts, positive, (row, column, high, wide))
            self._fold(safe, config, parts, (row, column, high, wide))
            if self.masks.ids_only:
                self._fold_positives(safe, config, positive, (row, column, high, wide))

    def _room(self, rows: int, columns: int) -> tuple[list[Any], list[Any]]:
        """Where the tile kernels leave a chunk's partial sums, and where ids name positives their dots and counts."""
        sizes = rows, columns
        held = self._parts.get(sizes)
        if held is None:
            both = [*sizes, *(2 * size for size in sizes)] if self.masks.ids_only else [*sizes, 0, 0]
            held = self._parts[sizes] = [empty(self.rows, size) for size in both]
        return held[:2], held[2:]

    def _features(self, which: int, start: int, length: int, block: tuple[int, int]) -> Any:
        """The descriptor of a chunk of one side; only of plain features does it stay right, others are overwritten."""
        place = which, start, length, *block
        found = self._descriptors.get(place)
        if found is None:
            found = descriptor(self.sides[which].tiles(start, length), block)
            if self.sides[which].plain:
                self._descriptors[place] = found
        return found

    def _tiles(self, safe: bool, config: Any, parts: Any, positive: Any, chunk: tuple[int, int, int, int]) -> None:
        row, column, high, wide = chunk
        forward.lse_tiles[grid(high, wide, config, self.rows)](
            self._features(0, row, high, (config.bm, config.bk)),
            self._features(1, column, wide, (config.bn, config.bk)),
            self.plan,
            self.status,
            self.block.scale,
            *parts,
            *positive,
            self.masks.positives,
            self.masks.excluded,
            self.masks.row_ids,
            self.masks.column_ids,
            self.m,
            self.n,
            row,
            column,
            high,
            wide,
            depth=self.sides[0].depth,
            SAFE=safe,
            COLUMNS=self.two_sided,
            # a positive is admitted although its ids are equal; without ids nothing hides it
            POSITIVES=self.masks.positives is not None and self.masks.ids == DROP.value,
            **self.masks.flags(),
            RAGGED=high % config.bm != 0 or wide % config.bn != 0,
            BM=config.bm,
            BN=config.bn,
            BK=config.bk,
            GROUP=config.group,
            PRECISION=config.precision,
            DIVIDED=self.scheme.divided,
            **config.options(),
        )

    def _fold(self, safe: bool, config: Any, parts: Any, chunk: tuple[int, int, int, int]) -> None:
        row, column, high, wide = chunk
        programs = ceil_div(high, LANES) + (ceil_div(wide, LANES) if self.two_sided else 0)
        forward.fold[(programs,)](
            *parts,
            *self.state,
            *self.lse,
            self.plan,
            self.status,
            self.block.scale,
            high,
            wide,
            row,
            column,
            ceil_div(high, config.bm),
            ceil_div(wide, config.bn),
            self.m,
            self.n,
            int(column == 0),
            int(column + wide == self.n),
            int(row == 0),
            int(row + high == self.m),
            SAFE=safe,
            COLUMNS=self.two_sided,
            LANES=LANES,
            DEPTH=DEPTH,
        )

    def _fold_positives(self, safe: bool, config: Any, parts: Any, chunk: tuple[int, int, int, int]) -> None:
        row, column, high, wide = chunk
        tiles = ceil_div(wide, config.bn), ceil_div(high, config.bm)
        for side, (start, length, first) in enumerate(((row, high, column == 0), (column, wide, row == 0))):
            if side == 1 and not self.two_sided:
                continue
            size = tiles[side] * length
            for which in (0, 1):
                forward.add_parts[(ceil_div(length, LANES),)](
                    parts[side][which * size :],
                    self.positive[side][which, start:],
                    self.status,
                    length,
                    tiles[side],
                    int(first),
                    SAFE=safe,
                    LANES=LANES,
                    DEPTH=DEPTH,
                )

    def _positives(self) -> tuple[Any, Any]:
        """The sums of the positive logits of each row, and of each column."""
        if self.masks.ids_only:
            bias = 0.0 if self.block.bias is None else self.block.bias
            rows, columns = (sums + counts * bias for sums, counts in self.positive)
            return rows, columns
        if self.masks.positives is None:
            return empty(self.rows, self.m).zero_(), empty(self.rows, self.n).zero_()
        rows, columns = empty(self.rows, self.m), empty(self.rows, self.n) if self.two_sided else None
        positive_dots(self.sides, self.scheme, self.masks, self.block.scale, self.block.bias, rows, columns)
        if columns is not None:
            if self.n > self.m:
                # rows beyond m have no positive there
                columns[self.m :].zero_()
            lanes, outer, inner = (8, 16, 8) if INTERPRETED else (64, 2048, 128)
            positives.sum_positives[(ceil_div(self.n, lanes),)](
                self.status,
                self.masks.positives,
                self.masks.excluded,
                rows,
                columns,
                self.m,
                self.n,
                LANES=lanes,
                OUTER=outer,
                INNER=inner,
            )
        return rows, columns
