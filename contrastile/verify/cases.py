"""The named cases: small problems, one per edge case. Random aligned input catches only half of the known defects.

Features are rounded to the case's dtype and all other numbers to float32 before the truth is computed, so that every
backend and the oracle see the same values; targets are 1 / n in float64. Each case has a fixed seed of its own.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from contrastile.backends.contract import Match
from contrastile.oracle.arrays import FloatArray, IntArray, float64
from contrastile.schedules.problem import Problem
from contrastile.verify.draws import (
    FAR,
    TRAINED,
    Draw,
    Pairs,
    certain_pairs,
    drowned,
    normals,
    pairs,
    sigmoid_problem,
    signs,
    softmax_problem,
    unit,
    units,
    with_guide,
    with_limits,
    wordnet_pairs,
)
from contrastile.verify.rounding import round_to


def build(name: str, dtype: str) -> Problem:
    """The case of this name: NumPy arrays, float64 and int64; features are exact in ``dtype``, other floats in float32.

    Raises:
        ValueError: there is no such case or dtype.
    """
    if name not in CASES:
        raise ValueError(f"case must be one of {', '.join(CASES)}, got {name!r}")
    problem = CASES[name](np.random.default_rng(zlib.crc32(name.encode())))
    columns = tuple(round_to(block, dtype) for block in problem.columns)
    return replace(problem, rows=round_to(problem.rows, dtype), columns=columns)


FEW = ("smoke", "ragged", "hot", "all-negative", "ids-drop@far", "labels", "blocks", "sigmoid-ids")
"""One case of each kind."""


Weights = Callable[[Draw, int, int], dict[str, Any]]
"""(draw, m, n) -> weights and positives."""


def _halves(draw: Draw, m: int, n: int) -> dict[str, Any]:
    """The weights and positives of the symmetric loss."""
    half = np.full(m, 0.5 / m)
    return {"row_weight": half, "column_weight": half, "positives": np.arange(m)}


def _signed(draw: Draw, m: int, n: int) -> dict[str, Any]:
    """Signed weights in both directions and positives at random: several rows may share one."""
    return {
        "row_weight": draw.standard_normal(m),
        "column_weight": draw.standard_normal(n),
        "positives": draw.integers(0, n, m),
    }


def _neighbours(draw: Draw, m: int, n: int) -> dict[str, Any]:
    """Signed weights, and positives beside the diagonal, in corners of tiles; the first row has no positive."""
    rows = np.arange(m)
    return _signed(draw, m, n) | {"positives": np.where(rows % 2 == 0, rows - 1, rows + 1)}


def _own_columns(draw: Draw, m: int, n: int) -> dict[str, Any]:
    """A mean over the rows; the positive of row i is column i."""
    return {"positives": np.arange(m)}


def _no_positives(draw: Draw, m: int, n: int) -> dict[str, Any]:
    return {"positives": np.full(m, -1)}


def _tiny_weights(draw: Draw, m: int, n: int) -> dict[str, Any]:
    weights = _signed(draw, m, n)
    weights["row_weight"] *= 10.0 ** np.linspace(-7, -12, m)
    weights["column_weight"] *= 10.0 ** np.linspace(-12, -7, n)
    return weights


def _case(
    features: Callable[..., Pairs],
    *sizes: Any,
    scale: float = 14.3,
    weights: Weights = _signed,
    bias: float | None = None,
    norm: float = 1.0,
) -> Callable[[Draw], Problem]:
    """A case of one column block, with ``features(draw, *sizes)``; a bias makes it a sigmoid problem."""

    def build_case(draw: Draw) -> Problem:
        rows, columns = (norm * x for x in features(draw, *sizes))
        problem = softmax_problem(rows, columns, scale, **weights(draw, len(rows), len(columns)))
        return problem if bias is None else sigmoid_problem(problem, bias)

    return build_case


def _nt_xent(draw: Draw, features: Callable[..., Pairs], b: int, d: int, scale: float) -> Problem:
    """An NT-Xent problem of b pairs of views."""
    views, itself = np.concatenate(features(draw, b, d)), np.arange(2 * b)
    return softmax_problem(views, views.copy(), scale, positives=np.roll(itself, b), excluded=itself)


def _far_positives(m: int) -> IntArray:
    """Positives; every third is no column, but would be one if truncated to 32 bits or counted from the end."""
    rows = np.arange(m)
    no_column = np.array([-2, 2**32 + 7, -(2**32)])[rows // 3 % 3]
    return np.where(rows % 3 > 0, rows, no_column)


def _hot(draw: Draw) -> Problem:
    weights: dict[str, Any] = _signed(draw, 41, 41) | {"positives": np.arange(41)}
    return softmax_problem(*pairs(draw, 41, 72, *TRAINED), 100.0, **weights)


def _limits(draw: Draw, scale: float, guide: int | None = None) -> Problem:
    weights = _signed(draw, 33, 47)
    problem = softmax_problem(*units(draw, 33, 47, 40), scale, **weights)
    # the guide is exact in every dtype
    return with_limits(problem if guide is None else with_guide(problem, draw, "bfloat16", guide))


def _vanished(draw: Draw, guide: int | None = None) -> Problem:
    # features near one direction; row 3 is opposite to all columns, so with a shared reference its terms underflow
    rows, columns = (unit(unit(np.ones(40)) + x / 4) for x in units(draw, 33, 47, 40))
    rows[3] *= -1.0
    problem = softmax_problem(rows, columns, 100.0, **_signed(draw, 33, 47))
    problem = with_limits(problem if guide is None else with_guide(problem, draw, "bfloat16", guide))
    for limits in (problem.row_limits, problem.column_limits):
        assert limits is not None
        # row 7 loses all its negatives; a NaN limit leaves out nothing
        limits[7], limits[9] = -np.inf, np.nan
    return problem


def _one_sided(draw: Draw) -> Problem:
    rows, columns = units(draw, 33, 47, 72)
    columns[11] = rows[3]
    problem = with_limits(softmax_problem(rows, columns, 100.0, **_signed(draw, 33, 47)))
    assert problem.row_limits is not None
    # the pair's logit is 144 in base 2: only its column leaves it out
    problem.row_limits[3] = 128.0
    return problem


def _staircase(draw: Draw, sign: float) -> Problem:
    rows, columns = draw.standard_normal((17, 16)) / 4, draw.standard_normal((53, 16)) / 4
    rows[:, 0], columns[:, 0] = 1.0, sign * 3.0 * np.arange(53)
    return softmax_problem(rows, columns, 2.0, **_signed(draw, 17, 53))


def _tiny_features(draw: Draw) -> Problem:
    rows, columns = (2.0**-12 * unit(draw.standard_normal((size, 40))) for size in (27, 35))
    # small weights keep the gradients in float16's range
    weights = {name: x if name == "positives" else x / 256 for name, x in _signed(draw, 27, 35).items()}
    return softmax_problem(rows, columns, 2.0**28, **weights)


def _repeated(draw: Draw, m: int, n: int, d: int) -> Pairs:
    rows, columns = units(draw, 7, 7, d)
    return np.resize(rows, (m, d)), np.resize(columns, (n, d))


def _zero_rows(draw: Draw) -> Problem:
    empty = np.zeros(0, dtype=np.int64)
    return softmax_problem(
        np.zeros((0, 24)), draw.standard_normal((13, 24)), 10.0, positives=empty, column_weight=np.zeros(13)
    )


def _ids_drop(draw: Draw) -> Problem:
    ids = draw.integers(0, 11, 37)
    return softmax_problem(*pairs(draw, 37, 40), 20.0, ids=(ids, ids), **_halves(draw, 37, 37))


def _ids_far(draw: Draw, match: Match) -> Problem:
    rows, columns = unit(draw.standard_normal((22, 23))), unit(draw.standard_normal((33, 23)))
    ids = np.resize(FAR, 22), FAR[draw.integers(0, len(FAR), 33)]
    # each number would be a column if truncated to 32 bits, or taken as an index from the end
    excluded = np.resize([2**32 + 3, -1, -33, 33, 2**33, 5], 22)
    weights: dict[str, Any] = _signed(draw, 22, 33) | {"positives": _far_positives(22) if match == "drop" else None}
    return softmax_problem(rows, columns, 14.3, ids=ids, match=match, excluded=excluded, **weights)


def _sup_con(features: FloatArray, labels: IntArray, scale: float, **weights: Any) -> Problem:
    """Samples against themselves, each excluded from its own columns; equal labels are positive."""
    itself = np.arange(len(labels))
    return softmax_problem(
        features, features.copy(), scale, ids=(labels, labels), match="target", excluded=itself, **weights
    )


def _anchor_weights(labels: IntArray) -> FloatArray:
    """SupCon's weights: 1 / (number of samples that have a positive), or 0 for a sample without."""
    repeated = (labels[:, None] == labels).sum(axis=1) > 1
    weight: FloatArray = repeated / repeated.sum()
    return weight


def _labels(draw: Draw) -> Problem:
    features = unit(draw.standard_normal((29, 40)))
    labels = np.concatenate([draw.integers(0, 5, 26), [50, 51, 52]])
    return _sup_con(features, labels, 10.0, row_weight=_anchor_weights(labels))


def _sorted_labels(draw: Draw) -> Problem:
    labels = np.repeat(np.arange(6), [200, 60, 3, 1, 128, 18])
    return _sup_con(unit(draw.standard_normal((410, 24))), labels, 10.0, row_weight=_anchor_weights(labels))


def _views(draw: Draw, norm: float) -> Problem:
    views, itself = norm * np.concatenate(pairs(draw, 75, 72, *TRAINED)), np.arange(150)
    weight = draw.standard_normal(150)
    return softmax_problem(views, views.copy(), 30.0, row_weight=weight, positives=np.roll(itself, 75), excluded=itself)


def _blocks(draw: Draw) -> Problem:
    rows = unit(draw.standard_normal((23, 40)))
    columns = tuple(unit(draw.standard_normal((size, 40))) if size else np.zeros((0, 40)) for size in (31, 0, 9))
    return softmax_problem(rows, columns, 20.0, **_signed(draw, 23, 40))


def _signed_zero_weights(draw: Draw) -> Problem:
    rows, columns = units(draw, 27, 35, 24)
    weights: dict[str, Any] = _signed(draw, 27, 35)
    row_ids, column_ids = np.arange(27), np.full(35, 100)
    # every fifth row admits no pair: it has no positive, and equal ids drop all its pairs
    row_ids[::5], weights["positives"][::5], weights["row_weight"][::5] = 100, -1, 0.0
    weights["row_weight"][1::5], weights["column_weight"][::4] = 0.0, 0.0
    return softmax_problem(rows, columns, 14.3, ids=(row_ids, column_ids), **weights)


def _sigmoid_ids(draw: Draw) -> Problem:
    rows, columns = draw.standard_normal((21, 24)), draw.standard_normal((31, 24))
    ids = draw.integers(0, 6, 21), draw.integers(0, 6, 31)
    weight = draw.standard_normal(21)
    weight[::6] = 0.0
    blocks = columns[:19], columns[19:]
    positives = draw.integers(0, 31, 21)
    return sigmoid_problem(softmax_problem(rows, blocks, 4.0, positives=positives, ids=ids, row_weight=weight), 1.5)


_APART = np.arange(16) * (2**33 + 2**9), np.arange(1, 33) * (2**41 + 2**17)
"""Ids of 16 x 32 pairs, a tile of Triton's interpreter; only one pair has equal ids."""
_APART[0][2] = _APART[1][7] = 2**34 + 2**32 + 7


def _sigmoid_labels(draw: Draw) -> Problem:
    rows, columns = units(draw, 22, 38, 24)
    ids: Any = [np.concatenate([x, draw.integers(0, 5, 6)]) for x in _APART]
    return sigmoid_problem(softmax_problem(rows, columns, 10.0, ids=ids, match="target"), -2.5)


def _sigmoid_ids_far(draw: Draw) -> Problem:
    rows, columns = unit(draw.standard_normal((30, 23))), unit(draw.standard_normal((43, 23)))
    far_ids = FAR, FAR[draw.integers(0, len(FAR), 11)]
    ids: Any = [np.concatenate(x) for x in zip(_APART, far_ids, strict=True)]
    positives = _far_positives(30)
    positives[:16] += 32 * (positives[:16] == np.arange(16))
    excluded = np.where(np.arange(30) % 4 == 1, positives, -1)
    return sigmoid_problem(softmax_problem(rows, columns, 10.0, positives=positives, ids=ids, excluded=excluded), -2.5)


def _certain_labels(draw: Draw, width: int = 64, noise: float | None = None, scale: float = 100.0) -> Problem:
    views = np.concatenate(certain_pairs(draw, 15, width))
    labels = np.concatenate([np.arange(15), np.arange(12), [0, 0, 1]])
    if noise is not None:
        near_copies = unit(views[[0, 0, 1]] + noise * draw.standard_normal((3, width)))
        views, labels = np.concatenate([views, near_copies]), np.concatenate([labels, [0, 0, 1]])
    return _sup_con(views, labels, scale)


def _copies(draw: Draw) -> Problem:
    labels = draw.integers(0, 2, 71)
    return _sup_con(unit(draw.standard_normal((2, 64)))[labels], labels, -100.0)


def _certain_shared(draw: Draw) -> Problem:
    rows, columns = certain_pairs(draw, 29, 64)
    positives = np.arange(29)
    rows[20:24], positives[20:24] = rows[20], 20
    columns[20] = rows[20]
    weights: dict[str, Any] = _halves(draw, 29, 29) | {"positives": positives}
    return softmax_problem(rows, (columns[:13], columns[13:]), 100.0, **weights)


def _wordnet(draw: Draw, scale: float) -> Problem:
    embeddings = wordnet_pairs()
    rows, columns, ids = float64(embeddings.examples[::2]), float64(embeddings.glosses[::2]), embeddings.gloss_ids[::2]
    return softmax_problem(rows, columns, scale, ids=(ids, ids), **_halves(draw, len(ids), len(ids)))


def _nan(draw: Draw) -> Problem:
    rows, columns = pairs(draw, 19, 24)
    rows[3, 5], columns[11, 7] = np.nan, np.nan
    return softmax_problem(rows, columns, 10.0, **_halves(draw, 19, 19))


def _inf(draw: Draw) -> Problem:
    rows, columns = (unit(np.abs(draw.standard_normal((19, 24)))) for _ in range(2))
    rows[3, 5], rows[3, 9] = np.inf, -np.inf
    return softmax_problem(rows, columns, 10.0, **_halves(draw, 19, 19))


CASES: dict[str, Callable[[Draw], Problem]] = {
    "smoke": _case(pairs, 32, 32, scale=10.0, weights=_halves),
    "ragged": _case(normals, 33, 47, 40, scale=1.0),
    "square-ragged": _case(units, 41, 41, 72, weights=_neighbours),
    "hot": _hot,
    "limits": partial(_limits, scale=10.0),
    "limits@vanished": _vanished,
    "limits@one-sided": _one_sided,
    "limits-hot": partial(_limits, scale=200.0),
    "guide": partial(_limits, scale=10.0, guide=23),
    "guide@vanished": partial(_vanished, guide=19),
    "guide-hot": partial(_limits, scale=200.0, guide=71),
    "all-negative": _case(units, 33, 47, 40, np.abs, -1.0, scale=200.0),
    "opposite": _case(units, 33, 47, 40, lambda x: 1.0 + x / 8, -1.0, scale=100.0),
    "staircase": partial(_staircase, sign=-1.0),
    "staircase@up": partial(_staircase, sign=1.0),
    "deep": _case(units, 17, 37, 1024, scale=100.0),
    "deep@1025": _case(units, 17, 37, 1025, scale=100.0),
    "wide": _case(units, 141, 203, 200),
    "aligned": _case(pairs, 128, 128),
    "long": _case(units, 128, 1153, 512),
    "long@sigmoid": _case(units, 128, 1153, 512, bias=-2.5),
    "tiny-features": _tiny_features,
    "exact": _case(signs, 29, 37, 24, scale=0.5),
    "duplicates": _case(_repeated, 25, 39, 40, scale=20.0),
    "one-row": _case(units, 1, 29, 24),
    "one-column": _case(units, 29, 1, 24),
    "zero-rows": _zero_rows,
    "ids-drop": _ids_drop,
    "ids-target@far": partial(_ids_far, match="target"),
    "ids-drop@far": partial(_ids_far, match="drop"),
    "labels": _labels,
    "sorted-labels": _sorted_labels,
    "self-excluded": partial(_nt_xent, features=pairs, b=13, d=40, scale=14.3),
    "views": partial(_views, norm=1.0),
    "views@norm": partial(_views, norm=300.0),
    "blocks": _blocks,
    "long-sums": _case(units, 5, 2000, 24, np.abs, scale=1.0, weights=_own_columns),
    "signed-zero-weights": _signed_zero_weights,
    "tiny-weights": _case(units, 19, 31, 23, weights=_tiny_weights),
    "tiny-weights@sigmoid": _case(units, 19, 31, 23, weights=_tiny_weights, bias=-2.5),
    "negative-scale": _case(pairs, 33, 41, *TRAINED, scale=-14.3),
    "wide-scale": _case(normals, 19, 31, 24, scale=0.0),
    "sigmoid": _case(pairs, 33, 40, scale=10.0, weights=_own_columns, bias=-10.0),
    "sigmoid-negatives": _case(units, 21, 33, 40, scale=10.0, weights=_no_positives, bias=-20.0),
    "sigmoid-ids": _sigmoid_ids,
    "sigmoid-labels": _sigmoid_labels,
    "sigmoid-ids@far": _sigmoid_ids_far,
    "certain": _case(certain_pairs, 43, 64, scale=100.0, weights=_halves),
    "certain@wrong": _case(certain_pairs, 43, 64, 1, scale=100.0, weights=_halves),
    "certain-labels": _certain_labels,
    "certain-labels@100": partial(_certain_labels, width=100, scale=16.0),
    "certain-labels@alike": partial(_certain_labels, noise=0.01),
    "copies@opposite": _copies,
    "certain-views": partial(_nt_xent, features=certain_pairs, b=17, d=64, scale=100.0),
    "certain-shared": _certain_shared,
    "one-direction": _case(units, 37, 37, 40, lambda x: 1.0 + x / 16, scale=100.0, weights=_halves),
    "norm-30": _case(units, 37, 37, 64, norm=30.0, scale=100.0, weights=_halves),
    "norm-3000": _case(units, 37, 37, 64, norm=3000.0, scale=100.0, weights=_halves),
    "drowned": _case(drowned, 64, scale=15.25, weights=_halves),
    "large-logits": _case(pairs, 37, 40, 0.3, 2.0, scale=300.0, weights=_halves),
    "wordnet@14.3": partial(_wordnet, scale=14.3),
    "wordnet@100": partial(_wordnet, scale=100.0),
    "nan": _nan,
    "inf": _inf,
}
"""The function that builds each case, in the order in which the cases run."""

ABOUT = {
    "smoke": "aligned 32 x 32 x 32, the symmetric loss",
    "ragged": "no side fits a tile; signed weights and random positives tell rows from columns",
    "square-ragged": "41 x 41 x 72: a swap of rows and columns keeps every shape",
    "hot": "pairs of a trained model at scale 100: the probability of the positive is near 1 and G cancels",
    "limits": "negatives beyond the limits of their rows, and others beyond those of their columns, are left out",
    "limits@vanished": "limits leave a row and a column no negative; of another row all underflow",
    "limits@one-sided": "what counts for a row is far above all that counts for any column",
    "limits-hot": "what is left out is far above all that counts: its exponential overflows",
    "guide": "limits of a guide's dot products, which say nothing of the logits; its width fits no tile",
    "guide@vanished": "a guide leaves a row and a column no negative; of another row all underflow",
    "guide-hot": "what the guide leaves out may be far above all that counts; it is wider than the features",
    "all-negative": "every logit far below 0 at scale 200: zero padding or a start at 0 would win the maximum",
    "opposite": "every logit near -100, as far below 0 as norms allow: with a reference from norms all terms underflow",
    "staircase": "logits fall along the columns: every later tile is far below the running maximum",
    "staircase@up": "logits rise along the columns: every tile moves the running maximum",
    "deep": "the longest dot products: width 1024",
    "deep@1025": "a width beyond 1024, and odd",
    "wide": "141 x 203 x 200: several tiles on both sides, and a width beyond 128",
    "aligned": "128 x 128 x 128: tiles of any power of two up to 128 are full",
    "long": "128 x 1153 x 512: row tiles are full, columns are many and no column tile divides them",
    "long@sigmoid": "the sigmoid loss of 128 x 1153 x 512",
    "tiny-features": "features below float16's normal range at scale 2^28: nothing is flushed, and no scale clamped",
    "exact": "entries in {-1, 0, 1}: every product is exact in every dtype",
    "duplicates": "repeated rows and columns: ties for the maximum, equal shares of the gradient",
    "one-row": "one row: every column's log-sum-exp is a logit, and its G is 0 where it is positive",
    "one-column": "one column: every row's log-sum-exp is a logit, and its G is 0",
    "zero-rows": "no rows: loss 0, every column log-sum-exp -inf, gradients 0",
    "ids-drop": "shared ids: false negatives are dropped from the log-sum-exps, the positive stays",
    "ids-target@far": "labels beyond 32 bits or below 0; exclusions of no column",
    "ids-drop@far": "shared ids beyond 32 bits or below 0; positives and exclusions of no column",
    "labels": "SupCon: every other row of the label is positive, some rows have none",
    "sorted-labels": "SupCon in the order of the labels: tiles of one label, of some in common, of none",
    "self-excluded": "NT-Xent: each row excludes itself, and its positive is the other view",
    "views": "NT-Xent of 75 samples, signed weights: several tiles on either side of the diagonal",
    "views@norm": "the same of norm 300: x_ij must be x_ji, though either is rounded by a tenth",
    "blocks": "three column blocks under one log-sum-exp, one of them empty; positives in both others",
    "long-sums": "2,000 columns of nearly the same probability, features of one sign: sums of many like terms",
    "signed-zero-weights": "weight 0 removes rows that admit nothing; other weights are negative",
    "tiny-weights": "weights of 1e-7 to 1e-12, as a large batch has: no threshold may treat them as 0",
    "tiny-weights@sigmoid": "the sigmoid loss with weights of 1e-7 to 1e-12, as a large batch has",
    "negative-scale": "scale -14.3 and an odd width: a maximum taken before scaling is a minimum after it",
    "wide-scale": "scale 0: dscale must not be computed by a division by the scale",
    "sigmoid": "SigLIP at initialisation: scale 10, bias -10",
    "sigmoid-negatives": "no positive and bias -20: log(1 + exp x) is 0 in float32, log1p(exp x) is not",
    "sigmoid-ids": "SigLIP with false negatives dropped, signed weights, two column blocks and large logits",
    "sigmoid-labels": "the sigmoid loss of labels: equal ids are positive, several to a row",
    "sigmoid-ids@far": "SigLIP with false negatives of far ids, and excluded positives",
    "certain": "every pair is certain, scale 100: loss and gradient are as small as 1 - p",
    "certain@wrong": "every row is certain of a column that is not its own, at scale 100",
    "certain-labels": "SupCon of pairs and of larger classes, all certain, at scale 100",
    "certain-labels@100": "the same of width 100 at scale 16: hardly certain",
    "certain-labels@alike": "the same, and samples that are nearly alike: positives share the row",
    "copies@opposite": "SupCon of two classes of copies at scale -100: positives are far below the negatives",
    "certain-views": "NT-Xent of certain pairs of views at scale 100",
    "certain-shared": "certain pairs in two column blocks, where several rows have one positive column",
    "one-direction": "all features share a direction: large logits, small differences",
    "norm-30": "features of norm 30 at scale 100",
    "norm-3000": "features of norm 3,000: logits up to 10^8, each row has one column",
    "drowned": "most negatives are 2^-22 of their row's and column's sums, others 2^-27.5: few may be flushed",
    "large-logits": "logits beyond 88: an exponential without a shift overflows float32",
    "wordnet@14.3": "real sentence embeddings, shared glosses dropped, at CLIP's initial scale",
    "wordnet@100": "real sentence embeddings, shared glosses dropped, at CLIP's final scale",
    "nan": "a NaN in one row and in one column: the results are NaN, never a number and never a hang",
    "inf": "inf - inf in one row's logits: NaN in its log-sum-exp, in every column's and in every gradient",
}
"""Each case's edge case, or the defect that the case catches."""
