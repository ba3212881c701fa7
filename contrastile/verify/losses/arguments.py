"""The arguments of a loss, and the problem that the oracle states of them: truth and bounds come from nothing else."""

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
"""What the oracle calls each objective."""

SELF = ("nt_xent", "sup_con")
"""The objectives whose features are rows and columns at once."""


@dataclass(frozen=True, slots=True)
class Arguments:
    """What a loss is called with, as NumPy arrays in float64.

    Attributes:
        features: (image, text), (query, key), (view_a, view_b), each (b, d); or SupCon's (features,); or of MaxSim
            a query (b, q, d) and a document (b, t, d).
        scale: a number that multiplies the dot products.
        labels: (b,) of SupCon, None elsewhere.
        bias: of the sigmoid loss; None elsewhere, and for its default.
        keywords: of integers: ids, positives, row_ids, column_ids, negative_counts; and masks.
        negatives: of info_nce, (r, d); or (b, k, d), which come last.
        joined: whether the negatives are given as one tensor, and not as a sequence.
        weights: (b,) of the mean; None for none.
        options: texts and numbers that say which loss it is, as contrastile's own functions name them.
        guide: (b, e) and (columns, e), features of another model; none for no guide.
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


def guided(draw: Draw, given: Arguments) -> Arguments:
    """With a guide that knows nothing of the features.

    Its dot products are integers, exact in float32 and not in 16 bits: some are those of positives, and count.
    """
    count, sizes = len(given.features[1]) + sum(map(len, given.negatives)), np.resize([31.0, 31.0, 31.0, 1.0], 13)
    rows, columns = signs(draw, len(given.features[0]), count, 13)
    return replace(given, guide=(sizes * rows, sizes * columns))


def hard(draw: Draw, given: Arguments, count: int) -> FloatArray:
    """Negatives as near to a query as its key: without any one of them the loss is another."""
    rows = np.resize(given.features[0], (count, given.features[0].shape[1]))
    return unit(rows + unit(draw.standard_normal(rows.shape)))


def optional(
    *makes: Callable[[Draw, Arguments], Arguments], weighted: bool = True, **options: Any
) -> Callable[[Draw, Arguments], Arguments]:
    """Options, beside what others make; and weights of three orders of magnitude, some of them 0 or negative."""

    def make(draw: Draw, given: Arguments) -> Arguments:
        for each in makes:
            given = each(draw, given)
        b = len(given.features[0])
        weights = 10.0 ** draw.uniform(-3, 0, b) * draw.choice((1, 1, 1, 0, -0.1), b) if weighted and b > 1 else None
        return replace(given, options=options, weights=weights)

    return make


def thresholded(
    *makes: Callable[[Draw, Arguments], Arguments], relative: bool = False
) -> Callable[[Draw, Arguments], Arguments]:
    """A threshold beyond which some negatives lie, far from each: what is left out depends on no rounding."""

    def make(draw: Draw, given: Arguments) -> Arguments:
        given = optional(*makes, weighted=relative)(draw, given)
        query, key = given.features
        if relative:
            # a share of a negative product is above it
            key = np.where(np.arange(len(key))[:, None] % 5, key, -key)
        x = query @ np.concatenate([key, *given.negatives]).T
        positives = given.keywords.get("positives", itself := np.arange(len(x)))
        own, square = x[itself, positives], x[:, : len(key)]
        sides = (x, own[:, None], positives), *([] if positives is not itself else [(square, own, itself)])
        excess = np.concatenate(
            [
                (each / limit - 1 if relative else each - limit)[at[:, None] != np.arange(each.shape[1])]
                for each, limit, at in sides
            ]
        )
        high = np.sort(excess)[-90:-30]
        at = int(np.diff(high).argmax())
        options = {"threshold": float(high[at : at + 2].mean()), "threshold_is": "relative" if relative else "absolute"}
        return replace(given, features=(query, key), options=options)

    return make


def with_own(draw: Draw, given: Arguments) -> Arguments:
    """Arguments with up to three negatives of each query, none of some; what lies beyond them is NaN."""
    (b, d), k = given.features[0].shape, 3
    counts = np.resize([0, k, *draw.integers(0, k + 1, 9)], b).astype(np.int64)
    own = unit(given.features[0][:, None] + unit(draw.standard_normal((b, k, d))))
    own[np.arange(k) >= counts[:, None]] = np.nan
    keywords = {**given.keywords, "negative_counts": counts}
    return replace(given, negatives=(*given.negatives, own), joined=False, keywords=keywords)


def labelled(names: Callable[[Draw, int], np.ndarray]) -> Callable[[Draw, Arguments], Arguments]:
    """Labels of one, two and many samples, in no order."""

    def make(draw: Draw, given: Arguments) -> Arguments:
        b = len(given.features[0])
        groups = np.minimum(np.arange(b) // 2, b // 3)
        groups[: b // 4] = b + np.arange(b // 4)
        _, place = np.unique(draw.permutation(groups), return_inverse=True)
        return replace(given, labels=np.asarray(names(draw, place.max() + 1)[place], np.int64))

    return make


def distinct(draw: Draw, count: int) -> np.ndarray:
    """Labels, no two equal: those of ``FAR``, and then negative ones and such as floats do not tell apart."""
    more = np.concatenate([2**60 + np.arange(count), -np.arange(2, count + 2) * 2**32])
    return draw.permutation(np.unique(np.concatenate([FAR, more])))[:count]


def normalised(given: Arguments) -> Arguments:
    features, negatives = (tuple(map(unit, x)) for x in (given.features, given.negatives))
    return replace(given, features=features, negatives=negatives)


def rounded(given: Arguments, dtype: str, facts: Accuracy | None = None) -> Arguments:
    """The arguments in numbers that features of this dtype, and numbers of float32 or a backend's state, hold."""
    state = "float32" if facts is None else state_dtype(dtype)
    features, negatives = (tuple(round_to(x, dtype) for x in xs) for xs in (given.features, given.negatives))
    bias = None if given.bias is None else float(round_to(given.bias, state))
    scale = float(round_to(given.scale, state))
    weights = None if given.weights is None else float64(round_to(given.weights, state))
    return replace(given, features=features, negatives=negatives, scale=scale, bias=bias, weights=weights)


def stated(objective: str, given: Arguments, weights: str = "float64") -> Problem:
    """The problem that an objective states of these arguments, with weights rounded to a dtype."""
    features, keywords, asked = given.features, dict(given.keywords), given.options
    blocks = [len(x) if x.ndim == 2 else x.shape[0] * x.shape[1] for x in (*features[1:2], *given.negatives)]
    more: dict[str, Any] = {} if given.weights is None else {"weights": given.weights}
    if objective == "info_nce":
        features = features[0], np.concatenate([features[1], *(x for x in given.negatives if x.ndim == 2)])
        more["own"] = next((x for x in given.negatives if x.ndim == 3), None)
        more |= {"counts": keywords.pop("negative_counts", None), "in_batch": asked.get("in_batch", True)}
        more["share"] = asked.get("share_negatives", True)
    if "ids" in keywords:
        same = keywords.pop("ids")
        keywords |= {"row_ids": same, "column_ids": same}
    labels = [] if given.labels is None else [given.labels]
    bias = [given.bias or 0.0] if objective == "sigmoid_loss" else []
    if asked.get("ids_are") == "positives":
        more["match"] = "target"
    if objective == "sigmoid_loss":
        more["mean"] = asked.get("mean_positives", False)
    else:
        more["options"] = named.Options(
            asked.get("sum_positives") == "inside",
            asked.get("label_smoothing", 0.0),
            asked.get("margin", 0.0),
            asked.get("threshold", 0.0 if given.guide else np.inf),
            asked.get("threshold_is") == "relative",
            (given.guide[0], given.guide[1]) if given.guide else None,
        )
    form = FORMS[objective].form(*features, *labels, given.scale, *bias, **keywords, **more)
    m, n = len(form.q), len(form.k)
    positive = form.pairs.positive(m, n)
    u, v, target = form.u, form.v, target_weights(positive)
    if form.mean:
        u = np.stack([u * target, u * (1 - target)], axis=-1)
    limits = [x.ravel() if given.guide or "threshold" in asked else None for x in named.limits(form)]
    row_guide, column_guide = given.guide or (None, None)
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


def of_arguments(x: Outcome, objective: str) -> Outcome:
    """An outcome in terms of the arguments: ``rows`` of the first features, ``columns`` of the others."""
    if objective not in SELF:
        return x
    both = folded(x)
    if objective == "sup_con":
        return both
    b = len(both.rows) // 2
    return replace(both, rows=both.rows[:b], columns=(both.rows[b:],))
