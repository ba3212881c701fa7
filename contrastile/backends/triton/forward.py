# pyright: reportAssignmentType=false
# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
"""The forward kernels: row and column statistics of X in one pass over its tiles, and the fold of their partials.

A chunk of X is ``height`` rows from ``row0`` by ``width`` columns from ``column0``. Each tile writes partial results of
its rows and columns. ``fold`` adds a chunk's partials to the running state in the order of the tiles, so the result
does not depend on the order in which programs run. Memory holds the partials of one chunk at a time.

* fast: ``E = 2^(alpha dot - r)`` with one reference r for all pairs; one exponential serves a row and a column;
* safe: each tile's maxima of rows and of columns are subtracted, which takes two exponentials.

The host launches both, for float32 features the safe path alone. The status word on the device selects one, and the
kernels of the other return at once.

Sums are over negatives. Tiles leave out positives by index, whose logits ``positive_dots`` computes; positives by ids
have sums of their own.
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
"""Programs of ``touched_tiles`` per tile row."""

_SMALLEST_NORMAL = tl.constexpr(2.0**-126)
"""The smallest normal float32: GPUs may flush smaller numbers to 0."""


def quantities(safe: bool, matched: bool) -> int:
    """The number of partial results that a tile writes for each of its rows or columns: see ``lse_tiles``."""
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
    """Write partial statistics of a chunk: row_parts (.., tile columns, height), column_parts (.., tile rows, width).

    rows, columns: descriptors of the chunk's features. m, n: sizes of the block, whose row and column numbers the pairs
    use. diagonals: the least and the largest j - i of the block's positives (i, j); tiles outside this range hold none.
    marks: descriptor of a guide's marks; None if logits are compared with the limits.

    For its negatives a tile writes the sum of E (fast), or the maximum x and the sum of 2^(X - x) (safe). Merged into
    one log-sum-exp, the two would be rounded at the size of a logit. With IDS = TARGET four results for its positives
    follow on both paths: the maximum x, the sums of 2^(X - x) and of X - x, and the count.
    """
    row_tiles, column_tiles = tl.cdiv(height, BM), tl.cdiv(width, BN)
    tiles = row_tiles * column_tiles
    tiles = tl.where(tl.load(status) != 0, tiles, 0) if SAFE else tl.where(tl.load(status) == 0, tiles, 0)
    alpha = tl.load(plan + ALPHA)
    reference = tl.load(plan + REFERENCE)
    BY_INDEX_ALONE: tl.constexpr = POSITIVES and not (EXCLUDED or IDS != NO_IDS)
    diagonal_ends = (tl.load(diagonals), tl.load(diagonals + 1)) if BY_INDEX_ALONE else (0, 0)
    path, masks = (alpha, reference, diagonal_ends), (positives, excluded, row_ids, column_ids)
    context = path, masks, (row_limits, column_limits), (m, n, row0, column0, height, width)
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=True):
        r, c = place(tile, row_tiles, column_tiles, GROUP)
        _tile(
            r, c, rows, columns, (row_parts, column_parts), context, depth, marks, SAFE, COLUMNS, POSITIVES, EXCLUDED,
            IDS, LIMITED, RAGGED, BM, BN, BK, PRECISION, DIVIDED,
        )  # fmt: skip


@kernel
@triton.jit(do_not_specialize=SIZES)
def touched_tiles(
    rows, columns, plan, status, row_parts, column_parts, excluded, row_ids, column_ids, m, n, row0, column0, height,
    width, depth, COLUMNS: tl.constexpr, EXCLUDED: tl.constexpr, RAGGED: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Write what ``lse_tiles`` writes with IDS = TARGET on the fast path, but only for tiles that are ``touched``.

    Grid (tile rows, any number): the programs of a tile row take its tiles in turn.
    """
    r, column_tiles = tl.program_id(0), tl.cdiv(width, BN)
    masks = None, excluded, row_ids, column_ids
    path = tl.load(plan + ALPHA), tl.load(plan + REFERENCE), (0, 0)
    context = path, masks, (None, None), (m, n, row0, column0, height, width)
    if tl.load(status) == 0:
        first, end = touched_columns(row0 + r * BM, m, n, masks, BM, EXCLUDED, LANES)
        first, end = tl.maximum(first - column0, 0) // BN, tl.minimum(tl.cdiv(end - column0, BN), column_tiles)
        for c in tl.range(first + tl.program_id(1), end, tl.num_programs(1)):
            if touched(row0 + r * BM, column0 + c * BN, m, n, masks, BM, BN, False, EXCLUDED, TARGET):
                _tile(
                    r, c, rows, columns, (row_parts, column_parts), context, depth, None, False, COLUMNS, False,
                    EXCLUDED, TARGET, False, RAGGED, BM, BN, BK, PRECISION, False,
                )  # fmt: skip


@triton.jit
def _tile(
    r, c, rows, columns, parts, context, depth, marks, SAFE: tl.constexpr, COLUMNS: tl.constexpr,
    POSITIVES: tl.constexpr, EXCLUDED: tl.constexpr, IDS: tl.constexpr, LIMITED: tl.constexpr, RAGGED: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr, DIVIDED: tl.constexpr,
):  # fmt: skip
    """Compute one tile of X, and write its partial results."""
    path, masks, limits, chunk = context
    row_parts, column_parts = parts
    row_limits, column_limits = limits
    m, n, row0, column0, height, width = chunk
    row_tiles, column_tiles = tl.cdiv(height, BM), tl.cdiv(width, BN)
    EMPTY: tl.constexpr = float("-inf") if SAFE else 0.0
    HALVED: tl.constexpr = (LIMITED or IDS == DROP) and not SAFE and IDS != TARGET
    row, column = r * BM, c * BN
    acc = dots(rows, columns, row, column, depth, BM, BN, BK, PRECISION, DIVIDED)
    compared, alpha = acc, path[0]
    if marks is not None:
        compared = marked(marks, row, column, BM, BN)
    i = row + tl.arange(0, BM)
    row_step, column_step = column_tiles.to(tl.int64) * height, row_tiles.to(tl.int64) * width
    row_out, column_out = row_parts + tl.cast(c, tl.int64) * height + i, column_parts + tl.cast(r, tl.int64) * width
    out = row_out, row_step, column_out, column_step
    context = path, masks, limits, chunk, out
    if SAFE:
        x = _terms(acc, row, column, context, SAFE, COLUMNS, POSITIVES, EXCLUDED, IDS, RAGGED)
        row_logits = within_limits(x, EMPTY, compared, alpha, row_limits, row0 + i, m, 1)
        _store_sums(row_logits, row_out, row_step, i < height, 1)
        if COLUMNS:
            j = column + tl.arange(0, BN)
            column_logits = within_limits(x, EMPTY, compared, alpha, column_limits, column0 + j, n, 0)
            _store_sums(column_logits, column_out + j, column_step, j < width, 0)
    elif HALVED:
        # in halves: registers cannot hold a tile of terms and one of logits, or of ids
        left, right = halves(acc)
        compared_left, compared_right = (left, right) if marks is None else halves(compared)
        row_sums = _sums(left, compared_left, alpha, row, column, context, COLUMNS, POSITIVES, EXCLUDED, IDS, RAGGED)
        column += BN // 2
        row_sums += _sums(right, compared_right, alpha, row, column, context, COLUMNS, POSITIVES, EXCLUDED, IDS, RAGGED)
        tl.store(row_out, row_sums, mask=i < height)
    else:
        row_sums = _sums(acc, compared, alpha, row, column, context, COLUMNS, POSITIVES, EXCLUDED, IDS, RAGGED)
        tl.store(row_out, row_sums, mask=i < height)


@triton.jit
def _sums(
    acc, compared, alpha, row, column, context, COLUMNS: tl.constexpr, POSITIVES: tl.constexpr, EXCLUDED: tl.constexpr,
    IDS: tl.constexpr, RAGGED: tl.constexpr,
):  # fmt: skip
    """The row sums of a tile, or of half a tile, on the fast path; writes the column sums."""
    _path, _masks, limits, chunk, out = context
    row_limits, column_limits = limits
    m, n, row0, column0, _height, width = chunk
    _row_out, _row_step, column_out, _column_step = out
    i, j = row + tl.arange(0, acc.shape[0]), column + tl.arange(0, acc.shape[1])
    x = _terms(acc, row, column, context, False, COLUMNS, POSITIVES, EXCLUDED, IDS, RAGGED)
    row_sums = tl.sum(within_limits(x, 0.0, compared, alpha, row_limits, row0 + i, m, 1), 1)
    if COLUMNS:
        column_terms = within_limits(x, 0.0, compared, alpha, column_limits, column0 + j, n, 0)
        tl.store(column_out + j, tl.sum(column_terms, 0), mask=j < width)
    return row_sums


@triton.jit
def _terms(
    acc, row, column, context, SAFE: tl.constexpr, COLUMNS: tl.constexpr, POSITIVES: tl.constexpr,
    EXCLUDED: tl.constexpr, IDS: tl.constexpr, RAGGED: tl.constexpr,
):  # fmt: skip
    """A tile's terms (fast) or logits (safe), EMPTY for pairs that are no negatives; writes the positives' results."""
    path, masks, limits, chunk, out = context
    alpha, reference, diagonal_ends = path
    row_limits, column_limits = limits
    positives, _excluded, _row_ids, _column_ids = masks
    m, n, row0, column0, height, width = chunk
    row_out, row_step, column_out, column_step = out
    BM: tl.constexpr = acc.shape[0]
    BN: tl.constexpr = acc.shape[1]
    MASKED: tl.constexpr = EXCLUDED or IDS != NO_IDS
    EMPTY: tl.constexpr = float("-inf") if SAFE else 0.0
    i, j = row + tl.arange(0, BM), column + tl.arange(0, BN)
    if SAFE:
        x = rounded(acc, alpha)
        if RAGGED:
            # -inf, not 0: a padding of 0 would be the maximum if every logit is negative
            x = tl.where((i < height)[:, None] & (j < width)[None, :], x, EMPTY)
    else:
        x = tl.math.exp2(acc * alpha - reference)
        if row_limits is not None or column_limits is not None:
            # terms stay above 0, so that a sum of 0 means that no term counts
            x = tl.maximum(x, _SMALLEST_NORMAL, propagate_nan=tl.PropagateNan.ALL)
        if RAGGED and (row + BM > height or column + BN > width):
            x = tl.where((i < height)[:, None] & (j < width)[None, :], x, EMPTY)
    if POSITIVES and not MASKED:
        corner_diagonal = (column0 - row0) + (column - row)
        if (corner_diagonal - BM < diagonal_ends[1]) & (corner_diagonal + BN > diagonal_ends[0]):
            positive_column = within(positives + row0, i, i < height, column0 + column, BN, tl.int32)
            x = tl.where(positive_column[:, None] == tl.arange(0, BN)[None, :], EMPTY, x)
    if MASKED:
        NEGATIVES: tl.constexpr = 2 if SAFE else 1
        row_out, column_out = row_out + NEGATIVES * row_step, column_out + NEGATIVES * column_step + j
        if touched(row0 + row, column0 + column, m, n, masks, BM, BN, POSITIVES, EXCLUDED, IDS):
            positive, admitted = pairs(row0 + i, column0 + j, m, n, masks, POSITIVES, EXCLUDED, IDS)
            x = tl.where(admitted & (positive == 0), x, EMPTY)
            if IDS == TARGET:
                positive = positive & (i < height)[:, None] & (j < width)[None, :]
                logit = tl.where(positive, rounded(acc, alpha), float("-inf"))
                _store_positives(logit, positive, row_out, row_step, i < height, 1)
                if COLUMNS:
                    _store_positives(logit, positive, column_out, column_step, j < width, 0)
        elif IDS == TARGET:
            _store_no_positives(row_out, row_step, i < height)
            if COLUMNS:
                _store_no_positives(column_out, column_step, j < width)
    return x


@triton.jit
def _store_sums(x, out, step, inside, AXIS: tl.constexpr):
    """Write a tile's maximum and sum along an axis on the safe path, from its logits x."""
    maximum = _finite(tl.max(x, AXIS))
    tl.store(out, maximum, mask=inside)
    tl.store(out + step, tl.sum(tl.math.exp2(x - tl.expand_dims(maximum, AXIS)), AXIS), mask=inside)


@triton.jit
def _store_positives(x, positive, out, step, inside, AXIS: tl.constexpr):
    """Write the results of a tile's positives along an axis, from their logits x, which is -inf elsewhere.

    The reference is the positives' own maximum on the fast path too. So a positive that is far likelier than
    all others is not rounded, nor is a sum of equal logits.
    """
    maximum = _finite(tl.max(x, AXIS))
    shifted = x - tl.expand_dims(maximum, AXIS)
    tl.store(out, maximum, mask=inside)
    tl.store(out + step, tl.sum(tl.math.exp2(shifted), AXIS), mask=inside)
    tl.store(out + 2 * step, tl.sum(tl.where(positive, shifted, 0.0), AXIS), mask=inside)
    tl.store(out + 3 * step, tl.sum(positive.to(tl.float32), AXIS), mask=inside)


@triton.jit
def _store_no_positives(out, step, inside):
    """Write 0, the count of a tile without positives; ``fold`` then uses no other result of its positives."""
    tl.store(out + 3 * step, 0.0, mask=inside)


@triton.jit
def _finite(maximum):
    """The maximum, or 0 if it is not finite: inf - inf would be NaN."""
    return tl.where((maximum > float("-inf")) & (maximum < float("inf")), maximum, 0.0)


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
    """Fold one chunk's partials into the running state; after the last chunk, write the statistics in nats.

    row_parts (.., column_tiles, height), column_parts (.., row_tiles, width): see ``lse_tiles``. row_state (1 or 4, m),
    column_state (1 or 4, n), float64: the sum (fast) or log2-sum-exp2 (safe) of the negatives and, if MATCHED, the
    log2-sum-exp2, the sum of logits and the count of the positives. first_*, last_*: whether the chunk is the state's
    first or last. row_* (m,), column_* (n,), float64, receive the log-sum-exp of the negatives and, if MATCHED, that of
    the positives and the sum of their logits. A sum of the fast path that may have lost terms to underflow sets the
    status word. LIMITED: a sum of 0 has no terms.
    """
    program = tl.program_id(0)
    row_programs = tl.cdiv(height, LANES)
    is_selected = tl.load(status) != 0 if SAFE else tl.load(status) == 0
    scalars = plan, status, scale, bias
    if is_selected:
        if program < row_programs:
            lanes = program * LANES + tl.arange(0, LANES)
            out, side = (row_negative, row_positive, row_sum), (row0, m, n, last_row)
            chunk = lanes, height, column_tiles, first_row
            _fold_side(row_parts, row_state, out, scalars, side, chunk, SAFE, MATCHED, LIMITED, DEPTH)
        elif COLUMNS:
            lanes = (program - row_programs) * LANES + tl.arange(0, LANES)
            out, side = (column_negative, column_positive, column_sum), (column0, n, m, last_column)
            chunk = lanes, width, row_tiles, first_column
            _fold_side(column_parts, column_state, out, scalars, side, chunk, SAFE, MATCHED, LIMITED, DEPTH)


@triton.jit
def _fold_side(
    parts, state, out, scalars, side, chunk, SAFE: tl.constexpr, MATCHED: tl.constexpr, LIMITED: tl.constexpr,
    DEPTH: tl.constexpr,
):  # fmt: skip
    """Fold the rows, or the columns, ``start + lanes`` of the block.

    side: start, the side's length, the other side's length (the number of terms), and whether the chunk is the last.
    chunk: the lanes, the chunk's length and tiles, and whether it is the first.
    """
    plan, status, scale, bias = scalars
    start, side_length, term_count, is_last = side
    lanes, length, tiles, is_first = chunk
    inside = lanes < length
    chunk = lanes, inside, length, tiles, is_first
    i, stride = start.to(tl.int64) + lanes, side_length.to(tl.int64)
    step = tiles.to(tl.int64) * length
    NEGATIVES: tl.constexpr = 2 if SAFE else 1
    negative = _fold_sum(parts, state + i, chunk, SAFE, DEPTH)
    if MATCHED:
        positive, logit_sum, count = _fold_positives(parts + NEGATIVES * step, state + stride + i, stride, chunk, DEPTH)
    if is_last != 0:
        to_log2, bias_value = binary_orders(tl.load(scale)), bias_of(bias)
        threshold = tl.load(plan + THRESHOLD).to(tl.float64)
        is_trusted = negative >= threshold * term_count
        if LIMITED:
            is_trusted = is_trusted | (negative == 0.0)
        # an atomic OR gives the same word in any order; a NaN sum fails the comparison
        if not SAFE and tl.max(tl.where(is_trusted | (lanes >= length), 0, 1), 0) != 0:
            tl.atomic_or(status, 1)
        negative_log2 = negative if SAFE else tl.log2(negative) + tl.load(plan + REFERENCE).to(tl.float64)
        tl.store(out[0] + i, negative_log2 / to_log2 + bias_value, mask=inside)
        if MATCHED:
            positive_sum = tl.where(count > 0.0, logit_sum / to_log2 + count * bias_value, 0.0)
            positive_lse = tl.where(count > 0.0, positive / to_log2 + bias_value, float("-inf"))
            # the log-sum-exp of one positive is its logit, the same number as in the backward pass
            tl.store(out[1] + i, tl.where(count == 1.0, positive_sum, positive_lse), mask=inside)
            tl.store(out[2] + i, positive_sum, mask=inside)


@triton.jit
def _part(parts, chunk, start, DEPTH: tl.constexpr):
    """Partial results of DEPTH tiles from ``start``, (DEPTH, lanes) float64; 0 past the last tile."""
    lanes, inside, length, tiles, _is_first = chunk
    t = start + tl.arange(0, DEPTH)
    is_valid = (t < tiles)[:, None] & inside[None, :]
    return tl.load(parts + t.to(tl.int64)[:, None] * length + lanes[None, :], mask=is_valid, other=0.0).to(tl.float64)


@triton.jit
def _add(parts, state, chunk, DEPTH: tl.constexpr):
    """Add parts (tiles, length) to the state, summed over tiles; return the new sum."""
    _lanes, inside, _length, tiles, is_first = chunk
    total = tl.load(state, mask=inside & (is_first == 0), other=0.0)
    for start in range(0, tiles, DEPTH):
        total += tl.sum(_part(parts, chunk, start, DEPTH), 0)
    tl.store(state, total, mask=inside)
    return total


@triton.jit
def _fold_sum(parts, state, chunk, SAFE: tl.constexpr, DEPTH: tl.constexpr):
    """Fold sums as ``_add`` does (fast), or maxima and the sums behind them into a log2-sum-exp2 (safe)."""
    if not SAFE:
        return _add(parts, state, chunk, DEPTH)
    _lanes, inside, length, tiles, is_first = chunk
    step = tiles.to(tl.int64) * length
    total = tl.load(state, mask=inside & (is_first == 0), other=float("-inf"))
    for start in range(0, tiles, DEPTH):
        maximum = _part(parts, chunk, start, DEPTH)
        total = _log2_add(total, _log2_sum(maximum + tl.log2(_part(parts + step, chunk, start, DEPTH)), 0))
    tl.store(state, total, mask=inside)
    return total


@triton.jit
def _fold_positives(parts, state, stride, chunk, DEPTH: tl.constexpr):
    """Fold log2-sum-exp2 and sum of the positives' logits, and their count; ``stride`` apart in the state."""
    _lanes, inside, length, tiles, is_first = chunk
    step = tiles.to(tl.int64) * length
    mask = inside & (is_first == 0)
    log = tl.load(state, mask=mask, other=float("-inf"))
    logit_sum, number = tl.load(state + stride, mask=mask, other=0.0), tl.load(state + 2 * stride, mask=mask, other=0.0)
    for start in range(0, tiles, DEPTH):
        count = _part(parts + 3 * step, chunk, start, DEPTH)
        # few tiles have positives
        if tl.max(tl.max(count, 0), 0) > 0:
            has_positives = count > 0.0
            maximum = _part(parts, chunk, start, DEPTH)
            logs = maximum + tl.log2(_part(parts + step, chunk, start, DEPTH))
            log = _log2_add(log, _log2_sum(tl.where(has_positives, logs, float("-inf")), 0))
            shifted = _part(parts + 2 * step, chunk, start, DEPTH)
            logit_sum += tl.sum(tl.where(has_positives, maximum * count + shifted, 0.0), 0)
            number += tl.sum(count, 0)
    tl.store(state, log, mask=inside)
    tl.store(state + stride, logit_sum, mask=inside)
    tl.store(state + 2 * stride, number, mask=inside)
    return log, logit_sum, number


@triton.jit
def _log2_add(x, y):
    """log2(2^x + 2^y)."""
    shift = _finite(tl.maximum(x, y))
    return shift + tl.log2(tl.math.exp2(x - shift) + tl.math.exp2(y - shift))


@triton.jit
def _log2_sum(x, AXIS: tl.constexpr):
    """log2 of the sum of 2^x along an axis; -inf if all x are -inf, inf for +inf, NaN for NaN."""
    shift = _finite(tl.max(x, AXIS))
    return shift + tl.log2(tl.sum(tl.math.exp2(x - tl.expand_dims(shift, AXIS)), AXIS))


@kernel
@triton.jit(do_not_specialize=["length", "tiles", "first"])
def add_parts(parts, out, length, tiles, first, LANES: tl.constexpr, DEPTH: tl.constexpr):
    """``out (length,) += sum of parts (tiles, length)`` over tiles, in their order; ``=``, not ``+=``, if ``first``."""
    lanes = tl.program_id(0) * LANES + tl.arange(0, LANES)
    inside = lanes < length
    total = tl.load(out + lanes, mask=inside & (first == 0), other=0.0)
    for start in range(0, tiles, DEPTH):
        t = start + tl.arange(0, DEPTH)
        is_valid = (t < tiles)[:, None] & inside[None, :]
        offsets = t.to(tl.int64)[:, None] * length + lanes[None, :]
        total += tl.sum(tl.load(parts + offsets, mask=is_valid, other=0.0), 0)
    tl.store(out + lanes, total, mask=inside)
