"""Calls that follow each other, run at once or share memory: none changes another's results, or the process."""

from __future__ import annotations

import gc
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from contrastile import compute
from contrastile.backends.contract import Array, Options
from contrastile.schedules.problem import Problem
from contrastile.verify import process
from contrastile.verify.comparison import GRADIENT, NOTHING, Comparisons, Worst, compare, largest, wrong
from contrastile.verify.draws import sigmoid_problem, softmax_problem
from contrastile.verify.execution import every_gradient, materialise, taken
from contrastile.verify.rounding import round_to
from contrastile.verify.trial import Subject
from contrastile.verify.truth import Outcome, truth

CASE, ALIASES = "calls", "aliases"
_REPEATS = 3
_MANY = 64
"""Calls after which a leak of one object a call is told from what a process takes once."""


def calls(subject: Subject, case: str) -> Comparisons:
    """Calls that are interleaved, repeated, in other threads or on rewritten arrays are right, and leave no trace."""
    for kind in ("softmax", "sigmoid"):

        def new(seed: int, kind: str = kind) -> Step:
            return Step(subject, _problem(kind, seed, subject.dtype))

        first, second = new(0), new(1)
        # what a first call imports may filter warnings
        first.run()
        process.advance()
        before = process.state()
        for each in (first, second):
            each.forward()
        for each in (first, second):
            each.backward()
        changed = process.changed(before, process.state())
        yield f"{kind}, settings", NOTHING if changed is None else wrong(changed)
        yield f"{kind}, two forward passes, then their backward passes", largest([first.judged(), second.judged()])
        first.backward()
        yield f"{kind}, a second backward pass", first.judged()
        again = new(0)
        again.run()
        again.rewrite(second)
        again.run()
        yield f"{kind}, new values in the same arrays", again.judged()
        yield f"{kind}, the same memory by other strides", _turned(new(0))
        if subject.dtype == "float32":
            held = _held(again)
            yield f"{kind}, objects left by {_MANY} calls", Worst(held / _MANY, "objects", (), held, _MANY)
        yield f"{kind}, in another thread", _in_threads([new(0)])
        yield f"{kind}, in two threads at once", _in_threads([new(0), new(1)])


class Step:
    """A problem in the backend's arrays, its truth, and the last results, as the backend left them."""

    def __init__(self, subject: Subject, problem: Problem, options: Options | None = None) -> None:
        self.subject, self.problem, self.options = subject, problem, options or subject.options
        self.native = materialise(problem, subject.backend, subject.dtype, subject.device)
        self.wanted = every_gradient(self.native)
        arrays = subject.backend.arrays
        self._one = arrays.full((), 1.0, arrays.dtype(self.native.scale), self.native.scale)
        self._state: Any = None
        self._found: Any = None
        self._loss: Any = None

    def forward(self) -> None:
        self._loss, self._state = compute.problem_loss(self.native, self.subject.backend, self.options, self.wanted)

    def backward(self) -> None:
        given = self.native, self._state, self._one, self.wanted
        self._found = compute.problem_gradients(*given, self.subject.backend, self.options)

    def run(self) -> None:
        self.forward()
        self.backward()

    def rewrite(self, other: Step) -> None:
        """Give every array the values of another step's, in place."""
        for mine, theirs in zip(self.native.arrays(), other.native.arrays(), strict=True):
            if mine is not None:
                mine[...] = theirs
        self.problem = other.problem

    def judged(self) -> Worst:
        """The last results, read now, beside the truth."""
        take, found = partial(taken, self.subject.backend.arrays), self._found
        columns = tuple(map(take, found.columns))
        got = Outcome(take(self._loss), take(found.rows), columns, take(found.scale), take(found.bias))
        subject, oracle = self.subject, truth(self.problem)
        bound = subject.bounds(self.problem, oracle, options=self.options)
        return compare(got, oracle.outcome, bound, ("loss", *GRADIENT))


def _turned(step: Step) -> Worst:
    """The worse of a step whose rows are square, and of that step with those rows transposed where they lie."""
    rows, (columns, *_) = step.native.rows, step.native.columns
    size = min(len(step.problem.rows), rows.shape[1])
    square, found = rows[:size, :size], []
    kept = slice(0, size)
    vectors = ("row_weight", "row_target", "positives")
    for turned in (False, True):
        x = step.problem.rows[kept, kept]
        cut: dict[str, Any] = {name: getattr(step.problem, name)[kept] for name in vectors}
        problem = replace(step.problem, rows=x.T if turned else x, columns=(step.problem.columns[0][:, kept],), **cut)
        again = Step(step.subject, problem)
        again.native = replace(again.native, rows=square.T if turned else square, columns=(columns[:, kept],))
        again.run()
        found.append(again.judged())
    return largest(found)


def _held(step: Step) -> int:
    """The objects that are more after some calls: the fewest of several rounds, for what leaks does so in each."""
    found = []
    # what is there already need not be searched each time
    gc.collect()
    gc.freeze()
    try:
        for _ in range(1 + _REPEATS):
            gc.collect()
            before = sys.getallocatedblocks()
            for _ in range(_MANY):
                step.run()
            gc.collect()
            found.append(max(0, sys.getallocatedblocks() - before))
    finally:
        gc.unfreeze()
    return min(found)


def _in_threads(steps: list[Step]) -> Worst:
    """The worst of several steps, each repeated in a thread of its own."""
    start = threading.Barrier(len(steps))

    def repeated(step: Step) -> Worst:
        start.wait()
        found = []
        for _ in range(_REPEATS):
            step.run()
            found.append(step.judged())
        return largest(found)

    with ThreadPoolExecutor(len(steps)) as pool:
        return largest(list(pool.map(repeated, steps)))


def _problem(kind: str, seed: int, dtype: str) -> Problem:
    """Problems of one shape and other values."""
    m, n, d = 19, 23, 12
    draw = np.random.default_rng([seed, m, n])
    rows, columns = (round_to(draw.standard_normal((size, d)) / 2, dtype) for size in (m, n))
    u, v = (draw.standard_normal(size) for size in (m, n))
    positives = draw.permutation(n)[:m]
    softmax = softmax_problem(rows, columns, 4.0 + seed, row_weight=u, column_weight=v, positives=positives)
    return softmax if kind == "softmax" else sigmoid_problem(softmax, -2.5 + seed)


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
