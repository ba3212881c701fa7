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
    """``acc alpha``, rounded to float32 before anything is added to it, by the forward as by the backward.

    A compiler makes one fused operation of a product and a difference. Near the top of large logits the difference is
    exact; of an unrounded product it would be off by half an ulp of the logit in one of the two passes.
    """
    if _PTX:
        return tl.inline_asm_elementwise(
            "mul.rn.f32 $0, $1, $2;", "=f,f,f", [acc, alpha], dtype=tl.float32, is_pure=True, pack=1
        )
    return acc * alpha


@triton.jit
def binary_orders(scale):
    """The factor that turns logits ``scale dot`` into ALPHA dot, float64: log2 e but for the rounding of ALPHA.

    Turned to and fro by this factor and not by log2 e, a logit is the same number in the forward and in the backward.
    """
    alpha = (scale * LOG2E).to(tl.float64)
    usable = (scale != 0.0) & (tl.abs(alpha) < float("inf"))
    return tl.where(usable, alpha / tl.where(usable, scale, 1.0).to(tl.float64), LOG2E)


@triton.jit
def log1p(y):
    """``log(1 + y)`` of float64 y from 0 to 1, to full relative accuracy."""
    w = 1.0 + y
    exact = w == 1.0
    # what 1 + y has lost, its logarithm has lost in proportion
    return tl.where(exact, y, tl.log(w) * (y / tl.where(exact, 1.0, w - 1.0)))


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
    """``log(exp a + exp b)`` in float64: -inf of two -inf, NaN of a NaN."""
    high, low = tl.maximum(a, b), tl.minimum(a, b)
    bounded = tl.abs(high) < float("inf")
    total = tl.where(bounded, high + log1p(tl.exp(tl.where(bounded, low - high, 0.0))), high)
    return tl.where((a != a) | (b != b), a + b, total)


@triton.jit
def split(x):
    """Float64 x as a float32 and the rest, which is 0 where it is a mere rounding of x.

    A rest beyond 64 in size goes with nothing: where float32 numbers lie that far apart, a log-sum-exp has as its
    nearest one its largest term.
    """
    high = x.to(tl.float32)
    low = x - high.to(tl.float64)
    # NaN and what is infinite have no rest
    counts = (tl.abs(high) < float("inf")) & (tl.abs(low) > tl.abs(high).to(tl.float64) * 9.094947017729282e-13)
    return high, tl.minimum(tl.maximum(tl.where(counts, low, 0.0), -64.0), 64.0)


@triton.jit
def bias_of(bias):
    """The bias in float64, 0 where there is none."""
    return 0.0 if bias is None else tl.load(bias).to(tl.float64)
