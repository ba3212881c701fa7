"""How the error of the gradients grows with d, b and the scale, beside its bounds and a plain computation's error.

All are norms over both towers' gradients, relative to the norm of the exact ones. The probabilistic bound is the
a-priori one with a chain of n additions counted as ``CONFIDENCE sqrt(n)`` roundings where that is less: if roundings
are independent and 0 on average, it holds for one sum with probability ``1 - 2 exp(-CONFIDENCE^2 / 2)`` (Higham and
Mary, 2019). It is shown, and decides nothing.
"""

from __future__ import annotations

import zlib
from dataclasses import replace

import numpy as np

from contrastile.oracle.arrays import FloatArray
from contrastile.schedules.problem import Problem
from contrastile.verify import cases
from contrastile.verify.bounds import bounds
from contrastile.verify.comparison import Comparisons, Point, compare
from contrastile.verify.draws import softmax_problem, unit
from contrastile.verify.plain import NOISIER, compare_with_plain, plain_outcome
from contrastile.verify.rounding import round_to
from contrastile.verify.trial import SkipError, Subject
from contrastile.verify.truth import Outcome, truth

CASE = "growth"
CONFIDENCE = 5.0

AXES: dict[str, tuple[float, ...]] = {
    "d": (16, 64, 256, 1024),
    "b": (16, 64, 256, 512),
    "scale": (1.0, 5.0, 25.0, 125.0),
}
_COSINE = 0.3
_USUAL = {"d": 64, "b": 64, "scale": 14.3}


def growth(subject: Subject, case: str) -> Comparisons:
    """Errors of the symmetric loss stay in their bounds, and near a plain computation's, as d, b and the scale grow."""
    if subject.dtype == "float64":
        raise SkipError("the oracle is no more exact than a plain float64 computation")
    for axis, values in AXES.items():
        for x in values:
            yield from _measured(subject, axis, x)
    if subject.device == "cpu":
        # a mean of equal logits is each of them, however large
        copies = replace(cases.build("copies@opposite", subject.dtype), scale=np.asarray(1e4))
        how = subject.accuracy, subject.dtype, NOISIER[subject.device]
        yield "copies, scale = 10000", compare_with_plain(copies, truth(copies), subject.run(copies), *how)


def _measured(subject: Subject, axis: str, x: float) -> Comparisons:
    problem = _problem(**(_USUAL | {axis: x}), dtype=subject.dtype)
    oracle = truth(problem)
    exact, accuracy, label = oracle.outcome, subject.accuracy, f"{axis} = {x:g}"
    got = subject.run(problem)
    # a depth counts additions; a chain of a few is as long as it is
    shorter = replace(
        accuracy, depth=lambda k: min(accuracy.depth(k), int(np.ceil(CONFIDENCE * np.sqrt(accuracy.depth(k)))))
    )
    bound, probable = (bounds(problem, oracle, each, subject.dtype) for each in (accuracy, shorter))
    plain = plain_outcome(problem, oracle, accuracy, subject.dtype)
    size = _norm(exact)
    point = Point(
        axis=axis,
        x=float(x),
        error=_norm(got, exact) / size,
        plain=_norm(plain, exact) / size,
        probable=_norm(probable) / size,
        bound=_norm(bound) / size,
    )
    yield label, replace(compare(got, exact, bound), point=point)
    beside = compare_with_plain(problem, oracle, got, accuracy, subject.dtype, NOISIER[subject.device])
    yield f"{label}, beside a plain computation", beside


def _norm(a: Outcome, b: Outcome | None = None) -> float:
    """The norm of both towers' gradients, or of the difference of two outcomes'."""

    def joined(x: Outcome) -> FloatArray:
        return np.concatenate([x.rows, *x.columns])

    return float(np.linalg.norm(joined(a) if b is None else joined(a) - joined(b)))


def _problem(d: float, b: float, scale: float, dtype: str) -> Problem:
    """The symmetric loss of b unit pairs of cosine ``_COSINE`` on average, of which a model is not certain."""
    b, d = int(b), int(d)
    draw = np.random.default_rng([b, d, zlib.crc32(CASE.encode())])
    rows = unit(draw.standard_normal((b, d)))
    columns = unit(_COSINE * rows + np.sqrt(1 - _COSINE**2) * unit(draw.standard_normal((b, d))))
    half, exact = np.full(b, 0.5 / b), [round_to(x, dtype) for x in (rows, columns)]
    return softmax_problem(exact[0], exact[1], scale, row_weight=half, column_weight=half, positives=np.arange(b))
