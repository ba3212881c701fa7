# pyright: reportAssignmentType=false
# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
"""The forward kernels: row and column statistics of X in one pass over its tiles, and the fold of their partials.

A chunk of X is ``height`` rows from ``row0`` by ``width`` columns from ``column0``. Each tile leaves partial results of
its rows and columns; ``fold`` adds a chunk's partials to the running state in the order of the tiles, so the result
does not depend on which program ran first, and the partials of one chunk are all that is ever held.

* fast: ``E = 2^(alpha dot - r)`` against one reference for all, one exponential an element for rows and columns;
* safe: each tile's row and column maxima, two exponentials.

Both are launched, of float32 features the safe one alone; the status word decides on the device which one works and
which one returns at once.

The sums are over the negatives. Positives named by index leave them in the tiles that they lie in, and
``positive_dots`` has their logits; positives named by ids have sums of their own.
"""

from __future__ import annotations

import triton
import triton.language as tl

from contrastile.backends.triton.kernel import kernel
from contrastile.backends.triton.logits import bias_of, binary_orders, rounded
from contrastile.backends.triton.tiles import (
    ALPHA,
    DROP,
    NO_IDS,
    REFERENCE,
    SIZES,
    TARGET,
    THRESHOLD,
    dots,
    halves,
    marked,
    pairs,
    place,
    touched,
    touched_columns,
    within,
    within_limits,
)

SHARE = 4
"""Programs of ``touched_tiles`` for a tile row."""

_LEAST = tl.constexpr(2.0**-126)
"""The smallest number that no GPU takes for 0."""


def quantities(safe: bool, matched: bool) -> int:
    """Partial results that a tile leaves of a row or column: see ``lse_tiles``."""
    return (2 if safe else 1) + (4 if matched else 0)


@kernel
@triton.jit(do_not_specialize=SIZES)
def lse_tiles(
    rows, columns, plan, status, diagonals, row_parts, column_parts, positives, excluded, row_ids, column_ids,
    row_limits, column_limits, marks, m, n, row0, column0, height, width, depth,
    SAFE: tl.constexpr, COLUMNS: tl.constexpr, POSITIVES: tl.constexpr, EXCLUDED: tl.constexpr, IDS: tl.constexpr,
    LIMITED: tl.constexpr, RAGGED: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    GROUP: tl.constexpr, PRECISION: tl.constexpr, DIVIDED: tl.constexpr,
):  # fmt: skip
    """Partial statistics of one chunk: of a tile's rows to row_parts (.., tile columns, height), likewise for columns.

    rows, columns: descriptors of the chunk's features. m, n: of the whole block, in which the pairs are counted.
    diagonals: the least and the largest j - i of the block's positives (i, j): no other tile holds one. marks: of a
    guide, whose limits they are; None where logits are compared with them.

    What a tile leaves of its negatives is the sum of E (fast), or the maximum x and the sum of 2^(X - x) (safe), for
    the sum of the two would be rounded at the size of a logit. With IDS = TARGET there follow, of the positives and on
    both paths, the maximum x, the sums of 2^(X - x) and of X - x, and their count.
    """
    row_tiles, column_tiles = tl.cdiv(height, BM), tl.cdiv(width, BN)
    tiles = row_tiles * column_tiles
    tiles = tl.where(tl.load(status) != 0, tiles, 0) if SAFE else tl.where(tl.load(status) == 0, tiles, 0)
    alpha = tl.load(plan + ALPHA)
    reference = tl.load(plan + REFERENCE)
    APART: tl.constexpr = POSITIVES and not (EXCLUDED or IDS != NO_IDS)
    ends = (tl.load(diagonals), tl.load(diagonals + 1)) if APART else (0, 0)
    path, masks = (alpha, reference, ends), (positives, excluded, row_ids, column_ids)
    given = path, masks, (row_limits, column_limits), (m, n, row0, column0, height, width)
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=True):
        r, c = place(tile, row_tiles, column_tiles, GROUP)
        _tile(
            r, c, rows, columns, (row_parts, column_parts), given, depth, marks, SAFE, COLUMNS, POSITIVES, EXCLUDED,
            IDS, LIMITED, RAGGED, BM, BN, BK, PRECISION, DIVIDED,
        )  # fmt: skip


@kernel
@triton.jit(do_not_specialize=SIZES)
def touched_tiles(
    rows, columns, plan, status, row_parts, column_parts, excluded, row_ids, column_ids, m, n, row0, column0, height,
    width, depth, COLUMNS: tl.constexpr, EXCLUDED: tl.constexpr, RAGGED: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """What ``lse_tiles`` leaves with IDS = TARGET on the fast path, of the tiles that are ``touched`` alone.

    Programs (tile rows, any number): those of a tile row take its tiles in turn.
    """
    r, column_tiles = tl.program_id(0), tl.cdiv(width, BN)
    masks = None, excluded, row_ids, column_ids
    path = tl.load(plan + ALPHA), tl.load(plan + REFERENCE), (0, 0)
    given = path, masks, (None, None), (m, n, row0, column0, height, width)
    if tl.load(status) == 0:
        first, end = touched_columns(row0 + r * BM, m, n, masks, BM, EXCLUDED, LANES)
        first, end = tl.maximum(first - column0, 0) // BN, tl.minimum(tl.cdiv(end - column0, BN), column_tiles)
        for c in tl.range(first + tl.program_id(1), end, tl.num_programs(1)):
            if touched(row0 + r * BM, column0 + c * BN, m, n, masks, BM, BN, False, EXCLUDED, TARGET):
                _tile(
                    r, c, rows, columns, (row_parts, column_parts), given, depth, None, False, COLUMNS, False,
                    EXCLUDED, TARGET, False, RAGGED, BM, BN, BK, PRECISION, False,
                )  # fmt: skip


@triton.jit
def _tile(
    r, c, rows, columns, parts, given, depth, marks, SAFE: tl.constexpr, COLUMNS: tl.constexpr,
    POSITIVES: tl.constexpr, EXCLUDED: tl.constexpr, IDS: tl.constexpr, LIMITED: tl.constexpr, RAGGED: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr, DIVIDED: tl.constexpr,
):  # fmt: skip
    """One tile of X, and what it leaves."""
    path, masks, limits, chunk = given
    row_parts, column_parts = parts
    row_limits, column_limits = limits
    m, n, row0, column0, height, width = chunk
    row_tiles, column_tiles = tl.cdiv(height, BM), tl.cdiv(width, BN)
    EMPTY: tl.constexpr = float("-inf") if SAFE else 0.0
    HALVED: tl.constexpr = (LIMITED or IDS == DROP) and not SAFE and IDS != TARGET
    row, column = r * BM, c * BN
    acc = dots(rows, columns, row, column, depth, BM, BN, BK, PRECISION, DIVIDED)
    compared, factor = acc, path[0]
    if marks is not None:
        compared = marked(marks, row, column, BM, BN)
    i = row + tl.arange(0, BM)
    row_size, column_size = column_tiles.to(tl.int64) * height, row_tiles.to(tl.int64) * width
    row_to, column_to = row_parts + tl.cast(c, tl.int64) * height + i, column_parts + tl.cast(r, tl.int64) * width
    to = row_to, row_size, column_to, column_size
    given = path, masks, limits, chunk, to
    if SAFE:
        x = _terms(acc, row, column, given, SAFE, COLUMNS, POSITIVES, EXCLUDED, IDS, RAGGED)
        of_rows = within_limits(x, EMPTY, compared, factor, row_limits, row0 + i, m, 1)
        _leave(of_rows, row_to, row_size, i < height, 1)
        if COLUMNS:
            j = column + tl.arange(0, BN)
            of_columns = within_limits(x, EMPTY, compared, factor, column_limits, column0 + j, n, 0)
            _leave(of_columns, column_to + j, column_size, j < width, 0)
    elif HALVED:
        # a tile of terms and one of logits, or of ids, are more than the registers hold
        left, right = halves(acc)
        of_left, of_right = (left, right) if marks is None else halves(compared)
        total = _sums(left, of_left, factor, row, column, given, COLUMNS, POSITIVES, EXCLUDED, IDS, RAGGED)
        column += BN // 2
        total += _sums(right, of_right, factor, row, column, given, COLUMNS, POSITIVES, EXCLUDED, IDS, RAGGED)
        tl.store(row_to, total, mask=i < height)
    else:
        total = _sums(acc, compared, factor, row, column, given, COLUMNS, POSITIVES, EXCLUDED, IDS, RAGGED)
        tl.store(row_to, total, mask=i < height)


@triton.jit
def _sums(
    acc, compared, factor, row, column, given, COLUMNS: tl.constexpr, POSITIVES: tl.constexpr, EXCLUDED: tl.constexpr,
    IDS: tl.constexpr, RAGGED: tl.constexpr,
):  # fmt: skip
    """The rows' sums of the fast path, of a tile or of a part of it; leaves the columns'.

    compared, factor: what ``beyond`` takes first.
    """
    _path, _masks, limits, chunk, to = given
    row_limits, column_limits = limits
    m, n, row0, column0, _height, width = chunk
    _row_to, _row_size, column_to, _column_size = to
    i, j = row + tl.arange(0, acc.shape[0]), column + tl.arange(0, acc.shape[1])
    x = _terms(acc, row, column, given, False, COLUMNS, POSITIVES, EXCLUDED, IDS, RAGGED)
    total = tl.sum(within_limits(x, 0.0, compared, factor, row_limits, row0 + i, m, 1), 1)
    if COLUMNS:
        of_columns = within_limits(x, 0.0, compared, factor, column_limits, column0 + j, n, 0)
        tl.store(column_to + j, tl.sum(of_columns, 0), mask=j < width)
    return total


@triton.jit
def _terms(
    acc, row, column, given, SAFE: tl.constexpr, COLUMNS: tl.constexpr, POSITIVES: tl.constexpr,
    EXCLUDED: tl.constexpr, IDS: tl.constexpr, RAGGED: tl.constexpr,
):  # fmt: skip
    """The terms of a tile's sums (fast), or their logits (safe), without what is no negative; leaves the positives."""
    path, masks, limits, chunk, to = given
    alpha, reference, ends = path
    row_limits, column_limits = limits
    positives, _excluded, _row_ids, _column_ids = masks
    m, n, row0, column0, height, width = chunk
    row_to, row_size, column_to, column_size = to
    BM: tl.constexpr = acc.shape[0]
    BN: tl.constexpr = acc.shape[1]
    MASKED: tl.constexpr = EXCLUDED or IDS != NO_IDS
    EMPTY: tl.constexpr = float("-inf") if SAFE else 0.0
    i, j = row + tl.arange(0, BM), column + tl.arange(0, BN)
    if SAFE:
        x = rounded(acc, alpha)
        if RAGGED:
            # -inf, not 0: a zero pad wins the maximum when every logit is negative
            x = tl.where((i < height)[:, None] & (j < width)[None, :], x, EMPTY)
    else:
        x = tl.math.exp2(acc * alpha - reference)
        if row_limits is not None or column_limits is not None:
            # so that a sum of 0 has no terms, not terms that have vanished
            x = tl.maximum(x, _LEAST, propagate_nan=tl.PropagateNan.ALL)
        if RAGGED and (row + BM > height or column + BN > width):
            x = tl.where((i < height)[:, None] & (j < width)[None, :], x, EMPTY)
    if POSITIVES and not MASKED:
        corner = (column0 - row0) + (column - row)
        if (corner - BM < ends[1]) & (corner + BN > ends[0]):
            named = within(positives + row0, i, i < height, column0 + column, BN, tl.int32)
            x = tl.where(named[:, None] == tl.arange(0, BN)[None, :], EMPTY, x)
    if MASKED:
        NEXT: tl.constexpr = 2 if SAFE else 1
        row_to, column_to = row_to + NEXT * row_size, column_to + NEXT * column_size + j
        if touched(row0 + row, column0 + column, m, n, masks, BM, BN, POSITIVES, EXCLUDED, IDS):
            positive, admitted = pairs(row0 + i, column0 + j, m, n, masks, POSITIVES, EXCLUDED, IDS)
            x = tl.where(admitted & (positive == 0), x, EMPTY)
            if IDS == TARGET:
                positive = positive & (i < height)[:, None] & (j < width)[None, :]
                logit = tl.where(positive, rounded(acc, alpha), float("-inf"))
                _leave_positives(logit, positive, row_to, row_size, i < height, 1)
                if COLUMNS:
                    _leave_positives(logit, positive, column_to, column_size, j < width, 0)
        elif IDS == TARGET:
            _leave_nothing(row_to, row_size, i < height)
            if COLUMNS:
                _leave_nothing(column_to, column_size, j < width)
    return x


@triton.jit
def _leave(x, to, size, inside, AXIS: tl.constexpr):
    """What a tile of logits leaves along an axis on the safe path."""
    top = _finite(tl.max(x, AXIS))
    tl.store(to, top, mask=inside)
    tl.store(to + size, tl.sum(tl.math.exp2(x - tl.expand_dims(top, AXIS)), AXIS), mask=inside)


@triton.jit
def _leave_positives(x, positive, to, size, inside, AXIS: tl.constexpr):
    """What a tile leaves of logits of positives; elsewhere x is -inf.

    Against their own maximum on the fast path, too: of a positive that is likelier than all others nothing is rounded,
    nor of the sum of logits that are alike.
    """
    top = _finite(tl.max(x, AXIS))
    less = x - tl.expand_dims(top, AXIS)
    tl.store(to, top, mask=inside)
    tl.store(to + size, tl.sum(tl.math.exp2(less), AXIS), mask=inside)
    tl.store(to + 2 * size, tl.sum(tl.where(positive, less, 0.0), AXIS), mask=inside)
    tl.store(to + 3 * size, tl.sum(positive.to(tl.float32), AXIS), mask=inside)


@triton.jit
def _leave_nothing(to, size, inside):
    """What ``_leave_positives`` leaves of a tile without positives: their count, without which nothing else is read."""
    tl.store(to + 3 * size, 0.0, mask=inside)


@triton.jit
def _finite(top):
    """A maximum that can be subtracted, 0 for one that cannot: inf - inf is NaN."""
    return tl.where((top > float("-inf")) & (top < float("inf")), top, 0.0)


@kernel
@triton.jit(
    do_not_specialize=[*SIZES, "row_tiles", "column_tiles", "first_row", "last_row", "first_column", "last_column"]
)
def fold(
    row_parts, column_parts, row_state, column_state,
    row_negative, row_positive, row_sum, column_negative, column_positive, column_sum,
    plan, status, scale, bias,
    height, width, row0, column0, row_tiles, column_tiles, m, n, first_row, last_row, first_column, last_column,
    SAFE: tl.constexpr, COLUMNS: tl.constexpr, MATCHED: tl.constexpr, LIMITED: tl.constexpr, LANES: tl.constexpr,
    DEPTH: tl.constexpr,
):  # fmt: skip
    """Fold one chunk's partials into the running state; after the last chunk, give the statistics in nats.

    row_parts: (.., column_tiles, height); column_parts: (.., row_tiles, width), as ``lse_tiles`` leaves them; states:
    (1 or 4, m) and (.., n) float64: sums (fast) or log2-sum-exp2 of the negatives and, if MATCHED, log2-sum-exp2 of the
    positives, their sums of logits, their counts; first_*, last_*: whether this is the state's first or last chunk. To
    row_* (m,) and column_* (n,), float64: the log-sum-exp of the negatives and, if MATCHED, that of the positives, and
    their sum. The fast path is checked here: a sum so small that what underflowed could matter sets the status word.
    LIMITED: a sum of 0 has no terms.
    """
    program = tl.program_id(0)
    row_programs = tl.cdiv(height, LANES)
    wanted = tl.load(status) != 0 if SAFE else tl.load(status) == 0
    path = plan, status, scale, bias
    if wanted:
        if program < row_programs:
            lanes = program * LANES + tl.arange(0, LANES)
            to, side = (row_negative, row_positive, row_sum), (row0, m, n, last_row)
            chunk = lanes, height, column_tiles, first_row
            _fold_side(row_parts, row_state, to, path, side, chunk, SAFE, MATCHED, LIMITED, DEPTH)
        elif COLUMNS:
            lanes = (program - row_programs) * LANES + tl.arange(0, LANES)
            to, side = (column_negative, column_positive, column_sum), (column0, n, m, last_column)
            chunk = lanes, width, row_tiles, first_column
            _fold_side(column_parts, column_state, to, path, side, chunk, SAFE, MATCHED, LIMITED, DEPTH)


@triton.jit
def _fold_side(
    parts, state, to, path, side, chunk, SAFE: tl.constexpr, MATCHED: tl.constexpr, LIMITED: tl.constexpr,
    DEPTH: tl.constexpr,
):  # fmt: skip
    """The rows ``start + lanes`` of ``total``, or the columns; ``terms`` is the length of the other side.

    chunk: the lanes, the chunk's length and tiles, and whether it is the state's first.
    """
    plan, status, scale, bias = path
    start, total, terms, last = side
    lanes, length, tiles, first = chunk
    inside = lanes < length
    chunk = lanes, inside, length, tiles, first
    at, step = start.to(tl.int64) + lanes, total.to(tl.int64)
    size = tiles.to(tl.int64) * length
    NEXT: tl.constexpr = 2 if SAFE else 1
    negative = _fold_sum(parts, state + at, chunk, SAFE, DEPTH)
    if MATCHED:
        positive, logits, count = _fold_positives(parts + NEXT * size, state + step + at, step, chunk, DEPTH)
    if last != 0:
        orders, shift = binary_orders(tl.load(scale)), bias_of(bias)
        least = tl.load(plan + THRESHOLD).to(tl.float64)
        trusted = negative >= least * terms
        if LIMITED:
            trusted = trusted | (negative == 0.0)
        # or-ing a bit gives the same word in any order; a NaN sum is not trusted
        if not SAFE and tl.max(tl.where(trusted | (lanes >= length), 0, 1), 0) != 0:
            tl.atomic_or(status, 1)
        log2 = negative if SAFE else tl.log2(negative) + tl.load(plan + REFERENCE).to(tl.float64)
        tl.store(to[0] + at, log2 / orders + shift, mask=inside)
        if MATCHED:
            total_logit = tl.where(count > 0.0, logits / orders + count * shift, 0.0)
            log = tl.where(count > 0.0, positive / orders + shift, float("-inf"))
            # of one positive its logit, as the backward has it
            tl.store(to[1] + at, tl.where(count == 1.0, total_logit, log), mask=inside)
            tl.store(to[2] + at, total_logit, mask=inside)


@triton.jit
def _part(parts, chunk, start, DEPTH: tl.constexpr):
    """Partial results of DEPTH tiles, float64; 0 where there is none."""
    lanes, inside, length, tiles, _first = chunk
    t = start + tl.arange(0, DEPTH)
    there = (t < tiles)[:, None] & inside[None, :]
    return tl.load(parts + t.to(tl.int64)[:, None] * length + lanes[None, :], mask=there, other=0.0).to(tl.float64)


@triton.jit
def _add(parts, state, chunk, DEPTH: tl.constexpr):
    """``state += sum of parts (tiles, length)`` over tiles, and the sum."""
    _lanes, inside, _length, tiles, first = chunk
    total = tl.load(state, mask=inside & (first == 0), other=0.0)
    for start in range(0, tiles, DEPTH):
        total += tl.sum(_part(parts, chunk, start, DEPTH), 0)
    tl.store(state, total, mask=inside)
    return total


@triton.jit
def _fold_sum(parts, state, chunk, SAFE: tl.constexpr, DEPTH: tl.constexpr):
    """The same of sums (fast), or of maxima and, behind them, sums, as a log2-sum-exp2 (safe)."""
    if not SAFE:
        return _add(parts, state, chunk, DEPTH)
    _lanes, inside, length, tiles, first = chunk
    size = tiles.to(tl.int64) * length
    total = tl.load(state, mask=inside & (first == 0), other=float("-inf"))
    for start in range(0, tiles, DEPTH):
        top = _part(parts, chunk, start, DEPTH)
        total = _log2_add(total, _log2_sum(top + tl.log2(_part(parts + size, chunk, start, DEPTH)), 0))
    tl.store(state, total, mask=inside)
    return total


@triton.jit
def _fold_positives(parts, state, step, chunk, DEPTH: tl.constexpr):
    """log2-sum-exp2 of the positives' logits, their sums and their counts, ``step`` apart: see ``_leave_positives``."""
    _lanes, inside, length, tiles, first = chunk
    size = tiles.to(tl.int64) * length
    old = inside & (first == 0)
    log = tl.load(state, mask=old, other=float("-inf"))
    total, number = tl.load(state + step, mask=old, other=0.0), tl.load(state + 2 * step, mask=old, other=0.0)
    for start in range(0, tiles, DEPTH):
        count = _part(parts + 3 * size, chunk, start, DEPTH)
        # few tiles have any
        if tl.max(tl.max(count, 0), 0) > 0:
            there = count > 0.0
            top = _part(parts, chunk, start, DEPTH)
            terms = top + tl.log2(_part(parts + size, chunk, start, DEPTH))
            log = _log2_add(log, _log2_sum(tl.where(there, terms, float("-inf")), 0))
            less = _part(parts + 2 * size, chunk, start, DEPTH)
            total += tl.sum(tl.where(there, top * count + less, 0.0), 0)
            number += tl.sum(count, 0)
    tl.store(state, log, mask=inside)
    tl.store(state + step, total, mask=inside)
    tl.store(state + 2 * step, number, mask=inside)
    return log, total, number


@triton.jit
def _log2_add(x, y):
    """log2(2^x + 2^y)."""
    shift = _finite(tl.maximum(x, y))
    return shift + tl.log2(tl.math.exp2(x - shift) + tl.math.exp2(y - shift))


@triton.jit
def _log2_sum(x, AXIS: tl.constexpr):
    """log2 sum 2^x along an axis; -inf for nothing, inf for +inf, NaN for NaN."""
    shift = _finite(tl.max(x, AXIS))
    return shift + tl.log2(tl.sum(tl.math.exp2(x - tl.expand_dims(shift, AXIS)), AXIS))


@kernel
@triton.jit(do_not_specialize=["length", "tiles", "first"])
def add_parts(parts, out, length, tiles, first, LANES: tl.constexpr, DEPTH: tl.constexpr):
    """``out (length,) = [out +] sum of parts (tiles, length)`` over tiles, in order."""
    lanes = tl.program_id(0) * LANES + tl.arange(0, LANES)
    inside = lanes < length
    total = tl.load(out + lanes, mask=inside & (first == 0), other=0.0)
    for start in range(0, tiles, DEPTH):
        t = start + tl.arange(0, DEPTH)
        there = (t < tiles)[:, None] & inside[None, :]
        at = t.to(tl.int64)[:, None] * length + lanes[None, :]
        total += tl.sum(tl.load(parts + at, mask=there, other=0.0), 0)
    tl.store(out + lanes, total, mask=inside)
