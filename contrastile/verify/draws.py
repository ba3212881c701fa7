"""Parts of cases: unit vectors, pairs like those of a model, real embeddings, ids, and problems of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import numpy as np

from contrastile.backends.contract import Match
from contrastile.data import load_wordnet_pairs
from contrastile.oracle.arrays import FloatArray, IntArray, float64
from contrastile.oracle.general import logits
from contrastile.oracle.pairs import target_weights
from contrastile.schedules.problem import Problem
from contrastile.verify.rounding import round_to
from contrastile.verify.truth import masks, similarities

Draw = np.random.Generator
Pairs = tuple[FloatArray, FloatArray]

TRAINED = 0.2, 3.0
"""Arguments of ``pairs`` for the pairs of a model in training: some are unrelated, some certain."""

FAR: IntArray = np.array(
    [-1, 2**32 - 1, 0, 2**32, -(2**32), -5, 2**32 - 5, 2**53, 2**53 + 1, 2**62, -(2**62), -100, 2**63 - 1, -(2**63)]
)
"""Ids beyond 32 bits or below 0, some equal in their low 32 bits or as float64; none of them may mean "no id"."""

wordnet_pairs = cache(load_wordnet_pairs)
"""The shipped embeddings, read once."""


def unit(x: FloatArray) -> FloatArray:
    return float64(x / np.linalg.norm(x, axis=-1, keepdims=True))


def normals(draw: Draw, m: int, n: int, d: int) -> Pairs:
    rows, columns = (draw.standard_normal((size, d)) for size in (m, n))
    return rows, columns


def signs(draw: Draw, m: int, n: int, d: int) -> Pairs:
    """Entries in {-1, 0, 1}."""
    rows, columns = (draw.integers(-1, 2, (size, d)).astype(np.float64) for size in (m, n))
    return rows, columns


def steps(draw: Draw, m: int, n: int, d: int) -> Pairs:
    """Multiples of 1 / 64: dot products are exact, and with 40 features they lie between 16-bit numbers."""
    rows, columns = (draw.integers(6, 17, (size, d)) / 64 for size in (m, n))
    return rows, columns


def units(
    draw: Draw, m: int, n: int, d: int, transform: Callable[[FloatArray], FloatArray] = lambda x: x, sign: float = 1.0
) -> Pairs:
    """Unit rows, and unit columns times ``sign``, in the directions of transformed normal features."""
    rows, columns = (unit(transform(x)) for x in normals(draw, m, n, d))
    return rows, sign * columns


def pairs(draw: Draw, b: int, d: int, least: float = 1.0, most: float = 1.0) -> Pairs:
    """Unit pairs like a model's: a column is one part noise and ``least`` to ``most`` parts its row."""
    rows = unit(draw.standard_normal((b, d)))
    return rows, unit(np.linspace(least, most, b)[:, None] * rows + unit(draw.standard_normal((b, d))))


def certain_pairs(draw: Draw, b: int, d: int, turned: int = 0) -> Pairs:
    """Unit pairs of a trained model: a column is far closer to its row, or the row ``turned`` above, than to others."""
    rows = unit(draw.standard_normal((b, d)))
    return rows, np.roll(unit(rows + draw.standard_normal((b, d)) / (2 * np.sqrt(d))), turned, axis=0)


def drowned(draw: Draw, b: int) -> Pairs:
    """One near negative for each row and column, whose logit is the scale; all others are 0, or -1/4 of the scale."""
    offset = np.where(draw.random((b, 1)) < 0.5, 0.25, 0.0)
    near = np.roll(np.eye(b), 1, axis=0) * (1 + offset)
    return np.concatenate([np.eye(b), np.ones((b, 1))], axis=1), np.concatenate([near, -offset], axis=1)


def softmax_problem(
    rows: FloatArray,
    columns: FloatArray | tuple[FloatArray, ...],
    scale: float,
    *,
    row_weight: FloatArray | None = None,
    column_weight: FloatArray | None = None,
    positives: IntArray | None = None,
    excluded: IntArray | None = None,
    ids: tuple[IntArray, IntArray] | None = None,
    match: Match = "drop",
) -> Problem:
    """A softmax problem with targets 1 / (positives of the row, or of the column)."""
    blocks = columns if isinstance(columns, tuple) else (columns,)
    m = len(rows)
    row_weight = np.full(m, 1 / max(m, 1)) if row_weight is None else row_weight
    bare = Problem(
        rows,
        blocks,
        round_to(scale, "float32"),
        np.zeros(m),
        np.zeros(m),
        positives=positives,
        excluded=excluded,
        row_ids=None if ids is None else ids[0],
        column_ids=None if ids is None else ids[1],
        match=match,
    )
    return targeted(bare, row_weight, column_weight)


def targeted(bare: Problem, row_weight: FloatArray, column_weight: FloatArray | None) -> Problem:
    """A problem with these weights, rounded to float32, and targets 1 / (positives of the row, or of the column)."""
    _, positive = masks(bare)
    problem = replace(bare, row_weight=round_to(row_weight, "float32"), row_target=target_weights(positive))
    if column_weight is None:
        return problem
    return replace(problem, column_weight=round_to(column_weight, "float32"), column_target=target_weights(positive.T))


def with_guide(problem: Problem, draw: Draw, dtype: str, width: int = 19) -> Problem:
    """The problem with a random guide that is independent of its features."""
    guide = units(draw, len(problem.rows), sum(map(len, problem.columns)), width)
    row_guide, column_guide = (round_to(x, dtype) for x in guide)
    return replace(problem, row_guide=row_guide, column_guide=column_guide)


def with_limits(problem: Problem, draw: Draw | None = None) -> Problem:
    """The problem with limits that leave out some of each row's and of each column's negatives.

    A limit lies in the middle of a wide gap, the widest or a random one, far from every number that is compared with
    it. So no rounding moves a number across a limit.
    """
    bias = 0.0 if problem.bias is None else float(problem.bias)
    x = similarities(problem, logits(problem.rows, np.concatenate(problem.columns), problem.scale, bias))
    limits = [_in_wide_gaps(logits_of_side, draw) for logits_of_side in (x, x.T)]
    return replace(problem, row_limits=limits[0], column_limits=None if problem.column_weight is None else limits[1])


def _in_wide_gaps(x: FloatArray, draw: Draw | None) -> FloatArray:
    """The middle of a wide gap in the upper half of each row, in float32; inf where there is none."""
    upper = np.sort(x, axis=1)[:, x.shape[1] // 2 :]
    if upper.shape[1] < 2:
        return np.full(len(x), np.inf)
    gaps = np.diff(upper, axis=1)
    gap_index = (gaps if draw is None else gaps * draw.random(gaps.shape)).argmax(axis=1)[:, None]
    low, gap = (np.take_along_axis(values, gap_index, axis=1)[:, 0] for values in (upper, gaps))
    return round_to(np.where(gap > 0.02 * np.abs(x).max(axis=1), low + gap / 2, np.inf), "float32")


def sigmoid_problem(problem: Problem, bias: float) -> Problem:
    """The sigmoid problem of a softmax problem's features, weights and pairs."""
    bare = replace(problem, column_weight=None, column_target=None, row_target=np.zeros(len(problem.rows)))
    return replace(bare, kind="sigmoid", bias=round_to(bias, "float32"))


def real(draw: Draw, b: int, d: int) -> Pairs:
    """Real sentence embeddings, repeated to b pairs."""
    embeddings = wordnet_pairs()
    rows, columns = (unit(float64(x)[:, :d]) for x in (embeddings.examples, embeddings.glosses))
    return np.resize(rows, (b, rows.shape[1])), np.resize(columns, (b, columns.shape[1]))
