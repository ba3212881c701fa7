"""The named cases: small problems, one per edge case. Random aligned input catches half of the known defects.

Features are rounded to the case's dtype and all other numbers to float32 before the truth is computed, so that every
backend and the oracle see the same values; targets are 1 / n in float64. Each case has a fixed seed of its own.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from contrastile.backends.contract import Match
from contrastile.oracle.arrays import FloatArray, IntArray, float64
from contrastile.schedules.problem import Problem
from contrastile.verify.draws import (
    FAR,
    Draw,
    certain_pairs,
    pairs,
    sigmoid_problem,
    softmax_problem,
    unit,
    with_limits,
    wordnet_pairs,
)
from contrastile.verify.rounding import round_to


@dataclass(frozen=True)
class Case:
    """A named problem.

    Attributes:
        name: what ``contrastile verify --case`` calls it.
        about: the edge case or the defect it catches, in one line.
        dtype: the features' dtype.
        problem: NumPy arrays, float64 and int64; features are exact in ``dtype``, all other floats in float32.
    """

    name: str
    about: str
    dtype: str
    problem: Problem


Builder = Callable[[Draw], Problem]
_ABOUT: dict[str, str] = {}
CASES: dict[str, Builder] = {}


def names() -> list[str]:
    """Names of all cases, in the order in which they run."""
    return list(CASES)


def build(name: str, dtype: str) -> Case:
    """The case of this name, with features of this dtype.

    Raises:
        ValueError: there is no such case or dtype.
    """
    if name not in CASES:
        raise ValueError(f"case must be one of {', '.join(CASES)}, got {name!r}")
    problem = CASES[name](np.random.default_rng(zlib.crc32(name.encode())))
    rounded = replace(
        problem,
        rows=round_to(problem.rows, dtype),
        columns=tuple(round_to(block, dtype) for block in problem.columns),
    )
    return Case(name, _ABOUT[name], dtype, rounded)


def _case(name: str, about: str, **variant: Any) -> Callable[[Callable[..., Problem]], Callable[..., Problem]]:
    """Register a builder under a name; ``variant`` goes to the builder. The lowest decorator runs first."""

    def register(builder: Callable[..., Problem]) -> Callable[..., Problem]:
        CASES[name] = lambda draw: builder(draw, **variant)
        _ABOUT[name] = about
        return builder

    return register


def _halves(b: int) -> dict[str, Any]:
    """The weights and positives of the symmetric loss."""
    half = np.full(b, 0.5 / b)
    return {"row_weight": half, "column_weight": half, "positives": np.arange(b)}


def _mostly_diagonal(m: int) -> IntArray:
    """Positives of which every third names no column, unless it is cut to 32 bits or counted from the end."""
    rows = np.arange(m)
    nowhere = np.array([-2, 2**32 + 7, -(2**32)])[rows // 3 % 3]
    return np.where(rows % 3 > 0, rows, nowhere)


def _signed(draw: Draw, m: int, n: int) -> dict[str, Any]:
    """Signed weights in both directions and positives at random: several rows may share one."""
    return {
        "row_weight": draw.standard_normal(m),
        "column_weight": draw.standard_normal(n),
        "positives": draw.integers(0, n, m),
    }


@_case("smoke", "aligned 32 x 32 x 32, the symmetric loss")
def _smoke(draw: Draw) -> Problem:
    return softmax_problem(*pairs(draw, 32, 32), 10.0, **_halves(32))


@_case("ragged", "no side fits a tile; signed weights and random positives tell rows from columns")
def _ragged(draw: Draw) -> Problem:
    rows, columns = draw.standard_normal((33, 40)), draw.standard_normal((47, 40))
    return softmax_problem(rows, columns, 1.0, **_signed(draw, 33, 47))


@_case("square-ragged", "41 x 41 x 72: a swap of rows and columns keeps every shape")
def _square_ragged(draw: Draw) -> Problem:
    rows, columns = (unit(draw.standard_normal((41, 72))) for _ in range(2))
    return softmax_problem(rows, columns, 14.3, **_signed(draw, 41, 41))


@_case("hot", "pairs of a trained model at scale 100: the probability of the positive is near 1 and G cancels")
def _hot(draw: Draw) -> Problem:
    weights: dict[str, Any] = _signed(draw, 41, 41) | {"positives": np.arange(41)}
    return softmax_problem(*pairs(draw, 41, 72, 0.2, 3.0), 100.0, **weights)


@_case("limits", "negatives beyond the limits of their rows, and others beyond those of their columns, are left out")
@_case("limits-hot", "what is left out is far above all that counts: its exponential overflows", scale=200.0)
@_case("limits-ids", "limits beside false negatives", ids=True)
@_case("limits-rows", "limits of the rows of a loss of one direction", two_sided=False)
def _limits(draw: Draw, scale: float = 10.0, *, ids: bool = False, two_sided: bool = True) -> Problem:
    weights: dict[str, Any] = _signed(draw, 33, 47)
    if not two_sided:
        del weights["column_weight"]
    if ids:
        weights["ids"] = draw.integers(0, 12, 33), draw.integers(0, 12, 47)
    rows, columns = (unit(draw.standard_normal((size, 40))) for size in (33, 47))
    return with_limits(softmax_problem(rows, columns, scale, **weights))


@_case("all-negative", "every logit far below 0 at scale 200: zero padding or a start at 0 would win the maximum")
def _all_negative(draw: Draw) -> Problem:
    rows, columns = (unit(np.abs(draw.standard_normal((size, 40)))) for size in (33, 47))
    return softmax_problem(rows, -columns, 200.0, **_signed(draw, 33, 47))


@_case(
    "opposite",
    "every logit near -100, as far below 0 as norms allow: with a reference from the norms every term underflows",
)
def _opposite(draw: Draw) -> Problem:
    rows, columns = (unit(1.0 + draw.standard_normal((size, 40)) / 8) for size in (33, 47))
    return softmax_problem(rows, -columns, 100.0, **_signed(draw, 33, 47))


@_case("staircase@up", "logits rise along the columns: every tile moves the running maximum", sign=1.0)
@_case("staircase", "logits fall along the columns: every later tile is far below the running maximum", sign=-1.0)
def _staircase(draw: Draw, sign: float) -> Problem:
    rows, columns = draw.standard_normal((17, 16)) / 4, draw.standard_normal((53, 16)) / 4
    rows[:, 0], columns[:, 0] = 1.0, sign * 3.0 * np.arange(53)
    return softmax_problem(rows, columns, 2.0, **_signed(draw, 17, 53))


@_case("deep@1025", "a width beyond 1024, and odd", width=1025)
@_case("deep@1000", "a width that is not a power of two: 1000", width=1000)
@_case("deep", "the longest dot products: width 1024", width=1024)
def _deep(draw: Draw, width: int) -> Problem:
    rows, columns = (unit(draw.standard_normal((size, width))) for size in (17, 37))
    return softmax_problem(rows, columns, 100.0, **_signed(draw, 17, 37))


@_case("wide", "141 x 203 x 200: several tiles on both sides, and a width beyond 128")
def _wide(draw: Draw) -> Problem:
    rows, columns = (unit(draw.standard_normal((size, 200))) for size in (141, 203))
    return softmax_problem(rows, columns, 14.3, **_signed(draw, 141, 203))


@_case("aligned", "128 x 128 x 128: tiles of any power of two up to 128 are full")
def _aligned(draw: Draw) -> Problem:
    return softmax_problem(*pairs(draw, 128, 128), 14.3, **_signed(draw, 128, 128))


@_case("long@sigmoid", "the sigmoid loss of 128 x 1153 x 512", sigmoid=True)
@_case("long", "128 x 1153 x 512: row tiles are full, columns are many and no column tile divides them")
@_case(
    "long@rows",
    "1153 x 128 x 512: a column has positives a thousand rows apart; heavy rows far down",
    m=1153,
    n=128,
)
def _long(draw: Draw, m: int = 128, n: int = 1153, sigmoid: bool = False) -> Problem:
    rows, columns = (unit(draw.standard_normal((size, 512))) for size in (m, n))
    weights = _signed(draw, m, n)
    weights["row_weight"][256:1024] *= 64.0
    softmax = softmax_problem(rows, columns, 14.3, **weights)
    return sigmoid_problem(softmax, -2.5) if sigmoid else softmax


@_case("tiny-features", "features below float16's normal range at scale 2^28: nothing is flushed, and no scale clamped")
def _tiny_features(draw: Draw) -> Problem:
    rows, columns = (2.0**-12 * unit(draw.standard_normal((size, 40))) for size in (27, 35))
    # weights with which float16 holds the gradients
    weights = {name: x if name == "positives" else x / 256 for name, x in _signed(draw, 27, 35).items()}
    return softmax_problem(rows, columns, 2.0**28, **weights)


@_case("exact", "entries in {-1, 0, 1}: every product is exact in every dtype")
def _exact(draw: Draw) -> Problem:
    rows, columns = (draw.integers(-1, 2, (size, 24)).astype(np.float64) for size in (29, 37))
    return softmax_problem(rows, columns, 0.5, **_signed(draw, 29, 37))


@_case("duplicates", "repeated rows and columns: ties for the maximum, equal shares of the gradient")
def _duplicates(draw: Draw) -> Problem:
    rows, columns = (unit(draw.standard_normal((7, 40))) for _ in range(2))
    weights: dict[str, Any] = _signed(draw, 25, 39)
    return softmax_problem(np.resize(rows, (25, 40)), np.resize(columns, (39, 40)), 20.0, **weights)


@_case("one-column", "one column: every row's log-sum-exp is a logit, and its G is 0", m=29, n=1)
@_case("one-row", "one row: every column's log-sum-exp is a logit, and its G is 0 where it is positive", m=1, n=29)
def _one(draw: Draw, m: int, n: int) -> Problem:
    rows, columns = (unit(draw.standard_normal((size, 24))) for size in (m, n))
    return softmax_problem(rows, columns, 14.3, **_signed(draw, m, n))


@_case("zero-rows", "no rows: loss 0, every column log-sum-exp -inf, gradients 0")
def _zero_rows(draw: Draw) -> Problem:
    none = np.zeros(0, dtype=np.int64)
    return softmax_problem(
        np.zeros((0, 24)), draw.standard_normal((13, 24)), 10.0, positives=none, column_weight=np.zeros(13)
    )


@_case("ids-drop", "shared ids: false negatives are dropped from the log-sum-exps, the positive stays")
def _ids_drop(draw: Draw) -> Problem:
    ids = draw.integers(0, 11, 37)
    return softmax_problem(*pairs(draw, 37, 40), 20.0, ids=(ids, ids), **_halves(37))


@_case("ids-drop@rows", "150 x 300 x 100 of one direction: shared ids are dropped in several tiles")
def _ids_drop_rows(draw: Draw) -> Problem:
    rows, columns = (unit(draw.standard_normal((size, 100))) for size in (150, 300))
    ids = draw.integers(0, 60, 150), draw.integers(0, 60, 300)
    positives, weight = draw.integers(0, 300, 150), draw.standard_normal(150)
    return softmax_problem(rows, columns, 20.0, ids=ids, positives=positives, row_weight=weight)


@_case("ids-drop@far", "shared ids beyond 32 bits or below 0; positives and exclusions of no column", match="drop")
@_case("ids-target@far", "labels beyond 32 bits or below 0; exclusions of no column", match="target")
def _ids_far(draw: Draw, match: Match) -> Problem:
    rows, columns = unit(draw.standard_normal((22, 23))), unit(draw.standard_normal((33, 23)))
    ids = np.resize(FAR, 22), FAR[draw.integers(0, len(FAR), 33)]
    # truncated to 32 bits, or taken as an index from the end, each of these is a column
    excluded = np.resize([2**32 + 3, -1, -33, 33, 2**33, 5], 22)
    weights: dict[str, Any] = _signed(draw, 22, 33) | {"positives": _mostly_diagonal(22) if match == "drop" else None}
    return softmax_problem(rows, columns, 14.3, ids=ids, match=match, excluded=excluded, **weights)


def _sup_con(features: FloatArray, labels: IntArray, scale: float, **weights: Any) -> Problem:
    """Samples against themselves, each excluded from its own columns; equal labels are positive."""
    itself = np.arange(len(labels))
    return softmax_problem(
        features, features.copy(), scale, ids=(labels, labels), match="target", excluded=itself, **weights
    )


def _anchors(labels: IntArray) -> FloatArray:
    """SupCon's weights: 1 / (samples that have a positive), and 0 of the others."""
    repeated = (labels[:, None] == labels).sum(axis=1) > 1
    weight: FloatArray = repeated / repeated.sum()
    return weight


@_case("labels", "SupCon: every other row of the label is positive, some rows have none")
def _labels(draw: Draw) -> Problem:
    features = unit(draw.standard_normal((29, 40)))
    labels = np.concatenate([draw.integers(0, 5, 26), [50, 51, 52]])
    return _sup_con(features, labels, 10.0, row_weight=_anchors(labels))


@_case("sorted-labels@72", "the same of width 72", width=72)
@_case("sorted-labels", "SupCon in the order of the labels: tiles of one label, of some in common, of none")
def _sorted_labels(draw: Draw, width: int = 24) -> Problem:
    labels = np.repeat(np.arange(6), [200, 60, 3, 1, 128, 18])
    return _sup_con(unit(draw.standard_normal((410, width))), labels, 10.0, row_weight=_anchors(labels))


@_case("self-excluded", "NT-Xent: each row excludes itself, and its positive is the other view")
def _self_excluded(draw: Draw) -> Problem:
    views = np.concatenate(pairs(draw, 13, 40))
    itself = np.arange(26)
    return softmax_problem(views, views.copy(), 14.3, positives=np.roll(itself, 13), excluded=itself)


@_case("views@norm", "the same of norm 300: x_ij must be x_ji, though either is rounded by a tenth", norm=300.0)
@_case("views", "NT-Xent of 75 samples, signed weights: several tiles on either side of the diagonal")
def _views(draw: Draw, norm: float = 1.0) -> Problem:
    views, itself = norm * np.concatenate(pairs(draw, 75, 72, 0.2, 3.0)), np.arange(150)
    weight = draw.standard_normal(150)
    return softmax_problem(views, views.copy(), 30.0, row_weight=weight, positives=np.roll(itself, 75), excluded=itself)


@_case("blocks@100", "the same of width 100", width=100)
@_case("blocks", "three column blocks under one log-sum-exp, one of them empty; positives in both others")
def _blocks(draw: Draw, width: int = 40) -> Problem:
    rows = unit(draw.standard_normal((23, width)))
    columns = tuple(unit(draw.standard_normal((size, width))) if size else np.zeros((0, width)) for size in (31, 0, 9))
    return softmax_problem(rows, columns, 20.0, **_signed(draw, 23, 40))


@_case("rectangular", "more columns than rows, one direction: hard negatives or a queue")
def _rectangular(draw: Draw) -> Problem:
    rows, columns = pairs(draw, 19, 40)
    queue = unit(draw.standard_normal((42, 40)))
    return softmax_problem(rows, np.concatenate([columns, queue]), 20.0, positives=np.arange(19))


@_case("long-sums", "2,000 columns of nearly the same probability, features of one sign: sums of many like terms")
def _long_sums(draw: Draw) -> Problem:
    rows, columns = (unit(np.abs(draw.standard_normal((size, 24)))) for size in (5, 2000))
    return softmax_problem(rows, columns, 1.0, positives=np.arange(5))


@_case("signed-zero-weights", "weight 0 removes rows that admit nothing; other weights are negative")
def _signed_zero_weights(draw: Draw) -> Problem:
    rows, columns = (unit(draw.standard_normal((size, 24))) for size in (27, 35))
    weights: dict[str, Any] = _signed(draw, 27, 35)
    row_ids, column_ids = np.arange(27), np.full(35, 100)
    # equal ids drop every pair of these rows, and they have no positive: they admit nothing
    row_ids[::5], weights["positives"][::5], weights["row_weight"][::5] = 100, -1, 0.0
    weights["row_weight"][1::5], weights["column_weight"][::4] = 0.0, 0.0
    return softmax_problem(rows, columns, 14.3, ids=(row_ids, column_ids), **weights)


@_case("tiny-weights@sigmoid", "the sigmoid loss with weights of 1e-7 to 1e-12, as a large batch has", sigmoid=True)
@_case(
    "tiny-weights", "weights of 1e-7 to 1e-12, as a large batch has: no threshold may treat them as 0", sigmoid=False
)
def _tiny_weights(draw: Draw, sigmoid: bool) -> Problem:
    rows, columns = (unit(draw.standard_normal((size, 23))) for size in (19, 31))
    weights = _signed(draw, 19, 31)
    weights["row_weight"] *= 10.0 ** np.linspace(-7, -12, 19)
    weights["column_weight"] *= 10.0 ** np.linspace(-12, -7, 31)
    softmax = softmax_problem(rows, columns, 14.3, **weights)
    return sigmoid_problem(softmax, -2.5) if sigmoid else softmax


@_case("negative-scale@sigmoid", "the sigmoid loss at scale -14.3", sigmoid=True)
@_case(
    "negative-scale",
    "scale -14.3 and an odd width: a maximum taken before scaling is a minimum after it",
    sigmoid=False,
)
def _negative_scale(draw: Draw, sigmoid: bool) -> Problem:
    rows, columns = pairs(draw, 33, 41, 0.2, 3.0)
    if sigmoid:
        return sigmoid_problem(softmax_problem(rows, columns, -14.3, positives=np.arange(33)), 2.5)
    return softmax_problem(rows, columns, -14.3, **_signed(draw, 33, 33))


@_case("wide-scale@tiny", "scale 2^-40: dQ and dK are tiny, dscale is not", scale=2.0**-40)
@_case("wide-scale", "scale 0: dscale must not be computed by a division by the scale", scale=0.0)
def _wide_scale(draw: Draw, scale: float) -> Problem:
    return softmax_problem(
        draw.standard_normal((19, 24)), draw.standard_normal((31, 24)), scale, **_signed(draw, 19, 31)
    )


@_case("sigmoid", "SigLIP at initialisation: scale 10, bias -10")
def _sigmoid_start(draw: Draw) -> Problem:
    return sigmoid_problem(softmax_problem(*pairs(draw, 33, 40), 10.0, positives=np.arange(33)), -10.0)


@_case("sigmoid-negatives", "no positive and bias -20: log(1 + exp x) is 0 in float32, log1p(exp x) is not")
def _sigmoid_negatives(draw: Draw) -> Problem:
    rows, columns = (unit(draw.standard_normal((size, 40))) for size in (21, 33))
    return sigmoid_problem(softmax_problem(rows, columns, 10.0, positives=np.full(21, -1)), -20.0)


@_case("sigmoid-ids", "SigLIP with false negatives dropped, signed weights, two column blocks and large logits")
def _sigmoid_ids(draw: Draw) -> Problem:
    rows, columns = draw.standard_normal((21, 24)), draw.standard_normal((31, 24))
    ids = draw.integers(0, 6, 21), draw.integers(0, 6, 31)
    weight = draw.standard_normal(21)
    weight[::6] = 0.0
    blocks = columns[:19], columns[19:]
    positives = draw.integers(0, 31, 21)
    return sigmoid_problem(softmax_problem(rows, blocks, 4.0, positives=positives, ids=ids, row_weight=weight), 1.5)


@_case("sigmoid-labels", "the sigmoid loss of labels: equal ids are positive, several to a row")
def _sigmoid_labels(draw: Draw) -> Problem:
    rows, columns = (unit(draw.standard_normal((size, 24))) for size in (23, 31))
    ids = draw.integers(0, 5, 23), draw.integers(0, 5, 31)
    return sigmoid_problem(softmax_problem(rows, columns, 10.0, ids=ids, match="target"), -2.5)


@_case("sigmoid-ids@far", "SigLIP with false negatives of far ids, and excluded positives")
def _sigmoid_ids_far(draw: Draw) -> Problem:
    rows, columns = unit(draw.standard_normal((22, 23))), unit(draw.standard_normal((33, 23)))
    ids = np.resize(FAR, 22), FAR[draw.integers(0, len(FAR), 33)]
    positives = _mostly_diagonal(22)
    excluded = np.where(np.arange(22) % 4 == 1, positives, -1)
    return sigmoid_problem(softmax_problem(rows, columns, 10.0, positives=positives, ids=ids, excluded=excluded), -2.5)


@_case("certain@wrong", "every row is certain of a column that is not its own, at scale 100", scale=100.0, turned=1)
@_case("certain@300", "every pair is certain, scale 300", scale=300.0)
@_case("certain@30", "every pair is certain, scale 30", scale=30.0)
@_case("certain", "every pair is certain, scale 100: loss and gradient are as small as 1 - p", scale=100.0)
def _certain(draw: Draw, scale: float, turned: int = 0) -> Problem:
    rows, columns = certain_pairs(draw, 43, 64)
    return softmax_problem(rows, np.roll(columns, turned, axis=0), scale, **_halves(43))


@_case("certain-labels@alike", "the same, and samples that are nearly alike: positives share the row", noise=0.01)
@_case("certain-labels@100", "the same of width 100", width=100)
@_case("certain-labels", "SupCon of pairs and of larger classes, all certain, at scale 100")
def _certain_labels(draw: Draw, width: int = 64, noise: float | None = None) -> Problem:
    views = np.concatenate(certain_pairs(draw, 15, width))
    labels = np.concatenate([np.arange(15), np.arange(12), [0, 0, 1]])
    if noise is not None:
        more = unit(views[[0, 0, 1]] + noise * draw.standard_normal((3, width)))
        views, labels = np.concatenate([views, more]), np.concatenate([labels, [0, 0, 1]])
    return _sup_con(views, labels, 100.0)


@_case("copies", "SupCon of two classes of copies: the loss is the logarithm of their number")
def _copies(draw: Draw) -> Problem:
    labels = draw.integers(0, 2, 71)
    return _sup_con(unit(draw.standard_normal((2, 64)))[labels], labels, 100.0)


@_case("certain-views", "NT-Xent of certain pairs of views at scale 100")
def _certain_views(draw: Draw) -> Problem:
    views, itself = np.concatenate(certain_pairs(draw, 17, 64)), np.arange(34)
    return softmax_problem(views, views.copy(), 100.0, positives=np.roll(itself, 17), excluded=itself)


@_case("certain-shared", "certain pairs in two column blocks, where several rows have one positive column")
def _certain_shared(draw: Draw) -> Problem:
    rows, columns = certain_pairs(draw, 29, 64)
    positives = np.arange(29)
    rows[20:24], positives[20:24] = rows[20], 20
    columns[20] = rows[20]
    weights: dict[str, Any] = _halves(29) | {"positives": positives}
    return softmax_problem(rows, (columns[:13], columns[13:]), 100.0, **weights)


@_case("one-direction", "all features share a direction: large logits, small differences")
def _one_direction(draw: Draw) -> Problem:
    rows, columns = (unit(1.0 + draw.standard_normal((37, 40)) / 16) for _ in range(2))
    return softmax_problem(rows, columns, 100.0, **_halves(37))


@_case("norm-3000", "features of norm 3,000: logits up to 10^8, each row has one column", norm=3000.0)
@_case("norm-300", "features of norm 300 at scale 100", norm=300.0)
@_case("norm-30", "features of norm 30 at scale 100", norm=30.0)
@_case("norm-3", "features of norm 3 at scale 100", norm=3.0)
def _norm(draw: Draw, norm: float) -> Problem:
    rows, columns = (norm * unit(draw.standard_normal((37, 64))) for _ in range(2))
    return softmax_problem(rows, columns, 100.0, **_halves(37))


@_case("sigmoid-certain", "SigLIP of certain pairs at scale 100: every term is tiny")
def _sigmoid_certain(draw: Draw) -> Problem:
    return sigmoid_problem(softmax_problem(*certain_pairs(draw, 31, 64), 100.0, positives=np.arange(31)), -60.0)


@_case("large-logits", "logits beyond 88: an exponential without a shift overflows float32")
def _large_logits(draw: Draw) -> Problem:
    return softmax_problem(*pairs(draw, 37, 40, 0.3, 2.0), 300.0, **_halves(37))


@_case("wordnet@100", "real sentence embeddings, shared glosses dropped, at CLIP's final scale", scale=100.0)
@_case("wordnet@14.3", "real sentence embeddings, shared glosses dropped, at CLIP's initial scale", scale=14.3)
def _wordnet(draw: Draw, scale: float) -> Problem:
    real = wordnet_pairs()
    rows, columns, ids = float64(real.examples), float64(real.glosses), real.gloss_ids
    return softmax_problem(rows, columns, scale, ids=(ids, ids), **_halves(len(ids)))


@_case("nan", "a NaN in one row and in one column: the results are NaN, never a number and never a hang")
def _nan(draw: Draw) -> Problem:
    rows, columns = pairs(draw, 19, 24)
    rows[3, 5], columns[11, 7] = np.nan, np.nan
    return softmax_problem(rows, columns, 10.0, **_halves(19))


@_case("inf", "inf - inf in one row's logits: NaN in its log-sum-exp, in every column's and in every gradient")
def _inf(draw: Draw) -> Problem:
    rows, columns = (unit(np.abs(draw.standard_normal((19, 24)))) for _ in range(2))
    rows[3, 5], rows[3, 9] = np.inf, -np.inf
    return softmax_problem(rows, columns, 10.0, **_halves(19))
