"""``gradients`` and its finished forms: G chunk by chunk into a fixed workspace, then two products.

Rows whose exponentials the forward pass kept come first, all at once and without G: see ``keeping``. If only the rows'
gradient of narrow features is requested, on Hopper, one kernel forms G and multiplies it, and G is never in memory.
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
    is_requested = row_gradient is not None or column_gradient is not None
    if is_requested and block.rows.shape[0] and block.columns.shape[0]:
        # the kernel that adds to the rows' gradient writes along its rows
        has_dense_rows = row_gradient is not None and row_gradient.strides[1] == row_gradient.itemsize
        with on_device(block.rows):
            backward_pass = _BackwardPass(block, weights, options, only_rows=has_dense_rows and column_gradient is None)
            columns = None if column_gradient is None else _Columns(backward_pass, "sums", column_gradient)
            backward_pass.add_gradients(row_gradient, columns)


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
        backward_pass = _BackwardPass(block, weights, options, upstream, kept, only_rows=columns is None)
        return backward_pass.final_gradients(columns)


def finished_columns(block: Block, weights: Weights, row_gradient: Array, options: Options) -> Array:
    """Adds G K, and returns the columns' gradient: see ``contract.Backend``."""
    if block.rows.shape[0] == 0 or block.columns.shape[0] == 0:
        return no_gradients(block, "gradient", ARRAYS).columns
    with on_device(block.rows):
        backward_pass = _BackwardPass(block, weights, options, only_rows=False)
        columns = _Columns(backward_pass, "gradient")
        backward_pass.add_gradients(row_gradient, columns)
        return columns.result()


def scale_gradient(plan: Any, x: Any, divide: bool) -> None:
    """Multiply x, float32, by the plan's gradient scale, or divide x by it; in place."""
    start = PLAN.gradient_scale.offset
    (cupy.divide if divide else cupy.multiply)(x, plan[start : start + 4].view("float32"), out=x)


class _SideVectors:
    """One side's log-sum-exps, weights and targets, and the vectors of the epilogue that are computed from them.

    Attributes:
        length: the number of rows or columns.
        vectors: log, weight and folded of ``GradientSide``, and where ids name positives also taken and certain; None
            for the columns of a loss of one direction.
    """

    def __init__(self, weights: SideWeights | None, by_ids: bool) -> None:
        share: Any = None
        if weights is not None and weights.bars is not None:
            weights, share = normalised(ARRAYS, weights, "float32")
        vectors: tuple[Any, ...] = () if weights is None else (*weights[:4], share)
        self.inputs, self.by_ids = [contiguous(x) for x in vectors], by_ids
        self.length = 0 if weights is None else weights.weight.shape[0]
        self.vectors = None if weights is None else empty((8 if by_ids else 3) * self.length)

    def weights(self) -> Any:
        """The struct that the precheck takes."""
        return struct("WeightSide")(*map(pointer, self.inputs))

    def epilogue(self) -> Any:
        """The struct that the tile kernels take."""
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
        self.dtype, itemsize = self.tiles.dtype, self.tiles.rows.itemsize
        self.factors = None if kept is None else Factors(kept, self.m, self.n, weights.columns is not None)
        self.start = 0 if kept is None else kept.rows
        is_plain = kept is None and block.values is None and options.tile is None
        self.narrow = only_rows and is_plain and self.tiles.narrow
        if self.narrow:
            self.height, self.width = narrow_rows(self.m, options), self.n
        else:
            # at least 1: where every row is kept, no chunk follows
            other_rows = max(1, self.m - self.start)
            step = self.tiles.family.step
            self.height, self.width = backward_chunk(other_rows, self.n, itemsize, step, options)
            # G of the other rows overwrites the kept exponentials, unless the caller requested memory for them
            self.place: Any = None
            if kept is not None and self.start < self.m and not is_keep_given(options):
                self.place = kept.place(self.width)
                self.height = min(self.height, self.place.shape[0] // step * step)
            self.products = Products()
        self._precheck(upstream)

    def _precheck(self, upstream: Array | None) -> None:
        """Launch the kernels that choose the path and prepare the vectors of the epilogue."""
        lengths = self.m, self.column.length
        blocks = sum(ceil_div(x, LANES) for x in lengths)
        peaks, pairs = empty(8 * blocks), self.tiles.pairs
        shared = {"bias": pointer(self.block.bias), "upstream": pointer(upstream)}
        shared |= {"row": self.row.weights(), "column": self.column.weights()}
        bounds = struct("WeightBoundsArguments")(m=self.m, n=self.n, peaks=pointer(peaks), **shared)
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
            **shared,
            **({} if self.factors is None else self.factors.epilogue_arguments()),
        )
        # vectors for kept exponentials are padded, but only to the end of the last block of each side
        blocks = sum(ceil_div(x, THREADS) for x in lengths)
        launch(instance("epilogue_scales", "epilogue_scales"), blocks, THREADS, scales)

    def add_gradients(self, row_gradient: Any, columns: _Columns | None) -> None:
        """Add to the requested gradients."""
        accumulators = row_gradient, None if columns is None else columns.accumulator
        with gradient_scaling(accumulators, self.dtype, partial(scale_gradient, self.plan)):
            if self.narrow:
                self.tiles.narrow_gradient(self._arguments(Chunk(0, 0, self.m, self.n)), row_gradient, fresh=False)
                return
            for g, chunk in self._chunks():
                row, column, height, width = chunk
                if row_gradient is not None:
                    k = self.multiplied[1][column : column + width]
                    self.products.accumulate(row_gradient[row : row + height], g, k)
                if columns is not None:
                    columns.add(g, chunk)

    def final_gradients(self, form: ColumnForm | None) -> Finished:
        """Compute both gradients, overwriting instead of adding."""
        out = cupy.empty(self.tiles.rows.shape, self.tiles.rows.dtype)
        rows, columns = _Rows(self, out), _Columns(self, form)
        if self.factors is not None:
            self._process_kept_rows(self.factors, rows, columns)
        if self.narrow:
            self._process_narrow_rows(rows)
        elif self.start < self.m:
            self._process_other_rows(rows, columns)
        # after all chunks, because the columns' gradient may take the memory of the workspace
        return Finished(out, columns.result(), rows.inner)

    def _process_narrow_rows(self, rows: _Rows) -> None:
        """Compute the rows' gradient without G in memory."""
        sums = workspace(self.height, self.tiles.rows.shape[1], "float32")
        for chunk in chunks(self.m, self.n, self.height, self.n):
            part = sums[: chunk.height]
            self.tiles.narrow_gradient(self._arguments(chunk), part, fresh=True)
            rows.finalize(part, chunk.row)

    def _process_kept_rows(self, factors: Factors, rows: _Rows, columns: _Columns) -> None:
        """Process the rows whose exponentials are kept. They begin the columns' sums."""
        factors.set_positives(self.tiles, self.plan, self.entries)
        # returns at once where the exponentials can be used in place of G
        self._form_tiles(factors.kept.exponentials, Chunk(0, 0, self.start, self.n), in_place_of_kept=True)
        width = self.tiles.rows.shape[1]
        shares = weighted_shares(self.start, width, self.n)
        sums = workspace(shares * self.start, width, "float32")
        factors.multiply(self.tiles, self.plan, sums, shares, across=False)
        rows.finalize(sums, 0, shares)
        if columns.sums is not None:
            factors.multiply(self.tiles, self.plan, columns.sums, columns.shares, across=True)
        if self.place is not None:
            factors.kept.spend()

    def _process_other_rows(self, rows: _Rows, columns: _Columns) -> None:
        """Process the other rows. Each is finalized when its sums are complete, which may still be in the cache."""
        sums = workspace(self.height, self.tiles.rows.shape[1], "float32")
        for g, chunk in self._chunks():
            row, column, height, width = chunk
            part = sums[:height]
            self.products.accumulate(part, g, self.tiles.columns[column : column + width], fresh=column == 0)
            if column + width == self.n:
                rows.finalize(part, row)
            columns.add(g, chunk)

    def _chunks(self) -> Iterator[tuple[Any, Chunk]]:
        """Form G of each chunk in the same workspace, and yield it with the chunk."""
        memory = self.place
        if memory is None:
            memory = workspace(self.height, self.width, self.tiles.rows.dtype)
        for chunk in chunks(self.m, self.n, self.height, self.width, self.start):
            g = memory[: chunk.height, : chunk.width]
            self._form_tiles(g, chunk)
            yield g, chunk

    def _form_tiles(self, g: Any, chunk: Chunk, *, in_place_of_kept: bool = False) -> None:
        output = {"g": pointer(g), "g_stride": row_stride(g), "in_place_of_kept": in_place_of_kept}
        self.tiles.run("gradient", self._arguments(chunk, **output), g)

    def _arguments(self, chunk: Chunk, **output: Any) -> Any:
        """The arguments that form G of a chunk; ``output`` says where G is stored, if it is."""
        return struct("GradientArguments")(
            **self.tiles.common(chunk),
            plan=pointer(self.plan),
            row=self.row.epilogue(),
            column=self.column.epilogue(),
            entries=pointer(self.entries),
            **output,
        )


class _Rows:
    """The rows' side of ``final_gradients``: their gradient, and ``Finished.inner``."""

    def __init__(self, owner: _BackwardPass, out: Any) -> None:
        self.owner, self.out = owner, out
        # heights of the launches of ``finalize``: the kept rows, and each chunk of the others
        heights = [
            owner.start,
            *(min(owner.height, owner.m - row) for row in range(owner.start, owner.m, owner.height)),
        ]
        self.total, self.finalized_blocks = sum(ceil_div(height, LINES) for height in heights), 0
        self.parts, self.inner = empty(self.total, dtype="float64"), empty(dtype="float64")

    def finalize(self, sums: Any, row: int, shares: int = 1) -> None:
        """Write the gradient of the rows from ``row`` on, from their complete sums. Calls must follow the rows' order.

        ``sums`` holds ``shares`` parts, one after the other, which are added.
        """
        features, height = self.owner.tiles.rows, sums.shape[0] // shares
        arguments = struct("FinalizeRowsArguments")(
            sums=matrix(sums),
            features=matrix(features[row : row + height]),
            out=matrix(self.out[row : row + height]),
            m=height,
            depth=features.shape[1],
            shares=shares,
            scale=pointer(self.owner.block.scale),
            plan=pointer(self.owner.plan),
            parts=pointer(self.parts),
            first=self.finalized_blocks,
            all_blocks=self.total,
            inner=pointer(self.inner),
            **self._entries(row),
        )
        blocks = ceil_div(height, LINES)
        launch(instance("finalize_rows", "finalize_rows", element(features)), blocks, THREADS, arguments)
        self.finalized_blocks += blocks

    def _entries(self, row: int) -> dict[str, int | None]:
        """The arguments by which ``inner`` is of a G that is not rounded at positives, for the rows from ``row`` on."""
        owner = self.owner
        if owner.entries is None or owner.dtype == "float32":
            return {}
        arguments = {"entries": pointer(owner.entries, row), "logits": pointer(owner.row.inputs[1], row)}
        if owner.factors is not None and row < owner.start:
            kept = owner.factors.row, owner.factors.column, owner.tiles.pairs.positives
            arguments |= dict(zip(("row_kept", "column_kept", "positives"), map(pointer, kept), strict=True))
        return arguments


class _Columns:
    """The columns' side: sums that are added to ``accumulator``, or new ones.

    Where one chunk holds all rows, a single product writes a gradient of 16 bits, and no sums are held; kept
    exponentials begin sums. A float32 gradient is always its sums times the scale, in place, because the number that
    cuBLAS takes instead of a factor of 0 would be visible in float32.
    """

    def __init__(self, owner: _BackwardPass, form: ColumnForm | None, accumulator: Any = None) -> None:
        self.owner, self.form, self.accumulator = owner, form, accumulator
        shape, is_float32 = (owner.n, owner.tiles.columns.shape[1]), owner.dtype == "float32"
        is_one_chunk = owner.start == 0 and owner.height >= owner.m
        has_no_sums = form is None or (form == "gradient" and is_one_chunk and not is_float32)
        # sums that one launch completes, and that are cast afterwards, may be divided into shares
        can_share = form == "gradient" and owner.start == owner.m
        self.shares = weighted_shares(*shape, owner.m) if can_share else 1
        self.sums = accumulator
        if accumulator is None and not has_no_sums:
            self.sums = cupy.empty((self.shares * owner.n, shape[1]), "float32")
        self.shape, dtype = shape, owner.tiles.columns.dtype
        self.out: Any = cupy.empty(shape, dtype) if form == "gradient" and self.sums is None else self.sums

    def add(self, g: Any, chunk: Chunk) -> None:
        """Add a chunk of G."""
        row, column, height, width = chunk
        column_range, q = slice(column, column + width), self.owner.multiplied[0][row : row + height]
        if self.sums is not None:
            fresh = row == 0 and self.accumulator is None
            self.owner.products.accumulate(self.sums[column_range], g, q, transposed=True, fresh=fresh)
        elif self.out is not None:
            factors = plan_field(self.owner.plan, "blas_scale"), plan_field(self.owner.plan, "zero")
            self.owner.products.write(self.out[column_range], g, q, factors)

    def result(self) -> Any:
        """The sums or the gradient, as ``form`` says."""
        plan, dtype = self.owner.plan, self.owner.tiles.columns.dtype
        if self.form == "sums" and self.owner.dtype == "float16":
            scale_gradient(plan, self.sums, divide=True)
        if self.form == "gradient" and self.sums is not None:
            self.out = self.sums if dtype == self.sums.dtype else cupy.empty(self.shape, dtype)
            scale_cast(self.sums, self.out, plan_field(plan, "output_scale"), self.shares)
        return self.out
