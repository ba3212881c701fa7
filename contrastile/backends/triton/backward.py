# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
# pyright: reportGeneralTypeIssues=false
"""The backward kernels: G over a chunk of X, formed in float32, rounded once to the features' dtype.

``G_ij = [admitted] (u_i 2^(x_ij - L_i) + v_j 2^(x_ij - M_j)) - [positive] (u_i t_i + v_j t'_j)``, in powers of two.
Of a positive the row is certain of, that difference is the gradient and nothing would be left of it: its entry is
``u_i ((q - t_i) - q sigmoid(N_i - P_i))`` with ``q = 2^(x_ij - P_i)``, and likewise for columns.
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
    """GRADIENT_SCALE times G of one chunk, to the descriptor g (height, width), whose blocks are (BM, BN / PARTS).

    rows, columns: descriptors of the chunk's features. With middle, and low, G goes in parts to two, or three.
    Positives given by index are left to ``set_positives``, which needs O(m) work for all of them. Those given by ids
    (IDS = TARGET) are finished here, in the exact form where CERTAIN says that some row or column needs it: nothing
    but accuracy depends on that. What lies outside the chunk is not written. marks: see ``lse_tiles``.
    """
    row_tiles, column_tiles = tl.cdiv(height, BM), tl.cdiv(width, BN)
    path = tl.load(plan + ALPHA), tl.load(plan + REFERENCE), tl.load(plan + FAST) != 0.0, tl.load(plan + CERTAIN) != 0.0
    vectors, chunk = (row_vectors, column_vectors, row_limits, column_limits), (m, n, row0, column0)
    masks, to = (None, excluded, row_ids, column_ids), (g, middle, low)
    for tile in tl.range(tl.program_id(0), row_tiles * column_tiles, tl.num_programs(0), flatten=True):
        r, c = place(tile, row_tiles, column_tiles, GROUP)
        acc = dots(rows, columns, r * BM, c * BN, depth, BM, BN, BK, PRECISION, DIVIDED)
        tile_marks = None if marks is None else marked(marks, r * BM, c * BN, BM, BN)
        given = to, path, vectors, masks, chunk
        _parts(acc, tile_marks, r * BM, c * BN, given, BN // PARTS, TWO_SIDED, EXCLUDED, IDS, LIMITED, RAGGED)


@triton.jit
def _parts(
    acc, marks, row, column, given, WIDE: tl.constexpr, TWO_SIDED: tl.constexpr, EXCLUDED: tl.constexpr,
    IDS: tl.constexpr, LIMITED: tl.constexpr, RAGGED: tl.constexpr,
):  # fmt: skip
    """``_epilogue`` part by part: fewer registers for the column vectors, a smaller staging buffer for the store."""
    if acc.shape[1] > WIDE:
        left, right = halves(acc)
        left_marks, right_marks = (None, None) if marks is None else halves(marks)
        _parts(left, left_marks, row, column, given, WIDE, TWO_SIDED, EXCLUDED, IDS, LIMITED, RAGGED)
        middle = column + acc.shape[1] // 2
        _parts(right, right_marks, row, middle, given, WIDE, TWO_SIDED, EXCLUDED, IDS, LIMITED, RAGGED)
    else:
        _epilogue(acc, marks, row, column, given, TWO_SIDED, EXCLUDED, IDS, LIMITED, RAGGED)


@triton.jit
def _epilogue(
    acc, marks, row, column, given, TWO_SIDED: tl.constexpr, EXCLUDED: tl.constexpr, IDS: tl.constexpr,
    LIMITED: tl.constexpr, RAGGED: tl.constexpr,
):  # fmt: skip
    """G of a tile's part from its dots, and its marks or None, stored at (row, column) of the chunk."""
    to, path, vectors, masks, chunk = given
    alpha, _reference, _fast, certain = path
    row_vectors, column_vectors, _row_limits, _column_limits = vectors
    m, n, row0, column0 = chunk
    i, j = row0 + row + tl.arange(0, acc.shape[0]), column0 + column + tl.arange(0, acc.shape[1])
    if not LIMITED:
        value = _admitted(acc, path, vectors, i, j, m, n, TWO_SIDED, RAGGED)
    else:
        compared = acc if marks is None else marks
        value = _limited(acc, compared, alpha, path, vectors, i, j, m, n, TWO_SIDED, RAGGED)
    if EXCLUDED or IDS != NO_IDS:  # noqa: SIM102 (decided as it is compiled)
        if touched(row0 + row, column0 + column, m, n, masks, acc.shape[0], acc.shape[1], False, EXCLUDED, IDS):
            positive, admitted = pairs(i, j, m, n, masks, False, EXCLUDED, IDS)
            value = tl.where(admitted, value, 0.0)
            if IDS == TARGET:
                if certain:
                    x = rounded(acc, alpha)
                    exact = _at_positive(x, row_vectors, i, m, RAGGED, 1)
                    if TWO_SIDED:
                        exact += _at_positive(x, column_vectors, j, n, RAGGED, 0)
                    value = tl.where(positive, exact, value)
                else:
                    t = _vector(row_vectors, TAKEN, i, m, RAGGED)
                    if TWO_SIDED:
                        s = _vector(column_vectors, TAKEN, j, n, RAGGED)
                        value -= tl.where(positive, t[:, None] + s[None, :], 0.0)
                    else:
                        value -= tl.where(positive, t[:, None], 0.0)
    store_parts(to, row, column, value)


@triton.jit
def _admitted(acc, path, vectors, i, j, m, n, TWO_SIDED: tl.constexpr, RAGGED: tl.constexpr):
    """G from the dots of negatives that count in both directions."""
    alpha, reference, fast, _certain = path
    row_vectors, column_vectors, _row_limits, _column_limits = vectors
    if fast:
        factor = _vector(row_vectors, FOLDED, i, m, RAGGED)[:, None]
        if TWO_SIDED:
            factor = factor + _vector(column_vectors, FOLDED, j, n, RAGGED)[None, :]
        value = tl.math.exp2(acc * alpha - reference) * factor
    else:
        x = rounded(acc, alpha)
        value = _direction(x, row_vectors, i, m, RAGGED, 1)
        if TWO_SIDED:
            value += _direction(x, column_vectors, j, n, RAGGED, 0)
    return value


@triton.jit
def _limited(
    acc, compared, factor, path, vectors, i, j, m, n, TWO_SIDED: tl.constexpr, RAGGED: tl.constexpr
):  # fmt: skip
    """G from dots where rows and columns have limits: each direction by itself, 0 beyond its limit.

    compared, factor: what ``beyond`` takes first. A logit beyond may be larger than the log-sum-exp, and its
    exponential infinite.
    """
    alpha, reference, fast, _certain = path
    row_vectors, column_vectors, row_limits, column_limits = vectors
    # each branch leaves one tile: two are more than the registers hold
    if fast:
        power = tl.math.exp2(acc * alpha - reference)
        of_row = power * _vector(row_vectors, FOLDED, i, m, RAGGED)[:, None]
        value = within_limits(of_row, 0.0, compared, factor, row_limits, i, m, 1)
        if TWO_SIDED:
            of_column = power * _vector(column_vectors, FOLDED, j, n, RAGGED)[None, :]
            value += within_limits(of_column, 0.0, compared, factor, column_limits, j, n, 0)
    else:
        x = rounded(acc, alpha)
        of_row = _direction(x, row_vectors, i, m, RAGGED, 1)
        value = within_limits(of_row, 0.0, compared, factor, row_limits, i, m, 1)
        if TWO_SIDED:
            of_column = _direction(x, column_vectors, j, n, RAGGED, 0)
            value += within_limits(of_column, 0.0, compared, factor, column_limits, j, n, 0)
    return value


@triton.jit
def _vector(vectors, WHICH: tl.constexpr, i, length, RAGGED: tl.constexpr):
    """Row WHICH of (.., length) vectors at i."""
    at = vectors + WHICH * length.to(tl.int64) + i
    return tl.load(at, mask=i < length, other=0.0) if RAGGED else tl.load(at)


@triton.jit
def _direction(x, vectors, i, length, RAGGED: tl.constexpr, AXIS: tl.constexpr):
    """``w 2^(x - L)`` and 0 where the weight is 0, whatever x is; AXIS is the one along which the vectors repeat."""
    log = tl.expand_dims(_vector(vectors, LOG, i, length, RAGGED), AXIS)
    w = tl.expand_dims(_vector(vectors, WEIGHT, i, length, RAGGED), AXIS)
    return tl.where(w != 0.0, w * tl.math.exp2(x - log), 0.0)


@triton.jit
def _at_positive(x, vectors, i, length, RAGGED: tl.constexpr, AXIS: tl.constexpr):
    """``w ((q - t) - q sigmoid(N - P))``, of a single positive -w sigmoid(N - P); 0 where the weight is 0."""
    e = tl.math.exp2(x - tl.expand_dims(_vector(vectors, POSITIVE_LOG, i, length, RAGGED), AXIS))
    t = tl.expand_dims(_vector(vectors, POSITIVE_TARGET, i, length, RAGGED), AXIS)
    w = tl.expand_dims(_vector(vectors, POSITIVE_WEIGHT, i, length, RAGGED), AXIS)
    less = tl.expand_dims(_vector(vectors, NEGATIVE_WEIGHT, i, length, RAGGED), AXIS)
    return tl.where(w != 0.0, w * (e - t) - less * e, 0.0)
