# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
"""``lse``, the forward primitive: kernels are queued and nothing waits for the device."""

from __future__ import annotations

import math
from typing import Any

import torch

from contrastile.backends import replay
from contrastile.backends.contract import STATISTICS, Block, Options, Statistics
from contrastile.backends.triton import forward, positives, survey
from contrastile.backends.triton.common import BLOCK, DEPTH, LANES, LINES, Masks, ceil_div, chunks, empty, step
from contrastile.backends.triton.configs import INTERPRETED, choose, forward_chunk
from contrastile.backends.triton.launch import architecture, descriptor, grid, on_device
from contrastile.backends.triton.operands import Scheme, Side, positive_dots
from contrastile.backends.triton.tiles import PLAN_SIZE


def lse(block: Block, columns: bool, options: Options) -> Statistics:
    """Row (and column) log-sum-exps and sums of positive logits: see ``contract.Backend``."""
    m, n = block.rows.shape[0], block.columns.shape[0]
    with on_device(block.rows):
        if m == 0 or n == 0:
            return _nothing(block.rows, m, n if columns else None)
        if not options.replay or not replay.fits(block.rows, n):
            return _Pass(block, columns, options).run()

        def compute(arrays: replay.Tensors) -> replay.Tensors:
            found = _Pass(replay.rebuilt(arrays, block), columns, options).run()
            return tuple(getattr(found, name) for name in STATISTICS)

        what = "lse", columns, options, block.pairs.match
        return Statistics(*replay.GRAPHS.call(what, replay.arrays_of(block), compute))


def _nothing(like: Any, m: int, n: int | None) -> Statistics:
    """The statistics of a block without pairs."""
    sides = [m] if n is None else [m, n]
    found = [_wide(like, size).fill_(value) for size in sides for value in (-math.inf, -math.inf, 0.0)]
    return Statistics(*found)


def _wide(like: Any, *shape: int) -> Any:
    """An unwritten float64 tensor beside ``like``."""
    return empty(like, *shape, dtype=torch.float64)


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
        self.status = torch.empty(1, dtype=torch.int32, device=self.rows.device)
        named = self.masks.positives is not None
        # the least and the largest j - i of the positives (i, j)
        self.diagonals = torch.empty(2, dtype=torch.int64, device=self.rows.device) if named else None
        sizes = self.m, self.n if columns else 0
        # log-sum-exps of the negatives and of the positives, sums of these
        self.found = [[_wide(self.rows, size) for _ in range(3)] for size in sizes]
        # sums; where ids name the positives, theirs besides, those of their logits, and their counts
        self.state = [_wide(self.rows, 4 if self.masks.ids_only else 1, size) for size in sizes]
        # what both sweeps use: the second follows the first on the stream
        self._parts: Any = None
        self._descriptors: dict[tuple[int, ...], Any] = {}

    def run(self) -> Statistics:
        """Launch everything."""
        self._survey()
        for safe in (False, True):
            self._sweep(safe)
        if not self.masks.ids_only:
            self._positives()
        return Statistics(*(x for side in self.found[: 1 + self.two_sided] for x in side))

    def _survey(self) -> None:
        """Decide on the path."""
        row_programs = ceil_div(self.m, LINES)
        squares = empty(self.rows, row_programs + ceil_div(self.n, LINES))
        named, device = self.masks.positives, self.rows.device
        ends = None if named is None else torch.empty(2, row_programs, dtype=torch.int64, device=device)
        width = self.rows.shape[1]
        survey.measure[(squares.shape[0],)](
            self.rows,
            self.columns,
            self.rows.stride(0),
            self.columns.stride(0),
            self.m,
            self.n,
            named,
            squares,
            ends,
            depth=width,
            LINES=LINES,
            BD=step(width),
        )
        survey.plan_forward[(1,)](
            squares,
            ends,
            self.block.scale,
            self.plan,
            self.status,
            self.diagonals,
            row_programs,
            squares.shape[0],
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
        quantities = forward.quantities(safe, self.masks.ids_only)
        height, width = forward_chunk(self.m, self.n, config, self.options.tile, quantities)
        row_tiles, column_tiles = ceil_div(height, config.bm), ceil_div(width, config.bn)
        sizes = column_tiles * height, row_tiles * width if self.two_sided else 0
        parts = self._room(*(quantities * size for size in sizes))
        for chunk in chunks(self.m, self.n, height, width):
            self._tiles(safe, config, parts, chunk)
            self._fold(safe, config, parts, chunk)

    def _room(self, rows: int, columns: int) -> tuple[Any, Any]:
        """Where the tile kernels leave a chunk's partial results."""
        # both sides begin where 16 bytes do
        start = rows + -rows % 4
        if self._parts is None or self._parts.shape[0] < start + columns:
            self._parts = empty(self.rows, start + columns)
        return self._parts[:rows], self._parts[start : start + columns]

    def _features(self, which: int, start: int, length: int, block: tuple[int, int]) -> Any:
        """The descriptor of a chunk of one side; only of plain features does it stay right, others are overwritten."""
        place = which, start, length, *block
        found = self._descriptors.get(place)
        if found is None:
            found = descriptor(self.sides[which].tiles(start, length), block)
            if self.sides[which].plain:
                self._descriptors[place] = found
        return found

    def _tiles(self, safe: bool, config: Any, parts: Any, chunk: tuple[int, int, int, int]) -> None:
        row, column, high, wide = chunk
        forward.lse_tiles[grid(high, wide, config, self.rows)](
            self._features(0, row, high, (config.bm, config.bk)),
            self._features(1, column, wide, (config.bn, config.bk)),
            self.plan,
            self.status,
            self.diagonals,
            *parts,
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
            POSITIVES=self.masks.positives is not None,
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
            *self.found[0],
            *self.found[1],
            self.plan,
            self.status,
            self.block.scale,
            self.block.bias,
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
            MATCHED=self.masks.ids_only,
            LANES=LANES,
            DEPTH=DEPTH,
        )

    def _positives(self) -> None:
        """The log-sum-exps and the sums of positives that are named by index."""
        rows, columns = (side[1:] for side in self.found)
        if self.masks.positives is None:
            for log, total in (rows, columns):
                log.fill_(-math.inf)
                total.zero_()
            return
        positive_dots(self.sides, self.scheme, self.masks, self.block.scale, self.block.bias, *rows)
        if self.two_sided:
            lanes, outer, inner = (8, 16, 8) if INTERPRETED else (64, 2048, 32)
            positives.sum_positives[(ceil_div(self.n, lanes),)](
                self.diagonals,
                self.masks.positives,
                self.masks.excluded,
                rows[0],
                *columns,
                self.m,
                self.n,
                LANES=lanes,
                OUTER=outer,
                INNER=inner,
            )
