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
"""The arrays that a loss keeps for its gradients. Only the schedule knows the meaning of each."""


def quiet() -> AbstractContextManager[Any]:
    """A context in which NumPy does not warn of NaN and infinity, because they are valid results here."""
    # imported when called: ``import contrastile`` imports nothing but the standard library
    import numpy as np

    return np.errstate(all="ignore")


class Work(NamedTuple):
    """The backend that computes the blocks of a problem, and its options."""

    backend: Backend
    options: Options


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which gradients are wanted. Unwanted gradients are neither computed nor allocated.

    Attributes:
        rows: whether the rows' gradient is wanted.
        columns: for each column block, whether its gradient is wanted.
        scale: whether the scale's gradient is wanted (it needs the sums that give the rows' gradient).
        bias: whether the bias's gradient is wanted (sigmoid loss only).
    """

    rows: bool
    columns: tuple[bool, ...]
    scale: bool = True
    bias: bool = False

    @staticmethod
    def every(problem: Problem) -> Wanted:
        """All gradients that a problem has."""
        return Wanted(True, (True,) * len(problem.columns), True, problem.kind == "sigmoid")

    @staticmethod
    def of(flags: Sequence[bool]) -> Wanted:
        """The inverse of ``flags``."""
        rows, *columns, scale, bias = flags
        return Wanted(rows, tuple(columns), scale, bias)

    @property
    def flags(self) -> list[bool]:
        """Whether each gradient is wanted: of the rows, of each column block, of the scale and of the bias."""
        return [self.rows, *self.columns, self.scale, self.bias]


@dataclass(frozen=True, slots=True)
class Forward:
    """The loss and the arrays that its backward pass needs.

    Attributes:
        loss: 0-d, state dtype.
        rows: N and P of the rows, (m,) float64 each, over all column blocks.
        columns: N and P of the joined columns, (n,) float64 each; None for a loss of one direction.
        gathered: the columns that this rank has gathered from all ranks; None if it has gathered none.
        global_columns: N, P, v and t' of all ranks' columns, for a gather of two directions; None otherwise.
        smoothed: the sums of label smoothing: see ``beside.Smoothing``; None without label smoothing.
        kept: the kept array of each block, in the schedule's order: see ``contract.Statistics``. Empty without any.
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
        """All attributes but the loss; ``Forward.of`` is the inverse."""
        columns, global_columns = self.columns or (None,) * 2, self.global_columns or (None,) * 4
        return *self.rows, *columns, self.gathered, *global_columns, self.smoothed, *self.kept

    @staticmethod
    def of(state: State) -> Forward:
        """The inverse of ``state``. Without ranks a state may hold its first four arrays alone, the log-sum-exps."""
        n, p, m, q = state[:4]
        gathered, *global_columns, smoothed = state[4:10] or (None,) * 6
        known = None if global_columns[0] is None else tuple(global_columns)
        return Forward(None, (n, p), None if m is None else (m, q), gathered, known, smoothed, kept=tuple(state[10:]))


@dataclass(frozen=True, slots=True)
class Gradients:
    """Gradients in the features' dtype; unwanted ones are None. ``scale`` and ``bias`` are 0-d, state dtype."""

    rows: Array | None
    columns: tuple[Array | None, ...]
    scale: Array | None
    bias: Array | None

    @staticmethod
    def of(arrays: Sequence[Array | None]) -> Gradients:
        """The inverse of ``listed``."""
        rows, scale, bias, *columns = arrays
        return Gradients(rows, tuple(columns), scale, bias)

    def listed(self) -> tuple[Array | None, ...]:
        """The gradients of the rows, the scale, the bias and each column block, in this order."""
        return self.rows, self.scale, self.bias, *self.columns


@dataclass(frozen=True, slots=True)
class Sums:
    """The sums that the primitives accumulate, in the state dtype: G K and G^T Q, both without the scale, and sum G."""

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


def lse_function(rows: Array, column_count: int, wanted: Wanted | None, work: Work, *, is_single: bool) -> LseFunction:
    """The backend's ``lse``, or its ``keeping`` if that may keep arrays that the gradients can use.

    Args:
        rows: (m, d) features.
        column_count: number of columns of all blocks.
        wanted: the gradients that the backward pass will compute; None for none.
        work: the backend and its options.
        is_single: whether the problem is one block, so that the backward pass may call ``finished``.
    """
    backend, options = work
    if wanted is None or backend.keeping is None or backend.keeps is None:
        return backend.lse
    dtype, device = backend.arrays.dtype(rows), backend.arrays.device(rows)
    if backend.keeps(rows.shape[0], column_count, dtype, device, options) == 0:
        return backend.lse
    if backend.finished is not None and not (is_single and wanted.rows and all(wanted.columns)):
        return backend.lse
    return backend.keeping


def forward(problem: Problem, work: Work, *, wanted: Wanted | None = None) -> Forward:
    """The softmax loss of one process, and its log-sum-exps.

    The backend may keep arrays that the ``wanted`` gradients can reuse; it keeps none if ``wanted`` is None.

    Raises:
        UnsupportedProblemError: the backend refuses one of the blocks.
    """
    backend, options = work
    arrays, two_sided = backend.arrays, problem.column_weight is not None
    count, is_single = sum(x.shape[0] for x in problem.columns), len(problem.columns) == 1 and not problem.beside
    lse = lse_function(problem.rows, count, wanted, work, is_single=is_single)
    parts = []
    for _, block in problem.blocks():
        backend.check(block, options)
        parts.append(lse(block, two_sided, options))
    rows = merge_parts(arrays, [*problem.beside, *(part.rows for part in parts)])
    columns = join_parts(arrays, [x.columns for x in parts if x.columns is not None]) if two_sided else None
    value = loss(problem, arrays, arrays.dtype(problem.scale), rows, columns)
    kept = pack_kept([part.kept for part in parts])
    return Forward(value, rows[:2], None if columns is None else columns[:2], kept=kept)


def loss(
    problem: Problem, arrays: ArrayLibrary, dtype: str, rows: SideStatistics, columns: SideStatistics | None = None
) -> Array:
    """The loss of the rows, plus that of the columns if they are given: 0-d, rounded once to ``dtype``."""
    sides = [(*rows, problem.row_weight, problem.row_target)]
    if columns is not None:
        sides.append((*columns, problem.column_weight, problem.column_target))
    return objectives.loss(problem.terms(arrays), arrays, dtype, sides)


def merge_parts(arrays: ArrayLibrary, parts: Sequence[Sequence[Array]]) -> SideStatistics:
    """The statistics of the same rows, or columns, over several blocks; each part is (N, P, S) over one block."""
    n, p, s = parts[0]
    for negative, positive, positive_sum in parts[1:]:
        n, p = arrays.merge(n, negative), arrays.merge(p, positive)
        s = s + positive_sum
    return SideStatistics(n, p, s)


def join_parts(arrays: ArrayLibrary, parts: Sequence[SideStatistics]) -> SideStatistics:
    return SideStatistics(*(arrays.concat(list(sides)) for sides in zip(*parts, strict=True)))


def backward(problem: Problem, saved: Forward, upstream: Array, wanted: Wanted, work: Work) -> Gradients:
    """Gradients of ``upstream * loss`` for the softmax loss; ``upstream`` is 0-d, state dtype."""
    backend, options = work
    arrays = backend.arrays
    if backend.finished is not None and wanted.rows and len(problem.columns) == 1 and problem.row_sums is None:
        ((span, block),) = problem.blocks()
        form: ColumnForm | None = "gradient" if any(wanted.columns) else None
        finished = backend.finished(block, _block_weights(problem, saved, span, 0, arrays), upstream, form, options)
        scale = arrays.cast(finished.inner, arrays.dtype(problem.scale)) if wanted.scale else None
        return Gradients(finished.rows, (finished.columns,), scale, None)
    weighted = problem.weighted(upstream)
    row_sum = row_accumulator(backend, problem, wanted)
    column_sums: list[Array | None] = []
    column_gradients: list[Array | None] = []
    for index, ((span, block), is_wanted) in enumerate(zip(weighted.blocks(), wanted.columns, strict=True)):
        weights = _block_weights(weighted, saved, span, index, arrays)
        finish_columns = backend.finished_columns if is_wanted and row_sum is not None else None
        column_sums.append(accumulator(backend, block.columns, is_wanted and finish_columns is None))
        if finish_columns is None:
            backend.gradients(block, weights, row_sum, column_sums[-1], options)
        column_gradients.append(None if finish_columns is None else finish_columns(block, weights, row_sum, options))
    # the weights include the upstream gradient, and a softmax does not depend on a bias
    gradients = gradients_from_sums(problem, Sums(row_sum, tuple(column_sums), None), None, wanted, arrays)
    columns = (x if y is None else y for x, y in zip(gradients.columns, column_gradients, strict=True))
    return replace(gradients, columns=tuple(columns))


def pack_kept(arrays: Sequence[Array | None]) -> tuple[Array | None, ...]:
    """The kept array of each block; empty if no block has kept one."""
    return () if all(array is None for array in arrays) else tuple(arrays)


def kept_array(saved: Forward, index: int) -> Array | None:
    """The kept array of a block; ``index`` is the block's position in the schedule's order."""
    return saved.kept[index] if saved.kept else None


def _block_weights(problem: Problem, saved: Forward, span: slice, index: int, arrays: ArrayLibrary) -> Weights:
    rows, columns = side_weights(problem, saved, arrays)
    if columns is not None and len(problem.columns) > 1:
        columns = columns.part(span)
    return Weights(rows, columns, kept_array(saved, index))


def side_weights(problem: Problem, saved: Forward, arrays: ArrayLibrary) -> tuple[SideWeights, SideWeights | None]:
    """The weights of all rows, and of all columns if the loss has two directions."""
    terms = problem.terms(arrays)
    rows = bars.side_weights(terms, arrays, saved.rows, problem.row_weight, problem.row_target)
    if problem.column_weight is None or saved.columns is None:
        return rows, None
    column_sides = saved.columns, problem.column_weight, problem.column_target
    return rows, bars.side_weights(terms, arrays, *column_sides)


def accumulator(backend: Backend, features: Array, is_wanted: bool) -> Array | None:
    """Zeros of the features' shape in the state dtype; None if unwanted."""
    state = backend.state(backend.arrays.dtype(features))
    return backend.arrays.full(tuple(features.shape), 0.0, state, features) if is_wanted else None


def row_accumulator(backend: Backend, problem: Problem, wanted: Wanted) -> Array | None:
    """The initial sums of the rows, to which blocks add in place; None if unwanted."""
    if problem.row_sums is not None:
        return problem.row_sums
    return accumulator(backend, problem.rows, wanted.rows or wanted.scale)


def weighted_total(arrays: ArrayLibrary, weight: Array, x: Array) -> Array:
    """``sum_i weight_i x_i`` in float64, 0-d; a weight of 0 gives 0 for any x, NaN included."""
    weight = arrays.cast(weight, "float64")
    return arrays.total(arrays.where(weight == 0, 0.0, weight * arrays.cast(x, "float64")))


def weighing_positives(work: Work) -> Work:
    """Work for a sigmoid loss with row weights (m, 2): the weight of a positive, and the extra weight of a negative.

    Each block is computed twice: all pairs with the first weights, then the negatives alone with the second. Both are
    losses that the backend knows, and no term is subtracted from another.
    """
    backend, arrays = work.backend, work.backend.arrays

    def sigmoid(
        block: Block, row_weight: Array, row_gradient: Array | None, column_gradient: Array | None, options: Options
    ) -> tuple[Array, Array]:
        no_positives = arrays.full((block.rows.shape[0],), -1, "int64", block.rows)
        negatives = replace(block, pairs=replace(block.pairs, match="drop", positives=no_positives))
        results = [
            backend.sigmoid(part, arrays.contiguous(row_weight[:, i]), row_gradient, column_gradient, options)
            for i, part in enumerate((block, negatives))
        ]
        return arrays.module.stack([loss for loss, _ in results], -1), results[0][1] + results[1][1]

    return work._replace(backend=replace(backend, sigmoid=sigmoid))


def sigmoid(problem: Problem, wanted: Wanted | None, work: Work) -> tuple[Array, Sums | None]:
    """The sigmoid loss (0-d, state dtype) and, from the same pass, the sums that give its gradients."""
    backend, options = work
    arrays = backend.arrays
    row_sum = accumulator(backend, problem.rows, wanted is not None and (wanted.rows or wanted.scale))
    column_sums, loss, total = [], None, None
    wanted_columns = wanted.columns if wanted is not None else (False,) * len(problem.columns)
    for (_, block), is_wanted in zip(problem.blocks(), wanted_columns, strict=True):
        backend.check(block, options)
        column_sums.append(accumulator(backend, block.columns, is_wanted))
        row_loss, slope = backend.sigmoid(block, problem.row_weight, row_sum, column_sums[-1], options)
        block_loss = weighted_total(arrays, problem.row_weight, row_loss)
        loss = block_loss if loss is None else loss + block_loss
        total = arrays.total(slope) if total is None else total + arrays.total(slope)
    value = arrays.cast(loss, arrays.dtype(problem.scale))
    return value, Sums(row_sum, tuple(column_sums), total) if wanted is not None else None


def gradients_from_sums(
    problem: Problem, sums: Sums, upstream: Array | None, wanted: Wanted, arrays: ArrayLibrary, scalar_dtype: str = ""
) -> Gradients:
    """Gradients from the accumulated sums: multiplied by the scale, then cast once to the features' dtype.

    ``dscale = sum_i <row_i, (G K)_i>`` is computed before the cast and needs no pass over the tiles. If the problem
    ``gives_sums``, the features' gradients are the sums themselves.

    Args:
        problem: only its rows and its scale are read.
        sums: the sums that the primitives accumulated over the problem.
        upstream: 0-d factor; the sums stay unchanged. None if the weights already include the factor: then the sums
            are consumed.
        wanted: which gradients to compute.
        arrays: the library of all arrays.
        scalar_dtype: dtype of the gradients of scale and bias; by default the scale's.
    """
    rows, scale = problem.rows, problem.scale
    dtype, scalar_dtype = arrays.dtype(rows), scalar_dtype or arrays.dtype(scale)

    def scalar_gradient(x: Array | None, is_wanted: bool) -> Array | None:
        if x is None or not is_wanted:
            return None
        return arrays.cast(x if upstream is None else x * upstream, scalar_dtype)

    factor = scale if upstream is None else scale * upstream

    def scaled(x: Array | None, is_wanted: bool) -> Array | None:
        if x is None or not is_wanted or problem.gives_sums:
            return x if is_wanted else None
        return arrays.scaled(x, factor, dtype, consume=upstream is None)

    d_scale = scalar_gradient(arrays.inner(rows, sums.rows), True) if wanted.scale else None
    columns = tuple(scaled(x, is_wanted) for x, is_wanted in zip(sums.columns, wanted.columns, strict=True))
    return Gradients(scaled(sums.rows, wanted.rows), columns, d_scale, scalar_gradient(sums.total, wanted.bias))
