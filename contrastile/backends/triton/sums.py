# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
"""Kernels of cost O(b d) or O(b) that end a pass: each element read and written once, sums in one fixed order."""

from __future__ import annotations

import triton
import triton.language as tl

from contrastile.backends.triton.kernel import kernel
from contrastile.backends.triton.logits import bias_of, log_add, softplus
from contrastile.backends.triton.precheck import load_features
from contrastile.backends.triton.tiles import GRADIENT_SCALE


@kernel
@triton.jit(do_not_specialize=["m"])
def finalize_rows(
    sums, rows, out, inner, scale, plan, bias, entries, logits, m, sums_stride, row_stride, out_stride, depth,
    LINES: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Write ``out = scale R``, rounded once, and sums over LINES rows of ``<q_i, R_i>`` to inner (programs,), float64.

    sums: (m, d) float32, GRADIENT_SCALE times R = G K; rows: (m, d) features; out: (m, d) in the features' dtype.
    entries, logits: (m,) float64, G at the rows' positives and their logits, or None. With them inner is of a G that is
    not rounded there. Such an entry is as large as all others of its row together, and the roundings may have one sign,
    while inner is a sum that cancels: its error would be up to 60 times as large.
    """
    i = tl.program_id(0) * LINES + tl.arange(0, LINES)
    inside = i < m
    s = tl.load(scale)
    # exact, because GRADIENT_SCALE is a power of two
    inverse_scale = 1.0 / tl.load(plan + GRADIENT_SCALE)
    dot = tl.zeros((LINES,), tl.float32)
    lost = tl.zeros((LINES,), tl.float64)
    if entries is not None:
        g = (tl.load(entries + i, mask=inside, other=0.0) / inverse_scale).to(tl.float32)
        error = (g - g.to(out.dtype.element_ty).to(tl.float32)) * inverse_scale
        x = tl.load(logits + i, mask=inside, other=0.0) - bias_of(bias)
        dots = x / tl.where(s == 0.0, float("inf"), s)
        lost = tl.where(error == 0.0, 0.0, error * dots)
    for k in range(0, depth, BD):
        r = load_features(sums, i, sums_stride, k, inside, depth, BD) * inverse_scale
        dot += tl.sum(load_features(rows, i, row_stride, k, inside, depth, BD).to(tl.float32) * r, 1)
        j = k + tl.arange(0, BD)
        is_inside = inside[:, None] & (j < depth)[None, :]
        pointers = out + i.to(tl.int64)[:, None] * out_stride + j[None, :]
        tl.store(pointers, (r * s).to(out.dtype.element_ty), mask=is_inside)
    tl.store(inner + tl.program_id(0), tl.sum(dot.to(tl.float64) + lost, 0))


@kernel
@triton.jit(do_not_specialize=["m", "n"])
def sum_nll(
    row_negative, row_positive, row_sum, row_weight, row_target,
    column_negative, column_positive, column_sum, column_weight, column_target,
    out, m, n, BLOCK: tl.constexpr, TIMES: tl.constexpr,
):  # fmt: skip
    """Write ``sum of w_i loss_i`` over TIMES blocks of BLOCK rows, with columns after the rows, to out (programs,).

    The sum is float64, and is rounded as it is written: see ``objectives.SOFTMAX``. column_*: (n,), or None with n = 0.
    """
    row_side = row_negative, row_positive, row_sum, row_weight, row_target
    column_side = column_negative, column_positive, column_sum, column_weight, column_target
    row_blocks = tl.cdiv(m, BLOCK)
    start = tl.program_id(0) * TIMES
    total = tl.zeros((BLOCK,), tl.float64)
    for block in range(start, min(start + TIMES, row_blocks + tl.cdiv(n, BLOCK))):
        if block < row_blocks:
            total += _weighted_nll(row_side, block * BLOCK + tl.arange(0, BLOCK), m)
        elif column_negative is not None:
            total += _weighted_nll(column_side, (block - row_blocks) * BLOCK + tl.arange(0, BLOCK), n)
    tl.store(out + tl.program_id(0), tl.sum(total, 0).to(out.dtype.element_ty))


@triton.jit
def _weighted_nll(side, i, length):
    """``w_i loss_i`` of elements i of a side, float64; 0 where the weight is 0."""
    negative, positive, positive_sum, weight, target = side
    inside = i < length
    w = tl.load(weight + i, mask=inside, other=0.0).to(tl.float64)
    t = tl.load(target + i, mask=inside, other=0.0).to(tl.float64)
    negative_lse = tl.load(negative + i, mask=inside, other=0.0)
    positive_lse = tl.load(positive + i, mask=inside, other=0.0)
    s = tl.load(positive_sum + i, mask=inside, other=0.0)
    # t is 1 / n rounded; this restores 1 / n: see ``objectives.reciprocal_of_count``
    t = tl.where(t == 0.0, 0.0, 1.0 / tl.floor(1.0 / tl.where(t == 0.0, 1.0, t) + 0.5))
    # NaN fails the comparison, and stays
    spread = positive_lse - t * s
    spread = tl.where(spread <= 0.0, 0.0, spread)
    # a positive whose logit is -inf is still a positive
    has_positive = (t != 0.0) & ((positive_lse != float("-inf")) | (s != 0.0))
    loss = tl.where(has_positive, softplus(negative_lse - positive_lse) + spread, log_add(negative_lse, positive_lse))
    return tl.where(w == 0.0, 0.0, w * loss)
