# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
"""``sigmoid``, the additive primitive: value and gradients in one pass over the tiles."""

from __future__ import annotations

from typing import Any

import torch

from contrastile.backends.contract import Array, Block, Options
from contrastile.backends.triton import forward, sigmoid
from contrastile.backends.triton.common import DEPTH, LANES, Masks, ceil_div, empty
from contrastile.backends.triton.configs import INTERPRETED, choose
from contrastile.backends.triton.gradients import Chunks, carried
from contrastile.backends.triton.launch import architecture, grid, on_device
from contrastile.backends.triton.operands import Scheme, Side
from contrastile.backends.triton.products import accumulate
from contrastile.backends.triton.tiles import PLAN_SIZE


def sigmoid_loss(
    block: Block,
    row_weight: Array,
    row_gradient: Array | None,
    column_gradient: Array | None,
    options: Options,
) -> tuple[Array, Array]:
    """The sigmoid loss of each row and the row sums of its G; adds the gradients: see ``contract.Backend``."""
    m, n = block.rows.shape[0], block.columns.shape[0]
    with on_device(block.rows):
        loss, slope = (empty(block.rows, m).zero_() for _ in range(2))
        if m and n:
            _Pass(block, row_weight.contiguous(), options).run(loss, slope, row_gradient, column_gradient)
    return loss, slope


class _Pass:
    """One pass over one block."""

    def __init__(self, block: Block, row_weight: Any, options: Options) -> None:
        self.block, self.row_weight, self.options = block, row_weight, options
        self.scheme = Scheme.of(block.rows, options)
        self.sides = Side(block.rows, self.scheme), Side(block.columns, self.scheme)
        self.rows, self.columns = (side.x for side in self.sides)
        self.m, self.n = self.rows.shape[0], self.columns.shape[0]
        self.masks = Masks.of(block.pairs)
        self.plan = empty(self.rows, PLAN_SIZE)
        lanes = 8 if INTERPRETED else 1024
        sigmoid.plan_sigmoid[(1,)](
            row_weight, block.bias, self.plan, self.m, HALF=self.rows.dtype == torch.float16, BLOCK=lanes
        )

    def run(self, loss: Any, slope: Any, row_gradient: Any, column_gradient: Any) -> None:
        """Fill loss and slope, and add to the gradients that are wanted."""
        config, product = (
            choose(x, self.scheme.dtype, architecture(self.rows), self.rows.shape[1], self.scheme.precision)
            for x in ("sigmoid", "product")
        )
        wanted = row_gradient is not None or column_gradient is not None
        walk = Chunks(self.sides, self.scheme, config, self.options, held=wanted)
        parts = [empty(self.rows, ceil_div(walk.width, config.bn) * walk.height) for _ in range(2)]
        with carried(self.plan, (row_gradient, column_gradient), self.rows.dtype):
            for g, place in walk:
                row, column, high, wide = place
                self._tiles(walk, g, parts, wanted, place)
                for part, out in zip(parts, (loss, slope), strict=True):
                    forward.add_parts[(ceil_div(high, LANES),)](
                        part,
                        out[row:],
                        high,
                        ceil_div(wide, config.bn),
                        int(column == 0),
                        LANES=LANES,
                        DEPTH=DEPTH,
                    )
                if row_gradient is not None:
                    accumulate(row_gradient[row : row + high], g, self.sides[1].factors(column, wide), product)
                if column_gradient is not None:
                    q = self.sides[0].factors(row, high)
                    accumulate(column_gradient[column : column + wide], g, q, product, transposed=True)
        sigmoid.row_sums[(ceil_div(self.m, LANES),)](slope, self.row_weight, self.m, LANES=LANES)

    def _tiles(
        self, walk: Chunks, g: list[Any], parts: list[Any], wanted: bool, place: tuple[int, int, int, int]
    ) -> None:
        (row, column, high, wide), config = place, walk.config
        sigmoid.sigmoid_tiles[grid(high, wide, config, self.rows)](
            *walk.features(place),
            *walk.descriptors(g),
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
            depth=self.sides[0].depth,
            GRADIENTS=wanted,
            **self.masks.flags(),
            BM=config.bm,
            BN=config.bn,
            BK=config.bk,
            GROUP=config.group,
            PARTS=config.parts,
            STRIP=config.strip,
            PRECISION=config.precision,
            DIVIDED=self.scheme.divided,
            **config.options(),
        )
