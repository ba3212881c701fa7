# pyright: reportOperatorIssue=false, reportGeneralTypeIssues=false
# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
"""Float32 numbers for tensor cores: rounded to nearest tf32, or as sums of parts that bfloat16 holds exactly.

A float32 has 24 bits. In ``x = x0 + x1 + x2`` each part has 8 of them, so that the parts are exact in bfloat16 and
``|x1| <= 2^-8 |x|``, ``|x2| <= 2^-17 |x|``. The product of two such sums is computed as six of its nine products, the
smallest first. The others amount to ``2 2^-8 2^-17 + 2^-34 < 2^-23.9`` of |x y|: as much as one rounding of each factor
to float32. With two parts ``x - x0 - x1`` is at most 2^-17 |x|, and three products leave out at most 2^-14.9 of |x y|.

Tensor cores truncate each sum towards 0: a sum of 8192 terms of one sign loses 3e-5 of itself. The sum of a logit has
as many terms as features are wide. A sum over all columns or rows leaves the tensor cores every few terms: ``add``.
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

# number of parts -> the parts of G and of the features that the host multiplies, smallest products first
PRODUCTS = {1: [(0, 0)], 2: [(1, 0), (0, 1), (0, 0)], 3: [(2, 0), (1, 1), (0, 2), (1, 0), (0, 1), (0, 0)]}

# how a kernel turns features into the factors of its products: see ``factor``
PLAIN = tl.constexpr(0)
TF32 = tl.constexpr(1)
SPLIT = tl.constexpr(2)

# the interpreter computes wrong products of bfloat16; float32 also holds the parts exactly
PART = tl.constexpr(tl.float32 if INTERPRETED else tl.bfloat16)


@triton.jit
def nearest(x, DROPPED: tl.constexpr):
    """The number nearest to x whose last DROPPED bits are 0, ties away from zero: 13 for tf32, 16 for bfloat16."""
    bits = x.to(tl.int32, bitcast=True) + (1 << (DROPPED - 1))
    rounded = ((bits >> DROPPED) << DROPPED).to(tl.float32, bitcast=True)
    # NaN stays: its sum above may carry into the sign
    return tl.where(tl.abs(x) < float("inf"), rounded, x)


@triton.jit
def part(x, WHICH: tl.constexpr):
    """Part 0, 1 or 2 of x, float32 but exact in bfloat16. If x is not finite, part 0 is x and the others are 0."""
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
    """What the products take for a feature x: x itself, x rounded to tf32, or part WHICH of x."""
    if HOW == TF32:
        return nearest(x, 13)
    if HOW == SPLIT:
        return part(x, WHICH)
    return x


@triton.jit
def add(total, x):
    """``total + x``, rounded to nearest. The compiler would let the tensor cores add a plain sum, and they truncate."""
    return tl.fma(x, tl.full(x.shape, 1.0, tl.float32), total)


@kernel
@triton.jit(do_not_specialize=["length"])
def divide(
    x, out, length, depth, span, stride, out_stride, HOW: tl.constexpr, PARTS: tl.constexpr, LINES: tl.constexpr,
    BD: tl.constexpr,
):  # fmt: skip
    """Write factors of x (length, depth) to out (length, PARTS span): parts side by side, zeros from depth to span."""
    i = tl.program_id(0).to(tl.int64) * LINES + tl.arange(0, LINES)
    k = tl.program_id(1) * BD + tl.arange(0, BD)
    value = tl.load(x + i[:, None] * stride + k[None, :], mask=(i < length)[:, None] & (k < depth)[None, :], other=0.0)
    pointers = out + i[:, None] * out_stride + k[None, :]
    inside = (i < length)[:, None] & (k < span)[None, :]
    for which in tl.static_range(PARTS):
        tl.store(pointers + which * span, factor(value, HOW, which).to(out.dtype.element_ty), mask=inside)


@triton.jit
def store_parts(out, row, column, value):
    """Store a tile through the descriptors (g, middle, low): in g's dtype if middle is None, else in parts."""
    g, middle, low = out
    if middle is None:
        g.store([row, column], value.to(g.dtype))
    else:
        g.store([row, column], part(value, 0).to(g.dtype))
        middle.store([row, column], part(value, 1).to(g.dtype))
        if low is not None:
            low.store([row, column], part(value, 2).to(g.dtype))


@triton.jit
def scatter_parts(out, offsets, value, inside):
    """Store float32 values through pointers (g, middle, low), whole or in parts: see ``store_parts``."""
    g, middle, low = out
    if middle is None:
        tl.store(g + offsets, value.to(g.dtype.element_ty), mask=inside)
    else:
        tl.store(g + offsets, part(value, 0).to(g.dtype.element_ty), mask=inside)
        tl.store(middle + offsets, part(value, 1).to(g.dtype.element_ty), mask=inside)
        if low is not None:
            tl.store(low + offsets, part(value, 2).to(g.dtype.element_ty), mask=inside)
