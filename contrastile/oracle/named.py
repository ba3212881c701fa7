"""The losses by name: each chooses weights, targets and admitted pairs for the general form.

Features are used as given: normalise them first. `scale` is 1 / temperature. ``clip.form`` and the other forms return
the choice as data. The loss and its gradients follow from that data here, and error bounds elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, NamedTuple, ParamSpec

import numpy as np
import numpy.typing as npt

from contrastile.oracle.arrays import BoolArray, FloatArray, IntArray, float64
from contrastile.oracle.general import Direction, gradient_of_logits, gradients, logits, loss, lse, weighted_sum
from contrastile.oracle.pairs import Match, Pairs, target_weights
from contrastile.oracle.sigmoid import gradient_of_sigmoid_logits, sigmoid_terms

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


class Options(NamedTuple):
    """The options of a softmax loss besides its weights and pairs.

    inside: whether the sum over the positives is inside of the logarithm (SupCon Eq. 3, L_in), not outside (Eq. 2).
    smoothing: e of (1 - e) y_ij + e / n, the targets of torch's cross_entropy with label_smoothing.
    margin: subtracted from the dot products of positives (CosFace Eq. 4).
    threshold: negatives whose dot product exceeds the positive's by more than this are left out (Qwen3-Embedding,
        Eq. 2); a column's negatives are compared with the column's positive.
    relative: whether the threshold is a share of the positive's dot product (NV-Retriever's percentage).
    guide: (m, e) and (n, e), features of another model, whose dot products the threshold compares (GISTEmbed, Sec. 3).
    """

    inside: bool = False
    smoothing: float = 0.0
    margin: float = 0.0
    threshold: float = np.inf
    relative: bool = False
    guide: tuple[FloatArray, FloatArray] | None = None


PLAIN = Options()


class Form(NamedTuple):
    """A loss as a choice of the parts of the general form.

    q: (m, d); k: (n, d); scale: a number or (m,); bias: a number; pairs: which are positive and admitted.
    u: (m,) row weights; v: (n,) column weights, or None for one direction.
    additive: whether it is the sigmoid loss, whose u is one number for all rows.
    first: the number of rows of the first argument, if rows and columns are the same features; else None.
    options: of a softmax loss.
    mean: of the sigmoid loss, whether the terms of a row's positives are averaged, not summed.
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
    options: Options = PLAIN
    mean: bool = False


class Named(Generic[P]):
    """A loss by name. A call returns a ``LossAndGradients``; ``form`` returns the loss's ``Form``."""

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
    weights: npt.ArrayLike | None = None,
    own: npt.ArrayLike | None = None,
    counts: IntArray | None = None,
    share: bool = True,
    in_batch: bool = True,
    options: Options = PLAIN,
) -> Form:
    """mean_i (L_i - sum_j y_ij x_ij): one direction, rows to columns (Inf-CL Eq. 1).

    q: (m, d); k: (n, d), more columns than rows are hard negatives or a queue; scale: a number or (m,).
    positives: (m,), each in 0..n-1; by default row i's is column i. Ids and `match` as in `Pairs`.
    weights: (m,) of the mean, which is over the rows that have a positive; by default 1.
    own: (m, c, d), each row's own negatives, which follow k and have no ids; only the first `counts`, (m,), of a row's
    c count, and the others are 0. share: whether an own negative counts for all rows, not for its row alone. in_batch:
    whether the first m of k count for rows other than their own.
    """
    q, k = float64(q), float64(k)
    m = len(q)
    if positives is None:
        positives = np.arange(m)
    owners = np.where((np.arange(len(k)) < m) & (not in_batch), np.arange(len(k)), -1)
    if own is not None:
        own = float64(own)
        counted = np.arange(own.shape[1]) < (np.full(m, own.shape[1]) if counts is None else counts)[:, None]
        k = np.concatenate([k, np.where(counted[:, :, None], own, 0.0).reshape(-1, k.shape[1])])
        owners = np.concatenate([owners, np.where(counted, -1 if share else np.arange(m)[:, None], -2).ravel()])
        if row_ids is not None and column_ids is not None:
            unused_ids = np.full(len(k) - len(column_ids), max(row_ids.max(), column_ids.max()) + 1)
            column_ids = np.concatenate([column_ids, unused_ids])
    pairs = Pairs(positives, row_ids, column_ids, match, owners=owners)
    return Form(q, k, scale, bias, pairs, u=_shares(weights, pairs.positive(m, len(k))), options=options)


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
    weights: npt.ArrayLike | None = None,
    options: Options = PLAIN,
) -> Form:
    """The symmetric loss, half of image-to-text plus half of text-to-image (DisCo Eq. 1, halved as in its Alg. 1).

    I, T: (b, d), row i of each is a pair; scale: a number or (b,). Ids and `match` as in `Pairs`.
    weights: (b,) of both means; by default 1.
    """
    I, T = float64(I), float64(T)
    b = len(I)
    pairs = Pairs(np.arange(b), row_ids, column_ids, match)
    half = _shares(weights, pairs.positive(b, b)) / 2
    return Form(I, T, scale, bias, pairs, u=half, v=half, options=options)


@Named
def nt_xent(
    view_a: npt.ArrayLike,
    view_b: npt.ArrayLike,
    scale: npt.ArrayLike,
    *,
    weights: npt.ArrayLike | None = None,
    options: Options = PLAIN,
) -> Form:
    """SimCLR's NT-Xent: 2b rows against the same 2b columns, each except itself; the other view is its positive.

    view_a, view_b: (b, d); scale: a number or (2b,). d_rows is view_a's gradient, d_columns view_b's.
    weights: (b,) of the mean, the same for both views of a sample; by default 1.
    """
    view_a, view_b = float64(view_a), float64(view_b)
    b = len(view_a)
    z = np.concatenate([view_a, view_b])
    itself = np.arange(2 * b)
    pairs = Pairs(positives=np.roll(itself, -b), excluded=itself)
    tiled = None if weights is None else np.tile(float64(weights), 2)
    return Form(z, z, scale, 0.0, pairs, u=_shares(tiled, pairs.positive(2 * b, 2 * b)), first=b, options=options)


@Named
def sup_con(
    features: npt.ArrayLike,
    labels: IntArray,
    scale: npt.ArrayLike,
    *,
    weights: npt.ArrayLike | None = None,
    options: Options = PLAIN,
) -> Form:
    """SupCon's L_out: every other row of the same label is a positive, of weight 1/|P(i)|.

    features: (m, d); labels: (m,); scale: a number or (m,). The mean is over the rows that have a positive; the
    others weigh 0 and serve as negatives only. d_rows is the whole gradient of features, d_columns is (0, d).
    """
    z = float64(features)
    m = len(z)
    pairs = Pairs(row_ids=labels, column_ids=labels, match="target", excluded=np.arange(m))
    return Form(z, z, scale, 0.0, pairs, u=_shares(weights, pairs.positive(m, m)), first=m, options=options)


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
    weights: npt.ArrayLike | None = None,
    mean: bool = False,
) -> Form:
    """SigLIP: sum over all admitted pairs of softplus(-z_ij x_ij), over the batch size.

    I, T: (b, d), row i of each is a pair; scale: a number or (b,). Ids and `match` as in `Pairs`.
    mean: whether each of a row's k positives weighs 1 / k; a negative always weighs 1.
    """
    I, T = float64(I), float64(T)
    b = len(I)
    pairs = Pairs(np.arange(b), row_ids, column_ids, match)
    return Form(I, T, scale, bias, pairs, u=_shares(weights, pairs.positive(b, b)), additive=True, mean=mean)


def distillation(
    form: Form, *teachers: tuple[npt.ArrayLike, npt.ArrayLike, npt.ArrayLike], share: float = 1.0
) -> LossAndGradients:
    """A loss, one of L_out without options, whose targets are the mean of teachers' softmaxes (CLIP-KD, MobileCLIP).

    teachers: each (m, e), (n, e) and a scale. share: of the targets; the positives keep the rest.
    """
    P, A = (mask(len(form.q), len(form.k)) for mask in (form.pairs.positive, form.pairs.admitted))
    x, *ys = (np.where(A, logits(*features), -np.inf) for features in ((form.q, form.k, form.scale), *teachers))
    value, G = 0.0, np.zeros(x.shape)
    for axis, w, own in ((1, form.u, P * target_weights(P)[:, None]), (0, form.v, P * target_weights(P.T))):
        if w is None:
            continue
        log_p, *log_ys = (z - np.expand_dims(lse(z, axis), axis) for z in (x, *ys))
        y = (1 - share) * own + share / len(ys) * sum(map(np.exp, log_ys))
        w = np.expand_dims(w, axis)
        value -= weighted_sum(w, np.where(A, y * log_p, 0.0))
        G = G + w * (np.exp(log_p) - y)
    return LossAndGradients(value, *gradients(form.q, form.k, form.scale, G))


def _shares(weights: npt.ArrayLike | None, P: BoolArray) -> FloatArray:
    """The weights of the rows that have a positive, divided by their sum; 0 for the other rows.

    weights: (m,); P: (m, n) bool.
    """
    w = np.where(P.any(axis=1), np.ones(len(P)) if weights is None else float64(weights), 0.0)
    return float64(w / w.sum()) if w.any() else float64(w)


def evaluated(form: Form) -> LossAndGradients:
    """The loss and the gradients of a form."""
    q, k, scale, bias, pairs, u, v, additive, first, options, mean = form
    m, n = len(q), len(k)
    x, P, A = logits(q, k, scale, bias), pairs.positive(m, n), pairs.admitted(m, n)
    if additive:
        w = np.where(P, target_weights(P)[:, None], 1.0) if mean else np.ones(P.shape)
        G = u[:, None] * w * gradient_of_sigmoid_logits(x, P, 1.0, A)
        value = weighted_sum(u, (w * sigmoid_terms(x, P, A)).sum(axis=1))
        return LossAndGradients(value, *gradients(q, k, scale, G))
    margins = np.where(P, options.margin, 0.0)
    similarity, settings = similarities(form, x), (options.inside, options.smoothing)
    x = x - np.reshape(scale, (-1, 1)) * margins
    row_limits, column_limits = limits(form)
    sides = [Direction(x, within(A, P, similarity, row_limits), P, u, target_weights(P), *settings)]
    if v is not None:
        sides.append(Direction(x.T, within(A, P, similarity, column_limits).T, P.T, v, target_weights(P.T), *settings))
    G = gradient_of_logits(sides)
    d = gradients(q, k, scale, G)
    d = d._replace(
        d_scale=d.d_scale - np.reshape((G * margins).sum(axis=1 if np.ndim(scale) else None), np.shape(scale))
    )
    if first is not None:
        dz = d.d_rows + d.d_columns
        d = d._replace(d_rows=dz[:first], d_columns=dz[first:])
    return LossAndGradients(loss(sides), *d)


def similarities(form: Form, x: FloatArray) -> FloatArray:
    """The values, (m, n), that are compared with limits: the guide's dot products, or the logits x without a guide."""
    guide = form.options.guide
    return x if guide is None else logits(*guide, 1.0)


def within(A: BoolArray, P: BoolArray, compared: FloatArray, limit: FloatArray | None) -> BoolArray:
    """The admitted pairs without the negatives whose logit, or guide's dot product, exceeds a limit.

    A, P, compared: (m, n); limit: (m,) or of a shape that broadcasts to (m, n); None for none.
    """
    if limit is None:
        return A
    return A & (P | ~(compared > (limit[:, None] if limit.ndim == 1 else limit)))


def limits(form: Form) -> tuple[FloatArray, FloatArray]:
    """The logits above which the threshold removes a negative from its row, (m, 1), and from its column, (1, n).

    With a guide they are dot products of the guide. Rows and columns have at most one positive; the limit is infinite
    without one. With a scale per row, the columns' limits are (m, n).
    """
    x, t = similarities(form, logits(form.q, form.k, 1.0)), form.options.threshold
    P = form.pairs.positive(len(form.q), len(form.k))
    scale, bias = (form.scale, form.bias) if form.options.guide is None else (1.0, 0.0)
    axis_limits = []
    for axis in (1, 0):
        x_p = np.where(P, x, 0.0).sum(axis=axis, keepdims=True)
        bound = np.where(P.any(axis=axis, keepdims=True), x_p * (1 + t) if form.options.relative else x_p + t, np.inf)
        finite = np.isfinite(bound)
        limit = np.reshape(scale, (-1, 1)) * np.where(finite, bound, 0.0) + bias
        axis_limits.append(np.where(finite, limit, np.inf))
    return axis_limits[0], axis_limits[1]
