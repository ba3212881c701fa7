# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
"""``gradients``, the backward primitive: G chunk by chunk into a fixed workspace, then the two products."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from contrastile.backends import replay
from contrastile.backends.contract import WEIGHTS, Array, Block, ColumnForm, Finished, Options, Weights
from contrastile.backends.triton import backward, positives, sums, survey
from contrastile.backends.triton.arrays import multiplied
from contrastile.backends.triton.common import (
    BLOCK,
    LANES,
    LINES,
    Masks,
    ceil_div,
    chunks,
    empty,
    step,
    weight_vectors,
)
from contrastile.backends.triton.configs import UNIT, Config, backward_chunk, choose
from contrastile.backends.triton.launch import architecture, descriptor, grid, on_device, workspace
from contrastile.backends.triton.operands import Scheme, Side
from contrastile.backends.triton.products import accumulate
from contrastile.backends.triton.tiles import FACTOR, PLAN_SIZE, VECTORS, VECTORS_OF_IDS


def gradients(
    block: Block, weights: Weights, row_gradient: Array | None, column_gradient: Array | None, options: Options
) -> None:
    """Adds G K and G^T Q: see ``contract.Backend``."""
    wanted = row_gradient is not None or column_gradient is not None
    if wanted and block.rows.shape[0] and block.columns.shape[0]:
        with on_device(block.rows):
            _Pass(block, weights, options).run(row_gradient, column_gradient)


def finished(
    block: Block, weights: Weights, upstream: Array | None, columns: ColumnForm | None, options: Options
) -> Finished:
    """Both gradients with every sum begun afresh, and their part of the scale's: see ``contract.Backend``."""
    rows = block.rows
    with on_device(rows):
        if rows.shape[0] and block.columns.shape[0]:
            if not options.replay or not replay.fits(rows, block.columns.shape[0]):
                return _Pass(block, _times(weights, upstream), options).finish(columns)

            def compute(arrays: replay.Tensors) -> replay.Tensors:
                known = _times(Weights(*arrays[9:]), arrays[8])
                done = _Pass(replay.rebuilt(arrays, block), known, options).finish(columns)
                return done.rows, done.columns, done.inner

            arrays = *replay.arrays_of(block), upstream, *(getattr(weights, name) for name in WEIGHTS)
            what = "finished", columns, options, block.pairs.match
            return Finished(*replay.GRAPHS.call(what, arrays, compute))

        def zeros(shape: Any, dtype: Any) -> Any:
            return torch.zeros(shape, dtype=dtype, device=rows.device)

        dtype = rows.dtype if columns == "gradient" else torch.float32
        none = None if columns is None else zeros(block.columns.shape, dtype)
        return Finished(zeros(rows.shape, rows.dtype), none, zeros((), torch.float64))


def _times(weights: Weights, upstream: Array | None) -> Weights:
    if upstream is None:
        return weights
    column = weights.column_weight
    return replace(
        weights,
        row_weight=weights.row_weight * upstream,
        column_weight=None if column is None else column * upstream,
    )


@contextmanager
def carried(plan: Any, outs: Iterable[Any], dtype: Any) -> Iterator[None]:
    """While G of float16 carries FACTOR, so do the sums it is added to: exact both ways, it is a power of two."""
    factor = plan[FACTOR.value]
    carrying = [x for x in outs if x is not None] if dtype == torch.float16 else []
    for x in carrying:
        x.mul_(factor)
    yield
    for x in carrying:
        x.div_(factor)


class Chunks:
    """A workspace for G, or for its parts, and the chunks of the block that pass through it."""

    def __init__(
        self,
        sides: tuple[Side, Side],
        scheme: Scheme,
        config: Config,
        options: Options,
        others: int = 0,
        held: bool = True,
    ) -> None:
        """See ``configs.backward_chunk``; without ``held`` there is no more of G than a descriptor needs."""
        self.sides, self.config = sides, config
        rows, columns = (side.x for side in sides)
        dtype = scheme.g_dtype(rows)
        self.m, self.n = rows.shape[0], columns.shape[0]
        size = dtype.itemsize * scheme.parts
        self.height, self.width = backward_chunk(self.m, self.n, size, config, options, others)
        shape = (self.height, self.width) if held else (1, config.bn)
        self._space = [workspace(*shape, dtype, rows) for _ in range(scheme.parts)]

    def __iter__(self) -> Iterator[tuple[list[Any], tuple[int, int, int, int]]]:
        """G's matrices and the place of each chunk: first row, first column, rows, columns."""
        for place in chunks(self.m, self.n, self.height, self.width):
            yield [x[: place[2], : place[3]] for x in self._space], place

    def descriptors(self, g: list[Any]) -> list[Any]:
        """G's descriptors, None where it has no such part."""
        block = self.config.bm, self.config.bn // self.config.parts
        return [descriptor(x, block) for x in g] + [None] * (3 - len(g))

    def features(self, place: tuple[int, int, int, int]) -> list[Any]:
        """Descriptors of the chunk's features."""
        c = self.config
        return [
            descriptor(side.tiles(start, length), (size, c.bk))
            for side, start, length, size in zip(self.sides, place[:2], place[2:], (c.bm, c.bn), strict=True)
        ]


class _Pass:
    """One backward pass over one block."""

    def __init__(self, block: Block, weights: Weights, options: Options) -> None:
        self.block, self.weights, self.options = block, weight_vectors(weights), options
        self.two_sided = weights.column_weight is not None
        self.scheme = Scheme.of(block.rows, options)
        self.sides = Side(block.rows, self.scheme), Side(block.columns, self.scheme)
        self.rows, self.columns = (side.x for side in self.sides)
        self.m, self.n = self.rows.shape[0], self.columns.shape[0]
        self.masks = Masks.of(block.pairs)
        kernels = "masked" if self.masks.masked else "gradient", "product"
        self.config, self.product = (
            choose(x, self.scheme.dtype, architecture(self.rows), self.rows.shape[1], self.scheme.precision)
            for x in kernels
        )
        self.plan = empty(self.rows, PLAN_SIZE)
        count = VECTORS_OF_IDS if self.masks.ids_only else VECTORS
        self.vectors = empty(self.rows, count, self.m), empty(self.rows, count, self.n if self.two_sided else 0)
        # G at the positives that are named by index
        self.values = None if self.masks.positives is None else empty(self.rows, self.m, dtype=torch.float64)
        self._survey()

    def _survey(self) -> None:
        """Decide on the path, and prepare the vectors of the epilogue."""
        programs = ceil_div(self.m, LANES) + (ceil_div(self.n, LANES) if self.two_sided else 0)
        peaks = empty(self.rows, programs, survey.PEAKS)
        survey.weigh[(programs,)](
            self.m,
            self.n,
            self.block.scale,
            self.block.bias,
            peaks,
            self.masks.positives,
            self.masks.excluded,
            self.values,
            *self.weights,
            MATCHED=self.masks.ids_only,
            LANES=LANES,
        )
        survey.plan_backward[(1,)](
            peaks,
            self.block.scale,
            self.plan,
            programs,
            TWO_SIDED=self.two_sided,
            HALF=self.rows.dtype == torch.float16,
            BLOCK=BLOCK,
        )
        survey.temper[(programs,)](
            self.plan,
            self.block.scale,
            self.block.bias,
            self.m,
            self.n,
            *self.weights,
            *self.vectors,
            MATCHED=self.masks.ids_only,
            LANES=LANES,
        )

    def run(self, row_gradient: Any, column_gradient: Any) -> None:
        """Add to the gradients that are wanted."""
        walk = Chunks(self.sides, self.scheme, self.config, self.options)
        with carried(self.plan, (row_gradient, column_gradient), self.rows.dtype):
            for g, place in walk:
                row, column, high, wide = place
                self._form(walk, g, place)
                if row_gradient is not None:
                    k = self.sides[1].factors(column, wide)
                    accumulate(row_gradient[row : row + high], g, k, self.product)
                if column_gradient is not None:
                    self.add_columns(column_gradient[column : column + wide], g, place)

    def finish(self, form: ColumnForm | None) -> Finished:
        """Every sum begun afresh."""
        out = torch.empty(self.rows.shape, dtype=self.rows.dtype, device=self.rows.device)
        side = _Columns(self, form)
        inner = self._finish_rows(out, side)
        # only now: the columns' gradient takes the place of the workspace
        return Finished(out, side.done(), inner)

    def _finish_rows(self, out: Any, side: _Columns) -> Any:
        """Write the rows' gradient, add to the columns' side, and give the part of the scale's gradient.

        Rows are finished as soon as they are complete, while a cache may still hold them.
        """
        rows, d = self.rows, self.rows.shape[1]
        # their sums in float32 and they themselves
        others = 4 * min(self.m, 2 * UNIT) * d + out.numel() * out.itemsize
        walk = Chunks(self.sides, self.scheme, self.config, self.options, others)
        sums_of_rows = workspace(walk.height, d, torch.float32, rows)
        lines = LINES // 2
        programs, starts = ceil_div(walk.height, lines), range(0, self.m, walk.height)
        left = (len(starts) - 1) * programs + ceil_div(self.m - starts[-1], lines)
        inner = torch.empty(left, dtype=torch.float64, device=rows.device)
        for g, place in walk:
            row, column, high, wide = place
            self._form(walk, g, place)
            k, part = self.sides[1].factors(column, wide), sums_of_rows[:high]
            accumulate(part, g, k, self.product, fresh=column == 0)
            if column + wide == self.n:
                sums.finish_rows[(ceil_div(high, lines),)](
                    part,
                    rows[row:],
                    out[row:],
                    inner[row // walk.height * programs :],
                    self.block.scale,
                    self.plan,
                    high,
                    part.stride(0),
                    rows.stride(0),
                    out.stride(0),
                    depth=d,
                    LINES=lines,
                    BD=step(d),
                )
            side.add(g, place)
        return inner.sum()

    def _form(self, walk: Chunks, g: list[Any], place: tuple[int, int, int, int]) -> None:
        """G of a chunk, its positives included."""
        self._tiles(walk, g, place)
        if self.values is not None:
            self._positives(g, place)

    def add_columns(self, out: Any, g: list[Any], place: tuple[int, int, int, int], *, fresh: bool = False) -> None:
        """``out += G^T Q`` over a chunk, or ``=`` if ``fresh``."""
        q = self.sides[0].factors(place[0], place[2])
        accumulate(out, g, q, self.product, transposed=True, fresh=fresh)

    def _tiles(self, walk: Chunks, g: list[Any], place: tuple[int, int, int, int]) -> None:
        (row, column, high, wide), config = place, self.config
        backward.gradient_tiles[grid(high, wide, config, self.rows)](
            *walk.features(place),
            *walk.descriptors(g),
            self.plan,
            *self.vectors,
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
            TWO_SIDED=self.two_sided,
            **self.masks.flags(),
            RAGGED=high % config.bm != 0 or wide % config.bn != 0,
            BM=config.bm,
            BN=config.bn,
            BK=config.bk,
            GROUP=config.group,
            PARTS=config.parts,
            PRECISION=config.precision,
            DIVIDED=self.scheme.divided,
            **config.options(),
        )

    def _positives(self, g: list[Any], place: tuple[int, int, int, int]) -> None:
        row, column, high, wide = place
        positives.set_positives[(ceil_div(high, LANES),)](
            *g,
            *[None] * (3 - len(g)),
            g[0].stride(0),
            self.plan,
            self.values,
            self.masks.positives,
            self.masks.excluded,
            row,
            column,
            high,
            wide,
            LANES=LANES,
        )


class _Columns:
    """The columns' side of a pass that finishes: sums in float32."""

    def __init__(self, whole: _Pass, form: ColumnForm | None) -> None:
        self.whole, self.form, x = whole, form, whole.columns
        self.sums: Any = None if form is None else torch.empty(x.shape, dtype=torch.float32, device=x.device)

    def add(self, g: list[Any], place: tuple[int, int, int, int]) -> None:
        """Take in a chunk of G."""
        row, column, _, wide = place
        if self.sums is not None:
            self.whole.add_columns(self.sums[column : column + wide], g, place, fresh=row == 0)

    def done(self) -> Any:
        """What was asked for."""
        factor, x, scale = self.whole.plan[FACTOR.value], self.whole.columns, self.whole.block.scale
        half = x.dtype == torch.float16
        if self.form == "sums" and half:
            # a power of two: exact
            self.sums.div_(factor)
        if self.form != "gradient":
            return self.sums
        out = self.sums if x.dtype == torch.float32 else torch.empty(x.shape, dtype=x.dtype, device=x.device)
        # exact but where it is so small that nothing it multiplies would show in float16
        multiplied(self.sums, scale / factor if half else scale, out)
        return out
