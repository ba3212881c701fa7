# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
"""``gradients``, the backward primitive: G chunk by chunk into a fixed workspace, then the two products."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import triton

from contrastile.backends.contract import Array, Block, Options, Weights
from contrastile.backends.triton import backward, survey
from contrastile.backends.triton.common import BLOCK, LANES, LINES, Masks, chunks, empty, step, weight_vectors
from contrastile.backends.triton.configs import Config, backward_chunk, choose
from contrastile.backends.triton.launch import aligned, architecture, descriptor, grid, on_device, workspace
from contrastile.backends.triton.products import accumulate
from contrastile.backends.triton.tiles import FACTOR, PLAN_SIZE


def gradients(
    block: Block,
    weights: Weights,
    row_gradient: Array | None,
    column_gradient: Array | None,
    options: Options,
    precision: str = "ieee",
) -> None:
    """Adds G K and G^T Q: see ``contract.Backend``."""
    wanted = row_gradient is not None or column_gradient is not None
    if wanted and block.rows.shape[0] and block.columns.shape[0]:
        with on_device(block.rows):
            _Pass(block, weights, precision).run(row_gradient, column_gradient, options)


@contextmanager
def carried(plan: Any, outs: Iterable[Any], dtype: Any) -> Iterator[None]:
    """While G of float16 carries FACTOR, so do the sums it is added to: exact both ways, it is a power of two."""
    factor = plan[FACTOR.value]
    sums = [x for x in outs if x is not None] if dtype == torch.float16 else []
    for x in sums:
        x.mul_(factor)
    yield
    for x in sums:
        x.div_(factor)


class _Pass:
    """One backward pass over one block."""

    def __init__(self, block: Block, weights: Weights, precision: str) -> None:
        self.block, self.weights, self.precision = block, weight_vectors(weights), precision
        self.two_sided = weights.column_weight is not None
        self.rows, self.columns = aligned(block.rows), aligned(block.columns)
        self.m, self.n = self.rows.shape[0], self.columns.shape[0]
        self.masks = Masks.of(block.pairs)
        self.plan = empty(self.rows, PLAN_SIZE)
        self.vectors = empty(self.rows, 3, self.m), empty(self.rows, 3, self.n if self.two_sided else 0)
        self.logits = None if self.masks.positives is None else empty(self.rows, self.m)
        self._survey()

    def _survey(self) -> None:
        """Decide on the path, and prepare the vectors of the epilogue."""
        row_programs = triton.cdiv(self.m, LINES)
        peaks = empty(self.rows, row_programs + (triton.cdiv(self.n, BLOCK) if self.two_sided else 0), survey.PEAKS)
        width = self.rows.shape[1]
        survey.weigh[(peaks.shape[0],)](
            self.rows,
            self.columns,
            self.rows.stride(0),
            self.columns.stride(0),
            self.m,
            self.n,
            self.masks.positives,
            self.masks.excluded,
            self.block.scale,
            self.block.bias,
            self.logits,
            peaks,
            *self.weights,
            depth=width,
            LINES=LINES,
            LANES=BLOCK,
            BD=step(width),
        )
        survey.plan_backward[(1,)](
            peaks,
            self.block.scale,
            self.plan,
            row_programs,
            peaks.shape[0],
            TWO_SIDED=self.two_sided,
            HALF=self.rows.dtype == torch.float16,
            BLOCK=BLOCK,
        )
        row_lse, row_weight, _, column_lse, column_weight, _ = self.weights
        programs = triton.cdiv(self.m, LANES) + (triton.cdiv(self.n, LANES) if self.two_sided else 0)
        survey.temper[(programs,)](
            self.plan,
            self.block.bias,
            self.m,
            self.n,
            row_lse,
            row_weight,
            column_lse,
            column_weight,
            *self.vectors,
            LANES=LANES,
        )

    def run(self, row_gradient: Any, column_gradient: Any, options: Options) -> None:
        """Add to the gradients that are wanted."""
        dtype = str(self.rows.dtype).removeprefix("torch.")
        kernels = "masked" if self.masks.masked else "gradient", "product"
        config, product = (
            choose(x, dtype, architecture(self.rows), self.rows.shape[1], self.precision) for x in kernels
        )
        height, width = backward_chunk(self.m, self.n, self.rows.element_size(), config, options.tile)
        space = workspace(height, width, self.rows.dtype, self.rows)
        with carried(self.plan, (row_gradient, column_gradient), self.rows.dtype):
            for row, column, high, wide in chunks(self.m, self.n, height, width):
                g = space[:high, :wide]
                self._tiles(g, config, (row, column, high, wide))
                if self.masks.positives is not None:
                    self._positives(g, (row, column, high, wide))
                if row_gradient is not None:
                    accumulate(row_gradient[row : row + high], g, self.columns[column : column + wide], False, product)
                if column_gradient is not None:
                    accumulate(column_gradient[column : column + wide], g, self.rows[row : row + high], True, product)

    def _tiles(self, g: Any, config: Config, chunk: tuple[int, int, int, int]) -> None:
        row, column, high, wide = chunk
        backward.gradient_tiles[grid(high, wide, config, self.rows)](
            descriptor(self.rows, (config.bm, config.bk)),
            descriptor(self.columns, (config.bn, config.bk)),
            descriptor(g, (config.bm, config.bn // config.parts)),
            self.plan,
            *self.vectors,
            self.weights[2],
            self.weights[5],
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
            TWO_SIDED=self.two_sided,
            **self.masks.flags(),
            RAGGED=high % config.bm != 0 or wide % config.bn != 0,
            BM=config.bm,
            BN=config.bn,
            BK=config.bk,
            GROUP=config.group,
            PARTS=config.parts,
            PRECISION=config.precision,
            **config.options(),
        )

    def _positives(self, g: Any, chunk: tuple[int, int, int, int]) -> None:
        row, column, high, wide = chunk
        backward.set_positives[(triton.cdiv(high, LANES),)](
            g,
            g.stride(0),
            self.plan,
            self.logits,
            self.masks.positives,
            self.masks.excluded,
            *self.vectors,
            self.weights[2],
            self.weights[5],
            self.m,
            self.n,
            row,
            column,
            high,
            wide,
            TWO_SIDED=self.two_sided,
            LANES=LANES,
        )
