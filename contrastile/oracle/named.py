"""The losses by name: each chooses weights, targets and admitted pairs for the general form.

Features are used as given: normalise them first. `scale` is 1 / temperature.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from contrastile.oracle.arrays import FloatArray, IntArray, float64
from contrastile.oracle.general import gradient_of_logits, gradients, logits, loss
from contrastile.oracle.pairs import Match, Pairs, column_target_weights, target_weights
from contrastile.oracle.sigmoid import gradient_of_sigmoid_logits, sigmoid_loss


class LossAndGradients(NamedTuple):
    """A loss with its gradients.

    d_rows: (m, d); d_columns: (n, d), or (0, d) where rows and columns are one and the same array; d_scale: the
    scale's own shape, () or (m,); d_bias: a number.
    """

    loss: float
    d_rows: FloatArray
    d_columns: FloatArray
    d_scale: FloatArray
    d_bias: float


def info_nce(
    q: npt.ArrayLike,
    k: npt.ArrayLike,
    scale: npt.ArrayLike,
    bias: float = 0.0,
    *,
    positives: IntArray | None = None,
    row_ids: IntArray | None = None,
    column_ids: IntArray | None = None,
    match: Match = "drop",
) -> LossAndGradients:
    """mean_i (L_i - sum_j y_ij x_ij): one direction, rows to columns (Inf-CL Eq. 1).

    q: (m, d); k: (n, d), more columns than rows are hard negatives or a queue; scale: a number or (m,).
    positives: (m,), each in 0..n-1; by default row i's is column i. Ids and `match` as in `Pairs`.
    """
    q, k = float64(q), float64(k)
    m = len(q)
    if positives is None:
        positives = np.arange(m)
    pairs = Pairs(positives, row_ids, column_ids, match)
    return _softmax_loss(q, k, scale, bias, pairs, u=np.ones(m) / m, v=None)


def clip(
    I: npt.ArrayLike,
    T: npt.ArrayLike,
    scale: npt.ArrayLike,
    bias: float = 0.0,
    *,
    row_ids: IntArray | None = None,
    column_ids: IntArray | None = None,
    match: Match = "drop",
) -> LossAndGradients:
    """The symmetric loss, half of image-to-text plus half of text-to-image (DisCo Eq. 1, halved as in its Alg. 1).

    I, T: (b, d), row i of each is a pair; scale: a number or (b,). Ids and `match` as in `Pairs`.
    """
    I, T = float64(I), float64(T)
    b = len(I)
    half = np.ones(b) / (2 * b)
    return _softmax_loss(I, T, scale, bias, Pairs(np.arange(b), row_ids, column_ids, match), u=half, v=half)


def nt_xent(view_a: npt.ArrayLike, view_b: npt.ArrayLike, scale: npt.ArrayLike) -> LossAndGradients:
    """SimCLR's NT-Xent: 2b rows against the same 2b columns, each except itself; the other view is its positive.

    view_a, view_b: (b, d); scale: a number or (2b,). d_rows is view_a's gradient, d_columns view_b's.
    """
    view_a, view_b = float64(view_a), float64(view_b)
    b = len(view_a)
    z = np.concatenate([view_a, view_b])
    itself = np.arange(2 * b)
    pairs = Pairs(positives=np.roll(itself, -b), excluded=itself)
    found = _softmax_loss(z, z, scale, 0.0, pairs, u=np.ones(2 * b) / (2 * b), v=None)
    dz = found.d_rows + found.d_columns
    return found._replace(d_rows=dz[:b], d_columns=dz[b:])


def sup_con(features: npt.ArrayLike, labels: IntArray, scale: npt.ArrayLike) -> LossAndGradients:
    """SupCon's L_out: every other row of the same label is a positive, of weight 1/|P(i)|.

    features: (m, d); labels: (m,); scale: a number or (m,). The mean is over the rows that have a positive; the
    others weigh 0 and serve as negatives only. d_rows is the whole gradient of features, d_columns is (0, d).
    """
    z = float64(features)
    m = len(z)
    pairs = Pairs(row_ids=labels, column_ids=labels, match="target", excluded=np.arange(m))
    anchors = pairs.positive(m, m).any(axis=1)
    u = float64(anchors / max(int(anchors.sum()), 1))
    found = _softmax_loss(z, z, scale, 0.0, pairs, u=u, v=None)
    return found._replace(d_rows=found.d_rows + found.d_columns, d_columns=z[:0])


def siglip(
    I: npt.ArrayLike,
    T: npt.ArrayLike,
    scale: npt.ArrayLike,
    bias: float,
    *,
    row_ids: IntArray | None = None,
    column_ids: IntArray | None = None,
    match: Match = "drop",
) -> LossAndGradients:
    """SigLIP: sum over all admitted pairs of softplus(-z_ij x_ij), over the batch size.

    I, T: (b, d), row i of each is a pair; scale: a number or (b,). Ids and `match` as in `Pairs`.
    """
    I, T = float64(I), float64(T)
    b = len(I)
    pairs = Pairs(np.arange(b), row_ids, column_ids, match)
    x, P, A = logits(I, T, scale, bias), pairs.positive(b, b), pairs.admitted(b, b)
    divisor = max(b, 1)
    G = gradient_of_sigmoid_logits(x, P, divisor, A)
    return LossAndGradients(sigmoid_loss(x, P, divisor, A), *gradients(I, T, scale, G))


def _softmax_loss(
    q: FloatArray,
    k: FloatArray,
    scale: npt.ArrayLike,
    bias: float,
    pairs: Pairs,
    u: FloatArray,
    v: FloatArray | None,
) -> LossAndGradients:
    """The general loss on these weights and pairs; v None for one direction."""
    m, n = len(q), len(k)
    x, P, A = logits(q, k, scale, bias), pairs.positive(m, n), pairs.admitted(m, n)
    y, y_c = target_weights(P), column_target_weights(P)
    G = gradient_of_logits(x, A, u, v, y, y_c)
    return LossAndGradients(loss(x, A, u, v, y, y_c), *gradients(q, k, scale, G))
