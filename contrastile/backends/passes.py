"""What the triton and cupy backends share on the host: supported blocks, chunks and their sizes, pairs, scaling."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from contrastile.backends.contract import Block, ColumnForm, Finished, Options, Pairs, SideStatistics, Statistics
from contrastile.backends.settings import workspace_bytes

_PARTIALS_MIB = 64

_UNIT = 8192
"""Rows or columns of a chunk of G come in multiples of this where there are more: the products that follow then fill a
GPU's multiprocessors nearly a whole number of times, at widths of 512 and 1024 from one unit on, at 768 from two."""


def supports(block: Block) -> str | None:
    """Why the kernels cannot take a block, or None."""
    if block.rows.shape[1] == 0:
        return "features must have at least one column, got 0"
    if block.pairs.match == "target" and block.pairs.limited:
        return "limits must be None where ids name the positives, got some"
    return None


def own_references(dtype: str) -> bool:
    """Whether each tile has its own reference for exponentials, instead of one for the block.

    With one reference for the block exponents reach 120, and rounding them costs 3e-6 of a probability. Gradients of 16
    bits hide that. In float32 it was 20 to 100 times the error of plain PyTorch where one probability of a row is
    nearly 1. Float32 products take so long that the second exponential costs little.
    """
    return dtype == "float32"


def no_statistics(block: Block, columns: bool, arrays: Any) -> Statistics:
    """The statistics of a block without pairs."""

    def side(length: int) -> SideStatistics:
        n, p, s = (arrays.full((length,), value, "float64", block.rows) for value in (-math.inf, -math.inf, 0.0))
        return SideStatistics(n, p, s)

    return Statistics(side(block.rows.shape[0]), side(block.columns.shape[0]) if columns else None)


def no_gradients(block: Block, columns: ColumnForm | None, arrays: Any) -> Finished:
    """What ``finished`` gives of a block without pairs."""
    rows, dtype = block.rows, arrays.dtype(block.rows)
    form = None if columns is None else dtype if columns == "gradient" else "float32"
    of_columns = None if form is None else arrays.full(tuple(block.columns.shape), 0.0, form, rows)
    return Finished(arrays.full(tuple(rows.shape), 0.0, dtype, rows), of_columns, arrays.full((), 0.0, "float64", rows))


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
    """Rows and columns of a chunk of the forward pass: what its partial results may take bounds it.

    Args:
        m: rows of the block.
        n: its columns.
        shape: rows and columns of a tile.
        options: a tile that caps it.
        numbers: float32 numbers that a tile leaves of each row and column.
        cluster: tiles above one another that are computed together.
        marks: half a byte of a pair is held besides, in half a workspace.
    """
    bm, bn = shape
    area = _PARTIALS_MIB * 2**20 // (4 * numbers) * bm * bn // (bm + bn)
    if marks:
        area = max(1, min(area, workspace_bytes(options)))
    return _capped(m, n, area, max(bm * cluster, bn), options)


def backward_chunk(m: int, n: int, size: int, step: int, options: Options, others: int = 0) -> Size:
    """Rows and columns of a chunk of G that fits in the workspace.

    Args:
        m: rows of the block.
        n: its columns.
        size: bytes of one element of G, all its parts.
        step: rows of tiles that are computed together.
        options: the size of the workspace, or a tile that caps it.
        others: bytes of the rows' own gradient, which are taken from the workspace as long as three quarters remain.
    """
    whole = workspace_bytes(options)
    return _capped(m, n, max(1, max(whole - others, whole * 3 // 4) // size), step, options)


def _capped(m: int, n: int, area: int, step: int, options: Options) -> Size:
    """Rows and columns of a chunk of at most ``area`` elements, or a tile that the caller names.

    The sums of dK are read and written once for each chunk of rows, those of dQ once for each chunk of columns, so
    that near a square the fewest bytes move. A large chunk has one or two UNITs of rows and as many columns as fit.
    """
    if options.tile is not None:
        return min(m, options.tile[0]), min(n, options.tile[1])
    side = max(step, int(area**0.5) // step * step)
    rows = 2 * _UNIT if area >= 2 * _UNIT * _UNIT else _UNIT if area >= _UNIT * _UNIT else side

    def beside(other: int) -> int:
        """The longest side that fits beside another: whole UNITs, or whole steps of less than one."""
        # a row of the workspace is padded to 16 bytes, 8 elements at most
        most = area // max(other, 8)
        unit = _UNIT if most > _UNIT else step
        return max(1, most // unit * unit or most)

    height = min(m, rows)
    width = min(n, beside(height))
    return height if width < n else min(m, beside(width)), width


def lines(x: Any, start: int, length: int) -> Any:
    """Rows of a matrix, or elements of a vector, from ``start`` on; x itself where these are all."""
    return x if length == x.shape[0] else x[start : start + length]


def ceil_div(a: int, b: int) -> int:
    """The quotient, rounded up. Triton's ``cdiv`` also serves kernels, and takes microseconds on the host."""
    return -(-a // b)


def contiguous_pairs(pairs: Pairs, contiguous: Callable[[Any], Any]) -> Pairs:
    """The pairs of contiguous vectors, without a guide; no index names positives where ids do.

    ``contiguous`` closes the gaps of an array.
    """
    positives = pairs.positives if pairs.match == "drop" else None
    given = positives, pairs.excluded, pairs.row_ids, pairs.column_ids, pairs.row_limits, pairs.column_limits
    named, excluded, row_ids, column_ids, of_rows, of_columns = (None if x is None else contiguous(x) for x in given)
    return Pairs(named, excluded, row_ids, column_ids, pairs.match, of_rows, of_columns, rising=pairs.rising)


@contextmanager
def gradient_scaling(outs: Iterable[Any], dtype: str, scale: Callable[[Any, bool], None]) -> Iterator[None]:
    """Scale the accumulators that a float16 G is added to as G is scaled, and undo it: exact, by a power of two.

    Args:
        outs: the accumulators; None for one that is not wanted.
        dtype: name of G's dtype; only float16 is scaled, to keep it in range.
        scale: ``scale(x, divide)`` multiplies x by the plan's gradient scale, or divides it by that.
    """
    scaled = [x for x in outs if x is not None] if dtype == "float16" else []
    for x in scaled:
        scale(x, False)
    yield
    for x in scaled:
        scale(x, True)
