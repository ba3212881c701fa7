# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
# pyright: reportGeneralTypeIssues=false
"""Marks of a guide: the guide's dot products of a chunk are compared with the limits once, and give two bits per pair.

Later kernels read the marks instead of comparing logits, because two tiles of dots are more than the registers hold.
"""

from __future__ import annotations

import triton
import triton.language as tl

from contrastile.backends.triton.kernel import kernel
from contrastile.backends.triton.tiles import BEYOND_COLUMN, BEYOND_ROW, SIZES, beyond, dots, halves, place


@kernel
@triton.jit(do_not_specialize=SIZES)
def mark_tiles(
    rows, columns, marks, status, row_limits, column_limits, m, n, row0, column0, height, width, depth,
    SAFE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
    PRECISION: tl.constexpr, DIVIDED: tl.constexpr,
):  # fmt: skip
    """Write a chunk's marks, for tiles of BM by BN: see ``tiles.marked``.

    rows, columns: descriptors of the guide's features of the chunk. marks: descriptor of int8 (height, tile columns
    BN / 2), whose blocks are (BM, BN / 2). status: the status word, if only the path that SAFE selects reads the marks;
    else None. row_limits, column_limits: of the whole block, or None.
    """
    row_tiles, column_tiles = tl.cdiv(height, BM), tl.cdiv(width, BN)
    tiles = row_tiles * column_tiles
    if status is not None:
        tiles = tl.where((tl.load(status) != 0) == SAFE, tiles, 0)
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=True):
        r, c = place(tile, row_tiles, column_tiles, GROUP)
        acc = dots(rows, columns, r * BM, c * BN, depth, BM, BN, BK, PRECISION, DIVIDED)
        i, j = row0 + r * BM + tl.arange(0, BM), column0 + c * BN + tl.arange(0, BN)
        tile_marks = tl.zeros((BM, BN), tl.int32)
        if row_limits is not None:
            tile_marks = tl.where(beyond(acc, None, row_limits, i, m, 1), BEYOND_ROW, tile_marks)
        if column_limits is not None:
            tile_marks += tl.where(beyond(acc, None, column_limits, j, n, 0), BEYOND_COLUMN, 0)
        left, right = halves(tile_marks)
        marks.store([r * BM, c * (BN // 2)], (left + 4 * right).to(tl.int8))
