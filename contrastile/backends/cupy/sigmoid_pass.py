"""``sigmoid``, the additive primitive: value and gradients in one pass over the tiles."""

from __future__ import annotations

from functools import partial
from typing import Any

import cupy

from contrastile.backends.contract import Array, Block, Options
from contrastile.backends.cupy.arguments import struct
from contrastile.backends.cupy.backward_pass import scale_gradient
from contrastile.backends.cupy.common import (
    FOLD,
    ONE_BLOCK,
    THREADS,
    contiguous,
    new_plan,
    scalars,
)
from contrastile.backends.cupy.instances import instance
from contrastile.backends.cupy.launch import empty, launch, on_device, pointer, row_stride, workspace
from contrastile.backends.cupy.products import Products
from contrastile.backends.cupy.tiles import Tiles
from contrastile.backends.passes import Chunk, backward_chunk, ceil_div, chunks, gradient_scaling


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
        if m == 0 or n == 0:
            return cupy.zeros(m, "float32"), cupy.zeros(m, "float32")
        return _SigmoidPass(block, row_weight, options).run(row_gradient, column_gradient)


class _SigmoidPass:
    """One pass over one block."""

    def __init__(self, block: Block, row_weight: Any, options: Options) -> None:
        self.options = options
        self.block, self.tiles, self.plan = block, Tiles(block, options.precision), new_plan()
        self.m, self.n = block.rows.shape[0], block.columns.shape[0]
        self.row_weight = contiguous(row_weight)
        self.dtype = self.tiles.dtype
        plan_arguments = struct("PlanSigmoidArguments")(
            row_weight=pointer(self.row_weight),
            plan=pointer(self.plan),
            m=self.m,
            half=self.dtype == "float16",
            **scalars(block),
        )
        launch(instance("plan", "plan_sigmoid"), 1, ONE_BLOCK, plan_arguments)

    def run(self, row_gradient: Any, column_gradient: Any) -> tuple[Array, Array]:
        """The loss of each row and its row sum of G; adds to the requested gradients."""
        rows, columns = self.tiles.rows, self.tiles.columns
        height, width = backward_chunk(self.m, self.n, rows.itemsize, self.tiles.family.step, self.options)
        needs_g = row_gradient is not None or column_gradient is not None
        memory = workspace(height, width, rows.dtype) if needs_g else None
        products = Products() if needs_g else None
        # losses, then slopes: partials of a chunk, the running state of its rows, and the results
        room = ceil_div(width, self.tiles.family.bn) * height
        partials, state, out = empty(2 * room), empty(2 * height, dtype="float64"), empty(2, self.m)
        with gradient_scaling((row_gradient, column_gradient), self.dtype, partial(scale_gradient, self.plan)):
            for chunk in chunks(self.m, self.n, height, width):
                row, column, high, wide = chunk
                g = None if memory is None else memory[:high, :wide]
                self._tiles(g, partials, room, chunk)
                self._fold(partials, room, state, out, chunk)
                if products is not None and row_gradient is not None:
                    products.accumulate(row_gradient[row : row + high], g, columns[column : column + wide])
                if products is not None and column_gradient is not None:
                    products.accumulate(
                        column_gradient[column : column + wide], g, rows[row : row + high], transposed=True
                    )
        return out[0], out[1]

    def _tiles(self, g: Any, partials: Any, room: int, chunk: Chunk) -> None:
        arguments = struct("SigmoidArguments")(
            **self.tiles.common(chunk),
            plan=pointer(self.plan),
            row_weight=pointer(self.row_weight),
            loss_parts=pointer(partials),
            slope_parts=pointer(partials, room),
            part_stride=chunk.height,
            g=pointer(g),
            g_stride=0 if g is None else row_stride(g),
        )
        self.tiles.run("sigmoid", arguments, g)

    def _fold(self, partials: Any, room: int, state: Any, out: Any, chunk: Chunk) -> None:
        row, column, height, width = chunk
        arguments = struct("FoldSigmoidArguments")(
            loss_parts=pointer(partials),
            slope_parts=pointer(partials, room),
            part_stride=height,
            tiles=ceil_div(width, self.tiles.family.bn),
            state=pointer(state),
            state_stride=height,
            row_weight=pointer(self.row_weight, row),
            loss=pointer(out, row),
            slope=pointer(out, self.m + row),
            length=height,
            first=column == 0,
            last=column + width == self.n,
        )
        launch(instance("fold", "fold_sigmoid"), ceil_div(height, FOLD), THREADS, arguments)
