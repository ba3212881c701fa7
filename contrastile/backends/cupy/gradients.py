"""``gradients`` and ``finished``, the backward: G chunk by chunk into a fixed workspace, then two products."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import cupy

from contrastile.backends.contract import Array, Block, ColumnForm, Finished, Options, Weights
from contrastile.backends.cupy.arguments import struct
from contrastile.backends.cupy.arrays import scale_cast
from contrastile.backends.cupy.common import (
    LANES,
    LINES,
    THREADS,
    ceil_div,
    chunks,
    contiguous,
    element,
    matrix,
    new_plan,
    planned,
)
from contrastile.backends.cupy.configs import DEFAULT, Way, backward_chunk
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
    way: Way = DEFAULT,
) -> None:
    """Adds G K and G^T Q: see ``contract.Backend``."""
    wanted = row_gradient is not None or column_gradient is not None
    if wanted and block.rows.shape[0] and block.columns.shape[0]:
        with on_device(block.rows):
            _Pass(block, weights, options, way).run(row_gradient, column_gradient)


def finished(
    block: Block,
    weights: Weights,
    upstream: Array | None,
    columns: ColumnForm | None,
    options: Options,
    way: Way = DEFAULT,
) -> Finished:
    """Both gradients with every sum begun afresh, and their part of the scale's: see ``contract.Backend``."""
    with on_device(block.rows):
        if block.rows.shape[0] and block.columns.shape[0]:
            return _Pass(block, weights, options, way, upstream).finish(columns)
        dtype = block.rows.dtype if columns == "gradient" else "float32"
        none = None if columns is None else cupy.zeros(block.columns.shape, dtype)
        return Finished(cupy.zeros(block.rows.shape, block.rows.dtype), none, cupy.zeros((), "float64"))


@contextmanager
def carried(plan: Any, outs: Iterable[Any], dtype: str) -> Iterator[None]:
    """While G of float16 carries FACTOR, so do the sums it is added to: exact both ways, it is a power of two."""
    sums = [x for x in outs if x is not None] if dtype == "float16" else []
    for x in sums:
        _carry(plan, x, divide=False)
    yield
    for x in sums:
        _carry(plan, x, divide=True)


def _carry(plan: Any, x: Any, *, divide: bool) -> None:
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

    def __init__(
        self, block: Block, weights: Weights, options: Options, way: Way, upstream: Array | None = None
    ) -> None:
        self.block, self.tiles, self.plan = block, Tiles(block, options.precision, way.hopper), new_plan()
        self.m, self.n = block.rows.shape[0], block.columns.shape[0]
        self.row = _Weighed(weights.row_lse, weights.row_weight, weights.row_target)
        self.column = _Weighed(weights.column_lse, weights.column_weight, weights.column_target)
        self.dtype, size = self.tiles.rows.dtype.name, self.tiles.rows.itemsize
        self.height, self.width = backward_chunk(self.m, self.n, size, self.tiles.family, options.tile, way.mib)
        self.products = Products()
        self._survey(upstream)

    def _survey(self, upstream: Array | None) -> None:
        """Decide on the path, and prepare the vectors of the epilogue."""
        n = self.column.length
        blocks = ceil_div(self.m, LANES) + ceil_div(n, LANES)
        peaks = empty(4 * blocks)
        given = {"bias": pointer(self.block.bias), "upstream": pointer(upstream)}
        given |= {"row": self.row.side(), "column": self.column.side()}
        weigh = struct("WeighArguments")(m=self.m, n=n, peaks=pointer(peaks), **given)
        launch(instance("weigh", "weigh"), blocks, THREADS, weigh)
        temper = struct("TemperArguments")(
            peaks=pointer(peaks),
            programs=blocks,
            scale=pointer(self.block.scale),
            plan=pointer(self.plan),
            m=self.m,
            n=n,
            row_vectors=pointer(self.row.vectors),
            column_vectors=pointer(self.column.vectors),
            two_sided=self.column.vectors is not None,
            half=self.dtype == "float16",
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
                if column_gradient is not None:
                    q = self.tiles.rows[row : row + high]
                    self.products.accumulate(column_gradient[column : column + wide], g, q, transposed=True)

    def finish(self, form: ColumnForm | None) -> Finished:
        """Every sum begun afresh."""
        out = cupy.empty(self.tiles.rows.shape, self.tiles.rows.dtype)
        side = _Columns(self, form)
        inner = self._finish_rows(out, side)
        # only now: the columns' gradient takes the place of the workspace
        return Finished(out, side.done(), inner)

    def _finish_rows(self, out: Any, side: _Columns) -> Any:
        """Write the rows' gradient, add to the columns' side, and give the part of the scale's gradient.

        Rows are finished as soon as they are complete, while a cache may still hold them.
        """
        rows, columns = self.tiles.rows, self.tiles.columns
        depth = rows.shape[1]
        sums = workspace(self.height, depth, "float32")
        starts = range(0, self.m, self.height)
        blocks = ceil_div(self.height, LINES)
        total = (len(starts) - 1) * blocks + ceil_div(self.m - starts[-1], LINES)
        parts, inner = empty(total, dtype="float64"), empty(dtype="float64")
        for g, chunk in self._chunks():
            row, column, high, wide = chunk
            part = sums[:high]
            self.products.accumulate(part, g, columns[column : column + wide], fresh=column == 0)
            if column + wide == self.n:
                arguments = struct("FinishRowsArguments")(
                    sums=matrix(part),
                    features=matrix(rows[row : row + high]),
                    out=matrix(out[row : row + high]),
                    m=high,
                    depth=depth,
                    scale=pointer(self.block.scale),
                    plan=pointer(self.plan),
                    parts=pointer(parts),
                    first=row // self.height * blocks,
                    all_blocks=total,
                    inner=pointer(inner),
                )
                launch(instance("finish_rows", "finish_rows", element(rows)), ceil_div(high, LINES), THREADS, arguments)
            side.add(g, chunk)
        return inner

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


class _Columns:
    """The columns' side of a pass that finishes.

    Where one chunk holds all rows, a single product makes a gradient of 16 bits itself and no sums are held. That of
    float32 is its sums times the scale, in place: what stands for a factor of 0 before cuBLAS would show in it.
    """

    def __init__(self, whole: _Pass, form: ColumnForm | None) -> None:
        self.whole, self.form = whole, form
        shape, wide = (whole.n, whole.tiles.columns.shape[1]), whole.dtype == "float32"
        once = form is None or (form == "gradient" and whole.height >= whole.m and not wide)
        self.sums = None if once else cupy.empty(shape, "float32")
        dtype = whole.tiles.columns.dtype
        self.out: Any = cupy.empty(shape, dtype) if form == "gradient" and self.sums is None else self.sums

    def add(self, g: Any, chunk: tuple[int, int, int, int]) -> None:
        """Take in a chunk of G."""
        row, column, high, wide = chunk
        here, q = slice(column, column + wide), self.whole.tiles.rows[row : row + high]
        if self.sums is not None:
            self.whole.products.accumulate(self.sums[here], g, q, transposed=True, fresh=row == 0)
        elif self.out is not None:
            factors = planned(self.whole.plan, "multiplier"), planned(self.whole.plan, "zero")
            self.whole.products.finish(self.out[here], g, q, factors)

    def done(self) -> Any:
        """What was asked for."""
        plan, dtype = self.whole.plan, self.whole.tiles.columns.dtype
        if self.form == "sums" and self.whole.dtype == "float16":
            _carry(plan, self.sums, divide=True)
        if self.form == "gradient" and self.sums is not None:
            self.out = self.sums if dtype == self.sums.dtype else cupy.empty(self.sums.shape, dtype)
            scale_cast(self.sums, self.out, planned(plan, "finishing"))
        return self.out
