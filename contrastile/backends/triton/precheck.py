# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
# pyright: reportGeneralTypeIssues=false
"""The prechecks, small kernels of cost O((m + n) d): what the tile kernels need to know of a block before they run.

``measure`` reads the features, ``weight_bounds`` the weights; ``plan_forward`` and ``epilogue_scales`` turn their peaks
into the plan that the tile kernels obey, and the latter prepares the vectors of the backward's epilogue. The device
decides here between the fast and the safe path, and the host does not wait for it.
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
"""Numbers that a program of ``weight_bounds`` leaves; ``measure`` leaves one."""

_LOW = tl.constexpr(0)  # least log-sum-exp, in powers of two, among those with a weight
_HIGH = tl.constexpr(1)  # largest, weight or not
_LEAST = tl.constexpr(2)  # least |weight| that is not 0
_MOST = tl.constexpr(3)  # bound of |G| from one direction, where positives are not named by index
_VALUE = tl.constexpr(4)  # largest |G| of the positives named by index
_SURE = tl.constexpr(5)  # 1 where a row or column is certain of its positives, else 0
_LEAST_NEGATIVES = tl.constexpr(6)  # as _LOW, of the negatives alone; -inf where bars are given

_FAR = tl.constexpr(1 << 62)


@kernel
@triton.jit(do_not_specialize=["length"])
def spans(x, to, length):
    """A copy of x (length,) to ``to``, followed by the least and then by the largest of every UNIT elements."""
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
    """The largest squared norm of every LINES rows or columns to squares (programs,).

    positives: (m,) or None; with them, the least and the largest j - i of the positives (i, j) of every LINES rows to
    ends (2, row programs), a large and a small number where there is none.
    """
    program = tl.program_id(0)
    row_programs = tl.cdiv(m, LINES)
    if program < row_programs:
        i = program * LINES + tl.arange(0, LINES)
        inside = i < m
        if positives is not None:
            j = tl.load(positives + i, mask=inside, other=-1)
            named = (j >= 0) & (j < n)
            tl.store(ends + program, tl.min(tl.where(named, j - i, _FAR), 0))
            tl.store(ends + row_programs + program, tl.max(tl.where(named, j - i, -_FAR), 0))
        _store_square(squares, program, _squares(rows, i, row_stride, inside, depth, LINES, BD))
    else:
        i = (program - row_programs) * LINES + tl.arange(0, LINES)
        _store_square(squares, program, _squares(columns, i, column_stride, i < n, depth, LINES, BD))


@triton.jit
def _squares(features, i, stride, inside, depth, LINES: tl.constexpr, BD: tl.constexpr):
    """Squared norms of the rows i."""
    square = tl.zeros((LINES,), tl.float32)
    for k in range(0, depth, BD):
        x = load_features(features, i, stride, k, inside, depth, BD).to(tl.float32)
        square += tl.sum(x * x, 1)
    return square


@triton.jit
def _store_square(squares, program, square):
    # NaN compares false: a feature that is not finite makes the bound infinite, and the path the safe one
    tl.store(squares + program, tl.max(tl.where(square < float("inf"), square, float("inf")), 0))


@triton.jit
def load_features(base, i, stride, start, inside, depth, BD: tl.constexpr):
    """BD features from ``start`` of the rows i, 0 where there is none."""
    k = start + tl.arange(0, BD)
    at = i.to(tl.int64)[:, None] * stride + k[None, :]
    return tl.load(base + at, mask=inside[:, None] & (k < depth)[None, :], other=0.0)


@kernel
@triton.jit(do_not_specialize=["m", "n"])
def weight_bounds(
    m, n, scale, bias, upstream, peaks, positives, excluded, values,
    row_negative, row_positive, row_weight, row_target, row_share,
    column_negative, column_positive, column_weight, column_target, column_share,
    MATCHED: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """For the backward: peaks of the weights and log-sum-exps of LANES rows or columns to peaks (programs, PEAKS).

    row_*: (m,), column_*: (n,), or None for a loss of one direction: log-sum-exps in float64, weights and targets in
    float32; with a share r, float64, the others are those of ``bars.normalised``. positives: (m,) or None; with
    them, G at row i's positive to values (m,), float64. MATCHED: ids name them. upstream: 0-d, multiplies every weight,
    or None.
    """
    row = row_negative, row_positive, row_weight, row_target, row_share, upstream
    column = column_negative, column_positive, column_weight, column_target, column_share, upstream
    program = tl.program_id(0)
    row_programs = tl.cdiv(m, LANES)
    at = peaks + program.to(tl.int64) * 7
    if program < row_programs:
        i = program * LANES + tl.arange(0, LANES)
        inside = i < m
        value = tl.zeros((LANES,), tl.float64)
        if positives is not None:
            at_column = tl.load(positives + i, mask=inside, other=-1)
            named = (at_column >= 0) & (at_column < n)
            if excluded is not None:
                named = named & (at_column != tl.load(excluded + i, mask=inside, other=-1))
            # its logit
            x = tl.load(row_positive + i, mask=named, other=0.0)
            value = _at_positive(x, row, i, named)
            if column_negative is not None:
                value += _at_positive(x, column, at_column, named)
            value = tl.where(named, value, 0.0)
            tl.store(values + i, value, mask=inside)
        size = tl.abs(value).to(tl.float32)
        tl.store(at + _VALUE, tl.max(tl.where(size < float("inf"), size, float("inf")), 0))
        _store_peaks(at, row, i, inside, scale, bias, MATCHED)
    elif column_negative is not None:
        j = (program - row_programs) * LANES + tl.arange(0, LANES)
        tl.store(at + _VALUE, 0.0)
        _store_peaks(at, column, j, j < n, scale, bias, MATCHED)


@triton.jit
def _at_positive(x, side, i, inside):
    """One direction's ``w ((q - t) - q sigmoid(N - P))`` with ``q = exp(x - P)``, float64; 0 where the weight is 0.

    With a share r, that instead of the sigmoid.
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
    """``sigmoid(N - P)``, float64; or what comes instead: see ``bars.normalised``."""
    return sigmoid(negative - positive) if share is None else tl.load(share + i, mask=inside, other=0.0)


@triton.jit
def _lse(negative, positive, share):
    """L, float64: where r comes instead of sigmoid(N - P), L comes instead of N."""
    return log_add(negative, positive) if share is None else negative


@triton.jit
def _weights(weight, upstream, i, inside):
    """Weights times the gradient that arrives from above, rounded once."""
    w = tl.load(weight + i, mask=inside, other=0.0)
    return w if upstream is None else w * tl.load(upstream)


@triton.jit
def _store_peaks(at, side, i, inside, scale, bias, MATCHED: tl.constexpr):
    negative, positive, weight, target, share, upstream = side
    w = tl.abs(_weights(weight, upstream, i, inside))
    t = tl.abs(tl.load(target + i, mask=inside, other=0.0))
    less = tl.load(negative + i, mask=inside, other=float("-inf"))
    more = tl.load(positive + i, mask=inside, other=float("-inf"))
    shift, orders = bias_of(bias), binary_orders(tl.load(scale))
    log = ((_lse(less, more, share) - shift) * orders).to(tl.float32)
    counts = w != 0.0
    # what admits nothing has no pair that could overflow; NaN compares false and counts as infinite
    high = tl.where(log < float("inf"), log, float("inf"))
    low = tl.where(log > float("-inf"), log, float("-inf"))
    tl.store(at + _LOW, tl.min(tl.where(counts, low, float("inf")), 0))
    tl.store(at + _HIGH, tl.max(high, 0))
    if share is not None:
        # bars are relative to the largest of their row: there N says nothing of what a term counts
        tl.store(at + _LEAST_NEGATIVES, float("-inf"))
    else:
        negatives = tl.where(less > float("-inf"), ((less - shift) * orders).to(tl.float32), low)
        tl.store(at + _LEAST_NEGATIVES, tl.min(tl.where(counts, negatives, float("inf")), 0))
    tl.store(at + _LEAST, tl.min(tl.where(counts, w, float("inf")), 0))
    if share is not None:
        # |q (1 - r) - t|, of which no bar is more than w
        most = w * (2.0 + t)
    else:
        # all negatives of a row together have the probability sigmoid(N - P)
        most = w * (1.0 + t if MATCHED else tl.maximum(sigmoid(less - more), 2.0**-64).to(tl.float32))
    most = tl.where(counts, tl.where(most < float("inf"), most, float("inf")), 0.0)
    tl.store(at + _MOST, tl.max(most, 0))
    # more - less > 5.6: the excess is under 2^-8; a silent row's bars say nothing of positives, of which L is no bound
    sure = counts & (t > 0.5) & (more - less > 5.6) if share is None else inside
    tl.store(at + _SURE, tl.max(tl.where(sure, 1.0, 0.0), 0))


@triton.jit
def _reduce(peaks, start, stop, STEP: tl.constexpr, WORST: tl.constexpr, LEAST: tl.constexpr, BLOCK: tl.constexpr):
    """The least or the largest of every STEP-th number start..stop, WORST of none."""
    best = tl.full((BLOCK,), WORST, peaks.dtype.element_ty)
    for at in range(start, stop, BLOCK):
        p = at + tl.arange(0, BLOCK)
        value = tl.load(peaks + p.to(tl.int64) * STEP, mask=p < stop, other=WORST)
        best = tl.minimum(best, value) if LEAST else tl.maximum(best, value)
    return tl.min(best, 0) if LEAST else tl.max(best, 0)


@triton.jit
def _peak(peaks, programs, SLOT: tl.constexpr, LEAST: tl.constexpr, BLOCK: tl.constexpr):
    """The least or the largest of one slot over all programs of ``weight_bounds``."""
    return _reduce(peaks + SLOT, 0, programs, 7, float("inf") if LEAST else float("-inf"), LEAST, BLOCK)


@triton.jit
def _largest_logit(squares, alpha, row_programs, programs, depth, BLOCK: tl.constexpr):
    """Bound on |alpha dot| from the norms (Cauchy and Schwarz), with room for rounding and for squares that vanish."""
    row = _reduce(squares, 0, row_programs, 1, 0.0, False, BLOCK) + depth * 1e-36
    column = _reduce(squares, row_programs, programs, 1, 0.0, False, BLOCK) + depth * 1e-36
    return tl.abs(alpha) * tl.sqrt(row) * tl.sqrt(column) * 1.01


@kernel
@triton.jit(do_not_specialize=["row_programs", "programs", "room", "depth"])
def plan_forward(
    squares, ends, scale, plan, status, diagonals, row_programs, programs, room, depth, BLOCK: tl.constexpr
):
    """The reference r of the fast path, and whether it can be tried (status is 0) or not (1).

    ends: see ``measure``; to diagonals (2,) the least and the largest of all, or None.

    ``room``: the exponent that one term may have so that the sum over the longer side stays finite. With
    ``B >= |alpha dot|`` and ``r = max(0, B - room)`` nothing overflows. Terms under 2^-126 are flushed, at most one a
    column: with ``B + r <= 125`` there are none; else a sum of at least 2^-100 a term loses less than 2^-26 of itself,
    and ``fold`` checks that it is so. A reference that no likely sum would survive is not tried, nor any where room is
    -inf.
    """
    alpha = tl.load(scale) * LOG2E
    bound = _largest_logit(squares, alpha, row_programs, programs, depth, BLOCK)
    reference = tl.maximum(bound - room, 0.0)
    fast = bound <= room + 100.0
    tl.store(plan + ALPHA, alpha)
    tl.store(plan + REFERENCE, tl.where(fast, reference, 0.0))
    tl.store(plan + THRESHOLD, tl.where(bound + reference <= 125.0, 0.0, 7.888609052210118e-31))
    tl.store(plan + FAST, fast.to(tl.float32))
    tl.store(status, tl.where(fast, 0, 1))
    if ends is not None:
        tl.store(diagonals, _reduce(ends, 0, row_programs, 1, _FAR, True, BLOCK))
        tl.store(diagonals + 1, _reduce(ends + row_programs, 0, row_programs, 1, -_FAR, False, BLOCK))


@triton.jit
def _plan(
    peaks, programs, longest, TWO_SIDED: tl.constexpr, HALF: tl.constexpr, EXACT: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Whether G may be formed as ``2^(x - r) (u_i 2^(r - L_i) + v_j 2^(r - M_j))``, r or else 0, and GRADIENT_SCALE.

    An admitted logit is at most its row's and its column's log-sum-exp, so with ``r >= max L - 120`` nothing admitted
    overflows. With ``r <= L`` wherever a weight counts, a term that is flushed costs at most 2^-126 in a probability;
    with ``r <= N + 100`` it is less than 2^-26 of the negatives of its row and of its column, for float16 2^-29: 2^17
    of them are less than a rounding of G, and of more each is less by their number. A factor that counts is not flushed
    while ``log2 |u| - (L - r) >= -125``, and none is infinite while ``|u| <= 2^20``. Of the r that these allow, the
    largest is taken: products of zeros cost the least energy, which limits the rate. Where there is none, the exact
    path is taken. So it is beyond 512: a logit is not rounded here before r leaves it, as in the forward, and the
    difference, half an ulp of the logit, shall be no more than a rounding of a difference. EXACT: no r is taken.

    GRADIENT_SCALE brings a float16 G near the top of its range.
    """
    factor = 1.0
    if HALF:
        most = _peak(peaks, programs, _MOST, False, BLOCK)
        if TWO_SIDED:
            # the two directions add up
            most = most * 2.0
        factor = near_top(tl.maximum(most, _peak(peaks, programs, _VALUE, False, BLOCK)))
    low = _peak(peaks, programs, _LOW, True, BLOCK)
    high = _peak(peaks, programs, _HIGH, False, BLOCK)
    least = tl.log2(_peak(peaks, programs, _LEAST, True, BLOCK) * factor)
    many = tl.maximum(tl.log2(longest.to(tl.float32)) - 17.0, 0.0)
    flushed = _peak(peaks, programs, _LEAST_NEGATIVES, True, BLOCK) + (97.0 if HALF else 100.0) - many
    small = _peak(peaks, programs, _MOST, False, BLOCK) * factor <= 1048576.0
    # where no weight counts, low is infinite
    reference = tl.where(low < float("inf"), tl.where(small, tl.maximum(low, flushed), low), high)
    # the comparisons fail for NaN and for infinities
    fast = (low >= -512.0) & (high <= 512.0) & (reference >= tl.maximum(high - 120.0, high - 125.0 - least))
    fast = fast & (not EXACT)
    return fast, tl.where(fast, reference, 0.0), factor


@triton.jit
def near_top(most):
    """A power of two that brings ``most`` to 2^13 at least and under 2^14, within 2^-100 and 2^100; 1 for 0 and inf."""
    usable = (most > 0.0) & (most < float("inf"))
    exponent = 13 - tl.floor(tl.log2(tl.where(usable, most, 1.0))).to(tl.int32)
    exponent = tl.minimum(tl.maximum(exponent, -100), 100)
    # built from its bits: an exponential may be off by an ulp, and this must be exact
    return tl.where(usable, ((exponent + 127) << 23).to(tl.float32, bitcast=True), 1.0)


@kernel
@triton.jit(do_not_specialize=["m", "n", "programs"])
def epilogue_scales(
    peaks, plan, scale, bias, upstream, m, n, programs,
    row_negative, row_positive, row_weight, row_target, row_share,
    column_negative, column_positive, column_weight, column_target, column_share,
    row_vectors, column_vectors,
    MATCHED: tl.constexpr, HALF: tl.constexpr, EXACT: tl.constexpr, LANES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The backward's plan, from the peaks of all programs of ``weight_bounds``, and the vectors for G's epilogue.

    The vectors to row_vectors (VECTORS, m) and column_vectors (VECTORS, n), float32: see ``tiles``. row_*, column_*,
    upstream: as in ``weight_bounds``. What a log-sum-exp in powers of two has beyond float32 goes with the weight. A
    weight of 0 gets L = 0, so that nothing that is not finite comes near it.
    """
    # each program finds the plan by itself: one launch fewer, and the peaks are few
    fast, reference, factor = _plan(peaks, programs, tl.maximum(m, n), column_negative is not None, HALF, EXACT, BLOCK)
    program = tl.program_id(0)
    if program == 0:
        tl.store(plan + ALPHA, tl.load(scale) * LOG2E)
        tl.store(plan + REFERENCE, reference)
        tl.store(plan + FAST, fast.to(tl.float32))
        tl.store(plan + GRADIENT_SCALE, factor)
        # see ``gradient_tiles``
        tl.store(plan + CERTAIN, _peak(peaks, programs, _SURE, False, BLOCK))
    row_programs = tl.cdiv(m, LANES)
    if program < row_programs:
        row = row_negative, row_positive, row_weight, row_target, row_share, upstream
        _scale_side(reference, factor, scale, bias, program, m, row, row_vectors, MATCHED, LANES)
    elif column_negative is not None:
        program -= row_programs
        column = column_negative, column_positive, column_weight, column_target, column_share, upstream
        _scale_side(reference, factor, scale, bias, program, n, column, column_vectors, MATCHED, LANES)


@triton.jit
def _scale_side(
    reference, factor, scale, bias, program, length, side, vectors, MATCHED: tl.constexpr, LANES: tl.constexpr
):
    negative, positive, weight, target, share, upstream = side
    i = program.to(tl.int64) * LANES + tl.arange(0, LANES)
    inside = i < length
    to, step = vectors + i, length.to(tl.int64)
    orders, shift = binary_orders(tl.load(scale)), bias_of(bias)
    w = (_weights(weight, upstream, i, inside) * factor).to(tl.float64)
    silent = w == 0.0
    less = tl.load(negative + i, mask=inside, other=0.0)
    more = tl.load(positive + i, mask=inside, other=0.0)
    log = (_lse(less, more, share) - shift) * orders
    # infinite logits have no softmax
    log = tl.where(silent, 0.0, tl.where(log < float("inf"), log, float("nan")))
    high, low = split(log)
    tl.store(to + LOG * step, high, mask=inside)
    tl.store(to + WEIGHT * step, (w * tl.math.exp2(-low)).to(tl.float32), mask=inside)
    folded = w * tl.math.exp2(reference.to(tl.float64) - log)
    tl.store(to + FOLDED * step, tl.where(silent, 0.0, folded).to(tl.float32), mask=inside)
    if MATCHED:
        t = tl.load(target + i, mask=inside, other=0.0).to(tl.float64)
        high, low = split(tl.where(silent, 0.0, (more - shift) * orders))
        rounding = tl.math.exp2(-low)
        tl.store(to + TAKEN * step, (w * t).to(tl.float32), mask=inside)
        tl.store(to + POSITIVE_LOG * step, high, mask=inside)
        tl.store(to + POSITIVE_WEIGHT * step, (w * rounding).to(tl.float32), mask=inside)
        tl.store(to + POSITIVE_TARGET * step, (t / rounding).to(tl.float32), mask=inside)
        r = _share(less, more, share, i, inside)
        tl.store(to + NEGATIVE_WEIGHT * step, (w * rounding * r).to(tl.float32), mask=inside)
