# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
# pyright: reportGeneralTypeIssues=false
"""The backward kernels: G over a chunk of X, formed in float32, rounded once to the features' dtype.

``G_ij = [admitted] (u_i 2^(x_ij - L_i) + v_j 2^(x_ij - M_j)) - [positive] (u_i t_i + v_j t'_j)``, in powers of two.
If a row is certain of a positive, the probability is near t_i, and the difference would cancel. Then the row's part of
G there is ``u_i ((q - t_i) - q sigmoid(N_i - P_i))`` with ``q = 2^(x_ij - P_i)``, and likewise for columns.
"""

from __future__ import annotations

import triton
import triton.language as tl

from contrastile.backends.triton.kernel import kernel
from contrastile.backends.triton.logits import rounded
from contrastile.backends.triton.parts import store_parts
from contrastile.backends.triton.tiles import (
    ALPHA,
    CERTAIN,
    FAST,
    FOLDED,
    LOG,
    NEGATIVE_WEIGHT,
    NO_IDS,
    POSITIVE_LOG,
    POSITIVE_TARGET,
    POSITIVE_WEIGHT,
    REFERENCE,
    SIZES,
    TAKEN,
    TARGET,
    WEIGHT,
    dots,
    halves,
    marked,
    pairs,
    place,
    touched,
    within_limits,
)


@kernel
@triton.jit(do_not_specialize=SIZES)
def gradient_tiles(
    rows, columns, g, middle, low, plan, row_vectors, column_vectors, excluded, row_ids, column_ids,
    row_limits, column_limits, marks, m, n, row0, column0, height, width, depth,
    TWO_SIDED: tl.constexpr, EXCLUDED: tl.constexpr, IDS: tl.constexpr, LIMITED: tl.constexpr, RAGGED: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, PARTS: tl.constexpr,
    PRECISION: tl.constexpr, DIVIDED: tl.constexpr,
):  # fmt: skip
    """Write GRADIENT_SCALE times G of one chunk to the descriptor g (height, width), whose blocks are (BM, BN / PARTS).

    rows, columns: descriptors of the chunk's features. middle, low: descriptors of G's other parts, or None. marks: see
    ``lse_tiles``. Nothing is written outside the chunk. ``set_positives`` overwrites G at positives by index, which is
    O(m) work. G at positives by ids (IDS = TARGET) is complete here, in the exact form if CERTAIN is 1; only accuracy
    depends on that.
    """
    row_tiles, column_tiles = tl.cdiv(height, BM), tl.cdiv(width, BN)
    path = tl.load(plan + ALPHA), tl.load(plan + REFERENCE), tl.load(plan + FAST) != 0.0, tl.load(plan + CERTAIN) != 0.0
    vectors, chunk = (row_vectors, column_vectors, row_limits, column_limits), (m, n, row0, column0)
    masks, out = (None, excluded, row_ids, column_ids), (g, middle, low)
    for tile in tl.range(tl.program_id(0), row_tiles * column_tiles, tl.num_programs(0), flatten=True):
        r, c = place(tile, row_tiles, column_tiles, GROUP)
        acc = dots(rows, columns, r * BM, c * BN, depth, BM, BN, BK, PRECISION, DIVIDED)
        tile_marks = None if marks is None else marked(marks, r * BM, c * BN, BM, BN)
        context = out, path, vectors, masks, chunk
        _epilogue_by_parts(
            acc, tile_marks, r * BM, c * BN, context, BN // PARTS, TWO_SIDED, EXCLUDED, IDS, LIMITED, RAGGED
        )


@triton.jit
def _epilogue_by_parts(
    acc, marks, row, column, context, WIDE: tl.constexpr, TWO_SIDED: tl.constexpr, EXCLUDED: tl.constexpr,
    IDS: tl.constexpr, LIMITED: tl.constexpr, RAGGED: tl.constexpr,
):  # fmt: skip
    """``_epilogue`` by parts of WIDE columns: fewer registers for column vectors, a smaller buffer for the store."""
    if acc.shape[1] > WIDE:
        left, right = halves(acc)
        left_marks, right_marks = (None, None) if marks is None else halves(marks)
        _epilogue_by_parts(left, left_marks, row, column, context, WIDE, TWO_SIDED, EXCLUDED, IDS, LIMITED, RAGGED)
        right_column = column + acc.shape[1] // 2
        _epilogue_by_parts(
            right, right_marks, row, right_column, context, WIDE, TWO_SIDED, EXCLUDED, IDS, LIMITED, RAGGED
        )
    else:
        _epilogue(acc, marks, row, column, context, TWO_SIDED, EXCLUDED, IDS, LIMITED, RAGGED)


@triton.jit
def _epilogue(
    acc, marks, row, column, context, TWO_SIDED: tl.constexpr, EXCLUDED: tl.constexpr, IDS: tl.constexpr,
    LIMITED: tl.constexpr, RAGGED: tl.constexpr,
):  # fmt: skip
    """Compute G of a part of a tile from its dots and its marks, or None; store it at (row, column) of the chunk."""
    out, path, vectors, masks, chunk = context
    alpha, _reference, _is_fast, is_certain = path
    row_vectors, column_vectors, _row_limits, _column_limits = vectors
    m, n, row0, column0 = chunk
    i, j = row0 + row + tl.arange(0, acc.shape[0]), column0 + column + tl.arange(0, acc.shape[1])
    if not LIMITED:
        gradient = _admitted(acc, path, vectors, i, j, m, n, TWO_SIDED, RAGGED)
    else:
        compared = acc if marks is None else marks
        gradient = _limited(acc, compared, alpha, path, vectors, i, j, m, n, TWO_SIDED, RAGGED)
    if EXCLUDED or IDS != NO_IDS:  # noqa: SIM102 (decided as it is compiled)
        if touched(row0 + row, column0 + column, m, n, masks, acc.shape[0], acc.shape[1], False, EXCLUDED, IDS):
            positive, admitted = pairs(i, j, m, n, masks, False, EXCLUDED, IDS)
            gradient = tl.where(admitted, gradient, 0.0)
            if IDS == TARGET:
                if is_certain:
                    x = rounded(acc, alpha)
                    exact_gradient = _at_positive(x, row_vectors, i, m, RAGGED, 1)
                    if TWO_SIDED:
                        exact_gradient += _at_positive(x, column_vectors, j, n, RAGGED, 0)
                    gradient = tl.where(positive, exact_gradient, gradient)
                else:
                    row_taken = _vector(row_vectors, TAKEN, i, m, RAGGED)
                    if TWO_SIDED:
                        column_taken = _vector(column_vectors, TAKEN, j, n, RAGGED)
                        gradient -= tl.where(positive, row_taken[:, None] + column_taken[None, :], 0.0)
                    else:
                        gradient -= tl.where(positive, row_taken[:, None], 0.0)
    store_parts(out, row, column, gradient)


@triton.jit
def _admitted(acc, path, vectors, i, j, m, n, TWO_SIDED: tl.constexpr, RAGGED: tl.constexpr):
    """G of admitted pairs from their dots, where no side has limits; no target is subtracted."""
    alpha, reference, is_fast, _is_certain = path
    row_vectors, column_vectors, _row_limits, _column_limits = vectors
    if is_fast:
        factor = _vector(row_vectors, FOLDED, i, m, RAGGED)[:, None]
        if TWO_SIDED:
            factor = factor + _vector(column_vectors, FOLDED, j, n, RAGGED)[None, :]
        gradient = tl.math.exp2(acc * alpha - reference) * factor
    else:
        x = rounded(acc, alpha)
        gradient = _direction(x, row_vectors, i, m, RAGGED, 1)
        if TWO_SIDED:
            gradient += _direction(x, column_vectors, j, n, RAGGED, 0)
    return gradient


@triton.jit
def _limited(
    acc, compared, limit_alpha, path, vectors, i, j, m, n, TWO_SIDED: tl.constexpr, RAGGED: tl.constexpr
):  # fmt: skip
    """G of admitted pairs from their dots, where sides have limits: beyond its limit a side adds 0.

    compared, limit_alpha: see ``within_limits``. A logit beyond a limit may be larger than the log-sum-exp, and its
    exponential infinite: hence a select, not a product with 0.
    """
    alpha, reference, is_fast, _is_certain = path
    row_vectors, column_vectors, row_limits, column_limits = vectors
    # each branch ends with one live tile, because registers cannot hold two
    if is_fast:
        power = tl.math.exp2(acc * alpha - reference)
        row_gradient = power * _vector(row_vectors, FOLDED, i, m, RAGGED)[:, None]
        gradient = within_limits(row_gradient, 0.0, compared, limit_alpha, row_limits, i, m, 1)
        if TWO_SIDED:
            column_gradient = power * _vector(column_vectors, FOLDED, j, n, RAGGED)[None, :]
            gradient += within_limits(column_gradient, 0.0, compared, limit_alpha, column_limits, j, n, 0)
    else:
        x = rounded(acc, alpha)
        row_gradient = _direction(x, row_vectors, i, m, RAGGED, 1)
        gradient = within_limits(row_gradient, 0.0, compared, limit_alpha, row_limits, i, m, 1)
        if TWO_SIDED:
            column_gradient = _direction(x, column_vectors, j, n, RAGGED, 0)
            gradient += within_limits(column_gradient, 0.0, compared, limit_alpha, column_limits, j, n, 0)
    return gradient


@triton.jit
def _vector(vectors, WHICH: tl.constexpr, i, length, RAGGED: tl.constexpr):
    """Elements i of vector WHICH of ``vectors`` (.., length); 0 past the end if RAGGED."""
    pointers = vectors + WHICH * length.to(tl.int64) + i
    return tl.load(pointers, mask=i < length, other=0.0) if RAGGED else tl.load(pointers)


@triton.jit
def _direction(x, vectors, i, length, RAGGED: tl.constexpr, AXIS: tl.constexpr):
    """One side's ``w 2^(x - L)``; 0 where the weight is 0, whatever x is. The vectors are repeated along AXIS."""
    log = tl.expand_dims(_vector(vectors, LOG, i, length, RAGGED), AXIS)
    w = tl.expand_dims(_vector(vectors, WEIGHT, i, length, RAGGED), AXIS)
    return tl.where(w != 0.0, w * tl.math.exp2(x - log), 0.0)


@triton.jit
def _at_positive(x, vectors, i, length, RAGGED: tl.constexpr, AXIS: tl.constexpr):
    """One side's ``w ((q - t) - q sigmoid(N - P))``, or -w sigmoid(N - P) of a single positive; 0 where w is 0."""
    power = tl.math.exp2(x - tl.expand_dims(_vector(vectors, POSITIVE_LOG, i, length, RAGGED), AXIS))
    t = tl.expand_dims(_vector(vectors, POSITIVE_TARGET, i, length, RAGGED), AXIS)
    w = tl.expand_dims(_vector(vectors, POSITIVE_WEIGHT, i, length, RAGGED), AXIS)
    negative_weight = tl.expand_dims(_vector(vectors, NEGATIVE_WEIGHT, i, length, RAGGED), AXIS)
    return tl.where(w != 0.0, w * (power - t) - negative_weight * power, 0.0)
