"""The schedule of one process: every column block against all rows, log-sum-exps merged, gradients added."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from contrastile.backends import bars, objectives
from contrastile.backends.arrays import ArrayLibrary
from contrastile.backends.contract import (
    Array,
    Backend,
    Block,
    ColumnForm,
    LseFunction,
    Options,
    SideStatistics,
    SideWeights,
    Weights,
)
from contrastile.schedules.problem import Problem

Lses = tuple[Array, Array]
"""N and P of one side: see ``contract.SideStatistics``."""

State = Sequence[Array | None]
"""What a loss leaves for its gradients, in one row. Only the schedule knows what each array is."""


def quiet() -> AbstractContextManager[Any]:
    """While open, NumPy does not warn of NaN and infinity: here they are results."""
    # imported when called: ``import contrastile`` imports nothing but the standard library
    import numpy as np

    return np.errstate(all="ignore")


class Work(NamedTuple):
    """What computes the blocks of a problem, and how."""

    backend: Backend
    options: Options


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which gradients are wanted; what is not wanted is neither computed nor allocated.

    Attributes:
        rows: the rows' gradient.
        columns: for each column block, whether its gradient is wanted.
        scale: the scale's gradient (needs the sums behind the rows' gradient).
        bias: the bias's gradient (sigmoid loss only).
    """

    rows: bool
    columns: tuple[bool, ...]
    scale: bool = True
    bias: bool = False

    @staticmethod
    def every(problem: Problem) -> Wanted:
        """All that a problem has."""
        return Wanted(True, (True,) * len(problem.columns), True, problem.kind == "sigmoid")

    @staticmethod
    def of(flags: Sequence[bool]) -> Wanted:
        """From ``flags``."""
        rows, *columns, scale, bias = flags
        return Wanted(rows, tuple(columns), scale, bias)

    @property
    def flags(self) -> list[bool]:
        """Of the rows, each column block, the scale and the bias."""
        return [self.rows, *self.columns, self.scale, self.bias]


@dataclass(frozen=True, slots=True)
class Forward:
    """The loss and what its backward needs.

    Attributes:
        loss: 0-d, state dtype.
        rows: (m,) float64 each, over all column blocks.
        columns: (n,) float64 each, over the joined columns; None for a loss of one direction.
        gathered: the columns that this rank has collected from others, or from all; None where it has none.
        global_columns: of a gather of two directions N, P, v and t' of the columns of all ranks; None otherwise.
        smoothed: the sums behind label smoothing: see ``beside.Smoothing``. None without it.
        kept: of each block, in the order of the schedule: see ``contract.Statistics``. Empty where nothing was kept.
    """

    loss: Array
    rows: Lses
    columns: Lses | None = None
    gathered: Array | None = None
    global_columns: tuple[Array, ...] | None = None
    smoothed: Array | None = None
    kept: tuple[Array | None, ...] = field(default=(), kw_only=True)

    @property
    def state(self) -> State:
        """All but the loss, as ``Forward.of`` takes it."""
        columns, everywhere = self.columns or (None,) * 2, self.global_columns or (None,) * 4
        return *self.rows, *columns, self.gathered, *everywhere, self.smoothed, *self.kept

    @staticmethod
    def of(state: State) -> Forward:
        """Of a state. Its first four, the log-sum-exps, are all that a process alone needs."""
        n, p, m, q = state[:4]
        gathered, *everywhere, smoothed = state[4:10] or (None,) * 6
        over = None if everywhere[0] is None else tuple(everywhere)
        return Forward(None, (n, p), None if m is None else (m, q), gathered, over, smoothed, kept=tuple(state[10:]))


@dataclass(frozen=True, slots=True)
class Gradients:
    """Gradients in the features' dtype; None where not wanted. ``scale`` and ``bias`` are 0-d, state dtype."""

    rows: Array | None
    columns: tuple[Array | None, ...]
    scale: Array | None
    bias: Array | None

    @staticmethod
    def of(found: Sequence[Array | None]) -> Gradients:
        """From what ``listed`` gives."""
        rows, scale, bias, *columns = found
        return Gradients(rows, tuple(columns), scale, bias)

    def listed(self) -> tuple[Array | None, ...]:
        """Those of the rows, the scale, the bias and the column blocks."""
        return self.rows, self.scale, self.bias, *self.columns


@dataclass(frozen=True, slots=True)
class Sums:
    """What the primitives accumulate: G K, G^T Q (both without the factor scale) and sum G, in the state dtype."""

    rows: Array | None
    columns: tuple[Array | None, ...]
    total: Array | None

    @property
    def state(self) -> State:
        return self.total, self.rows, *self.columns

    @staticmethod
    def of(state: State) -> Sums:
        total, rows, *columns = state
        return Sums(rows, tuple(columns), total)


def lse_function(rows: Array, count: int, wanted: Wanted | None, work: Work, *, single: bool) -> LseFunction:
    """A backend's ``lse``, or its ``keeping`` where that may keep something for the gradients.

    Args:
        rows: (m, d) features.
        count: of the columns, of all blocks together.
        wanted: the gradients that will be asked for; None for none.
        work: computes the blocks.
        single: whether there is one block, which ``finished`` may be given.
    """
    backend, options = work
    if wanted is None or backend.keeping is None or backend.keeps is None:
        return backend.lse
    dtype, device = backend.arrays.dtype(rows), backend.arrays.device(rows)
    if backend.keeps(rows.shape[0], count, dtype, device, options) == 0:
        return backend.lse
    if backend.finished is not None and not (single and wanted.rows and all(wanted.columns)):
        return backend.lse
    return backend.keeping


def forward(problem: Problem, work: Work, *, wanted: Wanted | None = None) -> Forward:
    """The softmax loss of one process, and its log-sum-exps.

    The backend may keep what the gradients can reuse that will be ``wanted``; None for none.

    Raises:
        UnsupportedProblemError: the backend refuses one of the blocks.
    """
    backend, options = work
    arrays, two_sided = backend.arrays, problem.column_weight is not None
    count, single = sum(x.shape[0] for x in problem.columns), len(problem.columns) == 1 and not problem.beside
    lse = lse_function(problem.rows, count, wanted, work, single=single)
    parts = []
    for _, block in problem.blocks():
        backend.check(block, options)
        parts.append(lse(block, two_sided, options))
    rows = merged(arrays, [*problem.beside, *(part.rows for part in parts)])
    columns = joined(arrays, [part.columns for part in parts if part.columns is not None]) if two_sided else None
    value = loss(problem, arrays, arrays.dtype(problem.scale), rows, columns)
    kept = kept_by([part.kept for part in parts])
    return Forward(value, rows[:2], None if columns is None else columns[:2], kept=kept)


def loss(
    problem: Problem, arrays: ArrayLibrary, dtype: str, rows: SideStatistics, columns: SideStatistics | None = None
) -> Array:
    """The loss of the rows and, where they are given, of the columns, 0-d, rounded once to ``dtype``."""
    sides = [(*rows, problem.row_weight, problem.row_target)]
    if columns is not None:
        sides.append((*columns, problem.column_weight, problem.column_target))
    return objectives.loss(problem.terms(arrays), arrays, dtype, sides)


def merged(arrays: ArrayLibrary, parts: Sequence[Sequence[Array]]) -> SideStatistics:
    """Those of the same rows, or columns, over several blocks; each part is a ``SideStatistics``, or its arrays."""
    n, p, s = parts[0]
    for negative, positive, total in parts[1:]:
        n, p = arrays.merge(n, negative), arrays.merge(p, positive)
        s = s + total
    return SideStatistics(n, p, s)


def joined(arrays: ArrayLibrary, parts: Sequence[SideStatistics]) -> SideStatistics:
    return SideStatistics(*(arrays.concat(list(x)) for x in zip(*parts, strict=True)))


def backward(problem: Problem, saved: Forward, upstream: Array, wanted: Wanted, work: Work) -> Gradients:
    """Gradients of ``upstream * loss`` for the softmax loss; ``upstream`` is 0-d, state dtype."""
    backend, options = work
    arrays = backend.arrays
    if backend.finished is not None and wanted.rows and len(problem.columns) == 1 and problem.row_sums is None:
        ((where, block),) = problem.blocks()
        form: ColumnForm | None = "gradient" if any(wanted.columns) else None
        found = backend.finished(block, _weights(problem, saved, where, 0, arrays), upstream, form, options)
        scale = arrays.cast(found.inner, arrays.dtype(problem.scale)) if wanted.scale else None
        return Gradients(found.rows, (found.columns,), scale, None)
    weighted = problem.weighted(upstream)
    row_sum = row_accumulator(backend, problem, wanted)
    column_sums: list[Array | None] = []
    finished: list[Array | None] = []
    for number, ((where, block), want) in enumerate(zip(weighted.blocks(), wanted.columns, strict=True)):
        weights = _weights(weighted, saved, where, number, arrays)
        at_once = backend.finished_columns if want and row_sum is not None else None
        column_sums.append(accumulator(backend, block.columns, want and at_once is None))
        if at_once is None:
            backend.gradients(block, weights, row_sum, column_sums[-1], options)
        finished.append(None if at_once is None else at_once(block, weights, row_sum, options))
    # the upstream gradient is in the weights already, and a softmax does not depend on a bias
    summed = gradients_from_sums(problem, Sums(row_sum, tuple(column_sums), None), None, wanted, arrays)
    columns = (x if y is None else y for x, y in zip(summed.columns, finished, strict=True))
    return replace(summed, columns=tuple(columns))


def kept_by(parts: Sequence[Array | None]) -> tuple[Array | None, ...]:
    """What blocks have kept; empty where none has."""
    return () if all(part is None for part in parts) else tuple(parts)


def kept_of(saved: Forward, number: int) -> Array | None:
    """What was kept of a block, by its number in the order of the schedule."""
    return saved.kept[number] if saved.kept else None


def _weights(problem: Problem, saved: Forward, where: slice, number: int, arrays: ArrayLibrary) -> Weights:
    rows, columns = side_weights(problem, saved, arrays)
    if columns is not None and len(problem.columns) > 1:
        columns = columns.part(where)
    return Weights(rows, columns, kept_of(saved, number))


def side_weights(problem: Problem, saved: Forward, arrays: ArrayLibrary) -> tuple[SideWeights, SideWeights | None]:
    """Of all rows, and of all columns where the loss has two directions."""
    terms = problem.terms(arrays)
    rows = bars.side_weights(terms, arrays, saved.rows, problem.row_weight, problem.row_target)
    if problem.column_weight is None or saved.columns is None:
        return rows, None
    given = saved.columns, problem.column_weight, problem.column_target
    return rows, bars.side_weights(terms, arrays, *given)


def accumulator(backend: Backend, features: Array, want: bool) -> Array | None:
    """Zeros of the features' shape in the state dtype; None where not wanted."""
    state = backend.state(backend.arrays.dtype(features))
    return backend.arrays.full(tuple(features.shape), 0.0, state, features) if want else None


def row_accumulator(backend: Backend, problem: Problem, wanted: Wanted) -> Array | None:
    """What the rows' sums begin with, which are added to in place; None where not wanted."""
    if problem.row_sums is not None:
        return problem.row_sums
    return accumulator(backend, problem.rows, wanted.rows or wanted.scale)


def weighted_total(arrays: ArrayLibrary, weight: Array, x: Array) -> Array:
    """``sum_i weight_i x_i`` in float64, 0-d; a weight of 0 gives 0 for any x, NaN included."""
    weight = arrays.cast(weight, "float64")
    return arrays.total(arrays.where(weight == 0, 0.0, weight * arrays.cast(x, "float64")))


def weighing_positives(work: Work) -> Work:
    """What computes a sigmoid loss whose row weights are (m, 2): of the positives, and how much more a negative weighs.

    Of each block the loss of all pairs by the first weights, and then that of the negatives alone by the second: no
    term is taken off another, and the backend computes two losses that it knows.
    """
    backend, arrays = work.backend, work.backend.arrays

    def sigmoid(
        block: Block, row_weight: Array, row_gradient: Array | None, column_gradient: Array | None, options: Options
    ) -> tuple[Array, Array]:
        nowhere = arrays.full((block.rows.shape[0],), -1, "int64", block.rows)
        negatives = replace(block, pairs=replace(block.pairs, match="drop", positives=nowhere))
        found = [
            backend.sigmoid(each, arrays.contiguous(row_weight[:, i]), row_gradient, column_gradient, options)
            for i, each in enumerate((block, negatives))
        ]
        return arrays.module.stack([loss for loss, _ in found], -1), found[0][1] + found[1][1]

    return work._replace(backend=replace(backend, sigmoid=sigmoid))


def sigmoid(problem: Problem, wanted: Wanted | None, work: Work) -> tuple[Array, Sums | None]:
    """The sigmoid loss (0-d, state dtype) and, in the same pass, the sums behind its gradients."""
    backend, options = work
    arrays = backend.arrays
    row_sum = accumulator(backend, problem.rows, wanted is not None and (wanted.rows or wanted.scale))
    column_sums, loss, total = [], None, None
    wants = wanted.columns if wanted is not None else (False,) * len(problem.columns)
    for (_, block), want in zip(problem.blocks(), wants, strict=True):
        backend.check(block, options)
        column_sums.append(accumulator(backend, block.columns, want))
        row_loss, g = backend.sigmoid(block, problem.row_weight, row_sum, column_sums[-1], options)
        part = weighted_total(arrays, problem.row_weight, row_loss)
        loss = part if loss is None else loss + part
        total = arrays.total(g) if total is None else total + arrays.total(g)
    value = arrays.cast(loss, arrays.dtype(problem.scale))
    return value, Sums(row_sum, tuple(column_sums), total) if wanted is not None else None


def gradients_from_sums(
    problem: Problem, sums: Sums, upstream: Array | None, wanted: Wanted, arrays: ArrayLibrary, numbers: str = ""
) -> Gradients:
    """Gradients from the accumulated sums: times the scale, cast once to the features' dtype.

    ``dscale = sum_i <row_i, (G K)_i>`` is taken before the cast and needs no pass over the tiles.

    Args:
        problem: of which the rows and the scale are read.
        sums: what the primitives accumulated over it.
        upstream: 0-d factor still to be applied, leaving the sums as they are; None when the weights carried it, and
            then the sums are consumed.
        wanted: which gradients to give.
        arrays: the library of all these arrays.
        numbers: dtype of the gradients of scale and bias; by default the scale's.
    """
    rows, scale = problem.rows, problem.scale
    dtype, scalar = arrays.dtype(rows), numbers or arrays.dtype(scale)

    def whole(x: Array | None, want: bool) -> Array | None:
        if x is None or not want:
            return None
        return arrays.cast(x if upstream is None else x * upstream, scalar)

    factor = scale if upstream is None else scale * upstream

    def scaled(x: Array | None, want: bool) -> Array | None:
        if x is None or not want:
            return None
        return arrays.scaled(x, factor, dtype, consume=upstream is None)

    d_scale = whole(arrays.inner(rows, sums.rows), True) if wanted.scale else None
    columns = tuple(scaled(x, want) for x, want in zip(sums.columns, wanted.columns, strict=True))
    return Gradients(scaled(sums.rows, wanted.rows), columns, d_scale, whole(sums.total, wanted.bias))
