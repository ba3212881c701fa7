# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
"""Kernels of cost O(b d) or O(b) that end a pass: each element read and written once, sums in one fixed order."""

from __future__ import annotations

import triton
import triton.language as tl

from contrastile.backends.triton.kernel import kernel
from contrastile.backends.triton.logits import log_add, softplus
from contrastile.backends.triton.precheck import load_features
from contrastile.backends.triton.tiles import GRADIENT_SCALE


@kernel
@triton.jit(do_not_specialize=["m"])
def finalize_rows(
    sums, rows, out, inner, scale, plan, m, sums_stride, row_stride, out_stride, depth,
    LINES: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """``out = scale R``, rounded once, and ``sum over LINES rows of <q_i, R_i>`` in float64 to inner (programs,).

    sums: (m, d) float32, GRADIENT_SCALE times R = G K; rows: (m, d) features; out: (m, d) in the features' dtype.
    """
    i = tl.program_id(0) * LINES + tl.arange(0, LINES)
    inside = i < m
    s = tl.load(scale)
    # a power of two: exact both ways
    undo = 1.0 / tl.load(plan + GRADIENT_SCALE)
    dot = tl.zeros((LINES,), tl.float32)
    for k in range(0, depth, BD):
        r = load_features(sums, i, sums_stride, k, inside, depth, BD) * undo
        dot += tl.sum(load_features(rows, i, row_stride, k, inside, depth, BD).to(tl.float32) * r, 1)
        at = k + tl.arange(0, BD)
        there = inside[:, None] & (at < depth)[None, :]
        place = out + i.to(tl.int64)[:, None] * out_stride + at[None, :]
        tl.store(place, (r * s).to(out.dtype.element_ty), mask=there)
    tl.store(inner + tl.program_id(0), tl.sum(dot.to(tl.float64), 0))


@kernel
@triton.jit(do_not_specialize=["m", "n"])
def sum_nll(
    row_negative, row_positive, row_sum, row_weight, row_target,
    column_negative, column_positive, column_sum, column_weight, column_target,
    out, m, n, BLOCK: tl.constexpr, TIMES: tl.constexpr,
):  # fmt: skip
    """``sum of w_i loss_i`` over TIMES times BLOCK rows, and columns after them, to out (programs,).

    The sum is float64, and rounded as it is written: see ``objectives.SOFTMAX``. column_*: (n,), or None, n = 0.
    """
    row = row_negative, row_positive, row_sum, row_weight, row_target
    column = column_negative, column_positive, column_sum, column_weight, column_target
    rows = tl.cdiv(m, BLOCK)
    start = tl.program_id(0) * TIMES
    total = tl.zeros((BLOCK,), tl.float64)
    for block in range(start, min(start + TIMES, rows + tl.cdiv(n, BLOCK))):
        if block < rows:
            total += _weighted_nll(row, block * BLOCK + tl.arange(0, BLOCK), m)
        elif column_negative is not None:
            total += _weighted_nll(column, (block - rows) * BLOCK + tl.arange(0, BLOCK), n)
    tl.store(out + tl.program_id(0), tl.sum(total, 0).to(out.dtype.element_ty))


@triton.jit
def _weighted_nll(side, i, length):
    negative, positive, positive_sum, weight, target = side
    inside = i < length
    w = tl.load(weight + i, mask=inside, other=0.0).to(tl.float64)
    t = tl.load(target + i, mask=inside, other=0.0).to(tl.float64)
    less = tl.load(negative + i, mask=inside, other=0.0)
    more = tl.load(positive + i, mask=inside, other=0.0)
    s = tl.load(positive_sum + i, mask=inside, other=0.0)
    # 1 / n as it was before it was rounded: see ``objectives.reciprocal_of_count``
    t = tl.where(t == 0.0, 0.0, 1.0 / tl.floor(1.0 / tl.where(t == 0.0, 1.0, t) + 0.5))
    # NaN stays: the comparison is false for it
    spread = more - t * s
    spread = tl.where(spread <= 0.0, 0.0, spread)
    # a positive whose logit is -inf is no missing one
    counted = (t != 0.0) & ((more != float("-inf")) | (s != 0.0))
    loss = tl.where(counted, softplus(less - more) + spread, log_add(less, more))
    return tl.where(w == 0.0, 0.0, w * loss)
