"""The losses by name: each chooses weights, targets and admitted pairs for the general form.

Features are used as given: normalise them first. `scale` is 1 / temperature. ``clip.form`` and its like give the choice
as data: loss and gradients are computed of it here, and error bounds elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, NamedTuple, ParamSpec

import numpy as np
import numpy.typing as npt

from contrastile.oracle.arrays import FloatArray, IntArray, float64
from contrastile.oracle.general import gradient_of_logits, gradients, logits, loss
from contrastile.oracle.pairs import Match, Pairs, column_target_weights, target_weights
from contrastile.oracle.sigmoid import gradient_of_sigmoid_logits, sigmoid_loss

P = ParamSpec("P")


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


class Form(NamedTuple):
    """What a loss chooses of the general form.

    q: (m, d); k: (n, d); scale: a number or (m,); bias: a number; pairs: which are positive and admitted.
    u: (m,) row weights; v: (n,) column weights, or None for one direction.
    additive: whether it is the sigmoid loss, whose u is one number for all rows.
    first: where rows and columns are the same features, how many of them the first argument has; else None.
    """

    q: FloatArray
    k: FloatArray
    scale: npt.ArrayLike
    bias: float
    pairs: Pairs
    u: FloatArray
    v: FloatArray | None = None
    additive: bool = False
    first: int | None = None


class Named(Generic[P]):
    """A loss by name: called it gives a ``LossAndGradients``, and ``form`` what it chooses."""

    def __init__(self, form: Callable[P, Form]) -> None:
        self.form = form
        self.__doc__ = form.__doc__

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> LossAndGradients:
        """The loss and its gradients."""
        return evaluated(self.form(*args, **kwargs))


@Named
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
) -> Form:
    """mean_i (L_i - sum_j y_ij x_ij): one direction, rows to columns (Inf-CL Eq. 1).

    q: (m, d); k: (n, d), more columns than rows are hard negatives or a queue; scale: a number or (m,).
    positives: (m,), each in 0..n-1; by default row i's is column i. Ids and `match` as in `Pairs`.
    """
    q, k = float64(q), float64(k)
    m = len(q)
    if positives is None:
        positives = np.arange(m)
    return Form(q, k, scale, bias, Pairs(positives, row_ids, column_ids, match), u=np.ones(m) / m)


@Named
def clip(
    I: npt.ArrayLike,
    T: npt.ArrayLike,
    scale: npt.ArrayLike,
    bias: float = 0.0,
    *,
    row_ids: IntArray | None = None,
    column_ids: IntArray | None = None,
    match: Match = "drop",
) -> Form:
    """The symmetric loss, half of image-to-text plus half of text-to-image (DisCo Eq. 1, halved as in its Alg. 1).

    I, T: (b, d), row i of each is a pair; scale: a number or (b,). Ids and `match` as in `Pairs`.
    """
    I, T = float64(I), float64(T)
    b = len(I)
    half = np.ones(b) / (2 * b)
    return Form(I, T, scale, bias, Pairs(np.arange(b), row_ids, column_ids, match), u=half, v=half)


@Named
def nt_xent(view_a: npt.ArrayLike, view_b: npt.ArrayLike, scale: npt.ArrayLike) -> Form:
    """SimCLR's NT-Xent: 2b rows against the same 2b columns, each except itself; the other view is its positive.

    view_a, view_b: (b, d); scale: a number or (2b,). d_rows is view_a's gradient, d_columns view_b's.
    """
    view_a, view_b = float64(view_a), float64(view_b)
    b = len(view_a)
    z = np.concatenate([view_a, view_b])
    itself = np.arange(2 * b)
    pairs = Pairs(positives=np.roll(itself, -b), excluded=itself)
    return Form(z, z, scale, 0.0, pairs, u=np.ones(2 * b) / (2 * b), first=b)


@Named
def sup_con(features: npt.ArrayLike, labels: IntArray, scale: npt.ArrayLike) -> Form:
    """SupCon's L_out: every other row of the same label is a positive, of weight 1/|P(i)|.

    features: (m, d); labels: (m,); scale: a number or (m,). The mean is over the rows that have a positive; the
    others weigh 0 and serve as negatives only. d_rows is the whole gradient of features, d_columns is (0, d).
    """
    z = float64(features)
    m = len(z)
    pairs = Pairs(row_ids=labels, column_ids=labels, match="target", excluded=np.arange(m))
    anchors = pairs.positive(m, m).any(axis=1)
    return Form(z, z, scale, 0.0, pairs, u=float64(anchors / max(int(anchors.sum()), 1)), first=m)


@Named
def siglip(
    I: npt.ArrayLike,
    T: npt.ArrayLike,
    scale: npt.ArrayLike,
    bias: float,
    *,
    row_ids: IntArray | None = None,
    column_ids: IntArray | None = None,
    match: Match = "drop",
) -> Form:
    """SigLIP: sum over all admitted pairs of softplus(-z_ij x_ij), over the batch size.

    I, T: (b, d), row i of each is a pair; scale: a number or (b,). Ids and `match` as in `Pairs`.
    """
    I, T = float64(I), float64(T)
    b = len(I)
    pairs = Pairs(np.arange(b), row_ids, column_ids, match)
    return Form(I, T, scale, bias, pairs, u=np.full(b, 1 / max(b, 1)), additive=True)


def evaluated(form: Form) -> LossAndGradients:
    """The loss and the gradients of a form."""
    q, k, scale, bias, pairs, u, v, additive, first = form
    m, n = len(q), len(k)
    x, P, A = logits(q, k, scale, bias), pairs.positive(m, n), pairs.admitted(m, n)
    if additive:
        G = gradient_of_sigmoid_logits(x, P, max(m, 1), A)
        return LossAndGradients(sigmoid_loss(x, P, max(m, 1), A), *gradients(q, k, scale, G))
    y, y_c = target_weights(P), column_target_weights(P)
    G = gradient_of_logits(x, A, u, v, y, y_c)
    d = gradients(q, k, scale, G)
    if first is not None:
        dz = d.d_rows + d.d_columns
        d = d._replace(d_rows=dz[:first], d_columns=dz[first:])
    return LossAndGradients(loss(x, A, u, v, y, y_c), *d)
