"""Small and thin problems of many sizes: results must be right at every size and every remainder of a tile."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from contrastile.schedules.problem import Problem
from contrastile.verify.comparison import Comparisons
from contrastile.verify.draws import sigmoid_problem, softmax_problem
from contrastile.verify.rounding import round_to
from contrastile.verify.trial import Subject, asked

CASE, KINDS = "sizes", ("softmax", "sigmoid")

DENSE = 130
"""In float32 on a host, rows, columns and features each take every size up to this: all remainders of 128-tiles."""

EDGES = tuple(2**k + more for k in range(6, 12) for more in (-1, 0, 1))
COUNTS = (*EDGES, 96, 192, 384, 768, 1536, 4096, 4097)
WIDTHS = (*EDGES, 96, 160, 192, 320, 384, 640, 768, 896, 1152, 1280, 1536, 1792, 3072, 4096, 4101, 8192, 8193)
"""Both neighbours of powers of two, multiples of tiles, and the widths of common models."""

LARGE = ((65537, 3, 2), (3, 65537, 2), (10007, 5, 129), (5, 10007, 129))
"""More rows, or columns, than 16 bits can count; and many rows, or columns, with many features."""

PAIRS = {"cpu": (1451, 1449, 2), "cuda": (3001, 2903, 8)}
"""More pairs than 21 bits can count; on a GPU more tiles than run at a time, so that a program has several."""

_DROWNED = "softmax, 3 x 524289 x 5, drowned"


def sizes(subject: Subject, case: str) -> Comparisons:
    """Value and gradients are right at every size of rows, columns and features."""
    for kinds, shape in _shapes(subject):
        for label, kind in (("{}, {} x {} x {}".format(kind, *shape), kind) for kind in kinds):
            if asked(case, label):
                yield label, subject.compare(_problem(kind, *shape, subject.dtype))
    if subject.device == "cuda" and asked(case, _DROWNED):
        yield _DROWNED, subject.compare(_drowned(2**19 + 1))


def _drowned(n: int) -> Problem:
    """One near negative for each row; all others are equal, 2^-26.7 of it each, but their sum counts."""
    rows, columns = np.eye(3, 5), np.zeros((n, 5))
    columns[:3], columns[3:, 4] = np.roll(rows, 1, axis=0), 1.0
    weight = np.where(np.arange(n) < 3, 1 / 3, 0.0)
    return softmax_problem(rows, columns, 18.5, column_weight=weight, positives=np.arange(3))


def _shapes(subject: Subject) -> Iterator[tuple[Sequence[str], tuple[int, int, int]]]:
    """Yields kinds and (rows, columns, features); every problem has a size that no other has."""
    if subject.dtype == "float32" and subject.device == "cpu":
        # 37 and 53 are coprime with the prime DENSE + 1, so each side takes all sizes; both kinds share a host's tiles
        yield from ((KINDS[k % 2 :][:1], (k, 37 * k % (DENSE + 1), 53 * k % (DENSE + 1))) for k in range(1, DENSE + 1))
        yield from ((KINDS[:1], shape) for shape in (*LARGE, PAIRS["cpu"]))
    elif subject.device == "cuda":
        yield KINDS, PAIRS["cuda"]
    shapes = [*((5, 7, width) for width in WIDTHS), *((count, 7, 3) for count in COUNTS)]
    shapes += [(6, count, 3) for count in COUNTS]
    # on a host every dtype has the tiles of float32
    takes_both_kinds = subject.dtype == "float32" or subject.device == "cuda"
    yield from ((KINDS if takes_both_kinds else KINDS[k % 2 :][:1], shape) for k, shape in enumerate(shapes))


def _problem(kind: str, m: int, n: int, d: int, dtype: str) -> Problem:
    """Signed weights, and random positives; every third row's positive is the last column."""
    generator = np.random.default_rng([m, n, d])
    rows, columns = (round_to(generator.standard_normal((size, d)) / d**0.25, dtype) for size in (m, n))
    u, v = (generator.standard_normal(size) for size in (m, n))
    positives = np.where(np.arange(m) % 3 == 0, n - 1, generator.integers(0, n, m))
    problem = softmax_problem(rows, columns, 3.0, row_weight=u, column_weight=v, positives=positives)
    return problem if kind == "softmax" else sigmoid_problem(problem, -1.25)
