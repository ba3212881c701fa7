"""The arguments of a loss, and the problem that the oracle states from them, the only source of truth and bounds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from contrastile.backends.contract import Accuracy, state_dtype
from contrastile.comm.buffers import split
from contrastile.oracle import named
from contrastile.oracle.arrays import FloatArray, IntArray, float64
from contrastile.oracle.pairs import target_weights
from contrastile.schedules.problem import Problem
from contrastile.verify.draws import FAR, Draw, signs, unit
from contrastile.verify.rearrange import folded
from contrastile.verify.rounding import round_to
from contrastile.verify.truth import Outcome, Owned

FORMS: dict[str, Any] = {
    "clip_loss": named.clip,
    "info_nce": named.info_nce,
    "sigmoid_loss": named.siglip,
    "nt_xent": named.nt_xent,
    "sup_con": named.sup_con,
}
"""The oracle's form of each objective."""

SELF = ("nt_xent", "sup_con")
"""The objectives whose features are both the rows and the columns."""


@dataclass(frozen=True, slots=True)
class Arguments:
    """The arguments of a loss, as NumPy arrays in float64.

    Attributes:
        features: (image, text), (query, key), (view_a, view_b), each (b, d); SupCon's (features,); or MaxSim's query
            (b, q, d) and document (b, t, d).
        scale: a number that multiplies the dot products.
        labels: (b,) of SupCon, None elsewhere.
        bias: of the sigmoid loss; None elsewhere, and for its default.
        keywords: arrays of integers: ids, positives, row_ids, column_ids, negative_counts; and masks.
        negatives: of info_nce, (r, d); or (b, k, d), which come last.
        joined: whether the negatives are passed as one tensor, not as a sequence.
        weights: (b,), the weights of the mean; None for equal weights.
        options: strings and numbers that select the loss, named as in contrastile's own functions.
        guide: (b, e) and (columns, e), features of another model; empty for no guide.
    """

    features: tuple[FloatArray, ...]
    scale: float
    labels: IntArray | None = None
    bias: float | None = None
    keywords: Mapping[str, IntArray] = field(default_factory=dict)
    negatives: tuple[FloatArray, ...] = ()
    joined: bool = False
    weights: FloatArray | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    guide: tuple[FloatArray, ...] = ()


def guided(draw: Draw, arguments: Arguments) -> Arguments:
    """The arguments with a guide that is independent of the features.

    The guide's dot products are integers, exact in float32 but not in 16 bits. Some equal
    the product of a positive, and count.
    """
    count = len(arguments.features[1]) + sum(map(len, arguments.negatives))
    factors = np.resize([31.0, 31.0, 31.0, 1.0], 13)
    rows, columns = signs(draw, len(arguments.features[0]), count, 13)
    return replace(arguments, guide=(factors * rows, factors * columns))


def hard(draw: Draw, arguments: Arguments, count: int) -> FloatArray:
    """Negatives as near to a query as its key. The loss changes if any one of them is missing."""
    rows = np.resize(arguments.features[0], (count, arguments.features[0].shape[1]))
    return unit(rows + unit(draw.standard_normal(rows.shape)))


def optional(
    *makers: Callable[[Draw, Arguments], Arguments], weighted: bool = True, **options: Any
) -> Callable[[Draw, Arguments], Arguments]:
    """Apply the makers, and add options and weights of three orders of magnitude, some of them 0 or negative."""

    def make(draw: Draw, arguments: Arguments) -> Arguments:
        for maker in makers:
            arguments = maker(draw, arguments)
        b = len(arguments.features[0])
        weights = 10.0 ** draw.uniform(-3, 0, b) * draw.choice((1, 1, 1, 0, -0.1), b) if weighted and b > 1 else None
        return replace(arguments, options=options, weights=weights)

    return make


def thresholded(
    *makers: Callable[[Draw, Arguments], Arguments], relative: bool = False
) -> Callable[[Draw, Arguments], Arguments]:
    """Apply the makers, and add a threshold below some products, so far from each that rounding changes no side."""

    def make(draw: Draw, arguments: Arguments) -> Arguments:
        arguments = optional(*makers, weighted=relative)(draw, arguments)
        query, key = arguments.features
        if relative:
            # Some products become negative, because a share of a negative product lies above it.
            key = np.where(np.arange(len(key))[:, None] % 5, key, -key)
        x = query @ np.concatenate([key, *arguments.negatives]).T
        positives = arguments.keywords.get("positives", itself := np.arange(len(x)))
        limits, square = x[itself, positives], x[:, : len(key)]
        sides = (x, limits[:, None], positives), *([] if positives is not itself else [(square, limits, itself)])
        excess = np.concatenate(
            [
                (products / limit - 1 if relative else products - limit)[p[:, None] != np.arange(products.shape[1])]
                for products, limit, p in sides
            ]
        )
        high = np.sort(excess)[-90:-30]
        at = int(np.diff(high).argmax())
        options = {"threshold": float(high[at : at + 2].mean()), "threshold_is": "relative" if relative else "absolute"}
        return replace(arguments, features=(query, key), options=options)

    return make


def with_own(draw: Draw, arguments: Arguments) -> Arguments:
    """The arguments with zero to three negatives for each query. The padding after them is NaN."""
    (b, d), k = arguments.features[0].shape, 3
    counts = np.resize([0, k, *draw.integers(0, k + 1, 9)], b).astype(np.int64)
    own = unit(arguments.features[0][:, None] + unit(draw.standard_normal((b, k, d))))
    own[np.arange(k) >= counts[:, None]] = np.nan
    keywords = {**arguments.keywords, "negative_counts": counts}
    return replace(arguments, negatives=(*arguments.negatives, own), joined=False, keywords=keywords)


def labelled(names: Callable[[Draw, int], np.ndarray]) -> Callable[[Draw, Arguments], Arguments]:
    """Labels of one, two and many samples, in random order."""

    def make(draw: Draw, arguments: Arguments) -> Arguments:
        b = len(arguments.features[0])
        groups = np.minimum(np.arange(b) // 2, b // 3)
        groups[: b // 4] = b + np.arange(b // 4)
        _, group = np.unique(draw.permutation(groups), return_inverse=True)
        return replace(arguments, labels=np.asarray(names(draw, group.max() + 1)[group], np.int64))

    return make


def distinct(draw: Draw, count: int) -> np.ndarray:
    """Distinct labels: those of ``FAR``, then negative ones, and some that are equal as floats."""
    extra = np.stack([2**60 + np.arange(count), -np.arange(2, count + 2) * 2**32], axis=1)
    return draw.permutation([*dict.fromkeys([*FAR.tolist(), *extra.ravel().tolist()])][:count])


def normalised(arguments: Arguments) -> Arguments:
    features, negatives = (tuple(map(unit, x)) for x in (arguments.features, arguments.negatives))
    return replace(arguments, features=features, negatives=negatives)


def rounded(arguments: Arguments, dtype: str, facts: Accuracy | None = None) -> Arguments:
    """Round features to this dtype, and scale, bias and weights to float32, or to a backend's state dtype."""
    state = "float32" if facts is None else state_dtype(dtype)
    features, negatives = (tuple(round_to(x, dtype) for x in xs) for xs in (arguments.features, arguments.negatives))
    bias = None if arguments.bias is None else float(round_to(arguments.bias, state))
    scale = float(round_to(arguments.scale, state))
    weights = None if arguments.weights is None else float64(round_to(arguments.weights, state))
    return replace(arguments, features=features, negatives=negatives, scale=scale, bias=bias, weights=weights)


def stated(objective: str, arguments: Arguments, weights: str = "float64") -> Problem:
    """The problem that an objective states from its arguments, with weights rounded to a dtype."""
    features, keywords, options = arguments.features, dict(arguments.keywords), arguments.options
    blocks = [len(x) if x.ndim == 2 else x.shape[0] * x.shape[1] for x in (*features[1:2], *arguments.negatives)]
    settings: dict[str, Any] = {} if arguments.weights is None else {"weights": arguments.weights}
    if objective == "info_nce":
        features = features[0], np.concatenate([features[1], *(x for x in arguments.negatives if x.ndim == 2)])
        settings["own"] = next((x for x in arguments.negatives if x.ndim == 3), None)
        settings |= {"counts": keywords.pop("negative_counts", None), "in_batch": options.get("in_batch", True)}
        settings["share"] = options.get("share_negatives", True)
    if "ids" in keywords:
        ids = keywords.pop("ids")
        keywords |= {"row_ids": ids, "column_ids": ids}
    labels = [] if arguments.labels is None else [arguments.labels]
    bias = [arguments.bias or 0.0] if objective == "sigmoid_loss" else []
    if options.get("ids_are") == "positives":
        settings["match"] = "target"
    if objective == "sigmoid_loss":
        settings["mean"] = options.get("mean_positives", False)
    else:
        settings["options"] = named.Options(
            options.get("sum_positives") == "inside",
            options.get("label_smoothing", 0.0),
            options.get("margin", 0.0),
            options.get("threshold", 0.0 if arguments.guide else np.inf),
            options.get("threshold_is") == "relative",
            (arguments.guide[0], arguments.guide[1]) if arguments.guide else None,
        )
    form = FORMS[objective].form(*features, *labels, arguments.scale, *bias, **keywords, **settings)
    m, n = len(form.q), len(form.k)
    positive = form.pairs.positive(m, n)
    u, v, target = form.u, form.v, target_weights(positive)
    if form.mean:
        u = np.stack([u * target, u * (1 - target)], axis=-1)
    limits = [x.ravel() if arguments.guide or "threshold" in options else None for x in named.limits(form)]
    row_guide, column_guide = arguments.guide or (None, None)
    return Owned(
        rows=form.q,
        columns=tuple(split(form.k, blocks)) if form.first is None else (form.k.copy(),),
        scale=float64(form.scale),
        row_weight=round_to(u, weights),
        row_target=target,
        kind="sigmoid" if form.additive else "inside" if form.options.inside else "softmax",
        smoothing=form.options.smoothing or None,
        margin=form.options.margin or None,
        bias=float64(form.bias) if form.additive else None,
        column_weight=None if v is None else round_to(v, weights),
        column_target=None if v is None else target_weights(positive.T),
        row_limits=limits[0],
        column_limits=None if v is None else limits[1],
        row_guide=row_guide,
        column_guide=column_guide,
        **form.pairs._asdict(),
    )


def of_arguments(outcome: Outcome, objective: str) -> Outcome:
    """An outcome in terms of the arguments: ``rows`` has the first features' gradient, ``columns`` the others'."""
    if objective not in SELF:
        return outcome
    joined = folded(outcome)
    if objective == "sup_con":
        return joined
    b = len(joined.rows) // 2
    return replace(joined, rows=joined.rows[:b], columns=(joined.rows[b:],))
