# pyright: reportOperatorIssue=false, reportGeneralTypeIssues=false
# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
"""Float32 numbers for tensor cores: rounded to nearest tf32, or as sums of parts that bfloat16 holds exactly.

A float32 has 24 bits. ``x = x0 + x1 + x2`` with 8 of them in each part, so that the parts are exact in bfloat16 and
``|x1| <= 2^-8 |x|``, ``|x2| <= 2^-17 |x|``. Of the nine products of two such sums six are taken, the smallest first;
the others amount to ``2 2^-8 2^-17 + 2^-34 < 2^-23.9`` of |x y|: as much as one rounding of each factor to float32.
From two parts, of which ``x - x0 - x1`` is at most 2^-17 |x|, three products leave out at most 2^-14.9.

Tensor cores truncate as they add, always towards 0: of a sum of 8192 terms of one sign 3e-5 is lost. A logit's sum is
no longer than a feature is wide; one over all columns or rows is taken from them every few terms: ``add``.
"""

from __future__ import annotations

import triton
import triton.language as tl

from contrastile.backends.triton.configs import INTERPRETED
from contrastile.backends.triton.kernel import kernel

# term t multiplies part ROW_PARTS >> 2t & 3 of a row by part COLUMN_PARTS >> 2t & 3 of a column:
# 2 0, 1 1, 0 2, 1 0, 0 1, 0 0
TERMS = tl.constexpr(6)
ROW_PARTS = tl.constexpr(0b00_00_01_00_01_10)
COLUMN_PARTS = tl.constexpr(0b00_01_00_10_01_00)

# the same for two parts, on the host: how many parts -> the parts of G and of the features, smallest products first
PRODUCTS = {1: [(0, 0)], 2: [(1, 0), (0, 1), (0, 0)], 3: [(2, 0), (1, 1), (0, 2), (1, 0), (0, 1), (0, 0)]}

# how a kernel that reads the features themselves turns them into factors
PLAIN = tl.constexpr(0)
TF32 = tl.constexpr(1)
SPLIT = tl.constexpr(2)

# the interpreter gets products of bfloat16 wrong; float32 holds the parts just as well
PART = tl.constexpr(tl.float32 if INTERPRETED else tl.bfloat16)


@triton.jit
def nearest(x, DROPPED: tl.constexpr):
    """X to the nearest number whose last DROPPED bits are 0, ties away from zero: 13 for tf32, 16 for bfloat16."""
    bits = x.to(tl.int32, bitcast=True) + (1 << (DROPPED - 1))
    rounded = ((bits >> DROPPED) << DROPPED).to(tl.float32, bitcast=True)
    # of a NaN the sum may carry into the sign
    return tl.where(tl.abs(x) < float("inf"), rounded, x)


@triton.jit
def part(x, WHICH: tl.constexpr):
    """Part 0, 1 or 2 of x, float32 but exact in bfloat16; of what is not finite part 0 is all, the others 0."""
    high = nearest(x, 16)
    if WHICH == 0:
        return high
    rest = tl.where(tl.abs(high) < float("inf"), x - high, 0.0)
    middle = nearest(rest, 16)
    if WHICH == 1:
        return middle
    return rest - middle


@triton.jit
def factor(x, HOW: tl.constexpr, WHICH: tl.constexpr):
    """What the products read of a feature: itself, rounded to tf32, or one part of it."""
    if HOW == TF32:
        return nearest(x, 13)
    if HOW == SPLIT:
        return part(x, WHICH)
    return x


@triton.jit
def add(total, x):
    """``total + x``, rounded to nearest. A plain sum would be taken into the tensor cores' own, which truncate."""
    return tl.fma(x, tl.full(x.shape, 1.0, tl.float32), total)


@kernel
@triton.jit(do_not_specialize=["length"])
def divide(
    x, out, length, depth, span, stride, out_stride, HOW: tl.constexpr, PARTS: tl.constexpr, LINES: tl.constexpr,
    BD: tl.constexpr,
):  # fmt: skip
    """Factors of x (length, depth) to out (length, PARTS span), part beside part, zeros from depth to span."""
    i = tl.program_id(0).to(tl.int64) * LINES + tl.arange(0, LINES)
    k = tl.program_id(1) * BD + tl.arange(0, BD)
    value = tl.load(x + i[:, None] * stride + k[None, :], mask=(i < length)[:, None] & (k < depth)[None, :], other=0.0)
    at = out + i[:, None] * out_stride + k[None, :]
    inside = (i < length)[:, None] & (k < span)[None, :]
    for which in tl.static_range(PARTS):
        tl.store(at + which * span, factor(value, HOW, which).to(out.dtype.element_ty), mask=inside)


@triton.jit
def store_parts(to, row, column, value):
    """A tile to the first of three descriptors, in its dtype; or its parts to as many as there are."""
    g, middle, low = to
    if middle is None:
        g.store([row, column], value.to(g.dtype))
    else:
        g.store([row, column], part(value, 0).to(g.dtype))
        middle.store([row, column], part(value, 1).to(g.dtype))
        if low is not None:
            low.store([row, column], part(value, 2).to(g.dtype))


@triton.jit
def scatter_parts(to, at, value, inside):
    """The same to pointers, ``value`` float32."""
    g, middle, low = to
    if middle is None:
        tl.store(g + at, value.to(g.dtype.element_ty), mask=inside)
    else:
        tl.store(g + at, part(value, 0).to(g.dtype.element_ty), mask=inside)
        tl.store(middle + at, part(value, 1).to(g.dtype.element_ty), mask=inside)
        if low is not None:
            tl.store(low + at, part(value, 2).to(g.dtype.element_ty), mask=inside)
