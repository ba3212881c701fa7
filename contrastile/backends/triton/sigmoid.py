# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportPossiblyUnboundVariable=false
# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
"""The sigmoid kernel: value and G of the additive loss in one pass over the tiles of X.

Nearly every pair is a negative that counts. A tile first checks whether it has any other pair: named, excluded, with
equal ids, past an edge, or of a row without weight. Only then does it compare pair by pair.

With ``t = -z x`` in powers of two and ``e = 2^-|t|`` in [0, 1], nothing overflows or cancels: a pair costs
``max(t, 0) + log2(1 + e)``, of slope ``1 / (1 + e)`` or ``e / (1 + e)``. One logarithm serves many pairs: the product
``p = (1 + e_1) (1 + e_2) .. - 1`` keeps small terms whole, and ``log(1 + p)`` is their sum.
"""

from __future__ import annotations

import triton
import triton.language as tl

from contrastile.backends.triton.kernel import kernel
from contrastile.backends.triton.logits import LOG2E
from contrastile.backends.triton.parts import store_parts
from contrastile.backends.triton.precheck import near_top
from contrastile.backends.triton.tiles import BIAS, GRADIENT_SCALE, NO_IDS, TARGET, dots, halves, place, within

LN2 = tl.constexpr(0.6931471805599453)


@kernel
@triton.jit(do_not_specialize=["m", "n", "row0", "column0", "height", "width", "depth"])
def sigmoid_tiles(
    rows, columns, g, middle, low, plan, scale, row_weight, loss_parts, slope_parts,
    positives, excluded, row_ids, column_ids, m, n, row0, column0, height, width, depth,
    GRADIENTS: tl.constexpr, EXCLUDED: tl.constexpr, IDS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, PARTS: tl.constexpr,
    STRIP: tl.constexpr, PRECISION: tl.constexpr, DIVIDED: tl.constexpr,
):  # fmt: skip
    """Write ``sum_j softplus(-z x)`` and ``sum_j -z sigmoid(-z x)`` of a tile's rows to parts (tile columns, height).

    With GRADIENTS, also write GRADIENT_SCALE times G of the chunk, ``-w_i z_ij sigmoid(-z_ij x_ij)``, to descriptor g,
    or its parts to g, middle and low. A logit in powers of two has these rounding errors, with u = 2^-24: 2 u |s dot|
    from the scale, 2 u |bias| from the bias, u |x| from the sum.
    """
    row_tiles, column_tiles = tl.cdiv(height, BM), tl.cdiv(width, BN)
    affine = tl.load(scale) * LOG2E, tl.load(plan + BIAS) * LOG2E
    gradient_scale = tl.load(plan + GRADIENT_SCALE)
    chunk, ids, out = (m, n, row0, column0, width), (row_ids, column_ids), (g, middle, low)
    for tile in tl.range(tl.program_id(0), row_tiles * column_tiles, tl.num_programs(0), flatten=True):
        r, c = place(tile, row_tiles, column_tiles, GROUP)
        acc = dots(rows, columns, r * BM, c * BN, depth, BM, BN, BK, PRECISION, DIVIDED)
        i, corner = r * BM + tl.arange(0, BM), (r * BM, c * BN)
        w = tl.load(row_weight + row0 + i, mask=i < height, other=1.0) * gradient_scale
        positive_column = _within(positives, row0 + i, m, column0 + c * BN, BN)
        excluded_column = _within(excluded, row0 + i, m, column0 + c * BN, BN)
        vectors = w, positive_column, excluded_column
        if (r * BM + BM > height) | (c * BN + BN > width) | _special(vectors, ids, corner, chunk, BN, GRADIENTS, IDS):
            loss, slope = _epilogue(
                acc, vectors, ids, corner, chunk, affine, out, GRADIENTS, EXCLUDED, IDS, PARTS, STRIP, SPECIAL=True
            )
        else:
            loss, slope = _epilogue(
                acc, vectors, ids, corner, chunk, affine, out, GRADIENTS, EXCLUDED, IDS, PARTS, STRIP, SPECIAL=False
            )
        offsets = c.to(tl.int64) * height + i
        tl.store(loss_parts + offsets, loss, mask=i < height)
        tl.store(slope_parts + offsets, slope, mask=i < height)


@triton.jit
def _within(indices, i, m, column, BN: tl.constexpr):
    """``within`` of a tile; -1 in all rows if there is no vector of indices."""
    no_column = tl.full((i.shape[0],), -1, tl.int32)
    return no_column if indices is None else within(indices, i, i < m, column, BN, tl.int32)


@triton.jit
def _halves_of_ids(ids, i, length):
    """The low and the high 32 bits of ids: compared separately, they take half the registers at a time."""
    x = tl.load(ids + i, mask=i < length, other=0).to(tl.int64)
    return x.to(tl.int32), (x >> 32).to(tl.int32)


@triton.jit
def _special(vectors, ids, corner, chunk, BN: tl.constexpr, GRADIENTS: tl.constexpr, IDS: tl.constexpr):
    """Whether a tile may hold a pair other than a negative that counts; ids are compared by 32 bits, low xor high."""
    w, positive_column, excluded_column = vectors
    is_special_row = tl.maximum(positive_column, excluded_column) >= 0
    if GRADIENTS:
        # a weight of 0 silences its row, even if a logit is NaN
        is_special_row = is_special_row | (w == 0.0)
    is_special = tl.max(is_special_row.to(tl.int32), 0) != 0
    if IDS != NO_IDS:
        m, n, row0, column0, _width = chunk
        low, high = _halves_of_ids(ids[0], row0 + corner[0] + tl.arange(0, w.shape[0]), m)
        column_low, column_high = _halves_of_ids(ids[1], column0 + corner[1] + tl.arange(0, BN), n)
        may_be_equal = (low ^ high)[:, None] == (column_low ^ column_high)[None, :]
        is_special = is_special | (tl.max(may_be_equal.to(tl.int32)) != 0)
    return is_special


@triton.jit
def _epilogue(
    acc, vectors, ids, corner, chunk, affine, out, GRADIENTS: tl.constexpr, EXCLUDED: tl.constexpr, IDS: tl.constexpr,
    PARTS: tl.constexpr, STRIP: tl.constexpr, SPECIAL: tl.constexpr,
):  # fmt: skip
    """Row sums of a tile's losses and slopes, (BM,) each; stores its G.

    Each element of the three sums takes every STRIP-th column. A product has a rounding error of 2 u per term. It is
    at most 2^(2 BN / STRIP) when two have become one.
    """
    BM: tl.constexpr = acc.shape[0]
    zeros = tl.zeros((BM, STRIP), tl.float32)
    row_ids = 0, 0
    if SPECIAL and IDS != NO_IDS:
        row_ids = _halves_of_ids(ids[0], chunk[2] + corner[0] + tl.arange(0, BM), chunk[0])
    context = vectors, row_ids, ids[1], corner, chunk, affine
    WIDE: tl.constexpr = acc.shape[1] // PARTS
    sums = _parts(acc, 0, (zeros, zeros, zeros), context, out, WIDE, GRADIENTS, EXCLUDED, IDS, STRIP, SPECIAL)
    linear, product_less_1, slope = sums
    first, second = tl.split(tl.reshape(product_less_1, (BM, STRIP // 2, 2)))
    p = _times(first, 1.0 + second, second)
    one_plus_p = 1.0 + p
    # with w = 1 + p rounded, log(1 + p) = log w + log(1 + c), c = (p - (w - 1)) / w; |c| <= u, so log(1 + c) is c
    logs = tl.log(one_plus_p) + (p - (one_plus_p - 1.0)) / one_plus_p
    return tl.math.fma(tl.sum(linear, 1), LN2, tl.sum(logs, 1)), tl.sum(slope, 1)


@triton.jit
def _times(p, one_plus_e, e):
    """``(1 + p) (1 + e) - 1``: a product less 1, so that terms far below 1 keep all their digits."""
    return tl.math.fma(p, one_plus_e, e)


@triton.jit
def _parts(
    acc, offset: tl.constexpr, sums, context, out, WIDE: tl.constexpr, GRADIENTS: tl.constexpr, EXCLUDED: tl.constexpr,
    IDS: tl.constexpr, STRIP: tl.constexpr, SPECIAL: tl.constexpr,
):  # fmt: skip
    """The sums with the columns from ``offset`` added; stores G by WIDE columns. context: see ``_epilogue``."""
    if acc.shape[1] > WIDE:
        left, right = halves(acc)
        right_offset: tl.constexpr = offset + acc.shape[1] // 2
        sums = _parts(left, offset, sums, context, out, WIDE, GRADIENTS, EXCLUDED, IDS, STRIP, SPECIAL)
        sums = _parts(right, right_offset, sums, context, out, WIDE, GRADIENTS, EXCLUDED, IDS, STRIP, SPECIAL)
    else:
        dtype = out[0].dtype if out[1] is None else tl.float32
        gradient, sums = _strips(acc, offset, sums, context, dtype, EXCLUDED, IDS, STRIP, SPECIAL)
        if GRADIENTS:
            corner = context[3]
            store_parts(out, corner[0], corner[1] + offset, gradient)
    return sums


@triton.jit
def _strips(
    acc, offset: tl.constexpr, sums, context, DTYPE: tl.constexpr, EXCLUDED: tl.constexpr, IDS: tl.constexpr,
    STRIP: tl.constexpr, SPECIAL: tl.constexpr,
):  # fmt: skip
    """G of the columns from ``offset``, and the sums with them added; STRIP columns at a time, or values spill."""
    if acc.shape[1] > STRIP:
        left, right = halves(acc)
        right_offset: tl.constexpr = offset + acc.shape[1] // 2
        first, sums = _strips(left, offset, sums, context, DTYPE, EXCLUDED, IDS, STRIP, SPECIAL)
        second, sums = _strips(right, right_offset, sums, context, DTYPE, EXCLUDED, IDS, STRIP, SPECIAL)
        gradient = tl.reshape(tl.permute(tl.join(first, second), (0, 2, 1)), acc.shape)
    else:
        linear, product_less_1, slope = sums
        vectors, row_ids, column_ids, corner, chunk, affine = context
        w, positive_column, excluded_column = vectors
        t = acc * affine[0] + affine[1]
        if SPECIAL:
            j = offset + tl.arange(0, STRIP)
            positive, hidden = positive_column[:, None] == j[None, :], (corner[1] + j >= chunk[4])[None, :]
            if IDS != NO_IDS:
                low, high = _halves_of_ids(column_ids, chunk[3] + corner[1] + j, chunk[1])
                has_equal_ids = (row_ids[0][:, None] == low[None, :]) & (row_ids[1][:, None] == high[None, :])
                if IDS == TARGET:
                    positive = has_equal_ids
                else:
                    hidden = hidden | (has_equal_ids & (positive == 0))
            if EXCLUDED:
                hidden = hidden | (excluded_column[:, None] == j[None, :])
            t = tl.where(hidden, float("-inf"), tl.where(positive, -t, t))
        e = tl.math.exp2(-tl.abs(t))
        one_plus_e = 1.0 + e
        # not a division, which takes five instructions to cover the range of its operands
        reciprocal = tl.rsqrt(one_plus_e * one_plus_e)
        # if t is NaN, the comparison fails and e is NaN, so NaN comes out
        gradient = tl.where(t >= 0.0, reciprocal, e * reciprocal)
        if SPECIAL:
            gradient = tl.where(positive, -gradient, gradient)
        sums = linear + tl.maximum(t, 0.0), _times(product_less_1, one_plus_e, e), slope + gradient
        gradient = w[:, None] * gradient
        if SPECIAL:
            gradient = tl.where((w == 0.0)[:, None], 0.0, gradient)
        gradient = gradient.to(DTYPE)
    return gradient, sums


@kernel
@triton.jit(do_not_specialize=["m"])
def plan_sigmoid(row_weight, bias, plan, m, HALF: tl.constexpr, BLOCK: tl.constexpr):
    """Write GRADIENT_SCALE, which brings a float16 G near the top of its range, and BIAS, the bias or 0."""
    largest = tl.zeros((BLOCK,), tl.float32)
    if HALF:
        for start in range(0, m, BLOCK):
            i = start + tl.arange(0, BLOCK)
            largest = tl.maximum(largest, tl.abs(tl.load(row_weight + i, mask=i < m, other=0.0)))
    tl.store(plan + GRADIENT_SCALE, near_top(tl.max(largest, 0)) if HALF else 1.0)
    tl.store(plan + BIAS, 0.0)
    if bias is not None:
        tl.store(plan + BIAS, tl.load(bias))


@kernel
@triton.jit(do_not_specialize=["m"])
def row_sums(slope, row_weight, m, LANES: tl.constexpr):
    """``slope_i = w_i slope_i`` in place, and 0 where the weight is 0."""
    i = tl.program_id(0).to(tl.int64) * LANES + tl.arange(0, LANES)
    w = tl.load(row_weight + i, mask=i < m, other=0.0)
    s = tl.load(slope + i, mask=i < m, other=0.0)
    tl.store(slope + i, tl.where(w == 0.0, 0.0, w * s), mask=i < m)
