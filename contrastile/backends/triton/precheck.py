# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
# pyright: reportGeneralTypeIssues=false
"""The prechecks: small kernels of cost O((m + n) d) that run before the tile kernels of a block.

``measure`` bounds the features, ``weight_bounds`` the weights and log-sum-exps. From these bounds ``plan_forward`` and
``epilogue_scales`` write the plan that the tile kernels read; the latter also writes the vectors of the epilogue of G.
So the device chooses between the fast and the safe path, and the host does not wait for it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from contrastile.backends.triton.kernel import kernel
from contrastile.backends.triton.logits import LOG2E, bias_of, binary_orders, log_add, sigmoid, split
from contrastile.backends.triton.tiles import (
    ALPHA,
    CERTAIN,
    FAST,
    FOLDED,
    GRADIENT_SCALE,
    LOG,
    NEGATIVE_WEIGHT,
    POSITIVE_LOG,
    POSITIVE_TARGET,
    POSITIVE_WEIGHT,
    REFERENCE,
    TAKEN,
    THRESHOLD,
    UNIT,
    WEIGHT,
)

PEAKS = 7
"""Numbers that a program of ``weight_bounds`` writes; a program of ``measure`` writes one."""

_LEAST_LSE = tl.constexpr(0)  # least log-sum-exp, in powers of two, where the weight is not 0
_LARGEST_LSE = tl.constexpr(1)  # largest log-sum-exp, whatever the weight
_LEAST_WEIGHT = tl.constexpr(2)  # least |weight| that is not 0
_LARGEST_BOUND = tl.constexpr(3)  # bound of |G| from one direction, except at positives by index
_LARGEST_VALUE = tl.constexpr(4)  # largest |G| at positives by index
_ANY_CERTAIN = tl.constexpr(5)  # 1 if a row or column is certain of its positives, else 0
_LEAST_NEGATIVES = tl.constexpr(6)  # as _LEAST_LSE, for the negatives alone; -inf if bars are given

_FAR = tl.constexpr(1 << 62)  # larger than any j - i


@kernel
@triton.jit(do_not_specialize=["length"])
def spans(x, to, length):
    """Copy x (length,) to ``to``, followed by the least and then by the largest of every UNIT elements."""
    unit = tl.program_id(0)
    i = unit * UNIT + tl.arange(0, UNIT)
    values = tl.load(x + tl.minimum(i, length - 1))
    tl.store(to + i, values, mask=i < length)
    tl.store(to + length + unit, tl.min(values, 0))
    tl.store(to + length + tl.num_programs(0) + unit, tl.max(values, 0))


@kernel
@triton.jit(do_not_specialize=["m", "n"])
def measure(
    rows, columns, row_stride, column_stride, m, n, positives, squares, ends, depth,
    LINES: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Write the largest squared norm of every LINES rows or columns to squares (programs,).

    positives: (m,) or None. If given, the least and the largest j - i of the positives (i, j) of every LINES rows go to
    ends (2, row programs); they are _FAR and -_FAR for rows without a positive.
    """
    program = tl.program_id(0)
    row_programs = tl.cdiv(m, LINES)
    if program < row_programs:
        i = program * LINES + tl.arange(0, LINES)
        inside = i < m
        if positives is not None:
            j = tl.load(positives + i, mask=inside, other=-1)
            has_positive = (j >= 0) & (j < n)
            tl.store(ends + program, tl.min(tl.where(has_positive, j - i, _FAR), 0))
            tl.store(ends + row_programs + program, tl.max(tl.where(has_positive, j - i, -_FAR), 0))
        _store_square(squares, program, _squares(rows, i, row_stride, inside, depth, LINES, BD))
    else:
        i = (program - row_programs) * LINES + tl.arange(0, LINES)
        _store_square(squares, program, _squares(columns, i, column_stride, i < n, depth, LINES, BD))


@triton.jit
def _squares(features, i, stride, inside, depth, LINES: tl.constexpr, BD: tl.constexpr):
    """Squared norms of the rows i, (LINES,) float32."""
    square = tl.zeros((LINES,), tl.float32)
    for k in range(0, depth, BD):
        x = load_features(features, i, stride, k, inside, depth, BD).to(tl.float32)
        square += tl.sum(x * x, 1)
    return square


@triton.jit
def _store_square(squares, program, square):
    # NaN fails the comparison: a feature that is not finite makes the bound infinite, which selects the safe path
    tl.store(squares + program, tl.max(tl.where(square < float("inf"), square, float("inf")), 0))


@triton.jit
def load_features(base, i, stride, start, inside, depth, BD: tl.constexpr):
    """BD features from ``start`` of the rows i; 0 outside."""
    k = start + tl.arange(0, BD)
    offsets = i.to(tl.int64)[:, None] * stride + k[None, :]
    return tl.load(base + offsets, mask=inside[:, None] & (k < depth)[None, :], other=0.0)


@kernel
@triton.jit(do_not_specialize=["m", "n"])
def weight_bounds(
    m, n, scale, bias, upstream, peaks, positives, excluded, values,
    row_negative, row_positive, row_weight, row_target, row_share,
    column_negative, column_positive, column_weight, column_target, column_share,
    MATCHED: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """For the backward, write peaks of LANES rows' or columns' weights and log-sum-exps to peaks (programs, PEAKS).

    row_* (m,), column_* (n,) or None for one direction: log-sum-exps in float64, weights and targets in float32. With a
    share r, float64, the others are those of ``bars.normalised``. positives: (m,) or None; if given, G at row i's
    positive goes to values (m,), float64. MATCHED: ids name the positives. upstream: 0-d factor of weights, or None.
    """
    row_side = row_negative, row_positive, row_weight, row_target, row_share, upstream
    column_side = column_negative, column_positive, column_weight, column_target, column_share, upstream
    program = tl.program_id(0)
    row_programs = tl.cdiv(m, LANES)
    program_peaks = peaks + program.to(tl.int64) * 7
    if program < row_programs:
        i = program * LANES + tl.arange(0, LANES)
        inside = i < m
        value = tl.zeros((LANES,), tl.float64)
        if positives is not None:
            positive_column = tl.load(positives + i, mask=inside, other=-1)
            has_positive = (positive_column >= 0) & (positive_column < n)
            if excluded is not None:
                has_positive = has_positive & (positive_column != tl.load(excluded + i, mask=inside, other=-1))
            # the logit of a row's positive by index is the row's P
            x = tl.load(row_positive + i, mask=has_positive, other=0.0)
            value = _at_positive(x, row_side, i, has_positive)
            if column_negative is not None:
                value += _at_positive(x, column_side, positive_column, has_positive)
            value = tl.where(has_positive, value, 0.0)
            tl.store(values + i, value, mask=inside)
        magnitude = tl.abs(value).to(tl.float32)
        tl.store(program_peaks + _LARGEST_VALUE, tl.max(tl.where(magnitude < float("inf"), magnitude, float("inf")), 0))
        _store_peaks(program_peaks, row_side, i, inside, scale, bias, MATCHED)
    elif column_negative is not None:
        j = (program - row_programs) * LANES + tl.arange(0, LANES)
        tl.store(program_peaks + _LARGEST_VALUE, 0.0)
        _store_peaks(program_peaks, column_side, j, j < n, scale, bias, MATCHED)


@triton.jit
def _at_positive(x, side, i, inside):
    """One side's ``w ((q - t) - q sigmoid(N - P))`` with ``q = exp(x - P)``, float64; 0 where the weight is 0.

    A share r, if given, replaces the sigmoid.
    """
    negative, positive, weight, target, share, upstream = side
    w = _weights(weight, upstream, i, inside).to(tl.float64)
    t = tl.load(target + i, mask=inside, other=0.0).to(tl.float64)
    p = tl.load(positive + i, mask=inside, other=0.0)
    q = tl.exp(x - p)
    r = _share(tl.load(negative + i, mask=inside, other=0.0), p, share, i, inside)
    return tl.where(w != 0.0, w * ((q - t) - q * r), 0.0)


@triton.jit
def _share(negative, positive, share, i, inside):
    """The share of the negatives, float64: ``sigmoid(N - P)``, or the given one (see ``bars.normalised``)."""
    return sigmoid(negative - positive) if share is None else tl.load(share + i, mask=inside, other=0.0)


@triton.jit
def _lse(negative, positive, share):
    """L, float64. If a share is given, L is given in place of N."""
    return log_add(negative, positive) if share is None else negative


@triton.jit
def _weights(weight, upstream, i, inside):
    """Weights times the upstream gradient, rounded once."""
    w = tl.load(weight + i, mask=inside, other=0.0)
    return w if upstream is None else w * tl.load(upstream)


@triton.jit
def _store_peaks(program_peaks, side, i, inside, scale, bias, MATCHED: tl.constexpr):
    """Write the peaks of one side of a program, all but _LARGEST_VALUE."""
    negative, positive, weight, target, share, upstream = side
    w = tl.abs(_weights(weight, upstream, i, inside))
    t = tl.abs(tl.load(target + i, mask=inside, other=0.0))
    negative_lse = tl.load(negative + i, mask=inside, other=float("-inf"))
    positive_lse = tl.load(positive + i, mask=inside, other=float("-inf"))
    bias_value, to_log2 = bias_of(bias), binary_orders(tl.load(scale))
    log = ((_lse(negative_lse, positive_lse, share) - bias_value) * to_log2).to(tl.float32)
    has_weight = w != 0.0
    # if a row admits no pair, L is -inf and nothing can overflow; NaN fails the comparisons and counts as infinite
    high = tl.where(log < float("inf"), log, float("inf"))
    low = tl.where(log > float("-inf"), log, float("-inf"))
    tl.store(program_peaks + _LEAST_LSE, tl.min(tl.where(has_weight, low, float("inf")), 0))
    tl.store(program_peaks + _LARGEST_LSE, tl.max(high, 0))
    if share is not None:
        # bars are relative to the largest of their row, so N bounds no term
        tl.store(program_peaks + _LEAST_NEGATIVES, float("-inf"))
    else:
        negatives = tl.where(negative_lse > float("-inf"), ((negative_lse - bias_value) * to_log2).to(tl.float32), low)
        tl.store(program_peaks + _LEAST_NEGATIVES, tl.min(tl.where(has_weight, negatives, float("inf")), 0))
    tl.store(program_peaks + _LEAST_WEIGHT, tl.min(tl.where(has_weight, w, float("inf")), 0))
    if share is not None:
        # a bound of w |q (1 - r) - t|, because no bar exceeds w
        bound = w * (2.0 + t)
    else:
        # the probabilities of a row's negatives sum to sigmoid(N - P)
        bound = w * (1.0 + t if MATCHED else tl.maximum(sigmoid(negative_lse - positive_lse), 2.0**-64).to(tl.float32))
    bound = tl.where(has_weight, tl.where(bound < float("inf"), bound, float("inf")), 0.0)
    tl.store(program_peaks + _LARGEST_BOUND, tl.max(bound, 0))
    # P - N > 5.6: the negatives are under 2^-8 of the positives. With bars L bounds no positive, even if w is 0
    is_certain = has_weight & (t > 0.5) & (positive_lse - negative_lse > 5.6) if share is None else inside
    tl.store(program_peaks + _ANY_CERTAIN, tl.max(tl.where(is_certain, 1.0, 0.0), 0))


@triton.jit
def _reduce(peaks, start, stop, STEP: tl.constexpr, WORST: tl.constexpr, LEAST: tl.constexpr, BLOCK: tl.constexpr):
    """The least or the largest of every STEP-th number, for indices from start to stop; WORST if there are none."""
    best = tl.full((BLOCK,), WORST, peaks.dtype.element_ty)
    for first in range(start, stop, BLOCK):
        p = first + tl.arange(0, BLOCK)
        value = tl.load(peaks + p.to(tl.int64) * STEP, mask=p < stop, other=WORST)
        best = tl.minimum(best, value) if LEAST else tl.maximum(best, value)
    return tl.min(best, 0) if LEAST else tl.max(best, 0)


@triton.jit
def _peak(peaks, programs, SLOT: tl.constexpr, LEAST: tl.constexpr, BLOCK: tl.constexpr):
    """The least or the largest of one slot over all programs of ``weight_bounds``."""
    return _reduce(peaks + SLOT, 0, programs, 7, float("inf") if LEAST else float("-inf"), LEAST, BLOCK)


@triton.jit
def _largest_logit(squares, alpha, row_programs, programs, depth, BLOCK: tl.constexpr):
    """Cauchy-Schwarz bound of |alpha dot| from the norms, enlarged for rounding and for squares that underflow."""
    row_square = _reduce(squares, 0, row_programs, 1, 0.0, False, BLOCK) + depth * 1e-36
    column_square = _reduce(squares, row_programs, programs, 1, 0.0, False, BLOCK) + depth * 1e-36
    return tl.abs(alpha) * tl.sqrt(row_square) * tl.sqrt(column_square) * 1.01


@kernel
@triton.jit(do_not_specialize=["row_programs", "programs", "room", "depth"])
def plan_forward(
    squares, ends, scale, plan, status, diagonals, row_programs, programs, room, depth, BLOCK: tl.constexpr
):
    """Write the reference r of the fast path, and whether to try that path (status 0) or not (status 1).

    ends: see ``measure``, or None. diagonals (2,) receives the least and the largest of all of them.

    ``room``: the largest exponent of one term for which the sum over the longer side stays finite; -inf if the fast
    path must not be tried. With ``B >= |alpha dot|`` and ``r = max(0, B - room)`` nothing overflows. Terms below 2^-126
    are flushed. If ``B + r <= 125`` there are none; else a sum of at least 2^-100 per term loses less than 2^-26 of
    itself, and ``fold`` checks each sum for that. The fast path is not tried if hardly any sum would pass.
    """
    alpha = tl.load(scale) * LOG2E
    bound = _largest_logit(squares, alpha, row_programs, programs, depth, BLOCK)
    reference = tl.maximum(bound - room, 0.0)
    is_fast = bound <= room + 100.0
    tl.store(plan + ALPHA, alpha)
    tl.store(plan + REFERENCE, tl.where(is_fast, reference, 0.0))
    tl.store(plan + THRESHOLD, tl.where(bound + reference <= 125.0, 0.0, 7.888609052210118e-31))
    tl.store(plan + FAST, is_fast.to(tl.float32))
    tl.store(status, tl.where(is_fast, 0, 1))
    if ends is not None:
        tl.store(diagonals, _reduce(ends, 0, row_programs, 1, _FAR, True, BLOCK))
        tl.store(diagonals + 1, _reduce(ends + row_programs, 0, row_programs, 1, -_FAR, False, BLOCK))


@triton.jit
def _plan(
    peaks, programs, longest, TWO_SIDED: tl.constexpr, HALF: tl.constexpr, EXACT: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Whether G may be formed as ``2^(x - r) (u_i 2^(r - L_i) + v_j 2^(r - M_j))``, its r (or 0), and GRADIENT_SCALE.

    * Overflow: an admitted logit is at most its row's and its column's log-sum-exp, so ``r >= max L - 120`` suffices.
    * Flushed terms: with ``r <= L`` wherever the weight is not 0, such a term changes a probability by at most 2^-126.
      Else, with ``r <= N + 100``, it is less than 2^-26 (float16: 2^-29) of its row's and its column's negatives. 2^17
      such terms are less than a rounding of G; with more terms the limit of r falls by log2 of their number.
    * Factors: ``u 2^(r - L)`` is not flushed while ``log2 |u| - (L - r) >= -125``, nor infinite while ``|u| <= 2^20``.
    * Rounding: r is subtracted from an unrounded logit, but the forward pass may have rounded it. With ``|L| <= 512``
      this difference, half an ulp of the logit, is no more than a rounding of a difference.

    The largest such r is taken: products of zeros cost the least energy, which limits the rate. If there is none, or
    with EXACT, the exact path is taken. GRADIENT_SCALE brings a float16 G near the top of its range.
    """
    gradient_scale = 1.0
    if HALF:
        bound = _peak(peaks, programs, _LARGEST_BOUND, False, BLOCK)
        if TWO_SIDED:
            # G is the sum of both directions
            bound = bound * 2.0
        gradient_scale = near_top(tl.maximum(bound, _peak(peaks, programs, _LARGEST_VALUE, False, BLOCK)))
    low = _peak(peaks, programs, _LEAST_LSE, True, BLOCK)
    high = _peak(peaks, programs, _LARGEST_LSE, False, BLOCK)
    least_weight = tl.log2(_peak(peaks, programs, _LEAST_WEIGHT, True, BLOCK) * gradient_scale)
    extra_terms = tl.maximum(tl.log2(longest.to(tl.float32)) - 17.0, 0.0)
    flush_limit = _peak(peaks, programs, _LEAST_NEGATIVES, True, BLOCK) + (97.0 if HALF else 100.0) - extra_terms
    is_modest = _peak(peaks, programs, _LARGEST_BOUND, False, BLOCK) * gradient_scale <= 1048576.0
    # low is infinite if all weights are 0
    reference = tl.where(low < float("inf"), tl.where(is_modest, tl.maximum(low, flush_limit), low), high)
    # the comparisons fail for NaN and for infinities
    is_fast = (low >= -512.0) & (high <= 512.0) & (reference >= tl.maximum(high - 120.0, high - 125.0 - least_weight))
    is_fast = is_fast & (not EXACT)
    return is_fast, tl.where(is_fast, reference, 0.0), gradient_scale


@triton.jit
def near_top(magnitude):
    """The power of two from 2^-100 to 2^100 that brings ``magnitude`` into [2^13, 2^14); 1 for 0, infinity and NaN."""
    is_usable = (magnitude > 0.0) & (magnitude < float("inf"))
    exponent = 13 - tl.floor(tl.log2(tl.where(is_usable, magnitude, 1.0))).to(tl.int32)
    exponent = tl.minimum(tl.maximum(exponent, -100), 100)
    # built from its bits, because an exponential may be off by an ulp, and this must be exact
    return tl.where(is_usable, ((exponent + 127) << 23).to(tl.float32, bitcast=True), 1.0)


@kernel
@triton.jit(do_not_specialize=["m", "n", "programs"])
def epilogue_scales(
    peaks, plan, scale, bias, upstream, m, n, programs,
    row_negative, row_positive, row_weight, row_target, row_share,
    column_negative, column_positive, column_weight, column_target, column_share,
    row_vectors, column_vectors,
    MATCHED: tl.constexpr, HALF: tl.constexpr, EXACT: tl.constexpr, LANES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the plan of the backward pass from all peaks of ``weight_bounds``, and the vectors of the epilogue of G.

    row_vectors (VECTORS, m), column_vectors (VECTORS, n), float32: see ``tiles``. row_*, column_*, upstream: see
    ``weight_bounds``. The weight takes up what L loses by rounding to float32. Where the weight is 0, L is set to 0, so
    that the epilogue meets no infinity or NaN there.
    """
    # every program computes the plan, because the peaks are few and another launch would cost more
    is_fast, reference, gradient_scale = _plan(
        peaks, programs, tl.maximum(m, n), column_negative is not None, HALF, EXACT, BLOCK
    )
    program = tl.program_id(0)
    if program == 0:
        tl.store(plan + ALPHA, tl.load(scale) * LOG2E)
        tl.store(plan + REFERENCE, reference)
        tl.store(plan + FAST, is_fast.to(tl.float32))
        tl.store(plan + GRADIENT_SCALE, gradient_scale)
        tl.store(plan + CERTAIN, _peak(peaks, programs, _ANY_CERTAIN, False, BLOCK))
    row_programs = tl.cdiv(m, LANES)
    if program < row_programs:
        row_side = row_negative, row_positive, row_weight, row_target, row_share, upstream
        _scale_side(reference, gradient_scale, scale, bias, program, m, row_side, row_vectors, MATCHED, LANES)
    elif column_negative is not None:
        program -= row_programs
        column_side = column_negative, column_positive, column_weight, column_target, column_share, upstream
        _scale_side(reference, gradient_scale, scale, bias, program, n, column_side, column_vectors, MATCHED, LANES)


@triton.jit
def _scale_side(
    reference, gradient_scale, scale, bias, program, length, side, vectors, MATCHED: tl.constexpr, LANES: tl.constexpr
):
    """Write one side's vectors for the epilogue of G."""
    negative, positive, weight, target, share, upstream = side
    i = program.to(tl.int64) * LANES + tl.arange(0, LANES)
    inside = i < length
    out, step = vectors + i, length.to(tl.int64)
    to_log2, bias_value = binary_orders(tl.load(scale)), bias_of(bias)
    w = (_weights(weight, upstream, i, inside) * gradient_scale).to(tl.float64)
    is_silent = w == 0.0
    negative_lse = tl.load(negative + i, mask=inside, other=0.0)
    positive_lse = tl.load(positive + i, mask=inside, other=0.0)
    log = (_lse(negative_lse, positive_lse, share) - bias_value) * to_log2
    # infinite logits have no softmax
    log = tl.where(is_silent, 0.0, tl.where(log < float("inf"), log, float("nan")))
    high, low = split(log)
    tl.store(out + LOG * step, high, mask=inside)
    tl.store(out + WEIGHT * step, (w * tl.math.exp2(-low)).to(tl.float32), mask=inside)
    folded = w * tl.math.exp2(reference.to(tl.float64) - log)
    tl.store(out + FOLDED * step, tl.where(is_silent, 0.0, folded).to(tl.float32), mask=inside)
    if MATCHED:
        t = tl.load(target + i, mask=inside, other=0.0).to(tl.float64)
        high, low = split(tl.where(is_silent, 0.0, (positive_lse - bias_value) * to_log2))
        correction = tl.math.exp2(-low)
        tl.store(out + TAKEN * step, (w * t).to(tl.float32), mask=inside)
        tl.store(out + POSITIVE_LOG * step, high, mask=inside)
        tl.store(out + POSITIVE_WEIGHT * step, (w * correction).to(tl.float32), mask=inside)
        tl.store(out + POSITIVE_TARGET * step, (t / correction).to(tl.float32), mask=inside)
        r = _share(negative_lse, positive_lse, share, i, inside)
        tl.store(out + NEGATIVE_WEIGHT * step, (w * correction * r).to(tl.float32), mask=inside)
