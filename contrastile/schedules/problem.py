"""A whole loss as data: rows, the column blocks under one log-sum-exp, weights, targets and pairs.

``loss = sum_i u_i (L_i - sum_j y_ij x_ij) + sum_j v_j (M_j - sum_i y'_ij x_ij)`` with ``y_ij = t_i [positive]`` and
``y'_ij = t'_j [positive]``, or the sigmoid loss ``sum_i u_i sum_j softplus(-z_ij x_ij)``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from contrastile.backends.arrays import ArrayLibrary, transfer
from contrastile.backends.contract import Array, Block, Match, Pairs, SideStatistics
from contrastile.backends.objectives import KEEPS_SUMS, STATISTICS, TEACHER, Terms, terms
from contrastile.schedules.placement import Placement

BLOCK = 65536
"""The default number of rows and of columns of a block on the device. Computing such a block takes a large GPU several
times as long as copying it."""


@dataclass(frozen=True, slots=True)
class Blocking:
    """How a process cuts a problem into blocks when the device that computes it does not hold all features at once.

    Attributes:
        block: the most rows, and the most columns, of a block on the device.
        device: a torch device with its index.
    """

    block: int
    device: Any


@dataclass(frozen=True, slots=True)
class Problem:
    """Everything that determines the loss. Column vectors extend over all column blocks, joined in order.

    Attributes:
        rows: (m, d) features.
        columns: tuple of (n_c, d) features; n = sum n_c. Empty for rows against themselves, as in NT-Xent: then n = m,
            each index names a row, positives and ids are symmetric, ``excluded`` excludes nothing or each row from
            itself, and the rows' gradient is the gradient of the features.
        scale: 0-d, state dtype.
        row_weight: (m,) u, state dtype; a sigmoid loss may have (m, 2): see ``local.weighing_positives``.
        row_target: (m,) t, 1 / |P(i)|, or 0 where the row has no positive or its positives do not count: each row of y
            sums to 1 or 0. The sigmoid loss does not use it.
        column_weight: (n,) v, or None for a loss of one direction.
        column_target: (n,) t', given with column_weight.
        positives: (m,) int64 indices of the joined columns; a value outside 0..n-1 means no positive.
        excluded: (m,) int64 indices of the joined columns; a value outside 0..n-1 means no exclusion.
        row_ids: (m,) int64.
        column_ids: (n,) int64, given with row_ids.
        row_limits: (m,) state dtype: see ``Pairs``. None for rows against themselves.
        column_limits: (n,) state dtype, given with row_limits.
        row_guide: (m, e) features: see ``Pairs``.
        column_guide: (n, e) features: see ``Pairs``.
        own_counts: (m,) int64, or None. If given, the last column block is (m k, d) and holds each row's own columns:
            columns i k to i k + k - 1 belong to row i, and the first ``own_counts[i]`` of them are its negatives. They
            are in no vector of the columns and in no placement. See ``has_own_positives``.
        kind: "sigmoid", or the name of a loss of the statistics, one of ``objectives.OBJECTIVES``; or
            ``objectives.STATISTICS``: see ``with_bars``; or ``objectives.TEACHER``.
        bias: 0-d, or None for 0. Of the kind ``TEACHER`` it is the scale of the teacher's logits.
        match: what equal ids mean: see ``Pairs``.
        placement: the position of this rank's part in a problem of several ranks; None for a process alone. With a
            placement rows, columns, weights and ids are this rank's; positives and excluded index all ranks' columns.
        blocking: None where the features are on the device and make one block.
        whole: the weight of each row in a loss without options, if column i is the one positive of row i or the rows
            are against themselves; 1 for labels, which give the weights. None for any other: see ``contract.Whole``.
        margin: the amount subtracted from the cosines of the positives before the scale is applied; None for 0.
        smoothing: the share of each row of y that is spread over all columns, which are then all admitted.
        depth: the number of the teacher's features, which come first: see ``schedules.teacher``; None without any.
        beside: statistics of the rows over other columns, merged with the statistics of the blocks.
        row_sums: (m, d) state dtype, on the features' device: the initial value of the rows' gradient sums; None for 0.
    """

    rows: Array
    columns: tuple[Array, ...]
    scale: Array
    row_weight: Array
    row_target: Array
    column_weight: Array | None = None
    column_target: Array | None = None
    positives: Array | None = None
    excluded: Array | None = None
    row_ids: Array | None = None
    column_ids: Array | None = None
    row_limits: Array | None = None
    column_limits: Array | None = None
    row_guide: Array | None = None
    column_guide: Array | None = None
    own_counts: Array | None = None
    kind: str = "softmax"
    bias: Array | None = None
    match: Match = "drop"
    placement: Placement | None = None
    blocking: Blocking | None = None
    whole: float | None = None
    margin: float | None = None
    smoothing: float | None = None
    depth: int | None = None
    beside: tuple[SideStatistics, ...] = ()
    row_sums: Array | None = None

    @property
    def others(self) -> Array | None:
        """The argument ``others`` of ``contract.Whole``: the columns, or the labels of rows against themselves."""
        return self.columns[0] if self.columns else self.row_ids

    def terms(self, arrays: ArrayLibrary) -> Terms:
        """The loss as a function of the statistics; ``arrays`` is the library of the scale."""
        if self.margin is None and self.smoothing is None:
            return terms(self.kind)
        margin = None if self.margin is None else arrays.cast(self.scale, "float64") * self.margin
        return Terms(self.kind, margin, self.smoothing)

    @property
    def has_own_positives(self) -> bool:
        """Whether the first block is own columns too: its row i is the positive of row i, and a column of no other."""
        return self.own_counts is not None and self.positives is None and self.match == "drop"

    @property
    def keeps_sums(self) -> bool:
        """Whether the state of the loss is the sums from which its gradients follow."""
        return self.kind in KEEPS_SUMS

    @property
    def gives_sums(self) -> bool:
        """Whether G multiplies values: their sums, in the state dtype, are then the result of a backward pass."""
        return self.depth is not None and self.kind != TEACHER

    @property
    def traceable(self) -> bool:
        """Whether an operator may represent the problem: a graph holds no messages of ranks and no copies of blocks."""
        return self.placement is None and self.blocking is None

    @property
    def vectors(self) -> tuple[Array | None, ...]:
        """The weights, targets, pairs and the guide's features, which are matrices; None for each absent one."""
        # every step reads them several times: ``getattr`` by name takes four times as long
        weights = self.row_weight, self.row_target, self.column_weight, self.column_target
        pairs = self.positives, self.excluded, self.row_ids, self.column_ids
        limits = self.row_limits, self.column_limits, self.row_guide, self.column_guide
        return *weights, *pairs, *limits, self.own_counts

    @property
    def marks(self) -> tuple[Array | None, ...]:
        """The arrays that decide which pairs of the columns count: their ids, their limits and the guide's features."""
        return self.column_ids, self.column_limits, self.column_guide

    def arrays(self) -> tuple[Array | None, ...]:
        """All arrays, None for each absent one: rows, scale, bias, the vectors, the column blocks."""
        return self.rows, self.scale, self.bias, *self.vectors, *self.columns

    def with_arrays(self, arrays: Sequence[Any]) -> Problem:
        """The problem with other arrays, in the order of ``Problem.arrays``."""
        rows, scale, bias, *rest = arrays
        vectors, columns = rest[: len(VECTORS)], tuple(rest[len(VECTORS) :])
        settings = self.kind, bias, self.match, self.placement, self.blocking, self.whole
        args: tuple[Any, ...] = (rows, columns, scale, *vectors, *settings, self.margin, self.smoothing, self.depth)
        return Problem(*args)

    def for_gradients(self) -> Problem:
        """The part that the gradients read. A loss that keeps its sums reads only its rows and scale."""
        if not self.keeps_sums:
            return self
        return Problem(
            self.rows, (), self.scale, None, None, kind=self.kind, placement=self.placement, blocking=self.blocking
        )

    def weighted(self, factor: Array) -> Problem:
        """The problem with every weight multiplied by a factor, 0-d."""
        rows, scale, bias, u, t, v, *rest = self.arrays()
        row_weight = u * factor
        column_weight = row_weight if v is u else None if v is None else v * factor
        return self.with_arrays((rows, scale, bias, row_weight, t, column_weight, *rest))

    def with_bars(self, upstream: Array) -> Problem:
        """The problem of kind ``STATISTICS`` with bars, (3, m + n) float64, in place of its weights."""
        m, bars = self.rows.shape[0], upstream.T
        return replace(self, row_weight=bars[:m], column_weight=None if self.column_weight is None else bars[m:])

    def of_rows(self, span: slice) -> Problem:
        vectors = zip(VECTORS, self.vectors, strict=True)
        row_vectors = {name: x[span] for name, x in vectors if x is not None and name not in COLUMN_VECTORS}
        return replace(self, rows=self.rows[span], **row_vectors)

    def blocks(self) -> Iterator[tuple[slice, Block]]:
        """Each column block with its span among the joined columns; indices become local to the block."""
        start = 0
        for columns in self.columns:
            span = slice(start, start + columns.shape[0])
            yield span, self.block(columns, start, slice_marks(self.marks, span))
            start = span.stop

    def block(self, columns: Array, start: int, marks: Sequence[Array | None]) -> Block:
        """All rows against some columns; ``start`` is the index of the first, and ``marks`` belong to them."""

        def localize(index: Array | None) -> Array | None:
            return index if index is None or start == 0 else index - start

        pairs = Pairs(
            positives=localize(self.positives),
            excluded=localize(self.excluded),
            row_ids=self.row_ids,
            column_ids=marks[0],
            match=self.match,
            row_limits=self.row_limits,
            column_limits=marks[1],
            row_guide=self.row_guide,
            column_guide=marks[2],
            # a loss sorts its samples by their ids: see ``Order``
            rising=self.kind != STATISTICS,
        )
        return Block(self.rows, columns, self.scale, self.bias, pairs)


VECTORS = tuple(attribute.name for attribute in fields(Problem))[3:16]
"""The names of ``Problem.vectors``."""

COLUMN_VECTORS = frozenset(name for name in VECTORS if name.startswith("column_"))
"""The vectors with an element for each column; all others have one for each row."""


def slice_marks(marks: Sequence[Array | None], span: slice) -> tuple[Array | None, ...]:
    return tuple(None if mark is None else mark[span] for mark in marks)


def convert(problem: Problem, source: ArrayLibrary, target: ArrayLibrary) -> Problem:
    """The problem with its arrays in another library; bfloat16 becomes float32 where the target library lacks it.

    If the problem is cut into blocks, the features stay where they are, and all other arrays move to the device.
    """
    blocking = problem.blocking
    if source.name == target.name and blocking is None:
        return problem
    moved: dict[int, Array | None] = {} if blocking is None else {id(x): x for x in (problem.rows, *problem.columns)}
    # both directions may share vectors: convert each array once, so that they share it afterwards too
    for x in problem.arrays():
        if id(x) not in moved:
            on_device = x if blocking is None or x is None else x.to(blocking.device)
            moved[id(x)] = transfer(on_device, source, target)
    return problem.with_arrays([moved[id(x)] for x in problem.arrays()])
