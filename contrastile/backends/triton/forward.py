# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
"""The forward kernels: row and column statistics of X in one pass over its tiles, and the fold of their partials.

A chunk of X is ``height`` rows from ``row0`` by ``width`` columns from ``column0``. Each tile writes one partial result
per row and one per column; ``fold`` adds a chunk's partials to the running state in the order of the tiles, so the
result does not depend on which program ran first, and the partials of one chunk are all that is ever held.

* fast: ``E = 2^(alpha dot - r)`` against one reference for all, one exponential an element for rows and columns;
* safe: each tile's row and column maxima, two exponentials.

Both are launched; the status word decides on the device which one works and which one returns at once.
"""

from __future__ import annotations

import triton
import triton.language as tl

from contrastile.backends.triton.kernel import kernel
from contrastile.backends.triton.tiles import (
    ALPHA,
    BIAS,
    NO_IDS,
    REFERENCE,
    TARGET,
    THRESHOLD,
    binary_orders,
    dots,
    pairs,
    place,
)

# 64-bit sizes would be compiled for every divisibility; these are not
_PLAIN = ["m", "n", "row0", "column0", "height", "width", "depth"]


@kernel
@triton.jit(do_not_specialize=_PLAIN)
def lse_tiles(
    rows,
    columns,
    plan,
    status,
    scale,
    row_parts,
    column_parts,
    row_positive_parts,
    column_positive_parts,
    positives,
    excluded,
    row_ids,
    column_ids,
    m,
    n,
    row0,
    column0,
    height,
    width,
    depth,
    SAFE: tl.constexpr,
    COLUMNS: tl.constexpr,
    POSITIVES: tl.constexpr,
    EXCLUDED: tl.constexpr,
    IDS: tl.constexpr,
    RAGGED: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP: tl.constexpr,
    PRECISION: tl.constexpr,
    DIVIDED: tl.constexpr,
):
    """Partial statistics of one chunk: of a tile's rows to row_parts (tile columns, height), likewise for columns.

    rows, columns: descriptors of the chunk's features. m, n: of the whole block, in which the pairs are counted.
    A partial is the sum of E (fast) or the log2-sum-exp2 (safe). With IDS = TARGET the sums of the positive logits,
    without the bias, and their counts go to the positive parts, laid out alike, counts behind sums.
    """
    row_tiles, column_tiles = tl.cdiv(height, BM), tl.cdiv(width, BN)
    tiles = row_tiles * column_tiles
    tiles = tl.where(tl.load(status) != 0, tiles, 0) if SAFE else tl.where(tl.load(status) == 0, tiles, 0)
    alpha = tl.load(plan + ALPHA)
    reference = tl.load(plan + REFERENCE)
    MASKED: tl.constexpr = EXCLUDED or IDS != NO_IDS
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=True):
        r, c = place(tile, row_tiles, column_tiles, GROUP)
        acc = dots(rows, columns, r * BM, c * BN, depth, BM, BN, BK, PRECISION, DIVIDED)
        i, j = r * BM + tl.arange(0, BM), c * BN + tl.arange(0, BN)
        row_at = c.to(tl.int64) * height + i
        column_at = r.to(tl.int64) * width + j
        if SAFE:
            x = acc * alpha
            if RAGGED:
                # -inf, not 0: a zero pad wins the maximum when every logit is negative
                x = tl.where((i < height)[:, None] & (j < width)[None, :], x, float("-inf"))
        else:
            x = tl.math.exp2(acc * alpha - reference)
            if RAGGED and (r == row_tiles - 1 or c == column_tiles - 1):
                x = tl.where((i < height)[:, None] & (j < width)[None, :], x, 0.0)
        if MASKED:
            positive, admitted = pairs(
                row0 + i,
                column0 + j,
                m,
                n,
                positives,
                excluded,
                row_ids,
                column_ids,
                POSITIVES,
                EXCLUDED,
                IDS,
            )
            x = tl.where(admitted, x, float("-inf") if SAFE else 0.0)
            if IDS == TARGET:
                inside = positive & (i < height)[:, None] & (j < width)[None, :]
                logit = tl.where(inside, acc * tl.load(scale), 0.0)
                count = inside.to(tl.float32)
                row_size, column_size = column_tiles.to(tl.int64) * height, row_tiles.to(tl.int64) * width
                tl.store(row_positive_parts + row_at, tl.sum(logit, 1), mask=i < height)
                tl.store(row_positive_parts + row_size + row_at, tl.sum(count, 1), mask=i < height)
                if COLUMNS:
                    tl.store(column_positive_parts + column_at, tl.sum(logit, 0), mask=j < width)
                    tl.store(column_positive_parts + column_size + column_at, tl.sum(count, 0), mask=j < width)
        if SAFE:
            tl.store(row_parts + row_at, _log2_sum(x, 1), mask=i < height)
            if COLUMNS:
                tl.store(column_parts + column_at, _log2_sum(x, 0), mask=j < width)
        else:
            tl.store(row_parts + row_at, tl.sum(x, 1), mask=i < height)
            if COLUMNS:
                tl.store(column_parts + column_at, tl.sum(x, 0), mask=j < width)


@triton.jit
def _log2_sum(x, AXIS: tl.constexpr):
    """log2 sum 2^x along an axis; -inf for nothing, inf for +inf, NaN for NaN."""
    top = tl.max(x, AXIS)
    # an infinite maximum cannot be subtracted: inf - inf is NaN
    shift = tl.where((top > float("-inf")) & (top < float("inf")), top, 0.0)
    return shift + tl.log2(tl.sum(tl.math.exp2(x - tl.expand_dims(shift, AXIS)), AXIS))


@kernel
@triton.jit(
    do_not_specialize=[*_PLAIN, "row_tiles", "column_tiles", "first_row", "last_row", "first_column", "last_column"]
)
def fold(
    row_parts,
    column_parts,
    row_state,
    column_state,
    row_lse,
    column_lse,
    plan,
    status,
    scale,
    height,
    width,
    row0,
    column0,
    row_tiles,
    column_tiles,
    m,
    n,
    first_row,
    last_row,
    first_column,
    last_column,
    SAFE: tl.constexpr,
    COLUMNS: tl.constexpr,
    LANES: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Fold one chunk's partials into the running state; after the last chunk, give the log-sum-exp in nats.

    row_parts: (column_tiles, height); column_parts: (row_tiles, width); states: (m,) and (n,) float64, sums or
    log2-sum-exp2; first_*, last_*: whether this is the state's first or last chunk. Float64 costs nothing here, and a
    trained model's loss is the small difference of a log-sum-exp and a logit.
    The fast path is checked here: a sum so small that what underflowed could matter sets the status word.
    """
    program = tl.program_id(0)
    row_programs = tl.cdiv(height, LANES)
    wanted = tl.load(status) != 0 if SAFE else tl.load(status) == 0
    if wanted:
        if program < row_programs:
            _fold_one(
                row_parts,
                row_state + row0,
                row_lse + row0,
                plan,
                status,
                scale,
                program,
                height,
                column_tiles,
                n,
                first_row,
                last_row,
                SAFE,
                LANES,
                DEPTH,
            )
        elif COLUMNS:
            _fold_one(
                column_parts,
                column_state + column0,
                column_lse + column0,
                plan,
                status,
                scale,
                program - row_programs,
                width,
                row_tiles,
                m,
                first_column,
                last_column,
                SAFE,
                LANES,
                DEPTH,
            )


@triton.jit
def _fold_one(
    parts,
    state,
    lse,
    plan,
    status,
    scale,
    program,
    length,
    tiles,
    terms,
    first,
    last,
    SAFE: tl.constexpr,
    LANES: tl.constexpr,
    DEPTH: tl.constexpr,
):
    lanes = program * LANES + tl.arange(0, LANES)
    inside = lanes < length
    empty = float("-inf") if SAFE else 0.0
    total = tl.load(state + lanes, mask=inside & (first == 0), other=empty)
    for start in range(0, tiles, DEPTH):
        t = start + tl.arange(0, DEPTH)
        there = (t < tiles)[:, None] & inside[None, :]
        part = tl.load(parts + t.to(tl.int64)[:, None] * length + lanes[None, :], mask=there, other=empty)
        part = part.to(tl.float64)
        if SAFE:
            part = _log2_sum(part, 0)
            high = tl.maximum(total, part)
            shift = tl.where((high > float("-inf")) & (high < float("inf")), high, 0.0)
            total = shift + tl.log2(tl.math.exp2(total - shift) + tl.math.exp2(part - shift))
        else:
            total += tl.sum(part, 0)
    tl.store(state + lanes, total, mask=inside)
    if last != 0:
        if SAFE:
            log = total
        else:
            log = tl.log2(total) + tl.load(plan + REFERENCE).to(tl.float64)
            trusted = total >= tl.load(plan + THRESHOLD) * terms
            # or-ing a bit gives the same word in any order; a NaN sum is not trusted
            doubtful = tl.max(tl.where(trusted | (lanes >= length), 0, 1), 0)
            if doubtful != 0:
                tl.atomic_or(status, 1)
        nats = log / binary_orders(tl.load(scale)) + tl.load(plan + BIAS).to(tl.float64)
        tl.store(lse + lanes, nats.to(tl.float32), mask=inside)


@kernel
@triton.jit(do_not_specialize=["length", "tiles", "first"])
def add_parts(parts, out, status, length, tiles, first, SAFE: tl.constexpr, LANES: tl.constexpr, DEPTH: tl.constexpr):
    """``out (length,) = [out +] sum of parts (tiles, length)`` over tiles, in order; only on the path that works."""
    wanted = True
    if status is not None:
        wanted = tl.load(status) != 0 if SAFE else tl.load(status) == 0
    if wanted:
        lanes = tl.program_id(0) * LANES + tl.arange(0, LANES)
        inside = lanes < length
        total = tl.load(out + lanes, mask=inside & (first == 0), other=0.0)
        for start in range(0, tiles, DEPTH):
            t = start + tl.arange(0, DEPTH)
            there = (t < tiles)[:, None] & inside[None, :]
            at = t.to(tl.int64)[:, None] * length + lanes[None, :]
            total += tl.sum(tl.load(parts + at, mask=there, other=0.0), 0)
        tl.store(out + lanes, total, mask=inside)
