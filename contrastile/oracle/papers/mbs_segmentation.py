"""Micro-Batch Streaming (Piao et al., 2021), Eq. 18 and 19: the Dice loss, and two ways to stream it exactly.

Letters: A (n, pixels) holds the ground truth of n images, 0 or 1; B (n, pixels) the prediction, in (0, 1). |A and B| is
sum A B, and |A| a sum. The Dice coefficient is a ratio of sums. Over several images it is not a mean of terms of one
image each, so no weights of the micro-batches make streaming exact. Two ways are exact: the mean of one ratio per
image, or two passes, of which the first computes the sums. Where A and B are both 0 everywhere, Eq. 18 is 0 / 0. The
cross-entropy that Eq. 20 adds is a mean over pixels, and streams exactly.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from contrastile.oracle.arrays import FloatArray, IntArray


def dice_coefficient(A: FloatArray, B: FloatArray) -> float:
    """MBS Eq. 18: DC = 2 |A and B| / (|A| + |B|), over all pixels given.

    A: ground truth, (n, pixels); B: prediction, (n, pixels). Returns the coefficient, in [0, 1].
    """
    return float(2.0 * (A * B).sum() / (A.sum() + B.sum()))


def dice_loss(A: FloatArray, B: FloatArray) -> float:
    """MBS Eq. 19: L_dc = 1 - DC.

    A: ground truth, (n, pixels); B: prediction, (n, pixels). Returns the loss, in [0, 1].
    """
    return 1.0 - dice_coefficient(A, B)


def dice_loss_gradient(A: FloatArray, B: FloatArray) -> FloatArray:
    """Gradient of MBS Eq. 19 by B: with X = |A and B| and Y = |A| + |B|, 2 X / Y^2 - 2 A / Y.

    A: ground truth, (n, pixels); B: prediction, (n, pixels). Returns (n, pixels).
    """
    X, Y = float((A * B).sum()), float(A.sum() + B.sum())
    return 2.0 * X / (Y * Y) - 2.0 * A / Y


def image_dice_loss(A: FloatArray, B: FloatArray) -> float:
    """MBS Eq. 19 with one ratio per image, averaged: separable, so Alg. 1 streams it exactly.

    A: ground truth, (n, pixels); B: prediction, (n, pixels). Returns the loss, in [0, 1].
    """
    return sum(dice_loss(A[i : i + 1], B[i : i + 1]) for i in range(len(A))) / len(A)


def image_dice_loss_gradient(A: FloatArray, B: FloatArray) -> FloatArray:
    """Gradient by B of MBS Eq. 19 with one ratio per image, averaged.

    A: ground truth, (n, pixels); B: prediction, (n, pixels). Returns (n, pixels).
    """
    return np.concatenate([dice_loss_gradient(A[i : i + 1], B[i : i + 1]) for i in range(len(A))]) / len(A)


def streamed_dice_loss_gradient(A: FloatArray, B: FloatArray, micro: Sequence[IntArray]) -> FloatArray:
    """MBS Eq. 19's gradient by B over the whole mini-batch, streamed exactly in two passes: the sums, then the ratio.

    A, B: (N_B, pixels), ground truth and prediction; micro: N_S arrays of image indices. Returns (N_B, pixels).
    """
    X = sum(float((A[micro_j] * B[micro_j]).sum()) for micro_j in micro)
    Y = sum(float(A[micro_j].sum() + B[micro_j].sum()) for micro_j in micro)
    dB = np.empty_like(B)
    for micro_j in micro:
        dB[micro_j] = 2.0 * X / (Y * Y) - 2.0 * A[micro_j] / Y
    return dB
