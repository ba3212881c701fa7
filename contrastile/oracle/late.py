"""Late interaction: a text is the vectors of its tokens, and a score is the sum of the query's largest dot products.

A maximum has no derivative where several tokens are equally near. The oracle gives the whole derivative to the first of
them; any other split among them is equally right.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from contrastile.oracle.arrays import BoolArray, FloatArray, float64
from contrastile.oracle.named import LossAndGradients, clip, info_nce


def scores(
    Q: npt.ArrayLike,
    D: npt.ArrayLike,
    query_mask: npt.ArrayLike | None = None,
    document_mask: npt.ArrayLike | None = None,
) -> tuple[FloatArray, FloatArray, BoolArray]:
    """``S_ij = sum_a max_b <q_ia, d_jb>`` over the tokens that count (ColBERT Eq. 3): -inf for a document without any.

    Q: (m, q, d); D: (n, t, d); masks: (m, q) and (n, t), nonzero where a token counts; by default all do. Returns the
    scores (m, n); the products (m, q, n, t), -inf where the document's token does not count; and a mask (m, q, n, t) of
    the largest products, the first of equal ones, False where the query's token does not count.
    """
    products = np.tensordot(float64(Q), float64(D), (2, 2))
    if document_mask is not None:
        products = np.where(np.not_equal(document_mask, 0), products, -np.inf)
    nearest: BoolArray = np.equal(np.arange(products.shape[3]), products.argmax(axis=3)[..., None])
    if query_mask is not None:
        nearest &= np.not_equal(query_mask, 0)[:, :, None, None]
    return float64(np.where(nearest, products, 0.0).sum(axis=(1, 3))), products, nearest


@np.errstate(all="ignore")
def maxsim(
    Q: npt.ArrayLike,
    D: npt.ArrayLike,
    scale: float,
    *,
    query_mask: npt.ArrayLike | None = None,
    document_mask: npt.ArrayLike | None = None,
    symmetric: bool = False,
) -> LossAndGradients:
    """InfoNCE of the scores, queries to documents (ColBERTv2 Sec. 3.2: in-batch negatives), or the mean of both ways.

    Q, D and the masks as in `scores`: document i is query i's, and documents beyond m are hard negatives of all; scale:
    a number. A document without tokens makes the loss NaN. Gradients have the shapes of Q and D, and are 0 at tokens
    that do not count.
    """
    S, _, nearest = scores(Q, D, query_mask, document_mask)
    contrastive = (clip if symmetric else info_nce)(S, np.eye(S.shape[1]), scale)
    W = nearest * contrastive.d_rows[:, None, :, None]
    d_Q, d_D = np.tensordot(W, float64(D), ((2, 3), (0, 1))), np.tensordot(W, float64(Q), ((0, 1), (0, 1)))
    return LossAndGradients(contrastive.loss, d_Q, d_D, contrastive.d_scale, 0.0)
