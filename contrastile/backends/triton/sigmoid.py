# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportPossiblyUnboundVariable=false
# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
"""The sigmoid kernel: value and G of the additive loss in one pass over the tiles of X.

Nearly every pair is a negative that counts. A tile first checks whether it has any other pair: named, excluded, with
equal ids, past an edge, or of a row without weight. Only then does it compare.

With ``t = -z x`` in powers of two and ``e = 2^-|t|`` in [0, 1], nothing overflows or cancels: a pair costs
``max(t, 0) + log2(1 + e)``, of slope ``1 / (1 + e)`` or ``e / (1 + e)``. No logarithm is taken of a pair: the
product ``p = (1 + e_1) (1 + e_2) .. - 1`` keeps small terms whole, and one ``log(1 + p)`` is their sum.
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
    """``sum_j softplus(-z x)`` and ``sum_j -z sigmoid(-z x)`` of each tile's rows to parts (tile columns, height).

    With GRADIENTS also GRADIENT_SCALE times G of the chunk, ``-w_i z_ij sigmoid(-z_ij x_ij)``, to the descriptor g, or
    its parts to g, middle and low. The logits in powers of two are rounded as follows, with u = 2^-24: 2 u |s dot| for
    the scale, 2 u |bias| for the bias, u |x| for the sum.
    """
    row_tiles, column_tiles = tl.cdiv(height, BM), tl.cdiv(width, BN)
    line = tl.load(scale) * LOG2E, tl.load(plan + BIAS) * LOG2E
    gradient_scale = tl.load(plan + GRADIENT_SCALE)
    chunk, ids, to = (m, n, row0, column0, width), (row_ids, column_ids), (g, middle, low)
    for tile in tl.range(tl.program_id(0), row_tiles * column_tiles, tl.num_programs(0), flatten=True):
        r, c = place(tile, row_tiles, column_tiles, GROUP)
        acc = dots(rows, columns, r * BM, c * BN, depth, BM, BN, BK, PRECISION, DIVIDED)
        i, corner = r * BM + tl.arange(0, BM), (r * BM, c * BN)
        w = tl.load(row_weight + row0 + i, mask=i < height, other=1.0) * gradient_scale
        named = _within(positives, row0 + i, m, column0 + c * BN, BN)
        own = _within(excluded, row0 + i, m, column0 + c * BN, BN)
        vectors = w, named, own
        if (r * BM + BM > height) | (c * BN + BN > width) | _special(vectors, ids, corner, chunk, BN, GRADIENTS, IDS):
            loss, slope = _epilogue(
                acc, vectors, ids, corner, chunk, line, to, GRADIENTS, EXCLUDED, IDS, PARTS, STRIP, SPECIAL=True
            )
        else:
            loss, slope = _epilogue(
                acc, vectors, ids, corner, chunk, line, to, GRADIENTS, EXCLUDED, IDS, PARTS, STRIP, SPECIAL=False
            )
        part = c.to(tl.int64) * height + i
        tl.store(loss_parts + part, loss, mask=i < height)
        tl.store(slope_parts + part, slope, mask=i < height)


@triton.jit
def _within(named, i, m, column, BN: tl.constexpr):
    """``within`` of a tile; no column where no vector is given."""
    none = tl.full((i.shape[0],), -1, tl.int32)
    return none if named is None else within(named, i, i < m, column, BN, tl.int32)


@triton.jit
def _halves_of_ids(ids, i, length):
    """The low and the high 32 bits: compared by themselves, and half as much to hold at a time."""
    x = tl.load(ids + i, mask=i < length, other=0).to(tl.int64)
    return x.to(tl.int32), (x >> 32).to(tl.int32)


@triton.jit
def _special(vectors, ids, corner, chunk, BN: tl.constexpr, GRADIENTS: tl.constexpr, IDS: tl.constexpr):
    """Whether any pair of a tile may be other than a negative that counts; ids are asked by 32 bits of them."""
    w, named, own = vectors
    found = tl.maximum(named, own) >= 0
    if GRADIENTS:
        # 0 silences its row, also where the logit is NaN
        found = found | (w == 0.0)
    special = tl.max(found.to(tl.int32), 0) != 0
    if IDS != NO_IDS:
        m, n, row0, column0, _width = chunk
        low, high = _halves_of_ids(ids[0], row0 + corner[0] + tl.arange(0, w.shape[0]), m)
        column_low, column_high = _halves_of_ids(ids[1], column0 + corner[1] + tl.arange(0, BN), n)
        alike = (low ^ high)[:, None] == (column_low ^ column_high)[None, :]
        special = special | (tl.max(alike.to(tl.int32)) != 0)
    return special


@triton.jit
def _epilogue(
    acc, vectors, ids, corner, chunk, line, to, GRADIENTS: tl.constexpr, EXCLUDED: tl.constexpr, IDS: tl.constexpr,
    PARTS: tl.constexpr, STRIP: tl.constexpr, SPECIAL: tl.constexpr,
):  # fmt: skip
    """Row sums of a tile's losses and slopes, (BM,) each; stores its G.

    Each element of the three sums has taken in every STRIP-th column: 2 u a term for a product, which is at most
    2^(2 BN / STRIP) when two have become one.
    """
    BM: tl.constexpr = acc.shape[0]
    zeros = tl.zeros((BM, STRIP), tl.float32)
    of_rows = 0, 0
    if SPECIAL and IDS != NO_IDS:
        of_rows = _halves_of_ids(ids[0], chunk[2] + corner[0] + tl.arange(0, BM), chunk[0])
    tile = vectors, of_rows, ids[1], corner, chunk, line
    WIDE: tl.constexpr = acc.shape[1] // PARTS
    sums = _parts(acc, 0, (zeros, zeros, zeros), tile, to, WIDE, GRADIENTS, EXCLUDED, IDS, STRIP, SPECIAL)
    above, product_less_1, slope = sums
    first, second = tl.split(tl.reshape(product_less_1, (BM, STRIP // 2, 2)))
    p = _times(first, 1.0 + second, second)
    w = 1.0 + p
    # log(1 + p) = log w + log(1 + (p - (w - 1)) / w), and what w has lost of p is at most u w
    logs = tl.log(w) + (p - (w - 1.0)) / w
    return tl.math.fma(tl.sum(above, 1), LN2, tl.sum(logs, 1)), tl.sum(slope, 1)


@triton.jit
def _times(p, one_plus_e, e):
    """``(1 + p) (1 + e) - 1``: a product less 1, so that terms far below 1 keep all their digits."""
    return tl.math.fma(p, one_plus_e, e)


@triton.jit
def _parts(
    acc, offset: tl.constexpr, sums, tile, to, WIDE: tl.constexpr, GRADIENTS: tl.constexpr, EXCLUDED: tl.constexpr,
    IDS: tl.constexpr, STRIP: tl.constexpr, SPECIAL: tl.constexpr,
):  # fmt: skip
    """The sums with the columns from ``offset`` added; stores G in parts of WIDE columns. tile: see ``_epilogue``."""
    if acc.shape[1] > WIDE:
        left, right = halves(acc)
        middle: tl.constexpr = offset + acc.shape[1] // 2
        sums = _parts(left, offset, sums, tile, to, WIDE, GRADIENTS, EXCLUDED, IDS, STRIP, SPECIAL)
        sums = _parts(right, middle, sums, tile, to, WIDE, GRADIENTS, EXCLUDED, IDS, STRIP, SPECIAL)
    else:
        dtype = to[0].dtype if to[1] is None else tl.float32
        value, sums = _strips(acc, offset, sums, tile, dtype, EXCLUDED, IDS, STRIP, SPECIAL)
        if GRADIENTS:
            corner = tile[3]
            store_parts(to, corner[0], corner[1] + offset, value)
    return sums


@triton.jit
def _strips(
    acc, offset: tl.constexpr, sums, tile, DTYPE: tl.constexpr, EXCLUDED: tl.constexpr, IDS: tl.constexpr,
    STRIP: tl.constexpr, SPECIAL: tl.constexpr,
):  # fmt: skip
    """G of the columns from ``offset`` and the sums with them: STRIP columns at a time, or intermediates spill."""
    if acc.shape[1] > STRIP:
        left, right = halves(acc)
        middle: tl.constexpr = offset + acc.shape[1] // 2
        first, sums = _strips(left, offset, sums, tile, DTYPE, EXCLUDED, IDS, STRIP, SPECIAL)
        second, sums = _strips(right, middle, sums, tile, DTYPE, EXCLUDED, IDS, STRIP, SPECIAL)
        value = tl.reshape(tl.permute(tl.join(first, second), (0, 2, 1)), acc.shape)
    else:
        above, product_less_1, slope = sums
        vectors, of_rows, column_ids, corner, chunk, line = tile
        w, named, own = vectors
        t = acc * line[0] + line[1]
        if SPECIAL:
            j = offset + tl.arange(0, STRIP)
            positive, hidden = named[:, None] == j[None, :], (corner[1] + j >= chunk[4])[None, :]
            if IDS != NO_IDS:
                low, high = _halves_of_ids(column_ids, chunk[3] + corner[1] + j, chunk[1])
                alike = (of_rows[0][:, None] == low[None, :]) & (of_rows[1][:, None] == high[None, :])
                if IDS == TARGET:
                    positive = alike
                else:
                    hidden = hidden | (alike & (positive == 0))
            if EXCLUDED:
                hidden = hidden | (own[:, None] == j[None, :])
            t = tl.where(hidden, float("-inf"), tl.where(positive, -t, t))
        e = tl.math.exp2(-tl.abs(t))
        one_plus_e = 1.0 + e
        # not by a division, which takes five instructions for the range of its operands
        reciprocal = tl.rsqrt(one_plus_e * one_plus_e)
        # NaN compares false, and e is NaN with it, so NaN comes out
        value = tl.where(t >= 0.0, reciprocal, e * reciprocal)
        if SPECIAL:
            value = tl.where(positive, -value, value)
        sums = above + tl.maximum(t, 0.0), _times(product_less_1, one_plus_e, e), slope + value
        value = w[:, None] * value
        if SPECIAL:
            value = tl.where((w == 0.0)[:, None], 0.0, value)
        value = value.to(DTYPE)
    return value, sums


@kernel
@triton.jit(do_not_specialize=["m"])
def plan_sigmoid(row_weight, bias, plan, m, HALF: tl.constexpr, BLOCK: tl.constexpr):
    """GRADIENT_SCALE and BIAS: a power of two that brings a float16 G near the top of its range, and the bias or 0."""
    most = tl.zeros((BLOCK,), tl.float32)
    if HALF:
        for start in range(0, m, BLOCK):
            i = start + tl.arange(0, BLOCK)
            most = tl.maximum(most, tl.abs(tl.load(row_weight + i, mask=i < m, other=0.0)))
    tl.store(plan + GRADIENT_SCALE, near_top(tl.max(most, 0)) if HALF else 1.0)
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
