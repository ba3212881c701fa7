"""``gradients`` and its finished forms: G chunk by chunk into a fixed workspace, then two products.

Rows whose exponentials the forward pass has kept come first, all at once and without G: see ``keeping``. Where only the
rows' gradient is wanted, of narrow features on Hopper, one kernel forms G and multiplies it, and G is never in memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import cupy

from contrastile.backends.bars import normalised
from contrastile.backends.compiling import side_by_side
from contrastile.backends.contract import Array, Block, ColumnForm, Finished, Options, SideWeights, Weights
from contrastile.backends.cupy.arguments import struct
from contrastile.backends.cupy.arrays import ARRAYS, scale_cast
from contrastile.backends.cupy.common import (
    LANES,
    LINES,
    PLAN,
    THREADS,
    contiguous,
    element,
    matrix,
    new_plan,
    plan_field,
)
from contrastile.backends.cupy.configs import narrow_rows, weighted_shares
from contrastile.backends.cupy.instances import TARGET, instance
from contrastile.backends.cupy.keeping import Factors, KeptExponentials
from contrastile.backends.cupy.launch import aligned, empty, launch, on_device, pointer, row_stride, workspace
from contrastile.backends.cupy.products import Products
from contrastile.backends.cupy.tiles import Tiles
from contrastile.backends.passes import Chunk, backward_chunk, ceil_div, chunks, gradient_scaling, no_gradients
from contrastile.backends.settings import is_keep_given


def gradients(
    block: Block,
    weights: Weights,
    row_gradient: Array | None,
    column_gradient: Array | None,
    options: Options,
) -> None:
    """Adds G K and G^T Q: see ``contract.Backend``."""
    wanted = row_gradient is not None or column_gradient is not None
    if wanted and block.rows.shape[0] and block.columns.shape[0]:
        # the kernel that adds to the rows' gradient writes along its rows
        dense = row_gradient is not None and row_gradient.strides[1] == row_gradient.itemsize
        with on_device(block.rows):
            one = _BackwardPass(block, weights, options, only_rows=dense and column_gradient is None)
            columns = None if column_gradient is None else _Columns(one, "sums", column_gradient)
            one.add_gradients(row_gradient, columns)


@side_by_side
def finished(
    block: Block,
    weights: Weights,
    upstream: Array | None,
    columns: ColumnForm | None,
    options: Options,
) -> Finished:
    """Both gradients, overwriting and not adding, and the scale's part: see ``contract.Backend``."""
    if block.rows.shape[0] == 0 or block.columns.shape[0] == 0:
        return no_gradients(block, columns, ARRAYS)
    with on_device(block.rows):
        kept = KeptExponentials.of(weights.kept, block.columns.shape[0])
        one = _BackwardPass(block, weights, options, upstream, kept, only_rows=columns is None)
        return one.final_gradients(columns)


def finished_columns(block: Block, weights: Weights, row_gradient: Array, options: Options) -> Array:
    """Adds G K, and returns the columns' gradient: see ``contract.Backend``."""
    if block.rows.shape[0] == 0 or block.columns.shape[0] == 0:
        return no_gradients(block, "gradient", ARRAYS).columns
    with on_device(block.rows):
        one = _BackwardPass(block, weights, options, only_rows=False)
        columns = _Columns(one, "gradient")
        one.add_gradients(row_gradient, columns)
        return columns.done()


def scale_gradient(plan: Any, x: Any, divide: bool) -> None:
    """Multiply x, float32, by the plan's gradient scale, or divide it by that; in place."""
    start = PLAN.gradient_scale.offset
    (cupy.divide if divide else cupy.multiply)(x, plan[start : start + 4].view("float32"), out=x)


class _SideVectors:
    """One side's log-sum-exps, weights and targets, and the vectors of the epilogue that come of them.

    Attributes:
        length: the number of rows or columns.
        vectors: log, weight and folded of ``GradientSide``, where ids name positives also taken and certain; None for
            a loss of one direction.
    """

    def __init__(self, given: SideWeights | None, by_ids: bool) -> None:
        share: Any = None
        if given is not None and given.bars is not None:
            given, share = normalised(ARRAYS, given, "float32")
        vectors: tuple[Any, ...] = () if given is None else (*given[:4], share)
        self.given, self.by_ids = [contiguous(x) for x in vectors], by_ids
        self.length = 0 if given is None else given.weight.shape[0]
        self.vectors = None if given is None else empty((8 if by_ids else 3) * self.length)

    def weights(self) -> Any:
        """As the precheck takes it."""
        return struct("WeightSide")(*map(pointer, self.given))

    def epilogue(self) -> Any:
        """As the tile kernels take it."""
        return struct("GradientSide")(*(pointer(self.vectors, k * self.length) for k in range(5 if self.by_ids else 3)))


class _BackwardPass:
    """One backward pass over one block."""

    def __init__(
        self,
        block: Block,
        weights: Weights,
        options: Options,
        upstream: Array | None = None,
        kept: KeptExponentials | None = None,
        *,
        only_rows: bool,
    ) -> None:
        self.block, self.tiles, self.plan = block, Tiles(block, options.precision), new_plan()
        self.m, self.n = block.rows.shape[0], block.columns.shape[0]
        self.multiplied = self.tiles.rows, self.tiles.columns
        if block.values is not None:
            self.multiplied = aligned(block.values[0]), aligned(block.values[1])
        by_ids = self.tiles.mask == TARGET
        self.row, self.column = _SideVectors(weights.rows, by_ids), _SideVectors(weights.columns, by_ids)
        self.entries = None if self.tiles.pairs.positives is None else empty(self.m)
        self.dtype, size = self.tiles.dtype, self.tiles.rows.itemsize
        self.factors = None if kept is None else Factors(kept, self.m, self.n, weights.columns is not None)
        self.start = 0 if kept is None else kept.rows
        usual = kept is None and block.values is None and options.tile is None
        self.narrow = only_rows and usual and self.tiles.narrow
        if self.narrow:
            self.height, self.width = narrow_rows(self.m, options), self.n
        else:
            # where everything is kept, no chunk is left
            rest = max(1, self.m - self.start)
            step = self.tiles.family.step
            self.height, self.width = backward_chunk(rest, self.n, size, step, options)
            # G of the other rows overwrites what was kept, unless memory for that was asked for
            self.place: Any = None
            if kept is not None and self.start < self.m and not is_keep_given(options):
                self.place = kept.place(self.width)
                self.height = min(self.height, self.place.shape[0] // step * step)
            self.products = Products()
        self._precheck(upstream)

    def _precheck(self, upstream: Array | None) -> None:
        """Decide on the path, and prepare the vectors of the epilogue."""
        lengths = self.m, self.column.length
        blocks = sum(ceil_div(x, LANES) for x in lengths)
        peaks, pairs = empty(8 * blocks), self.tiles.pairs
        given = {"bias": pointer(self.block.bias), "upstream": pointer(upstream)}
        given |= {"row": self.row.weights(), "column": self.column.weights()}
        bounds = struct("WeightBoundsArguments")(m=self.m, n=self.n, peaks=pointer(peaks), **given)
        launch(instance("weight_bounds", "weight_bounds"), blocks, THREADS, bounds)
        scales = struct("EpilogueScalesArguments")(
            peaks=pointer(peaks),
            programs=blocks,
            scale=pointer(self.block.scale),
            plan=pointer(self.plan),
            m=self.m,
            n=self.n,
            positives=pointer(pairs.positives),
            excluded=pointer(pairs.excluded),
            entries=pointer(self.entries),
            row_vectors=pointer(self.row.vectors),
            column_vectors=pointer(self.column.vectors),
            two_sided=self.column.vectors is not None,
            by_ids=self.row.by_ids,
            half=self.dtype == "float16",
            exact=self.tiles.exact,
            **given,
            **({} if self.factors is None else self.factors.epilogue_arguments()),
        )
        # what goes with kept exponentials is longer, by no more than fills the last block of each side
        blocks = sum(ceil_div(x, THREADS) for x in lengths)
        launch(instance("epilogue_scales", "epilogue_scales"), blocks, THREADS, scales)

    def add_gradients(self, row_gradient: Any, columns: _Columns | None) -> None:
        """Add to the gradients that are wanted."""
        added = row_gradient, None if columns is None else columns.given
        with gradient_scaling(added, self.dtype, partial(scale_gradient, self.plan)):
            if self.narrow:
                self.tiles.narrow_gradient(self._arguments(Chunk(0, 0, self.m, self.n)), row_gradient, fresh=False)
                return
            for g, chunk in self._chunks():
                row, column, high, wide = chunk
                if row_gradient is not None:
                    k = self.multiplied[1][column : column + wide]
                    self.products.accumulate(row_gradient[row : row + high], g, k)
                if columns is not None:
                    columns.add(g, chunk)

    def final_gradients(self, form: ColumnForm | None) -> Finished:
        """Both gradients, overwriting and not adding."""
        out = cupy.empty(self.tiles.rows.shape, self.tiles.rows.dtype)
        rows, columns = _Rows(self, out), _Columns(self, form)
        if self.factors is not None:
            self._kept_rows(self.factors, rows, columns)
        if self.narrow:
            self._narrow_rows(rows)
        elif self.start < self.m:
            self._other_rows(rows, columns)
        # only now: the workspace is free, and its memory holds the columns' gradient
        return Finished(out, columns.done(), rows.inner)

    def _narrow_rows(self, rows: _Rows) -> None:
        """The rows' gradient, without a G in memory."""
        sums = workspace(self.height, self.tiles.rows.shape[1], "float32")
        for chunk in chunks(self.m, self.n, self.height, self.n):
            part = sums[: chunk.height]
            self.tiles.narrow_gradient(self._arguments(chunk), part, fresh=True)
            rows.finalize(part, chunk.row)

    def _kept_rows(self, factors: Factors, rows: _Rows, columns: _Columns) -> None:
        """The rows whose exponentials are kept, which begin the columns' sums."""
        factors.set_positives(self.tiles, self.plan, self.entries)
        # nothing, where the exponentials stand for G
        self._tiles(factors.kept.exponentials, Chunk(0, 0, self.start, self.n), in_place_of_kept=True)
        width = self.tiles.rows.shape[1]
        shares = weighted_shares(self.start, width, self.n)
        sums = workspace(shares * self.start, width, "float32")
        factors.multiply(self.tiles, self.plan, sums, shares, across=False)
        rows.finalize(sums, 0, shares)
        if columns.sums is not None:
            factors.multiply(self.tiles, self.plan, columns.sums, columns.shares, across=True)
        if self.place is not None:
            factors.kept.spend()

    def _other_rows(self, rows: _Rows, columns: _Columns) -> None:
        """The other rows, finalized as soon as their sums are complete, while they may still be in the cache."""
        sums = workspace(self.height, self.tiles.rows.shape[1], "float32")
        for g, chunk in self._chunks():
            row, column, high, wide = chunk
            part = sums[:high]
            self.products.accumulate(part, g, self.tiles.columns[column : column + wide], fresh=column == 0)
            if column + wide == self.n:
                rows.finalize(part, row)
            columns.add(g, chunk)

    def _chunks(self) -> Iterator[tuple[Any, Chunk]]:
        """G of each chunk, formed in the one workspace, and where it lies."""
        space = self.place
        if space is None:
            space = workspace(self.height, self.width, self.tiles.rows.dtype)
        for chunk in chunks(self.m, self.n, self.height, self.width, self.start):
            g = space[: chunk.height, : chunk.width]
            self._tiles(g, chunk)
            yield g, chunk

    def _tiles(self, g: Any, chunk: Chunk, *, in_place_of_kept: bool = False) -> None:
        where = {"g": pointer(g), "g_stride": row_stride(g), "in_place_of_kept": in_place_of_kept}
        self.tiles.run("gradient", self._arguments(chunk, **where), g)

    def _arguments(self, chunk: Chunk, **where: Any) -> Any:
        """How G of a chunk is formed, and where it goes if anywhere."""
        return struct("GradientArguments")(
            **self.tiles.common(chunk),
            plan=pointer(self.plan),
            row=self.row.epilogue(),
            column=self.column.epilogue(),
            entries=pointer(self.entries),
            **where,
        )


class _Rows:
    """The rows' side of ``final_gradients``: their gradient, and their part of the scale's."""

    def __init__(self, owner: _BackwardPass, out: Any) -> None:
        self.owner, self.out = owner, out
        # of each launch below: of the rows that are kept, and of each chunk of the others
        heights = [
            owner.start,
            *(min(owner.height, owner.m - row) for row in range(owner.start, owner.m, owner.height)),
        ]
        self.total, self.done = sum(ceil_div(high, LINES) for high in heights), 0
        self.parts, self.inner = empty(self.total, dtype="float64"), empty(dtype="float64")

    def finalize(self, sums: Any, row: int, shares: int = 1) -> None:
        """Write the gradient of the rows from ``row`` on, of which these are the complete sums; in their order.

        With more than one of the ``shares``, sums holds so many parts of the sums, one after the other.
        """
        features, high = self.owner.tiles.rows, sums.shape[0] // shares
        arguments = struct("FinalizeRowsArguments")(
            sums=matrix(sums),
            features=matrix(features[row : row + high]),
            out=matrix(self.out[row : row + high]),
            m=high,
            depth=features.shape[1],
            shares=shares,
            scale=pointer(self.owner.block.scale),
            plan=pointer(self.owner.plan),
            parts=pointer(self.parts),
            first=self.done,
            all_blocks=self.total,
            inner=pointer(self.inner),
        )
        blocks = ceil_div(high, LINES)
        launch(instance("finalize_rows", "finalize_rows", element(features)), blocks, THREADS, arguments)
        self.done += blocks


class _Columns:
    """The columns' side: sums that are ``given`` and added to, or new ones.

    Where one chunk holds all rows, a single product makes a gradient of 16 bits itself and no sums are held; kept
    exponentials begin sums. That of float32 is its sums times the scale, in place: what stands for a factor of 0 before
    cuBLAS would show in it.
    """

    def __init__(self, owner: _BackwardPass, form: ColumnForm | None, given: Any = None) -> None:
        self.owner, self.form, self.given = owner, form, given
        shape, wide = (owner.n, owner.tiles.columns.shape[1]), owner.dtype == "float32"
        alone = owner.start == 0 and owner.height >= owner.m
        once = form is None or (form == "gradient" and alone and not wide)
        # where all sums come at once, and are cast, they may come in parts
        whole = form == "gradient" and owner.start == owner.m
        self.shares = weighted_shares(*shape, owner.m) if whole else 1
        self.sums = given
        if given is None and not once:
            self.sums = cupy.empty((self.shares * owner.n, shape[1]), "float32")
        self.shape, dtype = shape, owner.tiles.columns.dtype
        self.out: Any = cupy.empty(shape, dtype) if form == "gradient" and self.sums is None else self.sums

    def add(self, g: Any, chunk: Chunk) -> None:
        """Add a chunk of G."""
        row, column, high, wide = chunk
        here, q = slice(column, column + wide), self.owner.multiplied[0][row : row + high]
        if self.sums is not None:
            fresh = row == 0 and self.given is None
            self.owner.products.accumulate(self.sums[here], g, q, transposed=True, fresh=fresh)
        elif self.out is not None:
            factors = plan_field(self.owner.plan, "blas_scale"), plan_field(self.owner.plan, "zero")
            self.owner.products.write(self.out[here], g, q, factors)

    def done(self) -> Any:
        """What was asked for."""
        plan, dtype = self.owner.plan, self.owner.tiles.columns.dtype
        if self.form == "sums" and self.owner.dtype == "float16":
            scale_gradient(plan, self.sums, divide=True)
        if self.form == "gradient" and self.sums is not None:
            self.out = self.sums if dtype == self.sums.dtype else cupy.empty(self.shape, dtype)
            scale_cast(self.sums, self.out, plan_field(plan, "output_scale"), self.shares)
        return self.out
