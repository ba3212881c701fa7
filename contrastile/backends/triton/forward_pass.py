# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
"""``lse``, the forward primitive: kernels are queued and nothing waits for the device."""

from __future__ import annotations

import math
from typing import Any

import torch

from contrastile.backends.compiling import side_by_side
from contrastile.backends.contract import Block, Options, SideStatistics, Statistics
from contrastile.backends.passes import Chunk, ceil_div, chunks, forward_chunk, lines, no_statistics
from contrastile.backends.triton import forward, positives, precheck
from contrastile.backends.triton.arrays import ARRAYS
from contrastile.backends.triton.common import BLOCK, DEPTH, LANES, LINES, empties, empty, step
from contrastile.backends.triton.configs import INTERPRETED, Config
from contrastile.backends.triton.launch import descriptor, grid, on_device
from contrastile.backends.triton.operands import BlockPass
from contrastile.backends.triton.tiles import NO_IDS, PLAN_SIZE

MANY = 2**9 if INTERPRETED else 2**25
"""Pairs from which on tiles with positives by ids are computed apart, where they are few: a launch more."""


@side_by_side
def lse(block: Block, columns: bool, options: Options) -> Statistics:
    """Row (and column) log-sum-exps and sums of positive logits: see ``contract.Backend``."""
    if block.rows.shape[0] == 0 or block.columns.shape[0] == 0:
        return no_statistics(block, columns, ARRAYS)
    with on_device(block.rows):
        return _ForwardPass(block, columns, options).run()


class _ForwardPass(BlockPass):
    """One forward pass over one block: the fast kernels, then the safe ones; the device decides which return at once.

    float32 features take the safe ones alone: see ``passes.own_references``.
    """

    def __init__(self, block: Block, columns: bool, options: Options) -> None:
        super().__init__(block, options)
        self.two_sided = columns
        like, sizes = self.rows, (self.m, self.n if columns else 0)
        self.row_programs, self.programs = ceil_div(self.m, LINES), ceil_div(self.m, LINES) + ceil_div(self.n, LINES)
        self.plan, self.squares = empties(like, torch.float32, PLAN_SIZE, self.programs)
        # which path; the least and largest j - i over named positives (i, j): of all, and of each program's
        status, self.diagonals, self.ends = empties(like, torch.int64, 1, 2, 2 * self.row_programs)
        self.status = status.view(torch.int32)
        if self.masks.pairs.positives is None:
            self.diagonals = self.ends = None
        # running sums; where ids name positives also sums over these, of their logits, and counts
        count = 4 if self.masks.ids_only else 1
        *totals, row_state, column_state = empties(like, torch.float64, *sizes, *(count * size for size in sizes))
        self.state = row_state, column_state
        # N and P, which autograd saves one by one, and S
        self.found = []
        for size, x in zip(sizes, totals, strict=True):
            n, p = (empty(like, size, dtype=torch.float64) for _ in range(2))
            self.found.append(SideStatistics(n, p, lines(x, 0, size)))
        # shared by both sweeps: the second follows the first on the stream
        self._parts: Any = None
        self._descriptors: dict[tuple[int, ...], Any] = {}

    def run(self) -> Statistics:
        """Launch everything."""
        self._precheck()
        for safe in (True,) if self.exact else (False, True):
            self._sweep(safe)
        if not self.masks.ids_only:
            self._positives()
        rows, columns = self.found
        return Statistics(rows, columns if self.two_sided else None)

    def _precheck(self) -> None:
        """Decide on the path."""
        row_programs, programs, squares, ends = self.row_programs, self.programs, self.squares, self.ends
        named, width = self.masks.pairs.positives, self.rows.shape[1]
        features = self.rows, self.columns, self.rows.stride(0), self.columns.stride(0), self.m, self.n
        precheck.measure[(programs,)](*features, named, squares, ends, depth=width, LINES=LINES, BD=step(width))
        # with terms up to 2^room the longer side's sum stays under 2^125
        room = -math.inf if self.exact else float(124 - max(self.m, self.n).bit_length())
        decided = self.plan, self.status, self.diagonals
        precheck.plan_forward[(1,)](
            squares, ends, self.block.scale, *decided, row_programs, programs, room, depth=width, BLOCK=BLOCK
        )

    def _sweep(self, safe: bool) -> None:
        masks = self.masks
        # a plain loss's tiles, and again the few that hold a positive
        few = masks.ids_only and masks.pairs.rising and not masks.limited
        apart = few and self.m * self.n >= MANY and not safe
        matched = "matched" if masks.pairs.excluded is None else "matched, excluding"
        config = self.config("lse" if apart else {"drop": "masked", "target": matched, None: "lse"}[masks.pairs.of_ids])
        quantities = forward.quantities(safe, self.masks.ids_only)
        height, width = forward_chunk(self.m, self.n, config.shape, self.options, quantities, marks=bool(self.guide))
        row_tiles, column_tiles = ceil_div(height, config.bm), ceil_div(width, config.bn)
        sizes = column_tiles * height, row_tiles * width if self.two_sided else 0
        parts = self._partials(*(quantities * size for size in sizes))
        for chunk in chunks(self.m, self.n, height, width):
            self._tiles(safe, config, parts, chunk, apart)
            self._fold(safe, config, parts, chunk)

    def _partials(self, rows: int, columns: int) -> tuple[Any, Any]:
        """Memory for a chunk's partial results of the tile kernels."""
        # both sides are 16-byte aligned
        start = rows + -rows % 4
        if self._parts is None or self._parts.shape[0] < start + columns:
            self._parts = empty(self.rows, start + columns)
        return self._parts[:rows], self._parts[start : start + columns]

    def _features(self, which: int, start: int, length: int, block: tuple[int, int]) -> Any:
        """The descriptor of a chunk of one side; cached for plain features alone, since factors are overwritten."""
        place = which, start, length, *block
        found = self._descriptors.get(place)
        if found is None:
            found = descriptor(self.sides[which].tiles(start, length), block)
            if self.sides[which].plain:
                self._descriptors[place] = found
        return found

    def _tiles(self, safe: bool, config: Config, parts: Any, chunk: Chunk, apart: bool) -> None:
        row, column, high, wide = chunk
        features = (
            self._features(0, row, high, (config.bm, config.bk)),
            self._features(1, column, wide, (config.bn, config.bk)),
        )
        masks, flags = self.masks.spanned, self.masks.flags()
        block, ragged, shape = (self.m, self.n, *chunk), config.ragged(chunk), config.named
        if apart:
            sizes = ceil_div(wide, config.bn) * high, ceil_div(high, config.bm) * wide
            for part, size in zip(parts, sizes, strict=True):
                # the counts of positives
                part[4 * size : 5 * size].zero_()
            masks, flags = [None] * 4, {"EXCLUDED": False, "IDS": NO_IDS.value}
        forward.lse_tiles[grid(high, wide, config, self.rows)](
            *features, self.plan, self.status, self.diagonals, *parts, *masks, *self.masks.limits,
            self.marks(chunk, config, self.status, safe=safe), *block, self.depth,
            SAFE=safe, COLUMNS=self.two_sided, POSITIVES=masks[0] is not None, **flags, LIMITED=self.masks.limited,
            RAGGED=ragged, DIVIDED=self.scheme.divided, **shape,
        )  # fmt: skip
        if apart:
            shape = {name: x for name, x in shape.items() if name != "GROUP"}
            forward.touched_tiles[(ceil_div(high, config.bm), forward.SHARE)](
                *features, self.plan, self.status, *parts, *self.masks.spanned[1:], *block, self.depth,
                COLUMNS=self.two_sided, EXCLUDED=self.masks.pairs.excluded is not None, RAGGED=ragged, LANES=LANES,
                **shape,
            )  # fmt: skip

    def _fold(self, safe: bool, config: Config, parts: Any, chunk: Chunk) -> None:
        row, column, high, wide = chunk
        programs = ceil_div(high, LANES) + (ceil_div(wide, LANES) if self.two_sided else 0)
        tiles = ceil_div(high, config.bm), ceil_div(wide, config.bn)
        # whether the chunk is the first and the last of its rows' state, and of its columns'
        ends = map(int, (column == 0, column + wide == self.n, row == 0, row + high == self.m))
        forward.fold[(programs,)](
            *parts, *self.state, *self.found[0], *self.found[1], self.plan, self.status, self.block.scale,
            self.block.bias, high, wide, row, column, *tiles, self.m, self.n, *ends,
            SAFE=safe, COLUMNS=self.two_sided, MATCHED=self.masks.ids_only, LIMITED=self.masks.limited, LANES=LANES,
            DEPTH=DEPTH,
        )  # fmt: skip

    def _positives(self) -> None:
        """P and S of positives that are named by index."""
        rows, columns = (side[1:] for side in self.found)
        pairs = self.masks.pairs
        if pairs.positives is None:
            for log, total in (rows, columns):
                log.fill_(-math.inf)
                total.zero_()
            return
        self.positive_dots(*rows)
        if self.two_sided:
            lanes, outer, inner = (8, 16, 8) if INTERPRETED else (64, 2048, 32)
            named = self.diagonals, pairs.positives, pairs.excluded, rows[0]
            positives.sum_positives[(ceil_div(self.n, lanes),)](
                *named, *columns, self.m, self.n, LANES=lanes, OUTER=outer, INNER=inner
            )
