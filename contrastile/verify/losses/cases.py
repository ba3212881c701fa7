"""The cases of a loss. Each case is a batch of pairs of a claimed size, turned into the arguments of an objective.

A loss has one weight for all pairs, so the cases vary the arguments: features, scale, sizes, ids and the like.
"""

from __future__ import annotations

import pickle
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from typing import Any

import numpy as np

from contrastile.backends.contract import Accuracy, state_dtype
from contrastile.schedules.problem import Problem
from contrastile.verify.draws import FAR, TRAINED, Draw, Pairs, certain_pairs, pairs, real, steps, units
from contrastile.verify.losses.arguments import (
    Arguments,
    distinct,
    guided,
    hard,
    labelled,
    normalised,
    optional,
    rounded,
    stated,
    thresholded,
    with_own,
)
from contrastile.verify.losses.claims import KEYWORDS, Claims
from contrastile.verify.losses.maxsim import masked, of_pairs, problem_and_truth
from contrastile.verify.truth import Truth, truth

MEMORY, SIZES, CALLS = "memory", "sizes", "calls"
OWN = {
    MEMORY: "batches of which each is twice as large as the last",
    SIZES: "batches of up to 1,103 pairs: round numbers, around multiples of 8 to 1,024; the widths of common models",
    CALLS: "a few pairs called in every way there is",
}
"""The cases that only certain properties have, each with its description."""

SCALE, HIGH = 8.3, 37.3
"""Scales that no 16-bit dtype represents exactly, one of them above 20."""


@dataclass(frozen=True, slots=True)
class Batch:
    """A named batch of pairs.

    Attributes:
        about: the edge case or the defect that it catches, in one line.
        rows: the number of pairs, if the claims allow it; ``width`` likewise is the number of features.
        draw: draws unit pairs of a given size.
        keyword: the argument that the case is about: a name in ``KEYWORDS``, "labels" or "bias"; "" for none.
        make: adds that argument to the others.
        objectives: the objectives that have the case; empty for all that have the keyword.
    """

    name: str
    about: str
    rows: int
    width: int
    scale: float
    draw: Callable[[Draw, int, int], Pairs] = pairs
    norm: float = 1.0
    keyword: str = ""
    make: Callable[[Draw, Arguments], Arguments] = lambda draw, arguments: arguments
    objectives: tuple[str, ...] = ()


def _square(features: Callable[..., Pairs], *parameters: Any) -> Callable[[Draw, int, int], Pairs]:
    return lambda draw, b, d: features(draw, b, b, d, *parameters)


_unpaired = _square(units)
"""A pair is no more alike than any two other features: no probability is near 1."""
_together = _square(units, lambda x: 1.0 + x / 16)
_apart = _square(units, lambda x: 1.0 + x / 8, -1.0)
"""All components of the rows have one sign, and those of the columns the other."""
_poles = _square(units, lambda x: (-1.0) ** np.arange(len(x))[:, None] * (1.0 + x / 16))
"""Pairs that alternate between one direction and its opposite."""


def _trained(draw: Draw, b: int, d: int) -> Pairs:
    return pairs(draw, b, d, *TRAINED)


def _against(draw: Draw, b: int, d: int) -> Pairs:
    """The features of one pair are opposite; all others are nearly orthogonal."""
    rows, columns = _unpaired(draw, b, d)
    columns[b // 2] = -rows[b // 2]
    return rows, columns


def _rising(draw: Draw, b: int, d: int) -> Pairs:
    rows, columns = draw.standard_normal((b, d)) / 4, draw.standard_normal((b, d)) / 4
    rows[:, 0], columns[:, 0] = 1.0, 3.0 * np.arange(b)
    return rows, columns / np.linalg.norm(columns, axis=1).max()


def _repeated(draw: Draw, b: int, d: int) -> Pairs:
    rows, columns = _unpaired(draw, -(-b // 4), d)
    return np.resize(rows, (b, d)), np.resize(columns, (b, d))


def _not_a_number(draw: Draw, b: int, d: int) -> Pairs:
    rows, columns = pairs(draw, b, d)
    rows[b // 6, d // 5] = np.nan
    return rows, columns


def _not_a_column(draw: Draw, b: int, d: int) -> Pairs:
    rows, columns = _not_a_number(draw, b, d)
    return columns, rows


_NOT_NUMBERS = _not_a_number, _not_a_column


def _with(arguments: Arguments, **integers: np.ndarray) -> Arguments:
    return replace(arguments, keywords={name: np.asarray(x, np.int64) for name, x in integers.items()})


def _few(draw: Draw, arguments: Arguments) -> Arguments:
    b = len(arguments.features[0])
    return _with(arguments, ids=draw.integers(0, max(1, b // 3), b))


def _far(draw: Draw, arguments: Arguments) -> Arguments:
    return _with(arguments, ids=FAR[draw.integers(0, len(FAR), len(arguments.features[0]))])


def _one_tensor(draw: Draw, arguments: Arguments) -> Arguments:
    return replace(arguments, negatives=(hard(draw, arguments, len(arguments.features[0]) + 3),), joined=True)


def _blocks(draw: Draw, arguments: Arguments) -> Arguments:
    """Positives in all three blocks, the last column among them; the first and last row keep those of a diagonal."""
    b = len(arguments.features[0])
    negatives = tuple(hard(draw, arguments, n) for n in (b - 1, b + 2))
    positives = draw.permutation(3 * b + 1)[:b]
    positives[[0, b // 2, -1]] = 0, 3 * b, b - 1
    return replace(_with(arguments, positives=positives), negatives=negatives)


def _few_keys(draw: Draw, arguments: Arguments) -> Arguments:
    query, key = arguments.features
    count = len(key) // 5 + 1
    return _with(replace(arguments, features=(query, key[:count])), positives=draw.integers(0, count, len(query)))


def moved(draw: Draw, arguments: Arguments) -> Arguments:
    """Positives anywhere among the keys."""
    return _with(arguments, positives=draw.permutation(len(arguments.features[0])))


def _queue(draw: Draw, arguments: Arguments) -> Arguments:
    """Equal ids of queries and of keys in a queue."""
    b = len(arguments.features[0])
    arguments = replace(arguments, negatives=(hard(draw, arguments, b + 5),))
    ids = draw.integers(0, b, 3 * b + 5)
    return _with(arguments, row_ids=ids[:b], column_ids=ids[b:])


_ONE, _SELF = ("info_nce",), ("nt_xent", "sup_con")
_BATCH, _ROWWISE = ("clip_loss", "sigmoid_loss"), ("clip_loss", *_ONE)


def _option(
    name: str,
    about: str,
    scale: float,
    objectives: tuple[str, ...],
    make: Callable[[Draw, Arguments], Arguments],
    rows: int = 37,
    width: int = 40,
    draw: Callable[[Draw, int, int], Pairs] = pairs,
) -> Batch:
    return Batch(name, about, rows, width, scale, draw, 1.0, "options", make, objectives)


_SHARED: dict[str, Any] = {"ids_are": "positives"}
_INSIDE: dict[str, Any] = {"sum_positives": "inside"}
_APART: dict[str, Any] = {"share_negatives": False}
_ALONE: dict[str, Any] = {"in_batch": False}
_OPTIONS = (
    _option("weights", "weights of samples", HIGH, (*_ROWWISE, *_SELF, "sigmoid_loss"), optional()),
    # The package counts this many equal ids by sorting them.
    _option("several", "ids that are positives", 20.0, (*_BATCH, *_ONE), optional(_few, **_SHARED), 301, 24),
    _option(
        "several@mean",
        "positives that share a weight",
        20.0,
        ("sigmoid_loss",),
        optional(_few, **_SHARED, mean_positives=True),
    ),
    _option("own-ids", "a queue of positives", 20.0, _ONE, optional(_queue, **_SHARED)),
    _option(
        "inside",
        "the sum over positives inside of the logarithm",
        *(HIGH, _ROWWISE, optional(_few, weighted=False, **_SHARED, **_INSIDE)),
    ),
    _option(
        "inside@poles",
        "a sum inside, positives far above all negatives: its derivatives are 0 in float32",
        *(1000.0, _ROWWISE, optional(lambda _, x: _with(x, ids=x.features[0][:, 0] > 0), **_SHARED, **_INSIDE)),
        draw=_poles,
    ),
    _option("inside@labels", "SupCon's L_in", HIGH, ("sup_con",), optional(labelled(distinct), **_INSIDE), 301, 24),
    _option("smoothing", "label smoothing", 20.0, _ROWWISE, optional(label_smoothing=0.3)),
    _option(
        "smoothing@ids",
        "label smoothing of shared targets",
        *(20.0, _ROWWISE, optional(_few, weighted=False, label_smoothing=0.1, **_SHARED)),
    ),
    _option("smoothing@blocks", "label smoothing of more columns", 20.0, _ONE, optional(_blocks, label_smoothing=0.3)),
    _option(
        "smoothing@many",
        "label smoothing of 1,100 rows",
        *(20.0, _ONE, optional(_few_keys, label_smoothing=0.3), 1100, 8),
    ),
    _option("margin", "a margin", 20.0, (*_ROWWISE, *_SELF), optional(margin=0.35)),
    # The shapes are those of the previous case.
    _option("margin@labels", "a margin of L_in", 20.0, ("sup_con",), optional(sum_positives="inside", margin=0.35)),
    _option("margin@below", "a margin below 0", HIGH, (*_ROWWISE, *_SELF), optional(margin=-0.15)),
    _option("margin@inside", "a margin, sum inside", 20.0, _ROWWISE, optional(_few, **_SHARED, **_INSIDE, margin=0.35)),
    *(
        _option("threshold" + name, about, 20.0, objectives, make, draw=draw)
        for name, about, objectives, make, draw in (
            ("", "negatives far above the positive are left out", _ROWWISE, thresholded(), _unpaired),
            ("@ids", "beside false negatives", ("clip_loss",), thresholded(_few), _unpaired),
            ("@queue", "of a queue, too", _ONE, thresholded(_queue), _unpaired),
            ("@positives", "above positives in three blocks", _ONE, thresholded(_blocks), _unpaired),
            ("@exact", "products near limits", _ROWWISE, optional(weighted=False, threshold=2.0**-13), _square(steps)),
        )
    ),
    _option("threshold@relative", "by a share of the positive", 20.0, _ROWWISE, thresholded(relative=True)),
    _option("guide", "a guide without a threshold, and ties", 20.0, _ROWWISE, optional(guided, weighted=False)),
    _option("guide@positives", "of positives anywhere", 20.0, _ONE, optional(_blocks, guided, threshold=-1.0)),
    _option("guide@queue", "of a queue", 20.0, _ONE, optional(_queue, guided, threshold=0.5, threshold_is="relative")),
    *(
        _option("own" + name, about, scale, _ONE, optional(*makers, with_own, **options), draw=draw)
        for name, about, scale, draw, makers, options in (
            ("", "negatives of one query each, and NaN beyond their counts", HIGH, pairs, (), _APART),
            ("@certain", "of certain pairs", 100.0, certain_pairs, (), _APART),
            ("@alone", "nothing but them", 20.0, pairs, (), {**_APART, **_ALONE, "margin": 0.35}),
            ("@queue", "beside a queue, with ids", 20.0, pairs, (_queue,), _APART | _ALONE),
            ("@ids", "of several positives", 20.0, pairs, (_queue,), _APART | _SHARED | _INSIDE),
            ("@threshold", "less those far above the positive", 20.0, pairs, (), {**_APART, "threshold": -0.1}),
            ("@shared", "their padding, where all share them and 0 counts", 2.0, pairs, (_one_tensor,), _ALONE),
        )
    ),
)
OPTIONS = tuple(batch.name for batch in _OPTIONS)
"""The cases of the options of contrastile's own functions."""

_MAXSIM = tuple(
    replace(_option(name, about, HIGH, ("maxsim",), make, draw=draw), keyword=keyword)
    for name, about, make, draw, keyword in (
        ("one-token", "MaxSim of one token for each text", lambda _, x: of_pairs(x, (1, 1)), pairs, ""),
        ("many-tokens", "17 tokens against 33", lambda _, x: of_pairs(x, (17, 33)), pairs, ""),
        ("symmetric", "both directions", lambda _, x: replace(x, options={"symmetric": True}), pairs, "options"),
        ("masked", "tokens that do not count are the nearest", masked, pairs, "masks"),
        ("masked@opposite", "beside products below -100", partial(masked, norm=16.0), _apart, "masks"),
    )
)

BATCHES = {
    batch.name: batch
    for batch in (
        Batch("smoke", "aligned 32 x 32", 32, 32, 10.0),
        Batch("ragged", "sizes that fit no tile: 41 x 72", 41, 72, 14.25, _unpaired),
        Batch("wide", "sizes beyond a tile: 203 x 200", 203, 200, 14.25, _trained),
        Batch("aligned", "128 x 128: tiles of any power of two up to 128 are full", 128, 128, 14.25, _trained),
        Batch("deep", "the longest dot products, and an odd width: 1025", 37, 1025, 100.0, _unpaired),
        Batch("one-pair", "one pair: the loss and its gradients are 0", 1, 24, 14.25),
        Batch("hot", "pairs of a trained model at scale 100: gradients cancel", 41, 72, 100.0, _trained),
        Batch(
            "certain", "every pair is certain: loss and gradients are as small as 1 - p", 43, 64, 100.0, certain_pairs
        ),
        Batch("certain@300", "every pair is certain, scale 300", 43, 64, 300.0, certain_pairs),
        Batch("large-logits", "logits beyond 88: an exponential without a shift overflows", 37, 40, 300.0, _trained),
        Batch("opposite", "every logit near -100: a maximum that starts at 0 wins", 37, 40, 100.0, _apart),
        Batch("opposite@one", "one positive far below all negatives", 37, 256, 100.0, _against),
        Batch(
            "one-direction", "all features share a direction: large logits, small differences", 37, 40, 100.0, _together
        ),
        Batch(
            "staircase", "logits rise along the columns: every tile moves the running maximum", 53, 16, 150.0, _rising
        ),
        Batch("duplicates", "repeated pairs: ties for the maximum", 39, 40, 20.0, _repeated),
        Batch("norm-30", "features of norm 30 at scale 100", 37, 64, 100.0, _unpaired, norm=30.0),
        Batch("scale-0", "scale 0: its gradient must not come from a division by the scale", 31, 24, 0.0),
        Batch("negative-scale", "scale -14.25: a maximum taken before scaling is a minimum after it", 33, 41, -14.25),
        Batch("ids", "shared ids: false negatives are left out, positives stay", 37, 40, 20.0, pairs, 1.0, "ids", _few),
        Batch("ids@wide", "shared ids of rows far apart, in other tiles", 301, 24, 20.0, pairs, 1.0, "ids", _few),
        Batch("ids@far", "shared ids beyond 32 bits or below 0", 37, 40, 20.0, pairs, 1.0, "ids", _far),
        Batch(
            "ids@cold",
            "logits near -20,000: what is left out must weigh nothing, not as much as a finite logit",
            *(37, 40, 20000.0, _apart, 1.0, "ids", _few),
        ),
        Batch("negatives", "hard negatives as one tensor", 37, 40, HIGH, pairs, 1.0, "negatives", _one_tensor),
        Batch("positives", "positives in three blocks of columns", 37, 40, HIGH, pairs, 1.0, "positives", _blocks),
        Batch("few-keys", "many queries of a few keys", 37, 40, HIGH, pairs, 1.0, "positives", _few_keys),
        Batch("queue", "equal ids of queries and of a queue", 37, 40, 20.0, pairs, 1.0, "negatives", _queue),
        Batch(
            "labels",
            "labels of one, two and many samples, in no order: those without a partner are negatives alone",
            *(41, 40, HIGH, _unpaired, 1.0, "labels", labelled(lambda draw, count: draw.permutation(count))),
        ),
        Batch(
            "labels@far",
            "300 labels beyond 32 bits, below 0 or equal as floats",
            *(301, 24, HIGH, _unpaired, 1.0, "labels", labelled(distinct)),
        ),
        Batch("bias", "a positive bias", 37, 40, HIGH, pairs, 1.0, "bias", lambda draw, x: replace(x, bias=2.7)),
        *_MAXSIM,
        Batch("wordnet", "real sentence embeddings at CLIP's final scale", 1021, 384, 100.0, real),
        Batch(
            "nan", "a NaN in one feature: the loss is NaN, never a number and never a hang", 19, 24, 10.0, _not_a_number
        ),
        Batch("nan@second", "a NaN in one feature of the second argument", 19, 24, 10.0, _not_a_column),
        *_OPTIONS,
    )
}
"""All cases, in the order in which they run."""


@dataclass(frozen=True, eq=False)
class LossCase:
    """A case of an objective. Cases are equal if they have equal truths and bounds, however the loss is called."""

    batch: Batch
    dtype: str
    arguments: Arguments
    claims: Claims
    facts: Accuracy | None = None

    @cached_property
    def content(self) -> tuple[Any, ...]:
        claims = self.claims
        key = self.dtype, self.facts, self.state, claims.objective, claims.precision, claims.normalises
        return *key, pickle.dumps(self.arguments)

    def __hash__(self) -> int:
        return hash(self.content)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LossCase) and self.content == other.content

    @property
    def state(self) -> str:
        """The dtype of a plain computation's logits and sums."""
        return self.claims.state or self.dtype

    @cached_property
    def problem(self) -> Problem:
        """The whole problem in float64, of the given features, or of normalised ones if the loss normalises.

        A backend receives weights in its state dtype, so the problem's weights are rounded to that dtype.
        """
        if self.claims.objective == "maxsim":
            return problem_and_truth(self._used_arguments)[0]
        weights = "float64" if self.facts is None else state_dtype(self.dtype)
        return stated(self.claims.objective, self._used_arguments, weights)

    @property
    def oracle(self) -> Truth:
        return problem_and_truth(self._used_arguments)[1] if self.claims.objective == "maxsim" else truth(self.problem)

    @property
    def _used_arguments(self) -> Arguments:
        return normalised(self.arguments) if self.claims.normalises else self.arguments


def concerns(name: str, prop: str, own: str | None, objective: str) -> bool:
    """Whether a property is tested on this case for this objective; ``own`` is the property's own case, if any."""
    if own is not None or name in OWN:
        return name == own
    batch = BATCHES[name]
    objectives = {**KEYWORDS, "labels": ("sup_con",), "bias": ("sigmoid_loss",)}.get(batch.keyword, (objective,))
    if batch.make is _queue:
        objectives = ("info_nce",)
    objectives = batch.objectives or objectives
    # Of NaN features only the value is tested.
    return (prop == "value" or batch.draw not in _NOT_NUMBERS) and objective in objectives


@lru_cache(maxsize=1)
def build(name: str, dtype: str, claims: Claims, facts: Accuracy | None = None, seed: int = 0) -> LossCase:
    """The case of this name for a loss with these claims, with features rounded to this dtype and drawn by the seed.

    Raises:
        ValueError: the loss does not claim this kind of batch; the message says which claim is missing.
    """
    if name == CALLS:
        return sized(claims, claims.batch(23) or 1, claims.width(20) or 8, dtype, facts)
    if name in OWN:
        return sized(claims, claims.batch(1) or 1, claims.width(8) or 8, dtype, facts)
    batch = BATCHES[name]
    b, d = claims.batch(batch.rows), claims.width(batch.width)
    if b is None or (batch.rows == 1 < b):
        raise ValueError(f"a batch of {batch.rows} rows")
    if d is None:
        raise ValueError(f"features of width {batch.width}")
    if batch.norm != 1.0 and claims.normalises:
        raise ValueError("features that are not normalised")
    needed = [batch.keyword, *(["negatives"] if batch.make is _blocks else ["ids"] if batch.make is _queue else [])]
    missing = [name for name in needed if name in KEYWORDS and not getattr(claims, name)]
    if missing:
        raise ValueError({"ids": "equal ids"}.get(missing[0], missing[0]))
    if batch.draw in _NOT_NUMBERS and not claims.non_finite:
        raise ValueError("NaN features")
    case = formed(batch, b, d, dtype, claims, facts, seed)
    if "positives" in case.arguments.keywords and not claims.positives:
        raise ValueError("positives")
    features = case.arguments.features[0], case.arguments.features[-1]
    norms = [np.nanmax(np.linalg.norm(x, axis=-1)) for x in features]
    terms = features[0].shape[1] if claims.objective == "maxsim" else 1
    largest_logit = terms * abs(case.arguments.scale) * norms[0] * norms[1]
    if claims.largest_logit is not None and largest_logit > claims.largest_logit:
        raise ValueError(f"logits of {largest_logit:.3g}")
    if largest_logit > {"float16": 65504.0}.get(case.state, np.inf) / 2:
        raise ValueError(f"logits of {largest_logit:.3g}, which overflow in {case.state}")
    return case


def formed(
    batch: Batch, rows: int, width: int, dtype: str, claims: Claims, facts: Accuracy | None = None, seed: int = 0
) -> LossCase:
    """The case of a batch in another size. Another seed draws other values."""
    draw = np.random.default_rng(zlib.crc32(batch.name.encode()) + (seed << 32))
    # The padding changes no dot product.
    features = tuple(batch.norm * np.pad(x, ((0, 0), (0, width - x.shape[1]))) for x in batch.draw(draw, rows, width))
    arguments = batch.make(draw, _arguments(claims.objective, Arguments(features, batch.scale)))
    if claims.objective == "info_nce" and "ids" in arguments.keywords:
        arguments = _with(arguments, row_ids=arguments.keywords["ids"], column_ids=arguments.keywords["ids"])
    return LossCase(batch, dtype, rounded(arguments, dtype, facts), claims, facts)


def sized(
    claims: Claims, rows: int, width: int, dtype: str, facts: Accuracy | None = None, *, seed: int = 0
) -> LossCase:
    """A case of this size. Another seed gives other features, labels and numbers."""
    draw = np.random.default_rng(seed)
    # With equal parts of row and noise, one feature could be 0.
    features = pairs(draw, rows, width, 1.5, 1.5)
    if width < 3 and not claims.normalises:
        # A single feature of unit length is 1 or -1, which would make every pair certain.
        features = features[0] * draw.uniform(0.05, 0.3, (rows, 1)), features[1] * draw.uniform(0.05, 0.3, (rows, 1))
    arguments = _arguments(claims.objective, Arguments(features, SCALE + seed))
    if seed and arguments.labels is not None:
        arguments = replace(arguments, labels=draw.permutation(arguments.labels))
    batch = Batch(f"{rows} x {width}", "", rows, width, SCALE)
    return LossCase(batch, dtype, rounded(arguments, dtype, facts), claims, facts)


def _arguments(objective: str, arguments: Arguments) -> Arguments:
    """Turn pairs into the arguments of the objective."""
    if objective == "sigmoid_loss":
        # SigLIP starts at scale 10 and bias -10.
        return replace(arguments, bias=-abs(arguments.scale))
    if objective == "maxsim":
        return of_pairs(arguments)
    if objective == "sup_con":
        # The first half of the pairs gives two samples per label. Some labels are then merged.
        b = len(arguments.features[0])
        half = -(-b // 2)
        features = np.concatenate([x[:half] for x in arguments.features])[:b]
        labels = np.arange(half) % max(1, 3 * half // 4)
        return replace(arguments, features=(features,), labels=np.concatenate([labels, labels])[:b])
    return arguments
