"""The losses. They use the features as given, so normalize the features first.

``scale`` multiplies the dot products. It is CLIP's exp(logit_scale), and 1 / temperature of other losses.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Unpack

from contrastile import problems
from contrastile.backends.contract import Array
from contrastile.evaluation import evaluate, evaluate_taught
from contrastile.plan import Settings
from contrastile.problems import BUILDERS


class Side(NamedTuple):
    """Statistics of the rows or of the columns: float64, one number per row or column. x are the logits.

    Attributes:
        negatives: N, the log-sum-exp of x over the negatives; -inf without negatives.
        positives: P, the log-sum-exp of x over the positives; -inf without positives.
        spread: D, which is P minus the mean of x over the positives; 0 with fewer than two positives.
    """

    negatives: Array
    positives: Array
    spread: Array


class Statistics(NamedTuple):
    """The result of ``statistics``.

    Attributes:
        rows: the statistics of each row over all columns.
        columns: the statistics of each column over all rows.
    """

    rows: Side
    columns: Side


def statistics(
    rows: Array,
    columns: Array | None,
    scale: Any = None,
    *,
    negatives: Array | Sequence[Array] | None = None,
    positives: Array | None = None,
    row_ids: Array | None = None,
    column_ids: Array | None = None,
    ids_are: str = "false_negatives",
    row_limits: Array | None = None,
    column_limits: Array | None = None,
    guide: tuple[Array, Array] | None = None,
    **settings: Unpack[Settings],
) -> Statistics:
    """Statistics N, P and D of every row and column, from which losses are computed, without the matrix of logits.

    The loss of one row is softplus(N - P) + D in InfoNCE, CLIP and SupCon, N - P in the decoupled loss, and so on:
    docs/how-to/own-loss.md. Any function of these vectors is differentiable, in the features and the scale.

    With a group, each rank gets the statistics of its own rows over the columns of all ranks, and of its own columns
    over the rows of all ranks, and computes its loss from them. Averaging the parameters' gradients over the ranks, as
    DDP does, gives the gradient of the mean of the ranks' losses; adding them up gives the gradient of the sum.
    ``parameter_reduction`` has no effect. Every rank must call ``backward``.

    Args:
        rows: (m, d) float16, bfloat16, float32 or float64.
        columns: (n, d), same dtype and device. None compares the rows with each other, each row with all others; the
            statistics of the columns are then those of the rows.
        scale: number or one-element array that multiplies the dot products; differentiable.
        negatives: further columns, one (r, d) array or a sequence of them; r may be 0.
        positives: (m,) integers, the index of each row's positive among [columns, *negatives], -1 for none. None means
            column i for row i, and no positive if columns is None. With a group the index counts all ranks' columns.
        row_ids: (m,) integers, given together with column_ids, or alone if columns is None.
        column_ids: (n + all negatives,) integers.
        ids_are: the role of columns with the row's id: "false_negatives", which are left out except the positive, or
            "positives".
        row_limits: (m,) floating point, without a gradient: leave out a row's negatives whose logit exceeds its limit.
            Not if columns is None.
        column_limits: (n + all negatives,), the same for the columns.
        guide: (m, e) and (n + all negatives, e) features. The limits then apply to the dot products of the guide's
            features, not to the logits: see ``clip_loss``.
        **settings: see ``contrastile.plan.Settings``.

    Returns:
        ``.rows`` and ``.columns``, each with ``.negatives`` (N), ``.positives`` (P) and ``.spread`` (D), float64: (m,),
        and (n + all negatives,). Statistics of NumPy and CuPy arrays carry no gradient.

    Raises:
        TypeError, ValueError, BackendUnavailableError, UnsupportedProblemError, MismatchError, ExchangeError: see
            ``clip_loss``.
    """
    stacked = evaluate(
        problems.statistics,
        settings,
        rows,
        columns,
        scale,
        negatives=negatives,
        positives=positives,
        row_ids=row_ids,
        column_ids=column_ids,
        ids_are=ids_are,
        row_limits=row_limits,
        column_limits=column_limits,
        guide=guide,
    )
    m = rows.shape[0]
    row_statistics = Side(*stacked[:, :m])
    return Statistics(row_statistics, row_statistics if columns is None else Side(*stacked[:, m:]))


def clip_loss(
    image: Array,
    text: Array,
    scale: Any = None,
    *,
    ids: Array | None = None,
    ids_are: str = "false_negatives",
    sum_positives: str = "outside",
    weights: Array | None = None,
    label_smoothing: float = 0.0,
    margin: float = 0.0,
    threshold: float | None = None,
    threshold_is: str = "absolute",
    guide: tuple[Array, Array] | None = None,
    teacher: Any = None,
    teacher_share: float = 1.0,
    **settings: Unpack[Settings],
) -> Array:
    """Symmetric image-text loss: the mean of the two directions' InfoNCE (Inf-CL Eq. 1 both ways; DisCo Eq. 1 halved).

    Args:
        image: (b, d) float16, bfloat16, float32 or float64. Where ``torch.autocast`` is on for their device, every loss
            first casts its features to autocast's dtype, except float64 features.
        text: (b, d), same dtype and device; row i is the positive of image row i.
        scale: number or one-element array that multiplies the dot products; differentiable; positive with a threshold.
        ids: (b,) integers or None. Ids are compared across all ranks.
        ids_are: the role of pairs of different rows with equal ids: "false_negatives", which are left out, or
            "positives", which share the target with the row's own positive (UniCL; SupCon's L_out).
        sum_positives: where several positives are summed, "outside" or "inside" of the logarithm: SupCon's L_out or
            L_in (Eq. 2 and 3). "inside" needs ``ids_are="positives"``.
        weights: (b,) floating point or None, one for each pair, without a gradient: the mean becomes a weighted mean
            over all ranks. If all weights are 0, the loss is 0; otherwise their sum must not be 0.
        label_smoothing: 0..1, the share of the target that is spread over all columns, as in
            ``torch.nn.functional.cross_entropy``; not with false negatives, a margin or ``sum_positives="inside"``.
        margin: subtracted from the positives' dot products, before the scale multiplies them (CosFace Eq. 4).
        threshold: leave out likely false negatives: those whose dot product exceeds by more than the threshold that of
            their row's positive, or of their column's in the other direction (Qwen3-Embedding: 0.1). It may be
            negative; no gradient flows through the comparison. Not with label smoothing or ``ids_are="positives"``.
        threshold_is: "absolute", or "relative" for a share of the positive's dot product (NV-Retriever: -0.05).
        guide: (b, e) features of the images and (b, e) features of the texts from another model, floating point,
            without a gradient; used as given, in the features' dtype. The threshold then applies to the guide's dot
            products, and defaults to 0 (GISTEmbed).
        teacher: (rows, columns, scale): features of another model, as in ``guide``, and the scale of its logits, all
            without a gradient. The targets are the softmax of these logits (distillation: CLIP-KD). A list of such
            triples gives the mean of their targets (MobileCLIP). Each takes about the time of the loss itself. Only
            ``ids``, ``ids_are`` and ``weights`` go with it.
        teacher_share: 0..1, the teacher's share of the targets; the positives keep the rest.
        **settings: how to compute the loss, and with which processes: see ``contrastile.plan.Settings``.

    Returns:
        0-d loss, float32 (float64 for float64 features); for torch tensors differentiable in image, text and scale
        (once, in reverse mode).

    Raises:
        TypeError: wrong types or dtypes.
        ValueError: wrong shapes, devices or values.
        BackendUnavailableError: the backend's packages are missing; the message has the command that installs them.
        UnsupportedProblemError: the backend refuses the problem.
        MismatchError: the ranks' parts do not fit together; every rank raises it (a ValueError).
        ExchangeError: a rank died, stalled or left.
        RuntimeError: forward mode, ``torch.func.vmap`` or a second derivative, which are not defined.
    """
    options: Any = {"ids_are": ids_are, "sum_positives": sum_positives, "weights": weights, "margin": margin}
    options.update(label_smoothing=label_smoothing, threshold=threshold, threshold_is=threshold_is, guide=guide)
    options.update(teacher=teacher, teacher_share=teacher_share)
    return evaluate_taught("clip_loss", settings, image, text, scale, ids=ids, **options)


def info_nce(
    query: Array,
    key: Array,
    scale: Any = None,
    *,
    negatives: Array | Sequence[Array] | None = None,
    negative_counts: Array | None = None,
    share_negatives: bool = True,
    in_batch: bool = True,
    positives: Array | None = None,
    row_ids: Array | None = None,
    column_ids: Array | None = None,
    ids_are: str = "false_negatives",
    sum_positives: str = "outside",
    weights: Array | None = None,
    label_smoothing: float = 0.0,
    margin: float = 0.0,
    threshold: float | None = None,
    threshold_is: str = "absolute",
    guide: tuple[Array, Array] | None = None,
    teacher: Any = None,
    teacher_share: float = 1.0,
    **settings: Unpack[Settings],
) -> Array:
    """One-direction InfoNCE: each query against all keys and negatives under one log-sum-exp (Inf-CL Eq. 1).

    Args:
        query: (m, d) float16, bfloat16, float32 or float64.
        key: (n, d), same dtype and device; n may differ from m when ``positives`` is given.
        scale: number or one-element array that multiplies the dot products; differentiable.
        negatives: further columns, (r, d) or a sequence of arrays (hard negatives, a queue), which are never joined. r
            may be 0, as of a queue that is still empty.
            With a group every rank passes its own negatives; of a queue that all ranks hold, each passes a share.
            (m, k, d) holds k negatives per query: all queries share them, as (m k, d), or see ``share_negatives``.
        negative_counts: (m,) integers: the number of negatives of each query, the first ones of its k. The others may
            hold any values, and their gradient is 0. Not with ``row_ids`` if all queries share the negatives.
        share_negatives: False: negatives in (m, k, d), which must be one array, count for their own query alone. They
            are not sent to other ranks, take O(m k d), and have no index in ``positives`` and ``column_ids``.
        in_batch: False compares a query with its own key and the negatives alone, not with the keys of others. Not with
            ``positives`` or ``ids_are="positives"``.
        positives: (m,) integers, the index of each query's positive among [key, *negatives], padding too; None means
            key i for query i. With a group the index counts the columns of all ranks, rank by rank.
        row_ids: (m,) integers, given together with column_ids; columns with the query's id that are not its positive
            are false negatives and are left out.
        column_ids: (n + all negatives,) integers.
        ids_are: "false_negatives", or "positives": then all columns with the query's id are its positives, n may be any
            number, ``positives`` must be None, and the mean is over the queries that have a positive.
        sum_positives: see ``clip_loss``.
        weights: (m,), one for each query: see ``clip_loss``.
        label_smoothing: see ``clip_loss``; not if some columns count only for some queries.
        margin: see ``clip_loss``.
        threshold: see ``clip_loss``.
        threshold_is: see ``clip_loss``.
        guide: (m, e) features of the queries and (n + all negatives, e) of the columns: see ``clip_loss``.
        teacher: see ``clip_loss``; its matrices are as in ``guide``. Only shared negatives without counts,
            ``positives``, ids and ``weights`` go with it.
        teacher_share: see ``clip_loss``.
        **settings: see ``contrastile.plan.Settings``.

    Returns:
        0-d mean over the queries, float32 (float64 for float64 features); differentiable in query, key, negatives and
        scale.

    Raises:
        TypeError, ValueError, BackendUnavailableError, UnsupportedProblemError, MismatchError, ExchangeError: see
            ``clip_loss``.
    """
    return evaluate_taught(
        "info_nce",
        settings,
        query,
        key,
        scale,
        negatives=negatives,
        negative_counts=negative_counts,
        share_negatives=share_negatives,
        in_batch=in_batch,
        positives=positives,
        row_ids=row_ids,
        column_ids=column_ids,
        ids_are=ids_are,
        sum_positives=sum_positives,
        weights=weights,
        label_smoothing=label_smoothing,
        margin=margin,
        threshold=threshold,
        threshold_is=threshold_is,
        guide=guide,
        teacher=teacher,
        teacher_share=teacher_share,
    )


def nt_xent(
    view_a: Array,
    view_b: Array,
    scale: Any = None,
    *,
    weights: Array | None = None,
    margin: float = 0.0,
    **settings: Unpack[Settings],
) -> Array:
    """SimCLR's NT-Xent: each of the 2b views against the 2b - 1 others; the other view of its sample is the positive.

    Args:
        view_a: (b, d) float16, bfloat16, float32 or float64.
        view_b: (b, d), same dtype and device; row i is the other view of view_a's row i.
        scale: number or one-element array, 1 / temperature; differentiable.
        weights: (b,), one for each sample: see ``clip_loss``.
        margin: see ``clip_loss``.
        **settings: see ``contrastile.plan.Settings``.

    Returns:
        0-d mean over the 2b views, float32 (float64 for float64 features).

    Raises:
        TypeError, ValueError, BackendUnavailableError, UnsupportedProblemError, MismatchError, ExchangeError: see
            ``clip_loss``.
    """
    return evaluate(BUILDERS["nt_xent"], settings, view_a, view_b, scale, weights=weights, margin=margin)


def sup_con(
    features: Array,
    labels: Array,
    scale: Any = None,
    *,
    keys: Array | None = None,
    key_labels: Array | None = None,
    sum_positives: str = "outside",
    weights: Array | None = None,
    margin: float = 0.0,
    **settings: Unpack[Settings],
) -> Array:
    """SupCon's L_out: each sample against all others; each other sample of its label is a positive of weight 1/|P(i)|.

    Args:
        features: (b, d) float16, bfloat16, float32 or float64.
        labels: (b,) integers.
        scale: number or one-element array, 1 / temperature; differentiable.
        keys: (n, d), same dtype and device, given together with key_labels: samples are compared with the keys alone,
            such as other views or a queue; differentiable. None compares the samples with each other.
        key_labels: (n,) integers.
        sum_positives: "outside" of the logarithm, or "inside" for L_in: see ``clip_loss``.
        weights: (b,), one for each sample: see ``clip_loss``.
        margin: see ``clip_loss``.
        **settings: see ``contrastile.plan.Settings``.

    Returns:
        0-d mean over the samples that have a positive (0 if none has), float32 (float64 for float64 features).

    Raises:
        TypeError, ValueError, BackendUnavailableError, UnsupportedProblemError, MismatchError, ExchangeError: see
            ``clip_loss``.
    """
    options: Any = {"sum_positives": sum_positives, "weights": weights, "margin": margin}
    options.update(keys=keys, key_labels=key_labels)
    return evaluate(BUILDERS["sup_con"], settings, features, labels, scale, **options)


def sigmoid_loss(
    image: Array,
    text: Array,
    scale: Any = None,
    bias: Any = 0.0,
    *,
    ids: Array | None = None,
    ids_are: str = "false_negatives",
    mean_positives: bool = False,
    weights: Array | None = None,
    **settings: Unpack[Settings],
) -> Array:
    """SigLIP's loss: ``sum_ij softplus(-z_ij (scale <image_i, text_j> + bias)) / b``, z = +1 on the diagonal, else -1.

    Args:
        image: (b, d) float16, bfloat16, float32 or float64.
        text: (b, d), same dtype and device.
        scale: number or one-element array that multiplies the dot products; differentiable.
        bias: number or one-element array added to every logit; differentiable.
        ids: (b,) integers or None. Ids are compared across all ranks.
        ids_are: the role of pairs of different rows with equal ids: "false_negatives", which are left out, or
            "positives", such as an image with several captions.
        mean_positives: with ``ids_are="positives"``, whether each of a row's k positives on all ranks weighs 1 / k, so
            that an image with more captions does not count for more. Every pair is then computed twice.
        weights: (b,), one for each image: see ``clip_loss``.
        **settings: see ``contrastile.plan.Settings``.

    Returns:
        0-d loss, divided by b as in the paper, float32 (float64 for float64 features).

    Raises:
        TypeError, ValueError, BackendUnavailableError, UnsupportedProblemError, MismatchError, ExchangeError: see
            ``clip_loss``.
    """
    options: Any = {"ids_are": ids_are, "mean_positives": mean_positives, "weights": weights}
    return evaluate(BUILDERS["sigmoid_loss"], settings, image, text, scale, bias, ids=ids, **options)
