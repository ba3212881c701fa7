# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
"""``sigmoid``, the additive primitive: value and gradients in one pass over the tiles."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from contrastile.backends.contract import Array, Block, Options
from contrastile.backends.passes import Chunk, ceil_div, gradient_scaling
from contrastile.backends.triton import forward, sigmoid
from contrastile.backends.triton.backward_pass import Chunks, scale_gradient
from contrastile.backends.triton.common import DEPTH, LANES, empty
from contrastile.backends.triton.configs import INTERPRETED
from contrastile.backends.triton.launch import grid, on_device
from contrastile.backends.triton.operands import BlockPass
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
            _SigmoidPass(block, row_weight.contiguous(), options).run(loss, slope, row_gradient, column_gradient)
    return loss, slope


class _SigmoidPass(BlockPass):
    """One pass over one block."""

    def __init__(self, block: Block, row_weight: Any, options: Options) -> None:
        super().__init__(block, options)
        self.row_weight, self.plan = row_weight, empty(self.rows, PLAN_SIZE)
        is_half, lanes = self.rows.dtype == torch.float16, 8 if INTERPRETED else 1024
        sigmoid.plan_sigmoid[(1,)](row_weight, block.bias, self.plan, self.m, HALF=is_half, BLOCK=lanes)

    def run(self, loss: Any, slope: Any, row_gradient: Any, column_gradient: Any) -> None:
        """Fill loss and slope, and add to the requested gradients."""
        config, product = self.config("sigmoid"), self.config("product")
        needs_g = row_gradient is not None or column_gradient is not None
        walk = Chunks(self.sides, self.scheme, config, self.options, held=needs_g)
        partials = [empty(self.rows, ceil_div(walk.width, config.bn) * walk.height) for _ in range(2)]
        scale = partial(scale_gradient, self.plan)
        with gradient_scaling((row_gradient, column_gradient), self.scheme.dtype, scale):
            for g, chunk in walk:
                row, column, height, width = chunk
                self._launch_tiles(walk, g, partials, needs_g, chunk)
                sizes = height, ceil_div(width, config.bn), int(column == 0)
                for part, out in zip(partials, (loss, slope), strict=True):
                    forward.add_parts[(ceil_div(height, LANES),)](part, out[row:], *sizes, LANES=LANES, DEPTH=DEPTH)
                if row_gradient is not None:
                    accumulate(row_gradient[row : row + height], g, self.sides[1].factors(column, width), product)
                if column_gradient is not None:
                    q = self.sides[0].factors(row, height)
                    accumulate(column_gradient[column : column + width], g, q, product, transposed=True)
        sigmoid.row_sums[(ceil_div(self.m, LANES),)](slope, self.row_weight, self.m, LANES=LANES)

    def _launch_tiles(self, walk: Chunks, g: list[Any], partials: list[Any], needs_g: bool, chunk: Chunk) -> None:
        config, masks = walk.config, self.masks
        sigmoid.sigmoid_tiles[grid(chunk.height, chunk.width, config, self.rows)](
            *walk.features(chunk), *walk.descriptors(g), self.plan, self.block.scale, self.row_weight, *partials,
            masks.pairs.positives, *masks.vectors(), self.m, self.n, *chunk, depth=self.sides[0].depth,
            GRADIENTS=needs_g, **masks.flags(), PARTS=config.parts, STRIP=config.strip, DIVIDED=self.scheme.divided,
            **config.named,
        )  # fmt: skip
