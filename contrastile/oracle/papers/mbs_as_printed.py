"""Micro-Batch Streaming's mistakes, as printed: every equation that supposes N_B = N_S N_mu, Alg. 1, and Dice."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from contrastile.oracle.arrays import FloatArray, IntArray
from contrastile.oracle.papers.mbs import accumulated_gradient, mini_batch_gradient, split, summed_loss
from contrastile.oracle.papers.mbs_segmentation import dice_loss_gradient


def mini_batch_size(N_S: int, N_mu: int) -> int:
    """MBS Eq. 6 as printed: N_B = N_S N_mu, although Alg. 1 rounds N_S up.

    N_S: number of micro-batches; N_mu: micro-batch size. Returns N_B, too large unless N_mu divides it.
    """
    return N_S * N_mu


def mean_loss(L: FloatArray, micro: Sequence[IntArray], N_mu: int) -> float:
    """MBS Eq. 8 as printed: 1/(N_S N_mu) sum_j sum_k L_{j,k}.

    L: the samples' losses, (N_B,); micro: N_S arrays of sample indices; N_mu: micro-batch size. Returns a float, too
    small unless N_mu divides N_B.
    """
    return summed_loss(L, micro) / mini_batch_size(len(micro), N_mu)


def gradient_of_mean(dL: FloatArray, micro: Sequence[IntArray], N_mu: int) -> FloatArray:
    """MBS Eq. 10, 11, 16 and 17 as printed: d(1/(N_S N_mu) sum_j sum_k L_{j,k}), the same sum four times.

    dL: the samples' gradients, (N_B, P); micro: N_S arrays of sample indices; N_mu: micro-batch size. Returns (P,).
    """
    total = accumulated_gradient(np.stack([dL[micro_j].sum(axis=0) for micro_j in micro]))
    return total / mini_batch_size(len(micro), N_mu)


def gradient_of_micro_losses(dL_mu: FloatArray) -> FloatArray:
    """MBS Eq. 12 as printed: d(1/N_S sum_j L_mu_j); a mean of means, which is not Eq. 11 when L_mu_j is over n_j.

    dL_mu: gradients of the micro-batches' mean losses, (N_S, P). Returns (P,).
    """
    return mini_batch_gradient(dL_mu)


def normalized_loss(L_mu_j: float, N_S: int) -> float:
    """MBS Eq. 14 as printed: L_norm_j = (1/N_S) L_mu_j.

    L_mu_j: mean loss of the micro-batch; N_S: number of micro-batches. Returns Its part of the mini-batch's loss, right
    only if n_j = N_B / N_S.
    """
    return 1.0 / N_S * L_mu_j


def normalized_gradient(dL_mu: FloatArray) -> FloatArray:
    """MBS Eq. 15 as printed: sum_j d((1/N_S) L_mu_j).

    dL_mu: gradients of the micro-batches' mean losses, (N_S, P). Returns (P,).
    """
    return accumulated_gradient(1.0 / len(dL_mu) * dL_mu)


def algorithm_1(
    loss_and_gradient: Callable[[IntArray], tuple[float, FloatArray]], N_B: int, N_mu: int
) -> tuple[float, FloatArray]:
    """MBS Alg. 1 as printed: every micro-batch's loss over N_S, however few samples it holds.

    loss_and_gradient: samples' indices -> their loss, and its gradient (P,); N_B: samples in the mini-batch; N_mu: the
    micro-batch size asked for. Returns the accumulated loss and gradient.
    """
    micro = split(N_B, N_mu)
    L, grad = 0.0, np.zeros(())
    for micro_j in micro:
        L_mu_j, dL_mu_j = loss_and_gradient(micro_j)
        L = L + normalized_loss(L_mu_j, len(micro))
        grad = grad + dL_mu_j / len(micro)
    return L, grad


def streamed_dice_loss_gradient(A: FloatArray, B: FloatArray, micro: Sequence[IntArray]) -> FloatArray:
    """MBS Eq. 19 under Alg. 1, as printed: each micro-batch's own Dice loss, over N_S.

    A: ground truth, (N_B, pixels); B: prediction, (N_B, pixels); micro: N_S arrays of image indices. Returns Gradient
    by B, (N_B, pixels): not that of the mini-batch's Dice loss, even if micro-batches are equal.
    """
    dB = np.empty_like(B)
    for micro_j in micro:
        dB[micro_j] = dice_loss_gradient(A[micro_j], B[micro_j]) / len(micro)
    return dB
