"""GradCache's mistakes, as printed: shared targets, the temperature, the multi-GPU mean, what "exact" covers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from contrastile.oracle.arrays import FloatArray, IntArray
from contrastile.oracle.papers.collectives import data_parallel_mean
from contrastile.oracle.papers.gradcache import (
    Tower,
    accumulate,
    graphless_forward,
    local_gradients,
    loss,
    normalized_similarity,
    representation_gradient_cache,
)


def positives_of_targets(F: FloatArray, r: IntArray, n: int) -> FloatArray:
    """GradCache Eq. 7 as printed: epsilon_j = f(s_k) for one k with r_k = j (here the first), else 0.

    F: anchors' representations, (|S|, d); r: target of each anchor, (|S|,); n: the number of targets, |T|. Returns
    epsilon, (|T|, d): right only if no two anchors share a target.
    """
    epsilon = np.zeros((n, F.shape[1]))
    targets, first = np.unique(r, return_index=True)
    epsilon[targets] = F[first]
    return epsilon


def target_gradient(F: FloatArray, G: FloatArray, r: IntArray, tau: float) -> FloatArray:
    """GradCache Eq. 6 with Eq. 7 as printed: shared targets lose all positives but one.

    F: anchors' representations, (|S|, d); G: targets' representations, (|T|, d); r: target of each anchor, (|S|,); tau:
    temperature. Returns (|T|, d).
    """
    p = normalized_similarity(F @ G.T, tau)
    return -(positives_of_targets(F, r, len(G)) - p.T @ F) / (len(F) * tau)


def anchor_gradient(F: FloatArray, G: FloatArray, r: IntArray, tau: float) -> FloatArray:
    """GradCache Eq. 5 as printed: tau "only adds a constant multiplier", p being Eq. 2's, which has no tau.

    F: anchors' representations, (|S|, d); G: targets' representations, (|T|, d); r: target of each anchor, (|S|,); tau:
    temperature. Returns (|S|, d): right only at tau = 1.
    """
    p = normalized_similarity(F @ G.T, 1.0)
    return -(G[r] - p @ G) / (len(F) * tau)


def multi_gpu_step(f: Sequence[Tower], g: Sequence[Tower], r: IntArray, tau: float) -> tuple[FloatArray, FloatArray]:
    """GradCache Sec. 3.4, Step 4 as printed: reduction "as with standard parallel training", DDP's mean, gives 1/N.

    f: anchors' towers, one per rank; g: targets' towers, one per rank; r: target of each anchor, indices into the
    gathered batch, (|S|,); tau: temperature. Returns dTheta and dLambda, each 1/N of the gradient.
    """
    dTheta, dLambda = local_gradients(f, g, r, tau)
    return data_parallel_mean(dTheta), data_parallel_mean(dLambda)


def large_batch_step(f: Tower, g: Tower, r: IntArray, tau: float) -> tuple[float, FloatArray, FloatArray]:
    """The large batch whose "exact same gradient update" GradCache (v2) Sec. 1 and 6 claim: each side encoded whole.

    It runs in the first state. With BatchNorm it is a different function from the chunked run; with dropout, another
    draw.

    f: the anchors' tower; its sub-batches are joined; g: the targets' tower; likewise; r: target of each anchor,
    (|S|,); tau: temperature. Returns the loss, dTheta and dLambda.
    """
    whole_f = replace(f, sizes=(len(f.inputs),), states=f.states[:1])
    whole_g = replace(g, sizes=(len(g.inputs),), states=g.states[:1])
    F, G = graphless_forward(whole_f), graphless_forward(whole_g)
    u, v = representation_gradient_cache(F, G, r, tau)
    return loss(F, G, r, tau), accumulate(whole_f, u), accumulate(whole_g, v)


def step(
    f: Tower, g: Tower, r: IntArray, tau: float, states_f: tuple[int, ...], states_g: tuple[int, ...]
) -> tuple[float, FloatArray, FloatArray]:
    """GradCache (v2) Sec. 3.3 as printed: Step 3 runs on the random states that come next, not on Step 1's.

    f: the anchors' tower, with the states of Step 1; g: the targets' tower, with the states of Step 1; r: target of
    each anchor, (|S|,); tau: temperature; states_f: random states of f's sub-batches in Step 3; states_g: the same for
    g. Returns the loss, and dTheta and dLambda: with dropout, the gradient of no loss.
    """
    F, G = graphless_forward(f), graphless_forward(g)
    u, v = representation_gradient_cache(F, G, r, tau)
    return (
        loss(F, G, r, tau),
        accumulate(replace(f, states=states_f), u),
        accumulate(replace(g, states=states_g), v),
    )
