"""GradCache (Gao & Zhang, 2021; Gao et al., 2021), Eq. 10-13: a deep distance, the same in both versions.

Letters: Phi is the distance, Omega its parameters, d_ij = Phi(f(s_i), g(t_j)), and w_ij = dL/dd_ij its cached gradient.
In the loss d_ij replaces the dot product of Eq. 1. The grid of sub-batches need not be the encoders'.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from contrastile.oracle.arrays import FloatArray, IntArray
from contrastile.oracle.papers.collectives import row_slices
from contrastile.oracle.papers.gradcache import (
    Encoder,
    Tower,
    accumulate,
    graphless_forward,
    loss_of_distances,
    normalized_similarity,
)


def distances(
    Phi: Encoder,
    Omega: FloatArray,
    F: FloatArray,
    G: FloatArray,
    S: Sequence[slice],
    T: Sequence[slice],
) -> FloatArray:
    """GradCache Eq. 10: d_ij = Phi(f(s_i), g(t_j)), one pair of sub-batches at a time.

    Phi: the deep distance; Omega: its parameters; F: anchors' representations, (|S|, d); G: targets' representations,
    (|T|, d); S: sub-batches of the anchors; they need not be the encoder's; T: sub-batches of the targets. Returns d,
    (|S|, |T|).
    """
    return np.block([[Phi.forward(Omega, F[rows], G[columns]) for columns in T] for rows in S])


def distance_gradient_cache(d: FloatArray, r: IntArray, tau: float) -> FloatArray:
    """GradCache Sec. 5: w_ij = dL/dd_ij = (p_ij - [j = r_i]) / (|S| tau).

    d: distances, (|S|, |T|); r: target of each anchor, (|S|,); tau: temperature. Returns w, (|S|, |T|).
    """
    w = normalized_similarity(d, tau)
    w[np.arange(len(r)), r] -= 1.0
    return w / (len(r) * tau)


def distance_gradients(
    Phi: Encoder,
    Omega: FloatArray,
    F: FloatArray,
    G: FloatArray,
    w: FloatArray,
    S: Sequence[slice],
    T: Sequence[slice],
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Eq. 11-13: dL/dOmega = sum_ij w_ij dd_ij/dOmega, u_i = sum_j w_ij dd_ij/df(s_i), v_j = sum_i w_ij dd_ij/dg(t_j).

    They are accumulated over pairs of sub-batches. The arguments are those of `distances`, and w, the distance gradient
    cache, (|S|, |T|). Returns dOmega, u (|S|, d) and v (|T|, d).
    """
    dOmega, u, v = np.zeros_like(Omega), np.zeros_like(F), np.zeros_like(G)
    for rows in S:
        for columns in T:
            dOmega_b, u_b, v_b = Phi.vjp(Omega, F[rows], G[columns], w[rows, columns])
            dOmega += dOmega_b
            u[rows] += u_b
            v[columns] += v_b
    return dOmega, u, v


def deep_distance_step(
    f: Tower, g: Tower, Phi: Encoder, Omega: FloatArray, r: IntArray, tau: float
) -> tuple[float, FloatArray, FloatArray, FloatArray]:
    """GradCache Sec. 5: both caches linked, dL/dOmega (Eq. 11), then u and v (Eq. 12-13), then the encoders.

    f: the anchors' tower; g: the targets' tower; Phi: the deep distance; Omega: its parameters; r: target of each
    anchor, (|S|,); tau: temperature. Returns the loss, dTheta, dLambda and dOmega.
    """
    S, T = row_slices(f.sizes), row_slices(g.sizes)
    F, G = graphless_forward(f), graphless_forward(g)
    d = distances(Phi, Omega, F, G, S, T)
    w = distance_gradient_cache(d, r, tau)
    dOmega, u, v = distance_gradients(Phi, Omega, F, G, w, S, T)
    return loss_of_distances(d, r, tau), accumulate(f, u), accumulate(g, v), dOmega
