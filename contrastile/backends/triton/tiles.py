# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
"""What every tile kernel shares: the order of the tiles, a tile of dot products, and which of its pairs count."""

from __future__ import annotations

import triton
import triton.language as tl

from contrastile.backends.triton.parts import COLUMN_PARTS, ROW_PARTS, TERMS

LOG2E = tl.constexpr(1.4426950408889634)

# slots of a plan, float32 numbers that one kernel decides on the device and later ones obey
ALPHA = tl.constexpr(0)  # scale log2 e: logits in powers of two, without the bias
REFERENCE = tl.constexpr(1)  # the shared reference, in powers of two
THRESHOLD = tl.constexpr(2)  # least sum per term at which the terms that underflowed do not matter
FAST = tl.constexpr(3)  # 1 where the shared reference is proven safe, else 0
FACTOR = tl.constexpr(4)  # power of two that keeps a float16 G in range
BIAS = tl.constexpr(5)  # the bias, or 0
PLAN_SIZE = 8

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
    rows,
    columns,
    row,
    column,
    depth,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    PRECISION: tl.constexpr,
    DIVIDED: tl.constexpr,
):
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
def binary_orders(scale):
    """The factor that turns logits ``scale dot`` into ALPHA dot, float64: log2 e but for the rounding of ALPHA.

    A positive's logit and its row's log-sum-exp come from the same dots. Turned to and fro by this factor and not by
    log2 e, they stay equal where they are equal, and their difference is not lost in two roundings of a large number.
    """
    alpha = (scale * LOG2E).to(tl.float64)
    usable = (scale != 0.0) & (tl.abs(alpha) < float("inf"))
    return tl.where(usable, alpha / tl.where(usable, scale, 1.0).to(tl.float64), LOG2E)


@triton.jit
def pairs(
    i,
    j,
    m,
    n,
    positives,
    excluded,
    row_ids,
    column_ids,
    POSITIVES: tl.constexpr,
    EXCLUDED: tl.constexpr,
    IDS: tl.constexpr,
):
    """Which pairs of rows i (BM,) and columns j (BN,) are positive and which are admitted, (BM, BN) booleans each.

    Indices and ids are compared as the 64-bit integers they came as: a value far outside names no column.
    """
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
        named = tl.load(positives + i, mask=inside_rows, other=-1)
        positive = named[:, None] == j.to(tl.int64)[None, :]
    if EXCLUDED:
        own = tl.load(excluded + i, mask=inside_rows, other=-1)
        excluded_pair = own[:, None] == j.to(tl.int64)[None, :]
        positive = positive & (excluded_pair == 0)
        hidden = hidden | excluded_pair
    admitted = (positive | (hidden == 0)) & inside_rows[:, None] & inside_columns[None, :]
    return positive & inside_rows[:, None] & inside_columns[None, :], admitted
