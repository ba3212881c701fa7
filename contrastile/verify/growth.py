"""How the error of the gradients grows with d, b and the scale, compared with its bounds and a plain computation's.

Errors are norms over both towers' gradients, relative to the norm of the exact gradients. The probabilistic bound is
the a-priori bound with a chain of n additions counted as ``CONFIDENCE sqrt(n)`` roundings if that is less. It holds for
one sum with probability ``1 - 2 exp(-CONFIDENCE^2 / 2)`` if roundings are independent and 0 on average (Higham and
Mary, 2019). The report shows it, but no check uses it.
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
        # the mean of equal logits is each logit, however large
        copies = replace(cases.build("copies@opposite", subject.dtype), scale=np.asarray(1e4))
        plain_settings = subject.accuracy, subject.dtype, NOISIER[subject.device]
        yield "copies, scale = 10000", compare_with_plain(copies, truth(copies), subject.run(copies), *plain_settings)


def _measured(subject: Subject, axis: str, x: float) -> Comparisons:
    problem = _problem(**(_USUAL | {axis: x}), dtype=subject.dtype)
    oracle = truth(problem)
    exact, accuracy, label = oracle.outcome, subject.accuracy, f"{axis} = {x:g}"
    outcome = subject.run(problem)
    # ``depth`` counts additions; for a short chain the square root is no improvement
    probable_accuracy = replace(
        accuracy, depth=lambda k: min(accuracy.depth(k), int(np.ceil(CONFIDENCE * np.sqrt(accuracy.depth(k)))))
    )
    bound, probable = (bounds(problem, oracle, facts, subject.dtype) for facts in (accuracy, probable_accuracy))
    plain = plain_outcome(problem, oracle, accuracy, subject.dtype)
    norm = _norm(exact)
    point = Point(
        axis=axis,
        x=float(x),
        error=_norm(outcome, exact) / norm,
        plain=_norm(plain, exact) / norm,
        probable=_norm(probable) / norm,
        bound=_norm(bound) / norm,
    )
    yield label, replace(compare(outcome, exact, bound), point=point)
    worst = compare_with_plain(problem, oracle, outcome, accuracy, subject.dtype, NOISIER[subject.device])
    yield f"{label}, beside a plain computation", worst


def _norm(a: Outcome, b: Outcome | None = None) -> float:
    """The norm of both towers' gradients, or of the difference of two outcomes' gradients."""

    def gradients(x: Outcome) -> FloatArray:
        return np.concatenate([x.rows, *x.columns])

    return float(np.linalg.norm(gradients(a) if b is None else gradients(a) - gradients(b)))


def _problem(d: float, b: float, scale: float, dtype: str) -> Problem:
    """The symmetric loss of b unit pairs with a cosine of ``_COSINE`` on average, so that no pair is certain."""
    b, d = int(b), int(d)
    generator = np.random.default_rng([b, d, zlib.crc32(CASE.encode())])
    rows = unit(generator.standard_normal((b, d)))
    columns = unit(_COSINE * rows + np.sqrt(1 - _COSINE**2) * unit(generator.standard_normal((b, d))))
    half, features = np.full(b, 0.5 / b), [round_to(x, dtype) for x in (rows, columns)]
    return softmax_problem(features[0], features[1], scale, row_weight=half, column_weight=half, positives=np.arange(b))
