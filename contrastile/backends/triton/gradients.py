# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
"""``gradients``, the backward primitive: G chunk by chunk into a fixed workspace, then the two products."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import triton

from contrastile.backends.contract import Array, Block, Options, Weights
from contrastile.backends.triton import backward, positives, sums, survey
from contrastile.backends.triton.common import BLOCK, LANES, LINES, Masks, chunks, empty, step, weight_vectors
from contrastile.backends.triton.configs import UNIT, Config, backward_chunk, choose
from contrastile.backends.triton.launch import architecture, descriptor, grid, on_device, workspace
from contrastile.backends.triton.operands import Scheme, Side, positive_dots
from contrastile.backends.triton.products import accumulate
from contrastile.backends.triton.tiles import FACTOR, PLAN_SIZE


def gradients(
    block: Block, weights: Weights, row_gradient: Array | None, column_gradient: Array | None, options: Options
) -> None:
    """Adds G K and G^T Q: see ``contract.Backend``."""
    wanted = row_gradient is not None or column_gradient is not None
    if wanted and block.rows.shape[0] and block.columns.shape[0]:
        with on_device(block.rows):
            _Pass(block, weights, options).run(row_gradient, column_gradient)


def finished_rows(
    block: Block, weights: Weights, column_gradient: Array | None, options: Options
) -> tuple[Array, Array]:
    """The rows' gradient, finished chunk by chunk, and its part of the scale's: see ``contract.Backend``."""
    rows = block.rows
    with on_device(rows):
        if not (rows.shape[0] and block.columns.shape[0]):
            return torch.zeros_like(rows), torch.zeros((), dtype=torch.float64, device=rows.device)
        out = torch.empty(rows.shape, dtype=rows.dtype, device=rows.device)
        return out, _Pass(block, weights, options).finish(out, column_gradient)


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
        self.height, self.width = backward_chunk(self.m, self.n, size, config, options.tile, others)
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
        self.vectors = empty(self.rows, 3, self.m), empty(self.rows, 3, self.n if self.two_sided else 0)
        self._survey()
        self.dots = None
        if self.masks.positives is not None:
            self.dots = empty(self.rows, self.m)
            positive_dots(self.sides, self.scheme, self.masks, None, None, self.dots, None)

    def _survey(self) -> None:
        """Decide on the path, and prepare the vectors of the epilogue."""
        row_programs = triton.cdiv(self.m, BLOCK)
        peaks = empty(self.rows, row_programs + (triton.cdiv(self.n, BLOCK) if self.two_sided else 0), survey.PEAKS)
        survey.weigh[(peaks.shape[0],)](
            self.m, self.n, self.block.scale, self.block.bias, peaks, *self.weights, LANES=BLOCK
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
            self.block.scale,
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
                    self._add_columns(column_gradient, g, place)

    def finish(self, out: Any, column_gradient: Any) -> Any:
        """Add to the columns' gradient, write the finished rows' and give the sum behind the scale's."""
        d = self.rows.shape[1]
        # their sums in float32 and they themselves
        others = 4 * min(self.m, 2 * UNIT) * d + out.numel() * out.itemsize
        walk = Chunks(self.sides, self.scheme, self.config, self.options, others)
        sums_of_rows = workspace(walk.height, d, torch.float32, self.rows)
        lines = LINES // 2
        programs = triton.cdiv(walk.height, lines)
        inner = torch.empty(triton.cdiv(self.m, walk.height) * programs, dtype=torch.float64, device=out.device)
        if self.m % walk.height:
            inner.zero_()
        with carried(self.plan, (column_gradient,), self.rows.dtype):
            for g, place in walk:
                row, column, high, wide = place
                self._form(walk, g, place)
                k, part = self.sides[1].factors(column, wide), sums_of_rows[:high]
                accumulate(part, g, k, self.product, fresh=column == 0)
                if column_gradient is not None:
                    self._add_columns(column_gradient, g, place)
                if column + wide == self.n:
                    sums.finish_rows[(triton.cdiv(high, lines),)](
                        part,
                        self.rows[row:],
                        out[row:],
                        inner[row // walk.height * programs :],
                        self.block.scale,
                        self.plan,
                        high,
                        part.stride(0),
                        self.rows.stride(0),
                        out.stride(0),
                        depth=d,
                        LINES=lines,
                        BD=step(d),
                    )
        return inner.sum()

    def _form(self, walk: Chunks, g: list[Any], place: tuple[int, int, int, int]) -> None:
        """G of a chunk, its positives included."""
        self._tiles(walk, g, place)
        if self.dots is not None:
            self._positives(g, place)

    def _add_columns(self, out: Any, g: list[Any], place: tuple[int, int, int, int]) -> None:
        row, column, high, wide = place
        accumulate(out[column : column + wide], g, self.sides[0].factors(row, high), self.product, transposed=True)

    def _tiles(self, walk: Chunks, g: list[Any], place: tuple[int, int, int, int]) -> None:
        (row, column, high, wide), config = place, self.config
        backward.gradient_tiles[grid(high, wide, config, self.rows)](
            *walk.features(place),
            *walk.descriptors(g),
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
        positives.set_positives[(triton.cdiv(high, LANES),)](
            *g,
            *[None] * (3 - len(g)),
            g[0].stride(0),
            self.plan,
            self.dots,
            self.block.scale,
            self.block.bias,
            self.masks.positives,
            self.masks.excluded,
            *self.weights,
            self.m,
            self.n,
            row,
            column,
            high,
            wide,
            LANES=LANES,
        )
