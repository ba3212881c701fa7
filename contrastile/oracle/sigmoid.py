"""The sigmoid loss (SigLIP): every pair is a yes-or-no question, so tiles add and there is no LSE."""

from __future__ import annotations

import numpy as np

from contrastile.oracle.arrays import BoolArray, FloatArray


@np.errstate(all="ignore")
def softplus(t: FloatArray) -> FloatArray:
    """log(1 + exp t) = max(t, 0) + log1p(exp(-|t|)), which neither overflows nor cancels.

    t: any shape. Returns the same shape.
    """
    return np.maximum(t, 0.0) + np.log1p(np.exp(-np.abs(t)))


@np.errstate(all="ignore")
def sigma(t: FloatArray) -> FloatArray:
    """1 / (1 + exp(-t)), to full relative precision even where it is tiny.

    t: any shape. Returns the same shape.
    """
    e = np.exp(-np.abs(t))
    # NaN compares false, and e is NaN with it, so NaN comes out of either branch.
    return np.where(t >= 0, 1.0, e) / (1.0 + e)


@np.errstate(all="ignore")
def sigmoid_terms(x: FloatArray, P: BoolArray, A: BoolArray) -> FloatArray:
    """softplus(-z_ij x_ij) on admitted pairs and 0 elsewhere; z = +1 on P, -1 elsewhere.

    x: (m, n); P, A: (m, n) bool. Returns (m, n).
    """
    return np.where(A, softplus(np.where(P, -x, x)), 0.0)


@np.errstate(all="ignore")
def gradient_of_sigmoid_logits(x: FloatArray, P: BoolArray, b: float, A: BoolArray) -> FloatArray:
    """G_ij = -z_ij sigma(-z_ij x_ij) / b on admitted pairs and 0 elsewhere, the input of `gradients`.

    x: (m, n); P, A: (m, n) bool; b: the divisor. Returns (m, n).
    """
    return np.where(A, np.where(P, -sigma(-x), sigma(x)) / b, 0.0)
