# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
"""Small kernels of cost O((m + n) d): what the tile kernels need to know of a block before they run.

``measure`` reads the features once; ``plan_forward`` and ``plan_backward`` turn its peaks into the plan that the tile
kernels obey. The decision between the fast and the safe path is taken here, on the device, with nobody waiting for it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from contrastile.backends.triton.kernel import kernel
from contrastile.backends.triton.tiles import (
    ALPHA,
    BIAS,
    FACTOR,
    FAST,
    LOG2E,
    REFERENCE,
    THRESHOLD,
    binary_orders,
)

PEAKS = 5
_SQUARE = tl.constexpr(0)  # forward: largest squared norm
_STRAY = tl.constexpr(1)  # forward: 1 where a row's positive is not the column of its own number
_LOW = tl.constexpr(1)  # backward: least log-sum-exp, in powers of two, among those with a weight
_HIGH = tl.constexpr(2)  # largest, weight or not
_LEAST = tl.constexpr(3)  # least |weight| that is not 0
_MOST = tl.constexpr(4)  # largest |weight| (1 + |target|), which bounds |G|


@kernel
@triton.jit(do_not_specialize=["m", "n"])
def measure(
    rows,
    columns,
    row_stride,
    column_stride,
    m,
    n,
    positives,
    peaks,
    depth,
    LINES: tl.constexpr,
    BD: tl.constexpr,
):
    """Peaks of every LINES rows or columns to peaks (programs, PEAKS); positives: (m,) or None."""
    program = tl.program_id(0)
    row_programs = tl.cdiv(m, LINES)
    if program < row_programs:
        i = program * LINES + tl.arange(0, LINES)
        inside = i < m
        stray = 0.0
        if positives is not None:
            j = tl.load(positives + i, mask=inside, other=-1)
            stray = tl.max(tl.where(inside & ((j != i) | (i >= n)), 1.0, 0.0), 0)
        tl.store(peaks + program.to(tl.int64) * 5 + _STRAY, stray)
        _store_square(peaks, program, _squares(rows, i, row_stride, inside, depth, LINES, BD))
    else:
        i = (program - row_programs) * LINES + tl.arange(0, LINES)
        _store_square(peaks, program, _squares(columns, i, column_stride, i < n, depth, LINES, BD))


@triton.jit
def _squares(features, i, stride, inside, depth, LINES: tl.constexpr, BD: tl.constexpr):
    """Squared norms of the rows i."""
    square = tl.zeros((LINES,), tl.float32)
    for k in range(0, depth, BD):
        x = load_features(features, i, stride, k, inside, depth, BD).to(tl.float32)
        square += tl.sum(x * x, 1)
    return square


@triton.jit
def _store_square(peaks, program, square):
    # NaN compares false: a feature that is not finite makes the bound infinite, and the path the safe one
    top = tl.max(tl.where(square < float("inf"), square, float("inf")), 0)
    tl.store(peaks + program.to(tl.int64) * 5 + _SQUARE, top)


@triton.jit
def load_features(base, i, stride, start, inside, depth, BD: tl.constexpr):
    """BD features from ``start`` of the rows i, 0 where there is none."""
    k = start + tl.arange(0, BD)
    at = i.to(tl.int64)[:, None] * stride + k[None, :]
    return tl.load(base + at, mask=inside[:, None] & (k < depth)[None, :], other=0.0)


@kernel
@triton.jit(do_not_specialize=["m", "n"])
def weigh(
    m,
    n,
    scale,
    bias,
    peaks,
    row_lse,
    row_weight,
    row_target,
    column_lse,
    column_weight,
    column_target,
    LANES: tl.constexpr,
):
    """For the backward: peaks of the weights and log-sum-exps of LANES rows or columns."""
    program = tl.program_id(0)
    row_programs = tl.cdiv(m, LANES)
    if program < row_programs:
        i = program * LANES + tl.arange(0, LANES)
        _peaks(i, i < m, scale, bias, peaks, program, row_lse, row_weight, row_target)
    elif column_lse is not None:
        j = (program - row_programs) * LANES + tl.arange(0, LANES)
        _peaks(j, j < n, scale, bias, peaks, program, column_lse, column_weight, column_target)


@triton.jit
def _peaks(i, inside, scale, bias, peaks, program, lse, weight, target):
    at = peaks + program.to(tl.int64) * 5
    w = tl.abs(tl.load(weight + i, mask=inside, other=0.0))
    t = tl.abs(tl.load(target + i, mask=inside, other=0.0))
    log = _log2(tl.load(lse + i, mask=inside, other=float("-inf")), scale, bias)
    counts = w != 0.0
    # what admits nothing has no pair that could overflow; NaN compares false and counts as infinite
    high = tl.where(log < float("inf"), log, float("inf"))
    low = tl.where(log > float("-inf"), log, float("-inf"))
    tl.store(at + _LOW, tl.min(tl.where(counts, low, float("inf")), 0))
    tl.store(at + _HIGH, tl.max(high, 0))
    tl.store(at + _LEAST, tl.min(tl.where(counts, w, float("inf")), 0))
    most = w * (1.0 + t)
    tl.store(at + _MOST, tl.max(tl.where(most < float("inf"), most, float("inf")), 0))


@triton.jit
def _log2(lse, scale, bias):
    """A log-sum-exp in powers of two, without the bias, rounded once."""
    lse = lse.to(tl.float64)
    if bias is not None:
        lse = lse - tl.load(bias).to(tl.float64)
    return (lse * binary_orders(tl.load(scale))).to(tl.float32)


@triton.jit
def _reduce(peaks, start, stop, SLOT: tl.constexpr, LEAST: tl.constexpr, BLOCK: tl.constexpr):
    """The least or the largest of one slot over programs start..stop."""
    worst = float("inf") if LEAST else float("-inf")
    best = tl.full((BLOCK,), worst, tl.float32)
    for at in range(start, stop, BLOCK):
        p = at + tl.arange(0, BLOCK)
        value = tl.load(peaks + p.to(tl.int64) * 5 + SLOT, mask=p < stop, other=worst)
        best = tl.minimum(best, value) if LEAST else tl.maximum(best, value)
    return tl.min(best, 0) if LEAST else tl.max(best, 0)


@triton.jit
def _largest_logit(peaks, alpha, row_programs, programs, depth, BLOCK: tl.constexpr):
    """Bound on |alpha dot| from the norms (Cauchy and Schwarz), with room for rounding and for squares that vanish."""
    row = _reduce(peaks, 0, row_programs, _SQUARE, False, BLOCK) + depth * 1e-36
    column = _reduce(peaks, row_programs, programs, _SQUARE, False, BLOCK) + depth * 1e-36
    return tl.abs(alpha) * tl.sqrt(row) * tl.sqrt(column) * 1.01


@kernel
@triton.jit(do_not_specialize=["row_programs", "programs", "room", "depth"])
def plan_forward(peaks, scale, bias, plan, status, row_programs, programs, room, depth, BLOCK: tl.constexpr):
    """The reference r of the fast path, and whether it can be tried (status[0] is 0) or not (1).

    status[1] is 1 if a row's positive is not the column of its own number.

    ``room``: the exponent that one term may have so that the sum over the longer side stays finite. With
    ``B >= |alpha dot|`` and ``r = max(0, B - room)`` nothing overflows. Terms under 2^-126 are flushed, at most one a
    column: with ``B + r <= 125`` there are none; else a sum of at least 2^-100 a term loses less than 2^-26 of itself,
    and ``fold`` checks that it is so. A reference that no likely sum would survive is not tried.
    """
    alpha = tl.load(scale) * LOG2E
    bound = _largest_logit(peaks, alpha, row_programs, programs, depth, BLOCK)
    reference = tl.maximum(bound - room, 0.0)
    fast = bound <= room + 100.0
    tl.store(plan + ALPHA, alpha)
    tl.store(plan + REFERENCE, tl.where(fast, reference, 0.0))
    tl.store(plan + THRESHOLD, tl.where(bound + reference <= 125.0, 0.0, 7.888609052210118e-31))
    tl.store(plan + FAST, fast.to(tl.float32))
    tl.store(plan + BIAS, 0.0)
    if bias is not None:
        tl.store(plan + BIAS, tl.load(bias))
    tl.store(status, tl.where(fast, 0, 1))
    tl.store(status + 1, (_reduce(peaks, 0, row_programs, _STRAY, False, BLOCK) > 0.0).to(tl.int32))


@kernel
@triton.jit(do_not_specialize=["row_programs", "programs"])
def plan_backward(
    peaks, scale, plan, row_programs, programs, TWO_SIDED: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr
):
    """Whether G may be formed as ``2^(x - r) (u_i 2^(r - L_i) + v_j 2^(r - M_j))``, and with which r.

    An admitted logit is at most its row's and its column's log-sum-exp, so with ``r >= max L - 120`` nothing admitted
    overflows. With ``r <= L`` wherever a weight counts, a term that is flushed costs at most 2^-126 in a probability.
    A factor that counts is not flushed while ``log2 |u| - (L - r) >= -125``. Of the r that these allow, the one
    nearest 0 is taken; where there is none, the exact path is. FACTOR brings a float16 G near the top of its range.
    """
    factor = 1.0
    if HALF:
        most = _reduce(peaks, 0, programs, _MOST, False, BLOCK)
        if TWO_SIDED:
            # the two directions add up
            most = most * 2.0
        factor = near_top(most)
    fast = 0.0
    reference = 0.0
    if TWO_SIDED:
        low = _reduce(peaks, 0, programs, _LOW, True, BLOCK)
        high = _reduce(peaks, 0, programs, _HIGH, False, BLOCK)
        least = _reduce(peaks, 0, programs, _LEAST, True, BLOCK) * factor
        reference = tl.maximum(high - 120.0, tl.minimum(low, 0.0))
        # the comparisons fail for NaN and for infinities
        safe = (low > float("-inf")) & (reference <= low) & (tl.log2(least) - (high - reference) >= -125.0)
        safe = safe & (high < float("inf"))
        fast = safe.to(tl.float32)
        reference = tl.where(safe, reference, 0.0)
    tl.store(plan + ALPHA, tl.load(scale) * LOG2E)
    tl.store(plan + REFERENCE, reference)
    tl.store(plan + FAST, fast)
    tl.store(plan + FACTOR, factor)


@triton.jit
def near_top(most):
    """A power of two that brings ``most`` to 2^13 at least and under 2^14, within 2^-100 and 2^100; 1 for 0 and inf."""
    usable = (most > 0.0) & (most < float("inf"))
    exponent = 13 - tl.floor(tl.log2(tl.where(usable, most, 1.0))).to(tl.int32)
    exponent = tl.minimum(tl.maximum(exponent, -100), 100)
    # built from its bits: an exponential may be off by an ulp, and this must be exact
    return tl.where(usable, ((exponent + 127) << 23).to(tl.float32, bitcast=True), 1.0)


@kernel
@triton.jit(do_not_specialize=["m", "n"])
def temper(
    plan,
    scale,
    bias,
    m,
    n,
    row_lse,
    row_weight,
    column_lse,
    column_weight,
    row_vectors,
    column_vectors,
    LANES: tl.constexpr,
):
    """Vectors for the epilogue of G: (3, m) and (3, n): L in powers of two, w FACTOR, and ``w FACTOR 2^(r - L)``.

    A weight of 0 gets L = 0, so that nothing that is not finite comes near it.
    """
    program = tl.program_id(0)
    row_programs = tl.cdiv(m, LANES)
    if program < row_programs:
        _temper_one(plan, scale, bias, program, m, row_lse, row_weight, row_vectors, LANES)
    elif column_lse is not None:
        _temper_one(plan, scale, bias, program - row_programs, n, column_lse, column_weight, column_vectors, LANES)


@triton.jit
def _temper_one(plan, scale, bias, program, length, lse, weight, vectors, LANES: tl.constexpr):
    i = program.to(tl.int64) * LANES + tl.arange(0, LANES)
    inside = i < length
    w = tl.load(weight + i, mask=inside, other=0.0)
    log = tl.where(w == 0.0, 0.0, _log2(tl.load(lse + i, mask=inside, other=0.0), scale, bias))
    w = w * tl.load(plan + FACTOR)
    tl.store(vectors + i, log, mask=inside)
    tl.store(vectors + length + i, w, mask=inside)
    folded = tl.where(w == 0.0, 0.0, w * tl.math.exp2(tl.load(plan + REFERENCE) - log))
    tl.store(vectors + 2 * length.to(tl.int64) + i, folded, mask=inside)
