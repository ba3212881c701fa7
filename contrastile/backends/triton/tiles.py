# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
# pyright: reportGeneralTypeIssues=false
"""What every tile kernel shares: the order of the tiles, a tile of dot products, and which of its pairs count."""

from __future__ import annotations

import triton
import triton.language as tl

from contrastile.backends.triton.configs import INTERPRETED
from contrastile.backends.triton.logits import rounded
from contrastile.backends.triton.parts import COLUMN_PARTS, ROW_PARTS, TERMS

# slots of a plan, float32 numbers that one kernel decides on the device and later ones obey
ALPHA = tl.constexpr(0)  # scale log2 e: logits in powers of two, without the bias
REFERENCE = tl.constexpr(1)  # the shared reference, in powers of two
THRESHOLD = tl.constexpr(2)  # least sum per term at which the terms that underflowed do not matter
FAST = tl.constexpr(3)  # 1 where the shared reference is proven safe, else 0
GRADIENT_SCALE = tl.constexpr(4)  # power of two that keeps a float16 G in range
BIAS = tl.constexpr(5)  # the bias, or 0
CERTAIN = tl.constexpr(6)  # 1 where a row or column of the backward is certain of its positives, else 0
PLAN_SIZE = 8

# vectors of the backward's epilogue, one of them for each row and each column; s is the plan's GRADIENT_SCALE
LOG = tl.constexpr(0)  # L in powers of two, without the bias, its first 24 bits
WEIGHT = tl.constexpr(1)  # w s 2^-l, l being the other bits
FOLDED = tl.constexpr(2)  # w s 2^(r - L)
# where ids name the positives, with q = 2^(x - P) = R 2^(x - POSITIVE_LOG)
TAKEN = tl.constexpr(3)  # w s t
POSITIVE_LOG = tl.constexpr(4)  # P like L
POSITIVE_WEIGHT = tl.constexpr(5)  # w s R
POSITIVE_TARGET = tl.constexpr(6)  # t / R
NEGATIVE_WEIGHT = tl.constexpr(7)  # w s R sigmoid(N - P)
VECTORS, VECTORS_OF_IDS = 3, 8

UNIT = tl.constexpr(16 if INTERPRETED else 64)
"""Elements of a vector of ids or indices whose least and largest are known together."""

# of a block and a chunk: 64-bit sizes would be compiled for every divisibility; these are not
SIZES = ["m", "n", "row0", "column0", "height", "width", "depth"]

# what a guide marks: a pair beyond its row's limit, and beyond its column's
OF_ROW = tl.constexpr(1)
OF_COLUMN = tl.constexpr(2)

# what equal ids mean to a kernel
NO_IDS = tl.constexpr(0)
DROP = tl.constexpr(1)
TARGET = tl.constexpr(2)


@triton.jit
def place(tile, row_tiles, column_tiles, GROUP: tl.constexpr):
    """Row and column of tile number ``tile``: bands of GROUP tile rows, each walked down and then across.

    Programs that run at the same time then share rows and columns in the L2 cache.
    """
    band = GROUP * column_tiles
    top = tile // band * GROUP
    height = min(row_tiles - top, GROUP)
    inside = tile % band
    return top + inside % height, inside // height


@triton.jit
def dots(
    rows, columns, row, column, depth, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
    DIVIDED: tl.constexpr,
):  # fmt: skip
    """``<row_i, column_j>`` for BM rows from ``row`` and BN columns from ``column``, float32.

    rows, columns: tensor descriptors with blocks (BM, BK) and (BN, BK); what lies outside reads as 0. DIVIDED: they
    hold three parts of each feature, part beside part, each of width ``depth``, a multiple of BK.
    """
    acc = tl.zeros((BM, BN), tl.float32)
    if DIVIDED:
        tl.assume(depth * TERMS > 0)
        for step in range(0, depth * TERMS, BK):
            term = step // depth
            k = step - term * depth
            left = ((ROW_PARTS >> (2 * term)) & 3) * depth + k
            right = ((COLUMN_PARTS >> (2 * term)) & 3) * depth + k
            acc = tl.dot(rows.load([row, left]), columns.load([column, right]).T, acc, input_precision=PRECISION)
    else:
        # else the epilogue is compiled twice, once for tiles of no product
        tl.assume(depth > 0)
        for k in range(0, depth, BK):
            acc = tl.dot(rows.load([row, k]), columns.load([column, k]).T, acc, input_precision=PRECISION)
    return acc


@triton.jit
def halves(tile):
    """The left and the right half of a tile."""
    BM: tl.constexpr = tile.shape[0]
    BN: tl.constexpr = tile.shape[1]
    return tl.split(tl.permute(tl.reshape(tile, (BM, 2, BN // 2)), (0, 2, 1)))


@triton.jit
def marked(marks, row, column, BM: tl.constexpr, BN: tl.constexpr):
    """The marks of a tile, int8: OF_ROW and OF_COLUMN, of a pair beyond its row's and its column's limit.

    A byte of the descriptor ``marks`` has those of a pair of the left half of a tile and of one of the right.
    """
    both = marks.load([row, column // 2])
    return tl.reshape(tl.permute(tl.join(both, both >> 2), (0, 2, 1)), (BM, BN))


@triton.jit
def within(named, i, inside, start, length, DTYPE: tl.constexpr):
    """Which of the ``length`` columns from ``start`` the rows i name, counted from there; -1 where none of them."""
    at = tl.load(named + i, mask=inside, other=-1) - start
    return tl.where((at >= 0) & (at < length), at, -1).to(DTYPE)


@triton.jit
def _span(vector, first, length, SIZE: tl.constexpr):
    """The least and the largest of SIZE elements from ``first`` on, or of a few beside them: see ``precheck.spans``."""
    units, unit = tl.cdiv(length, UNIT), first // UNIT
    end = tl.minimum(first + SIZE, length)
    least, most = tl.load(vector + length + unit), tl.load(vector + length + units + unit)
    for k in tl.static_range(1, SIZE // UNIT + 1):
        other = tl.minimum(unit + k, (end - 1) // UNIT)
        least = tl.minimum(least, tl.load(vector + length + other))
        most = tl.maximum(most, tl.load(vector + length + units + other))
    return least, most


@triton.jit
def touched(
    row, column, m, n, masks, BM: tl.constexpr, BN: tl.constexpr, POSITIVES: tl.constexpr, EXCLUDED: tl.constexpr,
    IDS: tl.constexpr,
):  # fmt: skip
    """Whether ``pairs`` may say more of the BM rows and BN columns from these on than what lies inside.

    Spans alone are asked for: they overlap in few tiles where rows and columns are in the order of their ids, and
    where the columns that rows name rise with the rows. All loads come before any is waited for.
    """
    positives, excluded, row_ids, column_ids = masks
    found = m < 0
    if IDS != NO_IDS:
        least, most = _span(row_ids, row, m, BM)
        lowest, highest = _span(column_ids, column, n, BN)
        found = (least <= highest) & (lowest <= most)
    if POSITIVES:
        least, most = _span(positives, row, m, BM)
        found = found | ((least < column + BN) & (most >= column))
    if EXCLUDED:
        least, most = _span(excluded, row, m, BM)
        found = found | ((least < column + BN) & (most >= column))
    return found


@triton.jit
def touched_columns(row, m, n, masks, BM: tl.constexpr, EXCLUDED: tl.constexpr, LANES: tl.constexpr):
    """The first column, and the end of the last, that ``touched`` may tell of beside BM rows, by ids and exclusions."""
    _positives, excluded, row_ids, column_ids = masks
    least, most = _span(row_ids, row, m, BM)
    units, first, end = tl.cdiv(n, UNIT), n, n * 0
    for start in range(0, units, LANES):
        unit = start + tl.arange(0, LANES)
        lowest = tl.load(column_ids + n + unit, mask=unit < units, other=0)
        highest = tl.load(column_ids + n + units + unit, mask=unit < units, other=0)
        found = (unit < units) & (least <= highest) & (lowest <= most)
        first = tl.minimum(first, tl.min(tl.where(found, unit * UNIT, n), 0))
        end = tl.maximum(end, tl.max(tl.where(found, (unit + 1) * UNIT, 0), 0))
    if EXCLUDED:
        least, most = _span(excluded, row, m, BM)
        if most >= 0:
            first = tl.minimum(first, tl.maximum(least, 0).to(tl.int32))
            end = tl.maximum(end, tl.minimum(most + 1, n).to(tl.int32))
    return first, end


@triton.jit
def beyond(acc, alpha, limits, i, length, AXIS: tl.constexpr):
    """Which dots have a logit beyond the limits at i, of ``length`` in all; AXIS is the one along which they repeat.

    Not NaN, which must stay. With None for alpha the dots themselves are compared. Marks, given for dots, say so.
    """
    if acc.dtype == tl.int8:
        return (acc & (OF_ROW if AXIS == 1 else OF_COLUMN)) != 0
    most = tl.load(limits + i, mask=i < length, other=float("inf"))
    x = acc if alpha is None else rounded(acc, alpha)
    return x > tl.expand_dims(most, AXIS)


@triton.jit
def within_limits(x, under, compared, factor, limits, i, length, AXIS: tl.constexpr):
    """``x``, and ``under`` where it is ``beyond`` the limits; x itself where there are none."""
    return x if limits is None else tl.where(beyond(compared, factor, limits, i, length, AXIS), under, x)


@triton.jit
def pairs(i, j, m, n, masks, POSITIVES: tl.constexpr, EXCLUDED: tl.constexpr, IDS: tl.constexpr):
    """Which pairs of rows i (BM,) and columns j (BN,) are positive and which are admitted, (BM, BN) booleans each.

    masks: pointers to positives, excluded, row_ids and column_ids; those that the flags leave out are not read. Ids are
    compared as the 64-bit integers they came as; an index outside the block names no column.
    """
    positives, excluded, row_ids, column_ids = masks
    inside_rows, inside_columns = i < m, j < n
    positive = tl.zeros((i.shape[0], j.shape[0]), tl.int1)
    hidden = tl.zeros((i.shape[0], j.shape[0]), tl.int1)
    if IDS != NO_IDS:
        mine = tl.load(row_ids + i, mask=inside_rows, other=0)
        theirs = tl.load(column_ids + j, mask=inside_columns, other=0)
        equal = mine[:, None] == theirs[None, :]
        if IDS == TARGET:
            positive = equal
        else:
            hidden = equal
    if POSITIVES:
        positive = within(positives, i, inside_rows, 0, n, j.dtype)[:, None] == j[None, :]
    if EXCLUDED:
        excluded_pair = within(excluded, i, inside_rows, 0, n, j.dtype)[:, None] == j[None, :]
        positive = positive & (excluded_pair == 0)
        hidden = hidden | excluded_pair
    admitted = (positive | (hidden == 0)) & inside_rows[:, None] & inside_columns[None, :]
    return positive & inside_rows[:, None] & inside_columns[None, :], admitted
