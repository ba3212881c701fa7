"""The cases of a public loss: a batch of pairs each, as large as is claimed, made into the arguments of an objective.

The public losses have one weight for all pairs, so these cases vary what a caller varies: features, scale, sizes, ids.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import numpy as np

from contrastile.oracle.arrays import FloatArray, float64
from contrastile.problems import BUILDERS, FEW
from contrastile.schedules.problem import Problem
from contrastile.verify.draws import FAR, Draw, certain_pairs, pairs, unit, wordnet_pairs
from contrastile.verify.losses.claims import Claims
from contrastile.verify.losses.subject import Arguments
from contrastile.verify.rearrange import apart, folded, permuted
from contrastile.verify.rounding import round_to
from contrastile.verify.truth import Outcome, Truth, truth

Pairs = tuple[FloatArray, FloatArray]

MEMORY, ABOUT_MEMORY = "memory", "batches of which each is twice as large as the last"
"""The case of the property that measures memory, and what it is."""

SIZES, ABOUT_SIZES = (
    "sizes",
    "batches of up to 1,025 pairs around multiples of 8 to 1,024, and the widths of common models",
)
"""The case of the property of the same name, and what it is."""

OWN = {MEMORY: ABOUT_MEMORY, SIZES: ABOUT_SIZES}
"""The cases that belong to one property each."""

SELF = ("nt_xent", "sup_con")
"""The objectives whose features are rows and columns at once."""


@dataclass(frozen=True, slots=True)
class Batch:
    """A named batch of pairs.

    Attributes:
        name: what ``--case`` calls it.
        about: the edge case or the defect that it catches, in one line.
        rows: how many pairs it has, where the claims allow it.
        width: how many features, where the claims allow it.
        scale: that multiplies the dot products.
        draw: makes unit pairs of a size.
        norm: the features' norm.
        ids: makes ids of a number of rows; None for a case without.
    """

    name: str
    about: str
    rows: int
    width: int
    scale: float
    draw: Callable[[Draw, int, int], Pairs] = pairs
    norm: float = 1.0
    ids: Callable[[Draw, int], np.ndarray] | None = None


def _trained(draw: Draw, b: int, d: int) -> Pairs:
    return pairs(draw, b, d, 0.2, 3.0)


def _unpaired(draw: Draw, b: int, d: int) -> Pairs:
    """No pair is more alike than any two others: no probability is near 1."""
    rows, columns = (unit(draw.standard_normal((b, d))) for _ in range(2))
    return rows, columns


def _apart(draw: Draw, b: int, d: int) -> Pairs:
    """All features of one sign in every component, the columns of the other."""
    rows, columns = (unit(1.0 + draw.standard_normal((b, d)) / 8) for _ in range(2))
    return rows, -columns


def _together(draw: Draw, b: int, d: int) -> Pairs:
    rows, columns = (unit(1.0 + draw.standard_normal((b, d)) / 16) for _ in range(2))
    return rows, columns


def _rising(draw: Draw, b: int, d: int) -> Pairs:
    """Logits rise along the columns."""
    rows, columns = draw.standard_normal((b, d)) / 4, draw.standard_normal((b, d)) / 4
    rows[:, 0], columns[:, 0] = 1.0, 3.0 * np.arange(b)
    return rows, columns / np.linalg.norm(columns, axis=1).max()


def _repeated(draw: Draw, b: int, d: int) -> Pairs:
    rows, columns = _unpaired(draw, -(-b // 4), d)
    return np.resize(rows, (b, d)), np.resize(columns, (b, d))


def _real(draw: Draw, b: int, d: int) -> Pairs:
    real = wordnet_pairs()
    rows, columns = (unit(float64(x)[:, :d]) for x in (real.examples, real.glosses))
    return np.resize(rows, (b, rows.shape[1])), np.resize(columns, (b, columns.shape[1]))


def _not_a_number(draw: Draw, b: int, d: int) -> Pairs:
    rows, columns = pairs(draw, b, d)
    rows[b // 6, d // 5] = np.nan
    return rows, columns


def _few(draw: Draw, b: int) -> np.ndarray:
    return draw.integers(0, max(1, b // 3), b)


def _far(draw: Draw, b: int) -> np.ndarray:
    return FAR[draw.integers(0, len(FAR), b)]


BATCHES = {
    each.name: each
    for each in (
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
        Batch("ids", "shared ids: false negatives are left out, the positive stays", 37, 40, 20.0, ids=_few),
        Batch("ids@far", "shared ids beyond 32 bits or below 0", 37, 40, 20.0, ids=_far),
        Batch("wordnet", "real sentence embeddings at CLIP's final scale", 1021, 384, 100.0, _real),
        Batch(
            "nan", "a NaN in one feature: the loss is NaN, never a number and never a hang", 19, 24, 10.0, _not_a_number
        ),
    )
}
"""All cases, in the order in which they run."""


@dataclass(frozen=True)
class LossCase:
    """A case of an objective.

    Attributes:
        batch: the pairs it is made of.
        dtype: the features'.
        arguments: what the loss is called with.
        claims: the loss's.
    """

    batch: Batch
    dtype: str
    arguments: Arguments
    claims: Claims

    @cached_property
    def problem(self) -> Problem:
        """The whole problem in float64, of the features as they are, or after the loss's own normalisation."""
        given = self.arguments
        if self.claims.normalises:
            given = replace(given, features=tuple(unit(x) for x in given.features))
        return stated(self.claims.objective, given)

    @cached_property
    def oracle(self) -> Truth:
        """Its truth."""
        return truth(self.problem)


def stated(objective: str, given: Arguments) -> Problem:
    """The problem that an objective states of these arguments."""
    numbers = [x for x in (given.scale, given.bias) if x is not None]
    labels = [] if given.labels is None else [given.labels]
    named = {} if given.ids is None else {"ids": given.ids}
    if objective == "info_nce" and given.ids is not None:
        named = {"row_ids": given.ids, "column_ids": given.ids}
    problem = BUILDERS[objective](*given.features, *labels, *numbers, **named).problem
    if given.labels is not None and len(given.labels) > FEW:
        # it has the samples in the order of their labels
        place = np.argsort(np.argsort(given.labels, kind="stable"))
        return permuted(apart(problem), place, place)
    return apart(problem)


def concerns(name: str, prop: str, own: str | None, objective: str) -> bool:
    """Whether a property, which may have an own case, is tested on the case of this name for this objective."""
    if own is not None or name in OWN:
        return name == own
    batch = BATCHES[name]
    # of NaN features nothing is claimed but the value
    return (prop == "value" or batch.draw is not _not_a_number) and not (batch.ids and objective in SELF)


@lru_cache(maxsize=1)
def build(name: str, dtype: str, claims: Claims) -> LossCase:
    """The case of this name for a loss with these claims, its features rounded to this dtype.

    Raises:
        ValueError: the loss claims no batch of this kind; the message says which claim is missing.
    """
    if name in OWN:
        return sized(claims, claims.batch(1) or 1, claims.width(8) or 8, dtype)
    batch = BATCHES[name]
    draw = np.random.default_rng(zlib.crc32(name.encode()))
    b, d = claims.batch(batch.rows), claims.width(batch.width)
    if b is None or (batch.rows == 1 < b):
        raise ValueError(f"a batch of {batch.rows} rows")
    if d is None:
        raise ValueError(f"features of width {batch.width}")
    if batch.norm != 1.0 and claims.normalises:
        raise ValueError("features that are not normalised")
    if batch.ids is not None and not claims.ids:
        raise ValueError("equal ids")
    if batch.draw is _not_a_number and not claims.non_finite:
        raise ValueError("NaN features")
    rows, columns = batch.draw(draw, b, d)
    if rows.shape[1] != d:
        # zeros change no dot product
        rows, columns = (np.pad(x, ((0, 0), (0, d - x.shape[1]))) for x in (rows, columns))
    features = tuple(round_to(batch.norm * x, dtype) for x in (rows, columns))
    scale = float(round_to(batch.scale, "float32"))
    largest = (
        abs(scale) * np.nanmax(np.linalg.norm(features[0], axis=1)) * np.nanmax(np.linalg.norm(features[1], axis=1))
    )
    if claims.largest_logit is not None and largest > claims.largest_logit:
        raise ValueError(f"logits of {largest:.3g}")
    limit = {"float16": 65504.0}.get(claims.state or dtype, np.inf)
    if largest > limit / 2:
        raise ValueError(f"logits of {largest:.3g}, which overflow in {claims.state or dtype}")
    given = Arguments(features, scale)
    if batch.ids is not None:
        given = replace(given, ids=np.asarray(batch.ids(draw, b), dtype=np.int64))
    return LossCase(batch, dtype, _arguments(claims.objective, given), claims)


def sized(claims: Claims, rows: int, width: int, dtype: str) -> LossCase:
    """A case of this size."""
    image, text = pairs(np.random.default_rng(0), rows, width)
    given = Arguments((round_to(image, dtype), round_to(text, dtype)), 8.0)
    batch = Batch(f"{rows} x {width}", "", rows, width, 8.0)
    return LossCase(batch, dtype, _arguments(claims.objective, given), claims)


def _arguments(objective: str, given: Arguments) -> Arguments:
    """The pairs as the objective takes them."""
    if objective == "sigmoid_loss":
        # SigLIP starts at scale 10 and bias -10
        return replace(given, bias=-abs(given.scale))
    if objective == "sup_con":
        # half of them as both samples of a class, of which some are joined
        b = len(given.features[0])
        half = -(-b // 2)
        features = np.concatenate([x[:half] for x in given.features])[:b]
        label = np.arange(half) % max(1, 3 * half // 4)
        return replace(given, features=(features,), labels=np.concatenate([label, label])[:b])
    return given


def of_arguments(x: Outcome, objective: str) -> Outcome:
    """An outcome in terms of the arguments: where features are rows and columns at once, their gradients are added."""
    return folded(x) if objective in SELF else x
