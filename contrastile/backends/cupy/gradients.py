"""``gradients`` and ``finished_rows``, the backward: G chunk by chunk into a fixed workspace, then two products."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import cupy

from contrastile.backends.contract import Array, Block, Options, Weights
from contrastile.backends.cupy.arguments import struct
from contrastile.backends.cupy.arrays import added
from contrastile.backends.cupy.common import (
    LANES,
    LINES,
    ONE_BLOCK,
    THREADS,
    ceil_div,
    chunks,
    contiguous,
    element,
    matrix,
    new_plan,
    scalars,
)
from contrastile.backends.cupy.configs import backward_chunk
from contrastile.backends.cupy.instances import instance
from contrastile.backends.cupy.launch import empty, launch, on_device, pointer, row_stride, workspace
from contrastile.backends.cupy.products import Products
from contrastile.backends.cupy.tiles import Tiles

_CARRIERS = 1024
"""Blocks of ``carry``, which loop over the rows."""


def gradients(
    block: Block,
    weights: Weights,
    row_gradient: Array | None,
    column_gradient: Array | None,
    options: Options,
    hopper: bool = True,
) -> None:
    """Adds G K and G^T Q: see ``contract.Backend``."""
    wanted = row_gradient is not None or column_gradient is not None
    if wanted and block.rows.shape[0] and block.columns.shape[0]:
        with on_device(block.rows):
            _Pass(block, weights, options, hopper).run(row_gradient, column_gradient)


def finished_rows(
    block: Block, weights: Weights, column_gradient: Array | None, options: Options, hopper: bool = True
) -> tuple[Array, Array]:
    """The rows' gradient, finished chunk by chunk, and its part of the scale's: see ``contract.Backend``."""
    with on_device(block.rows):
        if not (block.rows.shape[0] and block.columns.shape[0]):
            return cupy.zeros_like(block.rows), cupy.zeros((), "float64")
        return _Pass(block, weights, options, hopper).finish(column_gradient)


@contextmanager
def carried(plan: Any, outs: Iterable[Any], dtype: str) -> Iterator[None]:
    """While G of float16 carries FACTOR, so do the sums it is added to: exact both ways, it is a power of two."""
    sums = [x for x in outs if x is not None] if dtype == "float16" else []
    for divide in (False, True):
        for x in sums:
            arguments = struct("CarryArguments")(
                x=pointer(x),
                rows=x.shape[0],
                columns=x.shape[1],
                row_stride=row_stride(x),
                column_stride=x.strides[1] // x.itemsize,
                plan=pointer(plan),
                divide=divide,
            )
            launch(instance("scale_cast", "carry"), min(x.shape[0], _CARRIERS), THREADS, arguments)
        if not divide:
            yield


class _Weighed:
    """One side's log-sum-exps, weights and targets, and the vectors of the epilogue that come of them."""

    def __init__(self, lse: Any, weight: Any, target: Any) -> None:
        self.given = [contiguous(x) for x in (lse, weight, target)]
        self.length = 0 if weight is None else weight.shape[0]
        self.vectors = None if weight is None else empty(3 * self.length)

    def side(self) -> Any:
        """As the survey takes it."""
        return struct("WeightSide")(*map(pointer, self.given))

    def tempered(self) -> Any:
        """As the tile kernels take it."""
        places = [pointer(self.vectors, k * self.length) for k in range(3)]
        return struct("GradientSide")(*places, pointer(self.given[2]))


class _Pass:
    """One backward pass over one block."""

    def __init__(self, block: Block, weights: Weights, options: Options, hopper: bool) -> None:
        self.options = options
        self.block, self.tiles, self.plan = block, Tiles(block, options.precision, hopper), new_plan()
        self.m, self.n = block.rows.shape[0], block.columns.shape[0]
        self.row = _Weighed(weights.row_lse, weights.row_weight, weights.row_target)
        self.column = _Weighed(weights.column_lse, weights.column_weight, weights.column_target)
        self.dtype, size = self.tiles.rows.dtype.name, self.tiles.rows.itemsize
        self.height, self.width = backward_chunk(self.m, self.n, size, self.tiles.family, options.tile)
        self.products = Products()
        self._survey()

    def _survey(self) -> None:
        """Decide on the path, and prepare the vectors of the epilogue."""
        n = self.column.length
        blocks = ceil_div(self.m, LANES) + ceil_div(n, LANES)
        peaks = empty(4 * blocks)
        given = {"bias": pointer(self.block.bias), "row": self.row.side(), "column": self.column.side()}
        weigh = struct("WeighArguments")(m=self.m, n=n, peaks=pointer(peaks), **given)
        launch(instance("weigh", "weigh"), blocks, THREADS, weigh)
        decide = struct("PlanBackwardArguments")(
            peaks=pointer(peaks),
            programs=blocks,
            plan=pointer(self.plan),
            two_sided=self.column.vectors is not None,
            half=self.dtype == "float16",
            **scalars(self.block),
        )
        launch(instance("plan", "plan_backward"), 1, ONE_BLOCK, decide)
        temper = struct("TemperArguments")(
            plan=pointer(self.plan),
            m=self.m,
            n=n,
            row_vectors=pointer(self.row.vectors),
            column_vectors=pointer(self.column.vectors),
            **given,
        )
        launch(instance("temper", "temper"), ceil_div(self.m, THREADS) + ceil_div(n, THREADS), THREADS, temper)

    def run(self, row_gradient: Any, column_gradient: Any) -> None:
        """Add to the gradients that are wanted."""
        with carried(self.plan, (row_gradient, column_gradient), self.dtype):
            for g, (row, column, high, wide) in self._chunks():
                if row_gradient is not None:
                    k = self.tiles.columns[column : column + wide]
                    self.products.accumulate(row_gradient[row : row + high], g, k)
                self._columns(column_gradient, g, (row, column, high, wide))

    def finish(self, column_gradient: Any) -> tuple[Array, Array]:
        """Add to the columns' gradient; the rows' own, finished chunk by chunk, and its part of the scale's."""
        rows, columns = self.tiles.rows, self.tiles.columns
        out = cupy.empty(rows.shape, rows.dtype)
        sums = workspace(self.height, rows.shape[1], "float32")
        blocks = ceil_div(self.height, LINES)
        inner = cupy.zeros(ceil_div(self.m, self.height) * blocks, "float64")
        with carried(self.plan, (column_gradient,), self.dtype):
            for g, (row, column, high, wide) in self._chunks():
                part = sums[:high]
                self.products.accumulate(part, g, columns[column : column + wide], fresh=column == 0)
                self._columns(column_gradient, g, (row, column, high, wide))
                if column + wide < self.n:
                    continue
                arguments = struct("FinishRowsArguments")(
                    sums=matrix(part),
                    features=matrix(rows[row : row + high]),
                    out=matrix(out[row : row + high]),
                    m=high,
                    depth=rows.shape[1],
                    scale=pointer(self.block.scale),
                    plan=pointer(self.plan),
                    inner=pointer(inner, row // self.height * blocks),
                )
                launch(instance("finish_rows", "finish_rows", element(rows)), ceil_div(high, LINES), THREADS, arguments)
        return out, added(inner)

    def _columns(self, column_gradient: Any, g: Any, chunk: tuple[int, int, int, int]) -> None:
        row, column, high, wide = chunk
        if column_gradient is not None:
            q = self.tiles.rows[row : row + high]
            self.products.accumulate(column_gradient[column : column + wide], g, q, transposed=True)

    def _chunks(self) -> Iterator[tuple[Any, tuple[int, int, int, int]]]:
        """G of each chunk, formed in the one workspace, and where it lies."""
        space = workspace(self.height, self.width, self.tiles.rows.dtype)
        for chunk in chunks(self.m, self.n, self.height, self.width):
            g = space[: chunk[2], : chunk[3]]
            self._tiles(g, chunk)
            yield g, chunk

    def _tiles(self, g: Any, chunk: tuple[int, int, int, int]) -> None:
        arguments = struct("GradientArguments")(
            **self.tiles.common(chunk),
            plan=pointer(self.plan),
            row=self.row.tempered(),
            column=self.column.tempered(),
            g=pointer(g),
            g_stride=row_stride(g),
        )
        self.tiles.run("gradient", arguments, g)
