# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
"""``sigmoid``, the additive primitive: value and gradients in one pass over the tiles."""

from __future__ import annotations

from typing import Any

import torch
import triton

from contrastile.backends.contract import Array, Block, Options
from contrastile.backends.triton import forward, sigmoid
from contrastile.backends.triton.common import DEPTH, LANES, Masks, chunks, empty
from contrastile.backends.triton.configs import INTERPRETED, Config, backward_chunk, choose
from contrastile.backends.triton.gradients import carried
from contrastile.backends.triton.launch import aligned, architecture, descriptor, grid, on_device, workspace
from contrastile.backends.triton.products import accumulate
from contrastile.backends.triton.tiles import PLAN_SIZE


def sigmoid_loss(
    block: Block,
    row_weight: Array,
    row_gradient: Array | None,
    column_gradient: Array | None,
    options: Options,
    precision: str = "ieee",
) -> tuple[Array, Array]:
    """The sigmoid loss of each row and the row sums of its G; adds the gradients: see ``contract.Backend``."""
    m, n = block.rows.shape[0], block.columns.shape[0]
    with on_device(block.rows):
        loss, slope = (empty(block.rows, m).zero_() for _ in range(2))
        if m and n:
            _Pass(block, row_weight.contiguous(), precision).run(loss, slope, row_gradient, column_gradient, options)
    return loss, slope


class _Pass:
    """One pass over one block."""

    def __init__(self, block: Block, row_weight: Any, precision: str) -> None:
        self.block, self.row_weight, self.precision = block, row_weight, precision
        self.rows, self.columns = aligned(block.rows), aligned(block.columns)
        self.m, self.n = self.rows.shape[0], self.columns.shape[0]
        self.masks = Masks.of(block.pairs)
        self.plan = empty(self.rows, PLAN_SIZE)
        lanes = 8 if INTERPRETED else 1024
        sigmoid.plan_sigmoid[(1,)](
            row_weight, block.bias, self.plan, self.m, HALF=self.rows.dtype == torch.float16, BLOCK=lanes
        )

    def run(self, loss: Any, slope: Any, row_gradient: Any, column_gradient: Any, options: Options) -> None:
        """Fill loss and slope, and add to the gradients that are wanted."""
        dtype = str(self.rows.dtype).removeprefix("torch.")
        config, product = (
            choose(x, dtype, architecture(self.rows), self.rows.shape[1], self.precision)
            for x in ("sigmoid", "product")
        )
        height, width = backward_chunk(self.m, self.n, self.rows.element_size(), config, options.tile)
        wanted = row_gradient is not None or column_gradient is not None
        # a descriptor needs memory, also where G is not wanted
        space = workspace(*((height, width) if wanted else (1, config.bn)), self.rows.dtype, self.rows)
        tiles = triton.cdiv(width, config.bn)
        parts = [empty(self.rows, tiles * height) for _ in range(2)]
        with carried(self.plan, (row_gradient, column_gradient), self.rows.dtype):
            for row, column, high, wide in chunks(self.m, self.n, height, width):
                g = space[:high, :wide]
                self._tiles(g, config, parts, wanted, (row, column, high, wide))
                for part, out in zip(parts, (loss, slope), strict=True):
                    forward.add_parts[(triton.cdiv(high, LANES),)](
                        part,
                        out[row:],
                        None,
                        high,
                        triton.cdiv(wide, config.bn),
                        int(column == 0),
                        SAFE=False,
                        LANES=LANES,
                        DEPTH=DEPTH,
                    )
                if row_gradient is not None:
                    accumulate(row_gradient[row : row + high], g, self.columns[column : column + wide], False, product)
                if column_gradient is not None:
                    accumulate(column_gradient[column : column + wide], g, self.rows[row : row + high], True, product)
        sigmoid.row_sums[(triton.cdiv(self.m, LANES),)](slope, self.row_weight, self.m, LANES=LANES)

    def _tiles(self, g: Any, config: Config, parts: Any, wanted: bool, chunk: tuple[int, int, int, int]) -> None:
        row, column, high, wide = chunk
        sigmoid.sigmoid_tiles[grid(high, wide, config, self.rows)](
            descriptor(self.rows, (config.bm, config.bk)),
            descriptor(self.columns, (config.bn, config.bk)),
            descriptor(g, (config.bm, config.bn // config.parts)),
            self.plan,
            self.block.scale,
            self.row_weight,
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
            depth=self.rows.shape[1],
            GRADIENTS=wanted,
            POSITIVES=self.masks.positives is not None,
            **self.masks.flags(),
            BM=config.bm,
            BN=config.bn,
            BK=config.bk,
            GROUP=config.group,
            PARTS=config.parts,
            PRECISION=config.precision,
            **config.options(),
        )
