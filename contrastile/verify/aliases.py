"""Features that share memory: whether equal, overlapping or transposed, only their values count."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from contrastile.backends.contract import Array
from contrastile.verify.calls import Step
from contrastile.verify.comparison import Comparisons
from contrastile.verify.draws import sigmoid_problem, softmax_problem
from contrastile.verify.rounding import round_to
from contrastile.verify.trial import Subject

CASE = "aliases"
_SIZES = (24, 12), (37, 16)
_LARGE = 1088, 16
"""Products of this shape with their own transpose are not symmetric in a common BLAS."""


def aliases(subject: Subject, case: str) -> Comparisons:
    """Rows and columns that are one array, or views of one, give what copies of them give."""
    arrays = subject.backend.arrays
    for b, d in (*_SIZES, *([_LARGE] if subject.dtype == "float64" else [])):
        small, draw = (b, d) != _LARGE, np.random.default_rng([b, d])
        base = round_to(draw.standard_normal((2 * b, max(b, d) if small else d)) / 2, subject.dtype)
        for label, (rows, columns) in _views(base, b, d).items():
            if not (small or label == "one array"):
                continue
            softmax = softmax_problem(rows, columns, 4.0, column_weight=np.full(b, 1 / b), positives=np.arange(b))
            for problem in (softmax, sigmoid_problem(softmax, -1.5)):
                for tile in (None, (8, 8)) if small else (None,):
                    step = Step(subject, problem, replace(subject.options, tile=tile))
                    like = step.native.rows
                    views = _views(arrays.asarray(base.copy(), arrays.dtype(like), like), b, d)[label]
                    step.native = replace(step.native, rows=views[0], columns=(views[1],))
                    step.run()
                    yield f"{problem.kind}, {label}, {b} x {rows.shape[1]}, tile {tile}", step.judged()


def _views(base: Array, b: int, d: int) -> dict[str, tuple[Array, Array]]:
    """Pairs of matrices of b rows in one array, by name."""
    first = base[:b, :d]
    found = {
        "one array": (first, first),
        "one row apart": (first, base[1 : b + 1, :d]),
        "every other row": (base[: 2 * b : 2, :d], first),
        "halves": (first, base[b:, :d]),
    }
    if base.shape[1] >= b:
        square = base[:b, :b]
        found["a square and its transpose"] = square, square.T
    return found
