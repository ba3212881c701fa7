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
from contrastile.backends.objectives import STATISTICS, Terms, terms
from contrastile.schedules.placement import Placement

BLOCK = 65536
"""Rows and columns of a block that a device holds at a time, where nobody says how many: they fill a large GPU for
several times as long as they travel."""


@dataclass(frozen=True, slots=True)
class Blocking:
    """How a process cuts a problem whose features are not, or not all at once, on the device that computes it.

    Attributes:
        block: most rows, and most columns, on the device at a time.
        device: torch's, with its index.
    """

    block: int
    device: Any


@dataclass(frozen=True, slots=True)
class Problem:
    """Everything that determines the loss. Column vectors run over all column blocks, joined in order.

    Attributes:
        rows: (m, d) features.
        columns: tuple of (n_c, d) features; n = sum n_c. Empty for rows against themselves, where positives and ids
            are the same either way round, as in NT-Xent: n = m, each index names a row, excluded are none or each row
            from itself, and the rows' gradient is the features'.
        scale: 0-d, state dtype.
        row_weight: (m,) u, state dtype; of a sigmoid loss, (m, 2): see ``local.weighing_positives``.
        row_target: (m,) t, 1 / |P(i)|, or 0 where the row has no positive or its positives are not to count: each row
            of y sums to 1 or 0. Unused by the sigmoid loss.
        column_weight: (n,) v, or None for a loss of one direction.
        column_target: (n,) t', given with column_weight.
        positives: (m,) int64 over the joined columns; outside 0..n-1 means none.
        excluded: (m,) int64 likewise.
        row_ids: (m,) int64.
        column_ids: (n,) int64, given with row_ids.
        row_limits: (m,) state dtype: see ``Pairs``. Not of rows against themselves.
        column_limits: (n,) state dtype, likewise.
        row_guide: (m, e) features: see ``Pairs``.
        column_guide: (n, e) features, likewise.
        own_counts: (m,) int64, or None. Given, the last block is (m k, d), of which row i's are i k to i k + k - 1, and
            count for it alone, as negatives: the first ``own_counts[i]`` of them. See ``own_positives``. They are in no
            vector of the columns and in no placement.
        kind: "sigmoid", or the name of a loss of the statistics, one of ``objectives.OBJECTIVES``; or
            ``objectives.STATISTICS``: see ``with_bars``.
        bias: 0-d, or None for 0.
        match: what equal ids mean: see ``Pairs``.
        placement: where this rank's part lies in a problem of several ranks, None for a process alone. Rows, columns,
            weights and ids are then this rank's, and positives and excluded count over the columns of all ranks.
        blocking: None where the features are on the device and make one block.
        whole: the weight of each row, of a loss without options whose row i has column i for its one positive, or of
            rows against themselves; of labels 1, for they give the weights. None of any other: see ``contract.Whole``.
        margin: what is taken off the positives' cosines, times the scale; None for nothing.
        smoothing: the share of each row of y that is spread over all columns, which are then all admitted.
        depth: of features with values, see ``schedules.values``, how many are features; None of features alone.
        beside: the statistics of the rows over other columns, which join those of the blocks.
        row_sums: (m, d) state dtype, where the features are: what the rows' sums of gradients begin with; None for 0.
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
        """What goes with the rows in ``contract.Whole``: the columns, or of rows against themselves their labels."""
        return self.columns[0] if self.columns else self.row_ids

    def terms(self, arrays: ArrayLibrary) -> Terms:
        """Which loss of the statistics it is; ``arrays`` is the library of the scale."""
        if self.margin is None and self.smoothing is None:
            return terms(self.kind)
        margin = None if self.margin is None else arrays.cast(self.scale, "float64") * self.margin
        return Terms(self.kind, margin, self.smoothing)

    @property
    def own_positives(self) -> bool:
        """Whether the first block is the rows' own, too: row i of it is row i's positive, and no other row's column."""
        return self.own_counts is not None and self.positives is None and self.match == "drop"

    @property
    def traceable(self) -> bool:
        """Whether an operator may stand for it: what ranks say to each other, and copies of blocks, are in no graph."""
        return self.placement is None and self.blocking is None

    @property
    def vectors(self) -> tuple[Array | None, ...]:
        """The weights, targets, pairs and the guide's features, which are matrices; None for what is absent."""
        # read several times in a step: by name they take four times as long
        weights = self.row_weight, self.row_target, self.column_weight, self.column_target
        pairs = self.positives, self.excluded, self.row_ids, self.column_ids
        limits = self.row_limits, self.column_limits, self.row_guide, self.column_guide
        return *weights, *pairs, *limits, self.own_counts

    @property
    def marks(self) -> tuple[Array | None, ...]:
        """What goes with the columns to decide which pairs count: their ids, their limits and the guide's features."""
        return self.column_ids, self.column_limits, self.column_guide

    def arrays(self) -> tuple[Array | None, ...]:
        """All arrays, None for what is absent: rows, scale, bias, the vectors, the column blocks."""
        return self.rows, self.scale, self.bias, *self.vectors, *self.columns

    def with_arrays(self, arrays: Sequence[Any]) -> Problem:
        """The problem with other arrays, in the order of ``arrays``."""
        rows, scale, bias, *rest = arrays
        vectors, columns = rest[: len(VECTORS)], tuple(rest[len(VECTORS) :])
        form = self.kind, bias, self.match, self.placement, self.blocking, self.whole
        every: tuple[Any, ...] = (rows, columns, scale, *vectors, *form, self.margin, self.smoothing, self.depth)
        return Problem(*every)

    def for_gradients(self) -> Problem:
        """What the gradients read of it: of a sigmoid loss, whose sums came with the value, the rows and the scale."""
        if self.kind != "sigmoid":
            return self
        return Problem(
            self.rows, (), self.scale, None, None, kind=self.kind, placement=self.placement, blocking=self.blocking
        )

    def weighted(self, factor: Array) -> Problem:
        """The problem with every weight times a factor, 0-d."""
        rows, scale, bias, u, t, v, *rest = self.arrays()
        weight = u * factor
        both = weight if v is u else None if v is None else v * factor
        return self.with_arrays((rows, scale, bias, weight, t, both, *rest))

    def with_bars(self, upstream: Array) -> Problem:
        """The problem of the statistics with their bars, (3, m + n) float64, instead of its weights."""
        m, bars = self.rows.shape[0], upstream.T
        return replace(self, row_weight=bars[:m], column_weight=None if self.column_weight is None else bars[m:])

    def of_rows(self, where: slice) -> Problem:
        pairs = zip(VECTORS, self.vectors, strict=True)
        cut = {name: x[where] for name, x in pairs if x is not None and name not in OF_COLUMNS}
        return replace(self, rows=self.rows[where], **cut)

    def blocks(self) -> Iterator[tuple[slice, Block]]:
        """Each column block with its place among the joined columns; indices become local to the block."""
        start = 0
        for columns in self.columns:
            where = slice(start, start + columns.shape[0])
            yield where, self.block(columns, start, marks_of(self.marks, where))
            start = where.stop

    def block(self, columns: Array, start: int, marks: Sequence[Array | None]) -> Block:
        """All rows against some columns, of which the first has the number ``start``; these are their ``marks``."""

        def local(index: Array | None) -> Array | None:
            return index if index is None or start == 0 else index - start

        pairs = Pairs(
            positives=local(self.positives),
            excluded=local(self.excluded),
            row_ids=self.row_ids,
            column_ids=marks[0],
            match=self.match,
            row_limits=self.row_limits,
            column_limits=marks[1],
            row_guide=self.row_guide,
            column_guide=marks[2],
            # a loss takes samples in the order of their ids: see ``Order``
            rising=self.kind != STATISTICS,
        )
        return Block(self.rows, columns, self.scale, self.bias, pairs)


VECTORS = tuple(each.name for each in fields(Problem))[3:16]
"""The names of ``Problem.vectors``."""

OF_COLUMNS = frozenset(name for name in VECTORS if name.startswith("column_"))
"""Those that have an element for each column; all others have one for each row."""


def marks_of(marks: Sequence[Array | None], where: slice) -> tuple[Array | None, ...]:
    return tuple(None if x is None else x[where] for x in marks)


def convert(problem: Problem, source: ArrayLibrary, target: ArrayLibrary) -> Problem:
    """The problem with its arrays in another library; bfloat16 arrives as float32 where the target lacks it.

    Of one in blocks, the features stay where they are, and everything else goes to the device.
    """
    blocking = problem.blocking
    if source.name == target.name and blocking is None:
        return problem
    moved: dict[int, Array | None] = {} if blocking is None else {id(x): x for x in (problem.rows, *problem.columns)}
    # both directions may share vectors: each crosses once, and is one array there too
    for x in problem.arrays():
        if id(x) not in moved:
            there = x if blocking is None or x is None else x.to(blocking.device)
            moved[id(x)] = transfer(there, source, target)
    return problem.with_arrays([moved[id(x)] for x in problem.arrays()])
