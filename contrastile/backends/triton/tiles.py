# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
# pyright: reportGeneralTypeIssues=false
"""What every tile kernel shares: the order of the tiles, a tile of dot products, and which of its pairs count."""

from __future__ import annotations

import triton
import triton.language as tl

from contrastile.backends.triton.configs import INTERPRETED
from contrastile.backends.triton.logits import rounded
from contrastile.backends.triton.parts import COLUMN_PARTS, ROW_PARTS, TERMS

# slots of a plan: float32 numbers that one kernel writes on the device and later kernels read
ALPHA = tl.constexpr(0)  # scale log2 e: logits in powers of two, without the bias
REFERENCE = tl.constexpr(1)  # the shared reference, in powers of two
THRESHOLD = tl.constexpr(2)  # a sum below this, per term, may have lost terms that count to underflow
FAST = tl.constexpr(3)  # 1 if the shared reference is proven safe, else 0
GRADIENT_SCALE = tl.constexpr(4)  # power of two that keeps a float16 G in range
BIAS = tl.constexpr(5)  # the bias, or 0 if there is none
CERTAIN = tl.constexpr(6)  # 1 if G at positives by ids needs its exact form: see ``backward``
PLAN_SIZE = 8

# vectors that the epilogue of G reads, one element for each row or column; s is the plan's GRADIENT_SCALE
LOG = tl.constexpr(0)  # L in powers of two, without the bias, rounded to float32
WEIGHT = tl.constexpr(1)  # w s 2^-l with l = L - LOG
FOLDED = tl.constexpr(2)  # w s 2^(r - L) with the plan's REFERENCE r
# only if ids name the positives; R = 2^(POSITIVE_LOG - P), so that 2^(x - P) = R 2^(x - POSITIVE_LOG)
TAKEN = tl.constexpr(3)  # w s t, which G of a positive subtracts
POSITIVE_LOG = tl.constexpr(4)  # P in powers of two, without the bias, rounded to float32
POSITIVE_WEIGHT = tl.constexpr(5)  # w s R
POSITIVE_TARGET = tl.constexpr(6)  # t / R
NEGATIVE_WEIGHT = tl.constexpr(7)  # w s R sigmoid(N - P)
VECTORS, VECTORS_OF_IDS = 3, 8

UNIT = tl.constexpr(16 if INTERPRETED else 64)
"""Elements of a vector of ids or indices that share one least and one largest: see ``precheck.spans``."""

# sizes of a block and a chunk: if Triton specialised them, it would compile a kernel for each divisibility
SIZES = ["m", "n", "row0", "column0", "height", "width", "depth"]

# bits of a mark: the guide's dot of a pair is beyond the row's limit, or beyond the column's
BEYOND_ROW = tl.constexpr(1)
BEYOND_COLUMN = tl.constexpr(2)

# equal ids do nothing, hide a pair that is not positive, or make a pair positive
NO_IDS = tl.constexpr(0)
DROP = tl.constexpr(1)
TARGET = tl.constexpr(2)


@triton.jit
def place(tile, row_tiles, column_tiles, GROUP: tl.constexpr):
    """Row and column of tile number ``tile``: bands of GROUP tile rows, each walked down and then across.

    Programs that run at the same time then share rows and columns in the L2 cache.
    """
    band_tiles = GROUP * column_tiles
    top = tile // band_tiles * GROUP
    height = min(row_tiles - top, GROUP)
    offset = tile % band_tiles
    return top + offset % height, offset // height


@triton.jit
def dots(
    rows, columns, row, column, depth, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
    DIVIDED: tl.constexpr,
):  # fmt: skip
    """``<row_i, column_j>`` for BM rows from ``row`` and BN columns from ``column``, float32.

    rows, columns: tensor descriptors with blocks (BM, BK) and (BN, BK); elements outside read as 0. DIVIDED: they hold
    the three parts of each feature side by side, each part of width ``depth``, a multiple of BK.
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
        # without this the compiler emits the epilogue twice, once for tiles without products
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
    """The marks of a tile, (BM, BN) int8: the bits BEYOND_ROW and BEYOND_COLUMN of each pair.

    A byte of the descriptor ``marks`` holds two pairs: one of the left half, and two bits higher one of the right half.
    """
    packed = marks.load([row, column // 2])
    return tl.reshape(tl.permute(tl.join(packed, packed >> 2), (0, 2, 1)), (BM, BN))


@triton.jit
def within(indices, i, inside, start, length, DTYPE: tl.constexpr):
    """The column that each row of i names, counted from ``start``; -1 outside the ``length`` columns from there."""
    column = tl.load(indices + i, mask=inside, other=-1) - start
    return tl.where((column >= 0) & (column < length), column, -1).to(DTYPE)


@triton.jit
def _span(vector, first, length, SIZE: tl.constexpr):
    """The least and the largest element of the units that hold SIZE elements from ``first``: see ``precheck.spans``."""
    units, unit = tl.cdiv(length, UNIT), first // UNIT
    end = tl.minimum(first + SIZE, length)
    least, largest = tl.load(vector + length + unit), tl.load(vector + length + units + unit)
    for k in tl.static_range(1, SIZE // UNIT + 1):
        next_unit = tl.minimum(unit + k, (end - 1) // UNIT)
        least = tl.minimum(least, tl.load(vector + length + next_unit))
        largest = tl.maximum(largest, tl.load(vector + length + units + next_unit))
    return least, largest


@triton.jit
def touched(
    row, column, m, n, masks, BM: tl.constexpr, BN: tl.constexpr, POSITIVES: tl.constexpr, EXCLUDED: tl.constexpr,
    IDS: tl.constexpr,
):  # fmt: skip
    """Whether the tile of BM rows and BN columns from (row, column) may hold a positive, an exclusion or equal ids.

    It compares spans alone, and may raise a false alarm. False alarms are few where rows and columns are sorted by
    their ids, and where the columns that rows name rise with the rows. All loads start before any is waited for.
    """
    positives, excluded, row_ids, column_ids = masks
    is_touched = m < 0
    if IDS != NO_IDS:
        least, largest = _span(row_ids, row, m, BM)
        column_least, column_largest = _span(column_ids, column, n, BN)
        is_touched = (least <= column_largest) & (column_least <= largest)
    if POSITIVES:
        least, largest = _span(positives, row, m, BM)
        is_touched = is_touched | ((least < column + BN) & (largest >= column))
    if EXCLUDED:
        least, largest = _span(excluded, row, m, BM)
        is_touched = is_touched | ((least < column + BN) & (largest >= column))
    return is_touched


@triton.jit
def touched_columns(row, m, n, masks, BM: tl.constexpr, EXCLUDED: tl.constexpr, LANES: tl.constexpr):
    """A range of columns, its first and its end: outside it BM rows from ``row`` exclude no column and share no id."""
    _positives, excluded, row_ids, column_ids = masks
    least, largest = _span(row_ids, row, m, BM)
    units, first, end = tl.cdiv(n, UNIT), n, n * 0
    for start in range(0, units, LANES):
        unit = start + tl.arange(0, LANES)
        column_least = tl.load(column_ids + n + unit, mask=unit < units, other=0)
        column_largest = tl.load(column_ids + n + units + unit, mask=unit < units, other=0)
        overlaps = (unit < units) & (least <= column_largest) & (column_least <= largest)
        first = tl.minimum(first, tl.min(tl.where(overlaps, unit * UNIT, n), 0))
        end = tl.maximum(end, tl.max(tl.where(overlaps, (unit + 1) * UNIT, 0), 0))
    if EXCLUDED:
        least, largest = _span(excluded, row, m, BM)
        if largest >= 0:
            first = tl.minimum(first, tl.maximum(least, 0).to(tl.int32))
            end = tl.maximum(end, tl.minimum(largest + 1, n).to(tl.int32))
    return first, end


@triton.jit
def beyond(acc, alpha, limits, i, length, AXIS: tl.constexpr):
    """Whether each logit ``alpha acc`` is beyond its limit: element i of ``limits`` (length,), repeated along AXIS.

    If alpha is None, dots are compared; marks in place of dots hold the answer. NaN is not beyond, so that it stays.
    """
    if acc.dtype == tl.int8:
        return (acc & (BEYOND_ROW if AXIS == 1 else BEYOND_COLUMN)) != 0
    limit = tl.load(limits + i, mask=i < length, other=float("inf"))
    x = acc if alpha is None else rounded(acc, alpha)
    return x > tl.expand_dims(limit, AXIS)


@triton.jit
def within_limits(x, replacement, compared, alpha, limits, i, length, AXIS: tl.constexpr):
    """``replacement`` where ``compared``, dots or marks, is ``beyond`` its limit, else ``x``; x if limits is None."""
    return x if limits is None else tl.where(beyond(compared, alpha, limits, i, length, AXIS), replacement, x)


@triton.jit
def pairs(i, j, m, n, masks, POSITIVES: tl.constexpr, EXCLUDED: tl.constexpr, IDS: tl.constexpr):
    """Which pairs of rows i (BM,) and columns j (BN,) are positive and which are admitted, (BM, BN) booleans each.

    An excluded pair is neither. masks: pointers to positives, excluded, row_ids and column_ids; the flags say which are
    read. Ids are compared as 64-bit integers. An index outside the block names no column.
    """
    positives, excluded, row_ids, column_ids = masks
    inside_rows, inside_columns = i < m, j < n
    positive = tl.zeros((i.shape[0], j.shape[0]), tl.int1)
    hidden = tl.zeros((i.shape[0], j.shape[0]), tl.int1)
    if IDS != NO_IDS:
        row_id = tl.load(row_ids + i, mask=inside_rows, other=0)
        column_id = tl.load(column_ids + j, mask=inside_columns, other=0)
        has_equal_ids = row_id[:, None] == column_id[None, :]
        if IDS == TARGET:
            positive = has_equal_ids
        else:
            hidden = has_equal_ids
    if POSITIVES:
        positive = within(positives, i, inside_rows, 0, n, j.dtype)[:, None] == j[None, :]
    if EXCLUDED:
        excluded_pair = within(excluded, i, inside_rows, 0, n, j.dtype)[:, None] == j[None, :]
        positive = positive & (excluded_pair == 0)
        hidden = hidden | excluded_pair
    admitted = (positive | (hidden == 0)) & inside_rows[:, None] & inside_columns[None, :]
    return positive & inside_rows[:, None] & inside_columns[None, :], admitted
