# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
"""Logits and log-sum-exps on the device: powers of two, two float32 parts, and what float64 functions Triton lacks."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from contrastile.backends.triton.configs import INTERPRETED

LOG2E = tl.constexpr(1.4426950408889634)

_PTX = tl.constexpr(not INTERPRETED and torch.version.hip is None)


@triton.jit
def rounded(acc, alpha):
    """``acc alpha`` rounded to float32, so that the forward and the backward pass add to the same number.

    A compiler fuses a product with the difference that follows. Near the top of large logits the difference is exact;
    with an unrounded product it would be off by half an ulp of the logit in one of the two passes.
    """
    if _PTX:
        return tl.inline_asm_elementwise(
            "mul.rn.f32 $0, $1, $2;", "=f,f,f", [acc, alpha], dtype=tl.float32, is_pure=True, pack=1
        )
    return acc * alpha


@triton.jit
def binary_orders(scale):
    """The factor that turns logits ``scale dot`` into ALPHA dot, float64: log2 e up to the rounding of ALPHA.

    Both passes convert by this factor instead of log2 e, so that a logit is the same number in both.
    """
    alpha = (scale * LOG2E).to(tl.float64)
    is_usable = (scale != 0.0) & (tl.abs(alpha) < float("inf"))
    return tl.where(is_usable, alpha / tl.where(is_usable, scale, 1.0).to(tl.float64), LOG2E)


@triton.jit
def log1p(y):
    """``log(1 + y)`` of float64 y from 0 to 1, to full relative accuracy."""
    w = 1.0 + y
    is_one = w == 1.0
    # y / (w - 1) corrects the logarithm for the rounding of w
    return tl.where(is_one, y, tl.log(w) * (y / tl.where(is_one, 1.0, w - 1.0)))


@triton.jit
def softplus(x):
    """``log(1 + exp x)`` of float64 x, to full relative accuracy."""
    return tl.maximum(x, 0.0) + log1p(tl.exp(-tl.abs(x)))


@triton.jit
def sigmoid(x):
    """``1 / (1 + exp(-x))`` of float64 x, to full relative accuracy."""
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def log_add(a, b):
    """``log(exp a + exp b)`` in float64; -inf for two -inf, NaN if either is NaN."""
    high, low = tl.maximum(a, b), tl.minimum(a, b)
    is_finite = tl.abs(high) < float("inf")
    total = tl.where(is_finite, high + log1p(tl.exp(tl.where(is_finite, low - high, 0.0))), high)
    return tl.where((a != a) | (b != b), a + b, total)


@triton.jit
def split(x):
    """Float64 x as a float32 and the rest; the rest is 0 where it is only the rounding error of x.

    The rest is at most 64 in size. Where float32 numbers lie further apart, the one nearest to a log-sum-exp is its
    largest term.
    """
    high = x.to(tl.float32)
    low = x - high.to(tl.float64)
    # NaN and infinities have no rest
    has_rest = (tl.abs(high) < float("inf")) & (tl.abs(low) > tl.abs(high).to(tl.float64) * 9.094947017729282e-13)
    return high, tl.minimum(tl.maximum(tl.where(has_rest, low, 0.0), -64.0), 64.0)


@triton.jit
def bias_of(bias):
    """The bias in float64, 0 if there is none."""
    return 0.0 if bias is None else tl.load(bias).to(tl.float64)
