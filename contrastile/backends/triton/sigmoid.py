# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
"""The sigmoid kernel: value and G of the additive loss in one pass over the tiles of X."""

from __future__ import annotations

import triton
import triton.language as tl

from contrastile.backends.triton.backward import halves
from contrastile.backends.triton.kernel import kernel
from contrastile.backends.triton.parts import store_parts
from contrastile.backends.triton.survey import near_top
from contrastile.backends.triton.tiles import BIAS, FACTOR, LOG2E, dots, pairs, place


@kernel
@triton.jit(do_not_specialize=["m", "n", "row0", "column0", "height", "width", "depth"])
def sigmoid_tiles(
    rows,
    columns,
    g,
    middle,
    low,
    plan,
    scale,
    row_weight,
    loss_parts,
    slope_parts,
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
    GRADIENTS: tl.constexpr,
    POSITIVES: tl.constexpr,
    EXCLUDED: tl.constexpr,
    IDS: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP: tl.constexpr,
    PARTS: tl.constexpr,
    PRECISION: tl.constexpr,
    DIVIDED: tl.constexpr,
):
    """``sum_j softplus(-z x)`` and ``sum_j -z sigmoid(-z x)`` of each tile's rows to parts (tile columns, height).

    With GRADIENTS also FACTOR times G of the chunk, ``-w_i z_ij sigmoid(-z_ij x_ij)``, to the descriptor g, or its
    parts to g, middle and low.
    """
    row_tiles, column_tiles = tl.cdiv(height, BM), tl.cdiv(width, BN)
    s, bias, factor = tl.load(scale), tl.load(plan + BIAS), tl.load(plan + FACTOR)
    for tile in tl.range(tl.program_id(0), row_tiles * column_tiles, tl.num_programs(0), flatten=True):
        r, c = place(tile, row_tiles, column_tiles, GROUP)
        acc = dots(rows, columns, r * BM, c * BN, depth, BM, BN, BK, PRECISION, DIVIDED)
        if PARTS == 1:
            softplus, slope = _finish(
                acc,
                r * BM,
                c * BN,
                g,
                middle,
                low,
                s,
                bias,
                factor,
                row_weight,
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
                GRADIENTS,
                POSITIVES,
                EXCLUDED,
                IDS,
            )
        else:
            left, right = halves(acc)
            softplus, slope = _finish(
                left,
                r * BM,
                c * BN,
                g,
                middle,
                low,
                s,
                bias,
                factor,
                row_weight,
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
                GRADIENTS,
                POSITIVES,
                EXCLUDED,
                IDS,
            )
            more, steeper = _finish(
                right,
                r * BM,
                c * BN + BN // 2,
                g,
                middle,
                low,
                s,
                bias,
                factor,
                row_weight,
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
                GRADIENTS,
                POSITIVES,
                EXCLUDED,
                IDS,
            )
            softplus, slope = softplus + more, slope + steeper
        i = r * BM + tl.arange(0, BM)
        part = c.to(tl.int64) * height + i
        tl.store(loss_parts + part, softplus, mask=i < height)
        tl.store(slope_parts + part, slope, mask=i < height)


@triton.jit
def _finish(
    acc,
    row,
    column,
    g,
    middle,
    low,
    scale,
    bias,
    factor,
    row_weight,
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
    GRADIENTS: tl.constexpr,
    POSITIVES: tl.constexpr,
    EXCLUDED: tl.constexpr,
    IDS: tl.constexpr,
):
    """Row sums of softplus(-z x) and of -z sigmoid(-z x) over a tile's part; stores its G at (row, column)."""
    i, j = row + tl.arange(0, acc.shape[0]), column + tl.arange(0, acc.shape[1])
    positive, admitted = pairs(
        row0 + i, column0 + j, m, n, positives, excluded, row_ids, column_ids, POSITIVES, EXCLUDED, IDS
    )
    admitted = admitted & (i < height)[:, None] & (j < width)[None, :]
    x = acc * scale + bias
    at = tl.where(positive, -x, x)
    # e is in (0, 1]: neither softplus nor its slope overflows or cancels
    e = tl.math.exp2(-tl.abs(at) * LOG2E)
    softplus = tl.where(admitted, tl.where(at > 0.0, at, 0.0) + _log1p(e), 0.0)
    # NaN compares false, and e is NaN with it, so NaN comes out
    slope = tl.where(at >= 0.0, 1.0, e) / (1.0 + e)
    slope = tl.where(admitted, tl.where(positive, -slope, slope), 0.0)
    if GRADIENTS:
        w = tl.load(row_weight + row0 + i, mask=i < height, other=0.0) * factor
        silent = (w == 0.0)[:, None]
        store_parts(g, middle, low, row, column, tl.where(silent, 0.0, w[:, None] * slope))
    return tl.sum(softplus, 1), tl.sum(slope, 1)


@triton.jit
def _log1p(e):
    """log(1 + e) for e in [0, 1], to full relative precision: 2 artanh z with z = e / (2 + e) <= 1/3.

    The series stops at z^17 / 17: what is left is under 2^-28 of the sum.
    """
    z = e / (2.0 + e)
    y = z * z
    p = 1.0 / 17.0
    p = p * y + 1.0 / 15.0
    p = p * y + 1.0 / 13.0
    p = p * y + 1.0 / 11.0
    p = p * y + 1.0 / 9.0
    p = p * y + 1.0 / 7.0
    p = p * y + 1.0 / 5.0
    p = p * y + 1.0 / 3.0
    return 2.0 * z + 2.0 * z * (p * y)


@kernel
@triton.jit(do_not_specialize=["m"])
def plan_sigmoid(row_weight, bias, plan, m, HALF: tl.constexpr, BLOCK: tl.constexpr):
    """FACTOR and BIAS: a power of two that brings a float16 G near the top of its range, and the bias or 0."""
    most = tl.zeros((BLOCK,), tl.float32)
    if HALF:
        for start in range(0, m, BLOCK):
            i = start + tl.arange(0, BLOCK)
            most = tl.maximum(most, tl.abs(tl.load(row_weight + i, mask=i < m, other=0.0)))
    tl.store(plan + FACTOR, near_top(tl.max(most, 0)) if HALF else 1.0)
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
