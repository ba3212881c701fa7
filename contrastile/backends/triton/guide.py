# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
# pyright: reportGeneralTypeIssues=false
"""Marks of a guide: its dot products are compared with its limits once for a chunk, and two bits of a pair are kept.

Later kernels read the marks instead of comparing logits, because two tiles of dots are more than the registers hold.
"""

from __future__ import annotations

import triton
import triton.language as tl

from contrastile.backends.triton.kernel import kernel
from contrastile.backends.triton.tiles import OF_COLUMN, OF_ROW, SIZES, beyond, dots, halves, place


@kernel
@triton.jit(do_not_specialize=SIZES)
def mark_tiles(
    rows, columns, marks, status, row_limits, column_limits, m, n, row0, column0, height, width, depth,
    SAFE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
    PRECISION: tl.constexpr, DIVIDED: tl.constexpr,
):  # fmt: skip
    """The marks of a chunk for tiles of this shape: see ``tiles.marked``.

    rows, columns: descriptors of the guide's features of the chunk. marks: descriptor of int8 (height, tile columns
    BN / 2), whose blocks are (BM, BN / 2). status: of the path that is SAFE or not; None for either. Limits: of all
    rows and columns, or None.
    """
    row_tiles, column_tiles = tl.cdiv(height, BM), tl.cdiv(width, BN)
    tiles = row_tiles * column_tiles
    if status is not None:
        tiles = tl.where((tl.load(status) != 0) == SAFE, tiles, 0)
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=True):
        r, c = place(tile, row_tiles, column_tiles, GROUP)
        acc = dots(rows, columns, r * BM, c * BN, depth, BM, BN, BK, PRECISION, DIVIDED)
        i, j = row0 + r * BM + tl.arange(0, BM), column0 + c * BN + tl.arange(0, BN)
        found = tl.zeros((BM, BN), tl.int32)
        if row_limits is not None:
            found = tl.where(beyond(acc, None, row_limits, i, m, 1), OF_ROW, found)
        if column_limits is not None:
            found += tl.where(beyond(acc, None, column_limits, j, n, 0), OF_COLUMN, 0)
        left, right = halves(found)
        marks.store([r * BM, c * (BN // 2)], (left + 4 * right).to(tl.int8))
