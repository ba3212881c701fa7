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
"""From so many pairs on, the few tiles with positives by ids are computed separately, in one more launch."""


@side_by_side
def lse(block: Block, columns: bool, options: Options) -> Statistics:
    """Row (and column) log-sum-exps and sums of positive logits: see ``contract.Backend``."""
    if block.rows.shape[0] == 0 or block.columns.shape[0] == 0:
        return no_statistics(block, columns, ARRAYS)
    with on_device(block.rows):
        return _ForwardPass(block, columns, options).run()


class _ForwardPass(BlockPass):
    """One forward pass over one block: the fast kernels, then the safe ones; the device decides which return at once.

    float32 features use only the safe kernels: see ``passes.own_references``.
    """

    def __init__(self, block: Block, columns: bool, options: Options) -> None:
        super().__init__(block, options)
        self.two_sided = columns
        like, sizes = self.rows, (self.m, self.n if columns else 0)
        self.row_programs, self.programs = ceil_div(self.m, LINES), ceil_div(self.m, LINES) + ceil_div(self.n, LINES)
        self.plan, self.squares = empties(like, torch.float32, PLAN_SIZE, self.programs)
        # which path; the least and largest j - i over named positives (i, j): of all, and of each program
        status, self.diagonals, self.ends = empties(like, torch.int64, 1, 2, 2 * self.row_programs)
        self.status = status.view(torch.int32)
        if self.masks.pairs.positives is None:
            self.diagonals = self.ends = None
        # running sums; where ids name positives, also the sums over positives, of their logits, and their counts
        count = 4 if self.masks.ids_only else 1
        *totals, row_state, column_state = empties(like, torch.float64, *sizes, *(count * size for size in sizes))
        self.state = row_state, column_state
        # N and P, each an allocation of its own, because autograd saves them one by one; and S
        self.statistics = []
        for size, x in zip(sizes, totals, strict=True):
            n, p = (empty(like, size, dtype=torch.float64) for _ in range(2))
            self.statistics.append(SideStatistics(n, p, lines(x, 0, size)))
        # both sweeps share this memory, because the second follows the first on the stream
        self._partials_memory: Any = None
        self._descriptors: dict[tuple[int, ...], Any] = {}

    def run(self) -> Statistics:
        """Launch all kernels, and return the statistics."""
        self._precheck()
        for safe in (True,) if self.exact else (False, True):
            self._sweep(safe)
        if not self.masks.ids_only:
            self._set_positives()
        rows, columns = self.statistics
        return Statistics(rows, columns if self.two_sided else None)

    def _precheck(self) -> None:
        """Launch the kernels that choose the path."""
        row_programs, programs, squares, ends = self.row_programs, self.programs, self.squares, self.ends
        named, width = self.masks.pairs.positives, self.rows.shape[1]
        features = self.rows, self.columns, self.rows.stride(0), self.columns.stride(0), self.m, self.n
        precheck.measure[(programs,)](*features, named, squares, ends, depth=width, LINES=LINES, BD=step(width))
        # with terms up to 2^room the sum over the longer side stays below 2^125
        room = -math.inf if self.exact else float(124 - max(self.m, self.n).bit_length())
        decisions = self.plan, self.status, self.diagonals
        precheck.plan_forward[(1,)](
            squares, ends, self.block.scale, *decisions, row_programs, programs, room, depth=width, BLOCK=BLOCK
        )

    def _sweep(self, safe: bool) -> None:
        masks = self.masks
        # separately: all tiles as in a loss without ids, and then again the few tiles that hold a positive
        are_few = masks.ids_only and masks.pairs.rising and not masks.limited
        apart = are_few and self.m * self.n >= MANY and not safe
        matched = "matched" if masks.pairs.excluded is None else "matched, excluding"
        config = self.config("lse" if apart else {"drop": "masked", "target": matched, None: "lse"}[masks.pairs.of_ids])
        quantities = forward.quantities(safe, self.masks.ids_only)
        height, width = forward_chunk(self.m, self.n, config.shape, self.options, quantities, marks=bool(self.guide))
        row_tiles, column_tiles = ceil_div(height, config.bm), ceil_div(width, config.bn)
        sizes = column_tiles * height, row_tiles * width if self.two_sided else 0
        partials = self._partials(*(quantities * size for size in sizes))
        for chunk in chunks(self.m, self.n, height, width):
            self._launch_tiles(safe, config, partials, chunk, apart)
            self._launch_fold(safe, config, partials, chunk)

    def _partials(self, rows: int, columns: int) -> tuple[Any, Any]:
        """Memory for a chunk's partial results of the tile kernels."""
        # both sides are 16-byte aligned
        start = rows + -rows % 4
        if self._partials_memory is None or self._partials_memory.shape[0] < start + columns:
            self._partials_memory = empty(self.rows, start + columns)
        return self._partials_memory[:rows], self._partials_memory[start : start + columns]

    def _features(self, side: int, start: int, length: int, block: tuple[int, int]) -> Any:
        """The descriptor of a chunk of one side; cached only for plain features, because factors are overwritten."""
        key = side, start, length, *block
        features = self._descriptors.get(key)
        if features is None:
            features = descriptor(self.sides[side].tiles(start, length), block)
            if self.sides[side].plain:
                self._descriptors[key] = features
        return features

    def _launch_tiles(self, safe: bool, config: Config, partials: Any, chunk: Chunk, apart: bool) -> None:
        row, column, height, width = chunk
        features = (
            self._features(0, row, height, (config.bm, config.bk)),
            self._features(1, column, width, (config.bn, config.bk)),
        )
        masks, flags = self.masks.spanned, self.masks.flags()
        positions, is_ragged, arguments = (self.m, self.n, *chunk), config.ragged(chunk), config.named
        if apart:
            sizes = ceil_div(width, config.bn) * height, ceil_div(height, config.bm) * width
            for part, size in zip(partials, sizes, strict=True):
                # the counts of positives
                part[4 * size : 5 * size].zero_()
            masks, flags = [None] * 4, {"EXCLUDED": False, "IDS": NO_IDS.value}
        forward.lse_tiles[grid(height, width, config, self.rows)](
            *features, self.plan, self.status, self.diagonals, *partials, *masks, *self.masks.limits,
            self.marks(chunk, config, self.status, safe=safe), *positions, self.depth,
            SAFE=safe, COLUMNS=self.two_sided, POSITIVES=masks[0] is not None, **flags, LIMITED=self.masks.limited,
            RAGGED=is_ragged, DIVIDED=self.scheme.divided, **arguments,
        )  # fmt: skip
        if apart:
            arguments = {name: value for name, value in arguments.items() if name != "GROUP"}
            forward.touched_tiles[(ceil_div(height, config.bm), forward.SHARE)](
                *features, self.plan, self.status, *partials, *self.masks.spanned[1:], *positions, self.depth,
                COLUMNS=self.two_sided, EXCLUDED=self.masks.pairs.excluded is not None, RAGGED=is_ragged, LANES=LANES,
                **arguments,
            )  # fmt: skip

    def _launch_fold(self, safe: bool, config: Config, partials: Any, chunk: Chunk) -> None:
        row, column, height, width = chunk
        programs = ceil_div(height, LANES) + (ceil_div(width, LANES) if self.two_sided else 0)
        tiles = ceil_div(height, config.bm), ceil_div(width, config.bn)
        # whether the chunk is the first and the last of its rows' state, and of its columns'
        is_end = map(int, (column == 0, column + width == self.n, row == 0, row + height == self.m))
        forward.fold[(programs,)](
            *partials, *self.state, *self.statistics[0], *self.statistics[1], self.plan, self.status, self.block.scale,
            self.block.bias, height, width, row, column, *tiles, self.m, self.n, *is_end,
            SAFE=safe, COLUMNS=self.two_sided, MATCHED=self.masks.ids_only, LIMITED=self.masks.limited, LANES=LANES,
            DEPTH=DEPTH,
        )  # fmt: skip

    def _set_positives(self) -> None:
        """Compute P and S of positives that an index names."""
        rows, columns = (side[1:] for side in self.statistics)
        pairs = self.masks.pairs
        if pairs.positives is None:
            for positive_lse, positive_sum in (rows, columns):
                positive_lse.fill_(-math.inf)
                positive_sum.zero_()
            return
        self.positive_dots(*rows)
        if self.two_sided:
            lanes, outer, inner = (8, 16, 8) if INTERPRETED else (64, 2048, 32)
            named = self.diagonals, pairs.positives, pairs.excluded, rows[0]
            positives.sum_positives[(ceil_div(self.n, lanes),)](
                *named, *columns, self.m, self.n, LANES=lanes, OUTER=outer, INNER=inner
            )
