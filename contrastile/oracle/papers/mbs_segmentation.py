"""Micro-Batch Streaming (Piao et al., 2021), Eq. 18-20: the segmentation losses, and what streams exactly.

Letters: A (n, pixels) holds the ground truth of n images, 0 or 1; B (n, pixels) what the model predicts, in (0, 1).
|A and B| is sum A B, and |A| a sum. The Dice coefficient is a ratio of sums: over many images at once it is no mean of
terms of one image each, and no weighing of micro-batches makes it exact. Two things are: one ratio an image, averaged;
or two passes, the sums first. Where A and B are both 0 throughout, Eq. 18 is 0 / 0.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from collections.abc import Sequence

FloatArray = NDArray[np.float64]
IndexArray = NDArray[np.int64]


def dice_coefficient(A: FloatArray, B: FloatArray) -> float:
    """MBS Eq. 18: DC = 2 |A and B| / (|A| + |B|), over all pixels given.

    Args:
        A: ground truth, (n, pixels).
        B: prediction, (n, pixels).

    Returns:
        The coefficient, in [0, 1].
    """
    return float(2.0 * (A * B).sum() / (A.sum() + B.sum()))


def dice_loss(A: FloatArray, B: FloatArray) -> float:
    """MBS Eq. 19: L_dc = 1 - DC.

    Args:
        A: ground truth, (n, pixels).
        B: prediction, (n, pixels).

    Returns:
        The loss, in [0, 1].
    """
    return 1.0 - dice_coefficient(A, B)


def dice_loss_gradient(A: FloatArray, B: FloatArray) -> FloatArray:
    """Gradient of MBS Eq. 19 by B: with X = |A and B| and Y = |A| + |B|, 2 X / Y^2 - 2 A / Y.

    Args:
        A: ground truth, (n, pixels).
        B: prediction, (n, pixels).

    Returns:
        (n, pixels).
    """
    X, Y = float((A * B).sum()), float(A.sum() + B.sum())
    return 2.0 * X / (Y * Y) - 2.0 * A / Y


def binary_cross_entropy(A: FloatArray, B: FloatArray) -> float:
    """MBS Eq. 20, first term: L_bce = -mean over pixels of A log B + (1 - A) log(1 - B).

    Args:
        A: ground truth, (n, pixels).
        B: prediction, (n, pixels), strictly between 0 and 1.

    Returns:
        The loss, a float.
    """
    return -float((A * np.log(B) + (1.0 - A) * np.log1p(-B)).sum() / A.size)


def binary_cross_entropy_gradient(A: FloatArray, B: FloatArray) -> FloatArray:
    """Gradient of MBS Eq. 20's first term by B: (B - A) / (B (1 - B)), over the number of pixels.

    Args:
        A: ground truth, (n, pixels).
        B: prediction, (n, pixels), strictly between 0 and 1.

    Returns:
        (n, pixels).
    """
    return (B - A) / (B * (1.0 - B)) / A.size


def total_loss(A: FloatArray, B: FloatArray) -> float:
    """MBS Eq. 20: L_total = L_bce + L_dc.

    Args:
        A: ground truth, (n, pixels).
        B: prediction, (n, pixels), strictly between 0 and 1.

    Returns:
        The loss, a float.
    """
    return binary_cross_entropy(A, B) + dice_loss(A, B)


def image_dice_loss(A: FloatArray, B: FloatArray) -> float:
    """MBS Eq. 19, one ratio an image, averaged: separable, so Alg. 1 streams it exactly.

    Args:
        A: ground truth, (n, pixels).
        B: prediction, (n, pixels).

    Returns:
        The loss, in [0, 1].
    """
    return sum(dice_loss(A[i : i + 1], B[i : i + 1]) for i in range(len(A))) / len(A)


def image_dice_loss_gradient(A: FloatArray, B: FloatArray) -> FloatArray:
    """Gradient by B of MBS Eq. 19 with one ratio an image, averaged.

    Args:
        A: ground truth, (n, pixels).
        B: prediction, (n, pixels).

    Returns:
        (n, pixels).
    """
    return np.concatenate([dice_loss_gradient(A[i : i + 1], B[i : i + 1]) for i in range(len(A))]) / len(A)


def streamed_dice_loss_gradient(A: FloatArray, B: FloatArray, micro: Sequence[IndexArray]) -> FloatArray:
    """MBS Eq. 19's gradient by B over the whole mini-batch, streamed exactly in two passes: the sums, then the ratio.

    Args:
        A: ground truth, (N_B, pixels).
        B: prediction, (N_B, pixels).
        micro: N_S arrays of image indices.

    Returns:
        (N_B, pixels).
    """
    X = sum(float((A[micro_j] * B[micro_j]).sum()) for micro_j in micro)
    Y = sum(float(A[micro_j].sum() + B[micro_j].sum()) for micro_j in micro)
    dB = np.empty_like(B)
    for micro_j in micro:
        dB[micro_j] = 2.0 * X / (Y * Y) - 2.0 * A[micro_j] / Y
    return dB
