"""Host code that the triton and cupy backends share: supported blocks, chunks and their sizes, pairs, scaling."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from contrastile.backends.contract import Block, ColumnForm, Finished, Options, Pairs, SideStatistics, Statistics
from contrastile.backends.settings import workspace_bytes

_PARTIALS_MIB = 64

_UNIT = 8192
"""Larger chunks of G have a multiple of this many rows and columns: the products of G then fill a GPU's multiprocessors
nearly a whole number of times, at widths of 512 and 1024 from one unit on, at 768 from two."""


def supports(block: Block) -> str | None:
    """Why the kernels cannot take a block, or None."""
    if block.rows.shape[1] == 0:
        return "features must have at least one column, got 0"
    if block.pairs.match == "target" and block.pairs.limited:
        return "limits must be None where ids name the positives, got some"
    return None


def own_references(dtype: str) -> bool:
    """Whether each tile has its own reference for exponentials, instead of one for the block.

    With one reference for the block, exponents reach 120, and rounding them costs 3e-6 of a probability. Gradients of
    16 bits hide this error. In float32 it was 20 to 100 times the error of plain PyTorch where one probability of a row
    is nearly 1. Float32 products take so long that the second exponential costs little.
    """
    return dtype == "float32"


def no_statistics(block: Block, columns: bool, arrays: Any) -> Statistics:
    """The statistics of a block without pairs."""

    def side(length: int) -> SideStatistics:
        n, p, s = (arrays.full((length,), value, "float64", block.rows) for value in (-math.inf, -math.inf, 0.0))
        return SideStatistics(n, p, s)

    return Statistics(side(block.rows.shape[0]), side(block.columns.shape[0]) if columns else None)


def no_gradients(block: Block, columns: ColumnForm | None, arrays: Any) -> Finished:
    """The result of ``finished`` for a block without pairs."""
    rows, dtype = block.rows, arrays.dtype(block.rows)
    column_dtype = None if columns is None else dtype if columns == "gradient" else "float32"
    zeros = None if column_dtype is None else arrays.full(tuple(block.columns.shape), 0.0, column_dtype, rows)
    return Finished(arrays.full(tuple(rows.shape), 0.0, dtype, rows), zeros, arrays.full((), 0.0, "float64", rows))


Size = tuple[int, int]


class Chunk(NamedTuple):
    """Part of a block: its first row and column, how many rows it has and how many columns."""

    row: int
    column: int
    height: int
    width: int


def chunks(m: int, n: int, height: int, width: int, start: int = 0) -> Iterator[Chunk]:
    """The chunks of rows ``start`` to m - 1 and of all n columns, each at most (height, width), row after row."""
    for row in range(start, m, height):
        for column in range(0, n, width):
            yield Chunk(row, column, min(height, m - row), min(width, n - column))


def forward_chunk(
    m: int, n: int, shape: tuple[int, int], options: Options, numbers: int, cluster: int = 1, *, marks: bool = False
) -> Size:
    """Rows and columns of a chunk of the forward pass, bounded by the memory of its partial results.

    Args:
        m: rows of the block.
        n: its columns.
        shape: rows and columns of a tile.
        options: a tile that caps it.
        numbers: float32 numbers that a tile stores for each row and column.
        cluster: tiles above one another that are computed together.
        marks: whether half a byte is also held for each pair, in half a workspace.
    """
    bm, bn = shape
    area = _PARTIALS_MIB * 2**20 // (4 * numbers) * bm * bn // (bm + bn)
    if marks:
        area = max(1, min(area, workspace_bytes(options)))
    return _chunk_size(m, n, area, max(bm * cluster, bn), options)


def backward_chunk(m: int, n: int, size: int, step: int, options: Options, others: int = 0) -> Size:
    """Rows and columns of a chunk of G that fits in the workspace.

    Args:
        m: rows of the block.
        n: its columns.
        size: bytes of one element of G, with all its parts.
        step: rows of tiles that are computed together.
        options: the size of the workspace, or a tile that caps it.
        others: bytes of the rows' gradient, which reduce the workspace by at most a quarter.
    """
    workspace = workspace_bytes(options)
    return _chunk_size(m, n, max(1, max(workspace - others, workspace * 3 // 4) // size), step, options)


def _chunk_size(m: int, n: int, area: int, step: int, options: Options) -> Size:
    """Rows and columns of a chunk of at most ``area`` elements, or the tile that the caller requests.

    The sums of dK are read and written once for each chunk of rows, those of dQ once for each chunk of columns, so that
    the fewest bytes move if a chunk is nearly square. A large chunk has one or two _UNITs of rows and the columns that
    fit.
    """
    if options.tile is not None:
        return min(m, options.tile[0]), min(n, options.tile[1])
    square_side = max(step, int(area**0.5) // step * step)
    rows = 2 * _UNIT if area >= 2 * _UNIT * _UNIT else _UNIT if area >= _UNIT * _UNIT else square_side

    def longest_side(length: int) -> int:
        """The longest side that fits beside another: whole _UNITs, or whole steps where it is shorter than one."""
        # a row of the workspace is padded to 16 bytes, 8 elements at most
        longest = area // max(length, 8)
        unit = _UNIT if longest > _UNIT else step
        return max(1, longest // unit * unit or longest)

    height = min(m, rows)
    width = min(n, longest_side(height))
    return height if width < n else min(m, longest_side(width)), width


def lines(x: Any, start: int, length: int) -> Any:
    """``length`` rows of a matrix, or elements of a vector, from ``start`` on; x itself where it has no others."""
    return x if length == x.shape[0] else x[start : start + length]


def ceil_div(a: int, b: int) -> int:
    """The quotient, rounded up. Triton's ``cdiv`` also serves kernels, and takes microseconds on the host."""
    return -(-a // b)


def contiguous_pairs(pairs: Pairs, contiguous: Callable[[Any], Any]) -> Pairs:
    """The pairs with contiguous vectors and without a guide; ``positives`` is None where ids name the positives.

    ``contiguous`` makes an array contiguous.
    """
    positives = pairs.positives if pairs.match == "drop" else None
    vectors = positives, pairs.excluded, pairs.row_ids, pairs.column_ids, pairs.row_limits, pairs.column_limits
    named, excluded, row_ids, column_ids, row_limits, column_limits = (
        None if x is None else contiguous(x) for x in vectors
    )
    return Pairs(named, excluded, row_ids, column_ids, pairs.match, row_limits, column_limits, rising=pairs.rising)


@contextmanager
def gradient_scaling(outs: Iterable[Any], dtype: str, scale: Callable[[Any, bool], None]) -> Iterator[None]:
    """Scale the accumulators of a float16 G like G itself, and undo it: exact, by a power of two.

    Args:
        outs: the accumulators; None for one that is not requested.
        dtype: name of G's dtype; only float16 is scaled, to keep it in range.
        scale: ``scale(x, divide)`` multiplies x by the plan's gradient scale, or divides x by it.
    """
    scaled = [x for x in outs if x is not None] if dtype == "float16" else []
    for x in scaled:
        scale(x, False)
    yield
    for x in scaled:
        scale(x, True)
