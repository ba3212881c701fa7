"""A whole loss as data: rows, the column blocks under one log-sum-exp, weights, targets and pairs.

``loss = sum_i u_i (L_i - sum_j y_ij x_ij) + sum_j v_j (M_j - sum_i y'_ij x_ij)`` with ``y_ij = t_i [positive]`` and
``y'_ij = t'_j [positive]``, or the sigmoid loss ``sum_i u_i sum_j softplus(-z_ij x_ij)``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from contrastile.backends.arrays import ArrayLibrary, transfer
from contrastile.backends.contract import Array, Block, Match, Pairs
from contrastile.schedules.placement import Placement


@dataclass(frozen=True, slots=True)
class Problem:
    """Everything that determines the loss. Column vectors run over all column blocks, joined in order.

    Attributes:
        rows: (m, d) features.
        columns: tuple of (n_c, d) features; n = sum n_c. Empty for rows against themselves, where positives, excluded
            and ids are the same either way round, as in NT-Xent: n = m, each index names a row, and the rows' gradient
            is the features'.
        scale: 0-d, state dtype.
        row_weight: (m,) u, state dtype.
        row_target: (m,) t, 1 / |P(i)|, or 0 where the row has no positive or its positives are not to count: each row
            of y sums to 1 or 0. Unused by the sigmoid loss.
        kind: "softmax" or "sigmoid".
        bias: 0-d, or None for 0.
        column_weight: (n,) v, or None for a loss of one direction.
        column_target: (n,) t', given with column_weight.
        positives: (m,) int64 over the joined columns; outside 0..n-1 means none.
        excluded: (m,) int64 likewise.
        row_ids: (m,) int64.
        column_ids: (n,) int64, given with row_ids.
        match: what equal ids mean: see ``Pairs``.
        placement: where this rank's part lies in a problem of several ranks, None for a process alone. Rows, columns,
            weights and ids are then this rank's, and positives and excluded count over the columns of all ranks.
    """

    rows: Array
    columns: tuple[Array, ...]
    scale: Array
    row_weight: Array
    row_target: Array
    kind: Literal["softmax", "sigmoid"] = "softmax"
    bias: Array | None = None
    column_weight: Array | None = None
    column_target: Array | None = None
    positives: Array | None = None
    excluded: Array | None = None
    row_ids: Array | None = None
    column_ids: Array | None = None
    match: Match = "drop"
    placement: Placement | None = None

    def arrays(self) -> tuple[Array | None, ...]:
        """All arrays, None for what is absent: rows, scale, bias, the vectors in their order, the column blocks."""
        return (
            self.rows,
            self.scale,
            self.bias,
            self.row_weight,
            self.row_target,
            self.column_weight,
            self.column_target,
            self.positives,
            self.excluded,
            self.row_ids,
            self.column_ids,
            *self.columns,
        )

    def with_arrays(self, arrays: Sequence[Any]) -> Problem:
        """The problem with other arrays, in the order of ``arrays``."""
        rows, scale, bias, u, t, v, other, positives, excluded, row_ids, column_ids, *columns = arrays
        return Problem(
            rows,
            tuple(columns),
            scale,
            u,
            t,
            self.kind,
            bias,
            v,
            other,
            positives,
            excluded,
            row_ids,
            column_ids,
            self.match,
            self.placement,
        )

    def weighted(self, factor: Array) -> Problem:
        """The problem with every weight times a factor, 0-d."""
        rows, scale, bias, u, t, v, *rest = self.arrays()
        return self.with_arrays((rows, scale, bias, u * factor, t, None if v is None else v * factor, *rest))

    def blocks(self) -> Iterator[tuple[slice, Block]]:
        """Each column block with its place among the joined columns; indices become local to the block."""
        if not self.columns:
            yield slice(None), replace(self.block(self.rows, 0, self.column_ids), symmetric=True)
        start = 0
        for columns in self.columns:
            where = slice(start, start + columns.shape[0])
            yield where, self.block(columns, start, None if self.column_ids is None else self.column_ids[where])
            start = where.stop

    def block(self, columns: Array, start: int, column_ids: Array | None) -> Block:
        """All rows against some columns, of which the first has the number ``start``; these are their ids."""

        def local(index: Array | None) -> Array | None:
            return index if index is None or start == 0 else index - start

        pairs = Pairs(
            positives=local(self.positives),
            excluded=local(self.excluded),
            row_ids=self.row_ids,
            column_ids=column_ids,
            match=self.match,
        )
        return Block(self.rows, columns, self.scale, self.bias, pairs)


def convert(problem: Problem, source: ArrayLibrary, target: ArrayLibrary) -> Problem:
    """The problem with its arrays in another library; bfloat16 arrives as float32 where the target lacks it."""
    if source.name == target.name:
        return problem

    def move(x: Any) -> Any:
        if isinstance(x, tuple):
            return tuple(move(each) for each in x)
        return transfer(x, source, target) if source.owns(x) else x

    return replace(problem, **{f.name: move(getattr(problem, f.name)) for f in fields(problem)})
