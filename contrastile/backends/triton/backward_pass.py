# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
"""``gradients`` and its finished forms: G chunk by chunk into a fixed workspace, then the two products."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from contrastile.backends.compiling import side_by_side
from contrastile.backends.contract import Array, Block, ColumnForm, Finished, Options, Weights
from contrastile.backends.passes import Chunk, backward_chunk, ceil_div, chunks, gradient_scaling, lines, no_gradients
from contrastile.backends.triton import backward, positives, precheck, sums
from contrastile.backends.triton.arrays import ARRAYS
from contrastile.backends.triton.common import BLOCK, LANES, LINES, empties, empty, step, weight_vectors
from contrastile.backends.triton.configs import Config
from contrastile.backends.triton.launch import descriptor, grid, on_device, workspace
from contrastile.backends.triton.operands import BlockPass, Scheme, Side, features_of, row_bytes
from contrastile.backends.triton.products import accumulate
from contrastile.backends.triton.tiles import GRADIENT_SCALE, PLAN_SIZE, VECTORS, VECTORS_OF_IDS


def gradients(
    block: Block, weights: Weights, row_gradient: Array | None, column_gradient: Array | None, options: Options
) -> None:
    """Adds G K and G^T Q: see ``contract.Backend``."""
    is_requested = row_gradient is not None or column_gradient is not None
    if is_requested and block.rows.shape[0] and block.columns.shape[0]:
        with on_device(block.rows):
            backward_pass = _BackwardPass(block, weights, options)
            columns = None if column_gradient is None else _ColumnSums(backward_pass, "sums", column_gradient)
            backward_pass.add_gradients(row_gradient, columns)


@side_by_side
def finished(
    block: Block, weights: Weights, upstream: Array | None, columns: ColumnForm | None, options: Options
) -> Finished:
    """Both gradients, overwriting and not adding, and the scale's part: see ``contract.Backend``."""
    if block.rows.shape[0] == 0 or block.columns.shape[0] == 0:
        return no_gradients(block, columns, ARRAYS)
    with on_device(block.rows):
        return _BackwardPass(block, weights, options, upstream).final_gradients(columns)


def finished_columns(block: Block, weights: Weights, row_gradient: Array, options: Options) -> Array:
    """Adds G K, and returns the columns' gradient: see ``contract.Backend``."""
    if block.rows.shape[0] == 0 or block.columns.shape[0] == 0:
        return no_gradients(block, "gradient", ARRAYS).columns
    with on_device(block.rows):
        backward_pass = _BackwardPass(block, weights, options)
        columns = _ColumnSums(backward_pass, "gradient")
        backward_pass.add_gradients(row_gradient, columns)
        return columns.result()


def scale_gradient(plan: Any, x: Any, divide: bool) -> None:
    """Multiply x by the plan's gradient scale, or divide x by it; in place."""
    (x.div_ if divide else x.mul_)(plan[GRADIENT_SCALE.value])


class Chunks:
    """A workspace for G, or for its parts, and the chunks of the block that are formed in it."""

    def __init__(
        self,
        sides: tuple[Side, Side],
        scheme: Scheme,
        config: Config,
        options: Options,
        others: int = 0,
        held: bool = True,
    ) -> None:
        """See ``passes.backward_chunk``; if not ``held``, no G is formed, and the workspace is a stub."""
        self.sides, self.config = sides, config
        rows, columns = (side.x for side in sides)
        dtype = scheme.g_dtype(rows)
        self.m, self.n = rows.shape[0], columns.shape[0]
        size = dtype.itemsize * scheme.parts
        self.height, self.width = backward_chunk(self.m, self.n, size, config.bm, options, others)
        shape = (self.height, self.width) if held else (1, config.bn)
        self._space = [workspace(*shape, dtype, rows) for _ in range(scheme.parts)]

    def __iter__(self) -> Iterator[tuple[list[Any], Chunk]]:
        """Iterate over the chunks, each with the matrices of its G."""
        for chunk in chunks(self.m, self.n, self.height, self.width):
            is_whole = chunk.height == self.height and chunk.width == self.width
            yield self._space if is_whole else [x[: chunk.height, : chunk.width] for x in self._space], chunk

    def descriptors(self, g: list[Any]) -> list[Any]:
        """The descriptors of G's three parts, None for missing parts."""
        block = self.config.bm, self.config.bn // self.config.parts
        return [descriptor(x, block) for x in g] + [None] * (3 - len(g))

    def features(self, chunk: Chunk) -> list[Any]:
        """Descriptors of the chunk's features."""
        return features_of(self.sides, chunk, self.config)


class _BackwardPass(BlockPass):
    """One backward pass over one block."""

    def __init__(self, block: Block, weights: Weights, options: Options, upstream: Array | None = None) -> None:
        super().__init__(block, options)
        self.weights, self.two_sided = weight_vectors(weights, ARRAYS), weights.columns is not None
        self.gradient = self.config("gradient" if self.masks.pairs.of_ids is None else "masked")
        self.product = self.config("product")
        count, columns = VECTORS_OF_IDS if self.masks.ids_only else VECTORS, self.n if self.two_sided else 0
        self.programs = ceil_div(self.m, LANES) + ceil_div(columns, LANES)
        sizes = PLAN_SIZE, self.programs * precheck.PEAKS, count * self.m, count * columns
        self.plan, self.peaks, *self.vectors = empties(self.rows, torch.float32, *sizes)
        self.factors = self.sides
        if block.values is not None:
            self.factors = Side(block.values[0], self.scheme), Side(block.values[1], self.scheme)
        # G at the positives that an index names
        self.entries = None if self.masks.pairs.positives is None else empty(self.rows, self.m, dtype=torch.float64)
        self._precheck(upstream)

    def _precheck(self, upstream: Array | None) -> None:
        """Launch the kernels that choose the path and prepare the vectors of the epilogue."""
        programs, peaks = self.programs, self.peaks
        scalars, is_half = (self.block.scale, self.block.bias, upstream), self.rows.dtype == torch.float16
        vectors = peaks, self.masks.pairs.positives, self.masks.pairs.excluded, self.entries, *self.weights
        flags = {"MATCHED": self.masks.ids_only, "LANES": LANES}
        precheck.weight_bounds[(programs,)](self.m, self.n, *scalars, *vectors, **flags)
        precheck.epilogue_scales[(programs,)](
            peaks, self.plan, *scalars, self.m, self.n, programs, *self.weights, *self.vectors,
            **flags, HALF=is_half, EXACT=self.exact, BLOCK=BLOCK,
        )  # fmt: skip

    def add_gradients(self, row_gradient: Any, columns: _ColumnSums | None) -> None:
        """Add to the requested gradients."""
        walk = Chunks(self.sides, self.scheme, self.gradient, self.options)
        accumulators = row_gradient, None if columns is None else columns.accumulator
        with gradient_scaling(accumulators, self.scheme.dtype, partial(scale_gradient, self.plan)):
            for g, chunk in walk:
                row, column, height, width = chunk
                self._form_chunk(walk, g, chunk)
                if row_gradient is not None:
                    k = self.factors[1].factors(column, width)
                    accumulate(row_gradient[row : row + height], g, k, self.product)
                if columns is not None:
                    columns.add(g, chunk)

    def final_gradients(self, form: ColumnForm | None) -> Finished:
        """Compute both gradients, overwriting instead of adding."""
        out = torch.empty(self.rows.shape, dtype=self.rows.dtype, device=self.rows.device)
        column_sums = _ColumnSums(self, form)
        inner = self._final_rows(out, column_sums)
        # after ``_final_rows``, because the columns' gradient may take the memory of the workspace
        return Finished(out, column_sums.result(), inner)

    def _final_rows(self, out: Any, column_sums: _ColumnSums) -> Any:
        """Write the rows' gradient, add to the columns' sums, and return ``Finished.inner``.

        Rows are finalized as soon as their sums are complete, while the sums may still be in the cache.
        """
        rows, d = self.rows, self.rows.shape[1]
        other_bytes = row_bytes(self.m, d, out.itemsize)
        walk = Chunks(self.sides, self.scheme, self.gradient, self.options, other_bytes)
        row_sums = workspace(walk.height, d, torch.float32, rows)
        tall = LINES // 2
        programs, starts = ceil_div(walk.height, tall), range(0, self.m, walk.height)
        row_programs = (len(starts) - 1) * programs + ceil_div(self.m - starts[-1], tall)
        inner = torch.empty(row_programs, dtype=torch.float64, device=rows.device)
        for g, chunk in walk:
            row, column, height, width = chunk
            self._form_chunk(walk, g, chunk)
            k, part = self.factors[1].factors(column, width), lines(row_sums, 0, height)
            accumulate(part, g, k, self.product, fresh=column == 0)
            if column + width == self.n:
                matrices = part, lines(rows, row, height), lines(out, row, height)
                strides, parts = [x.stride(0) for x in matrices], inner[row // walk.height * programs :]
                at_positives = (None, None, None)
                if self.entries is not None and rows.itemsize == 2:
                    vectors = lines(self.entries, row, height), lines(self.weights[1], row, height)
                    at_positives = (self.block.bias, *vectors)
                sums.finalize_rows[(ceil_div(height, tall),)](
                    *matrices, parts, self.block.scale, self.plan, *at_positives, height, *strides,
                    depth=d, LINES=tall, BD=step(d),
                )  # fmt: skip
            column_sums.add(g, chunk)
        return inner.sum()

    def _form_chunk(self, walk: Chunks, g: list[Any], chunk: Chunk) -> None:
        """Form G of a chunk, including its positives."""
        self._form_tiles(walk, g, chunk)
        if self.entries is not None:
            self._set_positives(g, chunk)

    def _form_tiles(self, walk: Chunks, g: list[Any], chunk: Chunk) -> None:
        config, masks = self.gradient, self.masks
        backward.gradient_tiles[grid(chunk.height, chunk.width, config, self.rows)](
            *walk.features(chunk), *walk.descriptors(g), self.plan, *self.vectors, *masks.spanned[1:],
            *masks.limits, self.marks(chunk, config), self.m, self.n, *chunk, self.depth,
            TWO_SIDED=self.two_sided, **masks.flags(), LIMITED=masks.limited, RAGGED=config.ragged(chunk),
            PARTS=config.parts, DIVIDED=self.scheme.divided, **config.named,
        )  # fmt: skip

    def _set_positives(self, g: list[Any], chunk: Chunk) -> None:
        vectors = self.plan, self.entries, self.masks.pairs.positives, self.masks.pairs.excluded
        positives.set_positives[(ceil_div(chunk.height, LANES),)](
            *g, *[None] * (3 - len(g)), g[0].stride(0), *vectors, *chunk, LANES=LANES
        )


class _ColumnSums:
    """The columns' gradient as sums in float32: added to ``accumulator``, or else in new memory."""

    def __init__(self, owner: _BackwardPass, form: ColumnForm | None, accumulator: Any = None) -> None:
        self.owner, self.form, self.accumulator, self.sums, x = owner, form, accumulator, accumulator, owner.columns
        if form is not None and accumulator is None:
            self.sums = torch.empty(x.shape, dtype=torch.float32, device=x.device)

    def add(self, g: list[Any], chunk: Chunk) -> None:
        """Add a chunk of G."""
        row, column, height, width = chunk
        if self.sums is not None:
            q, part = self.owner.factors[0].factors(row, height), lines(self.sums, column, width)
            accumulate(part, g, q, self.owner.product, transposed=True, fresh=row == 0 and self.accumulator is None)

    def result(self) -> Any:
        """The sums or the gradient, as ``form`` says."""
        x, scale = self.owner.columns, self.owner.block.scale
        is_half = x.dtype == torch.float16
        power = self.owner.plan[GRADIENT_SCALE.value] if is_half else None
        if self.form == "sums" and is_half:
            # exact: a power of two
            self.sums.div_(power)
        if self.form != "gradient":
            return self.sums
        out = self.sums if x.dtype == torch.float32 else torch.empty(x.shape, dtype=x.dtype, device=x.device)
        # scale / power is exact, unless it is so small that every product is 0 in float16
        return torch.mul(self.sums, scale / power if is_half else scale, out=out)
