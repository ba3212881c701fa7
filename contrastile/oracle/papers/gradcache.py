"""GradCache (Gao & Zhang, 2021; Gao et al., 2021), Eq. 1-9 and Sec. 3.3-3.4, as corrected.

v1 is the first version ("... with Almost Constant Peak Memory Usage"), v2 the workshop paper ("... under Memory Limited
Setup"). They number alike but for p: v1 has it in Eq. 2 and the chain rules in Eq. 3-4, v2 has the chain rules in
Eq. 2-3 and p in Eq. 4. Plain numbers below are v1's.

Letters: F = f(S) is (|S|, d), G = g(T) is (|T|, d), r_i is the target of anchor i, u and v are the cached gradients of
F and G. Both papers derive at tau = 1; here tau is kept throughout. Eq. 10-13 are in `gradcache_distance`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from contrastile.oracle.arrays import FloatArray, IntArray
from contrastile.oracle.general import lse
from contrastile.oracle.papers.collectives import data_parallel_mean, row_slices


@dataclass(frozen=True)
class Encoder:
    """f or g, both with a given random state, or a deep distance Phi: a forward pass and its vector-Jacobian product.

    Attributes:
        forward: (parameters, inputs (n, ...), state) -> representations (n, d); (Omega, F, G) -> distances (m, n).
        vjp: the same and u -> gradient of <u, representations> by the parameters; of <u, distances> by Omega, F and G.
    """

    forward: Callable[..., FloatArray]
    vjp: Callable[..., Any]


@dataclass(frozen=True)
class Tower:
    """An encoder with its parameters and its side of the batch, cut into sub-batches.

    Attributes:
        encoder: f or g.
        parameters: Theta or Lambda.
        inputs: S or T, (n, ...).
        sizes: rows of each sub-batch, with sum n.
        states: random state of each sub-batch, used by the first forward and replayed by the second.
    """

    encoder: Encoder
    parameters: FloatArray
    inputs: FloatArray
    sizes: tuple[int, ...]
    states: tuple[int, ...]


def loss_of_distances(d: FloatArray, r: IntArray, tau: float) -> float:
    """GradCache Eq. 1 over given d_ij: L = 1/|S| sum_i (log sum_j exp(d_ij / tau) - d_{i, r_i} / tau).

    d: similarities, (|S|, |T|); r: target of each anchor, (|S|,); tau: temperature. Returns the loss, a float.
    """
    x = d / tau
    return float((lse(x, axis=1) - x[np.arange(len(r)), r]).sum() / len(r))


def loss(F: FloatArray, G: FloatArray, r: IntArray, tau: float) -> float:
    """GradCache Eq. 1: L = -1/|S| sum_i log(exp(f(s_i)' g(t_{r_i}) / tau) / sum_j exp(f(s_i)' g(t_j) / tau)).

    F: (|S|, d); G: (|T|, d); r: (|S|,), each anchor's target; tau: temperature. Returns the loss, a float.
    """
    return loss_of_distances(F @ G.T, r, tau)


def normalized_similarity(d: FloatArray, tau: float) -> FloatArray:
    """GradCache Eq. 2 (v2: Eq. 4): p_ij = exp(d_ij / tau) / sum_j exp(d_ij / tau), d_ij = f(s_i)' g(t_j).

    d: similarities, (|S|, |T|); tau: temperature. Returns p, (|S|, |T|); rows sum to 1.
    """
    x = d / tau
    e = np.exp(x - x.max(axis=1, keepdims=True))
    p: FloatArray = e / e.sum(axis=1, keepdims=True)
    return p


def chain_rule(tower: Tower, u: FloatArray) -> FloatArray:
    """GradCache Eq. 3 and Eq. 4 (v2: Eq. 2 and Eq. 3): dL/dTheta = sum_i u_i df(s_i)/dTheta; Lambda likewise.

    tower: f or g with its inputs; its states and sizes are unused, each example runs alone, in state 0; u: gradients of
    the representations, (n, d). Returns the gradient of the tower's parameters.
    """
    total = np.zeros_like(tower.parameters)
    for i in range(len(u)):
        total += tower.encoder.vjp(tower.parameters, tower.inputs[i : i + 1], 0, u[i : i + 1])
    return total


def anchor_gradient(F: FloatArray, G: FloatArray, r: IntArray, tau: float) -> FloatArray:
    """GradCache Eq. 5: dL/df(s_i) = -(g(t_{r_i}) - sum_j p_ij g(t_j)) / (|S| tau), p at the same tau.

    F: (|S|, d); G: (|T|, d); r: (|S|,), each anchor's target; tau: temperature. Returns (|S|, d).
    """
    p = normalized_similarity(F @ G.T, tau)
    return -(G[r] - p @ G) / (len(F) * tau)


def target_gradient(F: FloatArray, G: FloatArray, r: IntArray, tau: float) -> FloatArray:
    """GradCache Eq. 6: dL/dg(t_j) = -(epsilon_j - sum_i p_ij f(s_i)) / (|S| tau), p at the same tau.

    F: (|S|, d); G: (|T|, d); r: (|S|,), each anchor's target; tau: temperature. Returns (|T|, d).
    """
    p = normalized_similarity(F @ G.T, tau)
    return -(positives_of_targets(F, r, len(G)) - p.T @ F) / (len(F) * tau)


def positives_of_targets(F: FloatArray, r: IntArray, n: int) -> FloatArray:
    """GradCache Eq. 7: epsilon_j = sum of f(s_k) over every k with r_k = j, and 0 where there is none.

    F: (|S|, d); r: (|S|,), each anchor's target; n: the number of targets, |T|. Returns epsilon, (|T|, d).
    """
    epsilon = np.zeros((n, F.shape[1]))
    np.add.at(epsilon, r, F)
    return epsilon


def graphless_forward(tower: Tower) -> FloatArray:
    """GradCache Sec. 3.3, Step 1: representations of every sub-batch, each under its own random state.

    tower: f or g with its inputs. Returns F or G, (n, d).
    """
    chunks = zip(row_slices(tower.sizes), tower.states, strict=True)
    return np.concatenate(
        [tower.encoder.forward(tower.parameters, tower.inputs[rows], state) for rows, state in chunks]
    )


def representation_gradient_cache(
    F: FloatArray, G: FloatArray, r: IntArray, tau: float
) -> tuple[FloatArray, FloatArray]:
    """GradCache Sec. 3.3, Step 2: u_i = dL/df(s_i) and v_j = dL/dg(t_j), (|S| + |T|) d numbers.

    F: (|S|, d); G: (|T|, d); r: (|S|,), each anchor's target; tau: temperature. Returns u (|S|, d) and v (|T|, d).
    """
    return anchor_gradient(F, G, r, tau), target_gradient(F, G, r, tau)


def accumulate(tower: Tower, u: FloatArray) -> FloatArray:
    """GradCache Eq. 8 and Eq. 9: dL/dTheta = sum over sub-batches of (sum_i u_i df(s_i)/dTheta); Lambda likewise.

    Each sub-batch runs again under the random state of its first forward.

    tower: f or g with its inputs, sub-batches and states; u: cached gradients of its representations, (n, d). Returns
    the gradient of the tower's parameters.
    """
    total = np.zeros_like(tower.parameters)
    for rows, state in zip(row_slices(tower.sizes), tower.states, strict=True):
        total += tower.encoder.vjp(tower.parameters, tower.inputs[rows], state, u[rows])
    return total


def step(f: Tower, g: Tower, r: IntArray, tau: float) -> tuple[float, FloatArray, FloatArray]:
    """GradCache Sec. 3.3, Steps 1-3: the gradient of the chunked run's loss, one sub-batch at a time.

    It is the large batch's gradient when a representation depends on its own example only.

    f: the anchors' tower; g: the targets' tower; r: target of each anchor, (|S|,); tau: temperature. Returns the loss,
    dTheta and dLambda.
    """
    F, G = graphless_forward(f), graphless_forward(g)
    u, v = representation_gradient_cache(F, G, r, tau)
    return loss(F, G, r, tau), accumulate(f, u), accumulate(g, v)


def local_gradients(
    f: Sequence[Tower], g: Sequence[Tower], r: IntArray, tau: float
) -> tuple[list[FloatArray], list[FloatArray]]:
    """GradCache Sec. 3.4, Steps 1-3: rank n back-propagates its own rows of the gathered batch's gradients.

    f: anchors' towers, one per rank, all with the same parameters; g: targets' towers, likewise; r: target of each
    anchor, indices into the gathered batch, (|S|,); tau: temperature. Returns each rank's dTheta and dLambda: their
    sums over ranks are the gradients.
    """
    F, G = [graphless_forward(tower) for tower in f], [graphless_forward(tower) for tower in g]
    u, v = representation_gradient_cache(np.concatenate(F), np.concatenate(G), r, tau)
    rows_f, rows_g = row_slices([len(x) for x in F]), row_slices([len(x) for x in G])
    return (
        [accumulate(tower, u[rows]) for tower, rows in zip(f, rows_f, strict=True)],
        [accumulate(tower, v[rows]) for tower, rows in zip(g, rows_g, strict=True)],
    )


def multi_gpu_step(f: Sequence[Tower], g: Sequence[Tower], r: IntArray, tau: float) -> tuple[FloatArray, FloatArray]:
    """GradCache Sec. 3.4, Step 4: dTheta and dLambda after DDP's mean, each rank's having been scaled by N.

    f: anchors' towers, one per rank; g: targets' towers, one per rank; r: target of each anchor, indices into the
    gathered batch, (|S|,); tau: temperature. Returns dTheta and dLambda, of the gathered batch's loss.
    """
    dTheta, dLambda = local_gradients(f, g, r, tau)
    N = len(f)
    return data_parallel_mean([N * x for x in dTheta]), data_parallel_mean([N * x for x in dLambda])
