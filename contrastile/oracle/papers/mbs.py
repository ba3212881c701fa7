"""Micro-Batch Streaming (Piao et al., 2021), Eq. 1-17 and Alg. 1, as corrected: micro-batches of any size.

Letters: N_B samples in the mini-batch, micro-batch j holds n_j of them (the paper's N_mu, which supposes that all are
equal), N_S micro-batches; L (N_B,) are the samples' losses, dL (N_B, P) their gradients by the P parameters, and
dL_mu (N_S, P) those of the micro-batches' mean losses L_mu. Differentiation is linear, so the paper's gradient
equations are sums over dL. Eq. 9 repeats Eq. 5, and Eq. 17 ends at Eq. 10. Eq. 18 and 19 are in `mbs_segmentation`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from contrastile.oracle.arrays import FloatArray, IntArray


def mini_batch(micro: Sequence[IntArray]) -> IntArray:
    """MBS Eq. 1: the mini-batch is the union of its micro-batches.

    micro: N_S arrays of sample indices. Returns the samples' indices, sorted.
    """
    return np.unique(np.concatenate(micro))


def is_micro_batch(micro_j: IntArray, batch: IntArray) -> bool:
    """MBS Eq. 2: a micro-batch is a subset of its mini-batch.

    micro_j: sample indices of the micro-batch; batch: sample indices of the mini-batch. Returns whether it is.
    """
    return bool(np.isin(micro_j, batch).all())


def micro_batch_size(N_B: int, N_mu: int) -> int:
    """MBS Eq. 3: a micro-batch is no larger than its mini-batch, so the size asked for is cut to N_B (Alg. 1, 2-4).

    N_B: samples in the mini-batch; N_mu: the size asked for. Returns min(N_mu, N_B).
    """
    return min(N_mu, N_B)


def split(N_B: int, N_mu: int) -> list[IntArray]:
    """MBS Alg. 1, lines 2-6: ceil(N_B / N_mu) micro-batches, the last one with the remainder.

    N_B: samples in the mini-batch; N_mu: the size asked for. Returns N_S arrays of sample indices.
    """
    N_mu = micro_batch_size(N_B, N_mu)
    return [np.arange(low, min(low + N_mu, N_B), dtype=np.int64) for low in range(0, N_B, N_mu)]


def mini_batch_loss(L: FloatArray) -> float:
    """MBS Eq. 4: L_B = 1/N_B sum_i L_i.

    L: the samples' losses, (N_B,). Returns the mean, a float.
    """
    return float(L.sum() / len(L))


def mini_batch_gradient(dL: FloatArray) -> FloatArray:
    """MBS Eq. 5 and Eq. 9: grad w_B = d(1/N_B sum_i L_i).

    dL: the samples' gradients, (N_B, P). Returns (P,).
    """
    total: FloatArray = dL.sum(axis=0)
    return total / len(dL)


def mini_batch_size(sizes: Sequence[int]) -> int:
    """MBS Eq. 6: N_B = sum_j n_j.

    sizes: samples in each micro-batch, N_S integers. Returns N_B.
    """
    return sum(sizes)


def summed_loss(L: FloatArray, micro: Sequence[IntArray]) -> float:
    """MBS Eq. 7: sum_i L_i = sum_j sum_k L_{j,k}.

    L: the samples' losses, (N_B,); micro: N_S arrays of sample indices. Returns the sum, a float.
    """
    return sum(float(L[micro_j].sum()) for micro_j in micro)


def mean_loss(L: FloatArray, micro: Sequence[IntArray]) -> float:
    """MBS Eq. 8: 1/N_B sum_i L_i = 1/(sum_j n_j) sum_j sum_k L_{j,k}.

    L: the samples' losses, (N_B,); micro: N_S arrays of sample indices. Returns the mean, a float.
    """
    return summed_loss(L, micro) / mini_batch_size([len(micro_j) for micro_j in micro])


def gradient_of_mean(dL: FloatArray, micro: Sequence[IntArray]) -> FloatArray:
    """MBS Eq. 10 and Eq. 17: grad w_B = d(1/(sum_j n_j) sum_j sum_k L_{j,k}).

    dL: the samples' gradients, (N_B, P); micro: N_S arrays of sample indices. Returns (P,).
    """
    total = np.zeros(dL.shape[1])
    for micro_j in micro:
        total += dL[micro_j].sum(axis=0)
    return total / mini_batch_size([len(micro_j) for micro_j in micro])


def gradient_of_micro_means(dL: FloatArray, micro: Sequence[IntArray]) -> FloatArray:
    """MBS Eq. 11: grad w_B = d(1/N_B sum_j n_j (1/n_j sum_k L_{j,k})).

    dL: the samples' gradients, (N_B, P); micro: N_S arrays of sample indices. Returns (P,).
    """
    dL_mu = np.stack([mini_batch_gradient(dL[micro_j]) for micro_j in micro])
    return gradient_of_micro_losses(dL_mu, [len(micro_j) for micro_j in micro])


def gradient_of_micro_losses(dL_mu: FloatArray, sizes: Sequence[int]) -> FloatArray:
    """MBS Eq. 12: grad w_B = d(1/N_B sum_j n_j L_mu_j).

    dL_mu: (N_S, P), of the micro-batches' mean losses; sizes: samples in each of them, N_S. Returns (P,).
    """
    total: FloatArray = np.asarray(sizes, dtype=np.float64) @ dL_mu
    return total / mini_batch_size(sizes)


def accumulated_gradient(dL_mu: FloatArray) -> FloatArray:
    """MBS Eq. 13: grad w_accum = sum_j d(L_mu_j), which is not the mini-batch's gradient.

    dL_mu: gradients of the micro-batches' losses, (N_S, P). Returns (P,).
    """
    total: FloatArray = dL_mu.sum(axis=0)
    return total


def normalized_loss(L_mu_j: float, n_j: int, N_B: int) -> float:
    """MBS Eq. 14: L_norm_j = (n_j / N_B) L_mu_j, the micro-batch's share of the samples.

    L_mu_j: the micro-batch's mean loss; n_j: its samples. Returns its part of the mini-batch's loss.
    """
    return n_j / N_B * L_mu_j


def normalized_gradient(dL_mu: FloatArray, sizes: Sequence[int]) -> FloatArray:
    """MBS Eq. 15: sum_j d(L_norm_j) = sum_j d((n_j / N_B) L_mu_j).

    dL_mu: (N_S, P), of the micro-batches' mean losses; sizes: samples in each of them, N_S. Returns (P,).
    """
    share = np.asarray(sizes, dtype=np.float64) / mini_batch_size(sizes)
    return accumulated_gradient(share[:, None] * dL_mu)


def normalized_sample_gradient(dL: FloatArray, micro: Sequence[IntArray]) -> FloatArray:
    """MBS Eq. 16: sum_j d(L_norm_j) = sum_j d((n_j / N_B) (1 / n_j) sum_k L_{j,k}).

    dL: the samples' gradients, (N_B, P); micro: N_S arrays of sample indices. Returns (P,).
    """
    dL_mu = np.stack([mini_batch_gradient(dL[micro_j]) for micro_j in micro])
    return normalized_gradient(dL_mu, [len(micro_j) for micro_j in micro])


def algorithm_1(
    loss_and_gradient: Callable[[IntArray], tuple[float, FloatArray]], N_B: int, N_mu: int
) -> tuple[float, FloatArray]:
    """MBS Alg. 1: stream the micro-batches, weight each loss by its share n_j / N_B, accumulate.

    Exact when the loss is a mean of terms that each depend on one sample.

    loss_and_gradient: samples' indices -> their loss, and its gradient (P,); N_B: samples in the mini-batch; N_mu: the
    micro-batch size asked for. Returns the accumulated loss and gradient.
    """
    L, grad = 0.0, np.zeros(())
    for micro_j in split(N_B, N_mu):
        L_mu_j, dL_mu_j = loss_and_gradient(micro_j)
        L = L + normalized_loss(L_mu_j, len(micro_j), N_B)
        grad = grad + len(micro_j) / N_B * dL_mu_j
    return L, grad
