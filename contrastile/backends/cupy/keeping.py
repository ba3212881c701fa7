"""Kept exponentials: 2^(x - r) of the first rows, which spare the backward pass their share of the product X.

The forward pass stores them in bfloat16. When the weights are known, the device decides whether they can be used. If
so, both second products read them, and apply the factors ``u 2^(r - L)`` and ``v 2^(r - M)`` on the way to the tensor
cores. If not, G overwrites them. After they have been read, G of the other rows overwrites them too, unless the caller
requested memory for them. So kept exponentials take the memory of G, and no more.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from contrastile.backends.compiling import current_call
from contrastile.backends.contract import Options
from contrastile.backends.cupy.arguments import constant, struct
from contrastile.backends.cupy.common import PLAN_BYTES, THREADS
from contrastile.backends.cupy.configs import keeping_pays, kept_rows, kept_stride, uses_hopper_kernels
from contrastile.backends.cupy.instances import KEPT_DTYPE, PLAIN, instance
from contrastile.backends.cupy.launch import empty, launch, pointer, row_stride
from contrastile.backends.cupy.tiles import Tiles
from contrastile.backends.passes import Chunk, ceil_div
from contrastile.backends.settings import is_keep_given, kept_bytes, workspace_bytes

_UNIT = constant("KEPT_UNIT")
_NARROW = 128
"""Features of this width leave half of each tile of the products empty, and keeping does not pay."""


def most_rows(m: int, n: int, dtype: str, options: Options) -> int:
    """The most rows of a block of m rows and n columns that can keep their exponentials on Hopper.

    By default these are the rows that fit in G's workspace, if they are an eighth of all rows at least: with fewer, the
    additional part of the pass costs more than it gains. None are kept with a tile that the caller requests, which
    bounds the memory in use.
    """
    if not (m and n and dtype == KEPT_DTYPE and options.tile is None and uses_hopper_kernels()):
        return 0
    if is_keep_given(options):
        return kept_rows(m, n, kept_bytes(options))
    rows = kept_rows(m, n, workspace_bytes(options))
    return rows if 8 * rows >= m else 0


def rows_to_keep(tiles: Tiles, options: Options) -> int:
    """How many of the first rows of a block keep their exponentials: 0 unless the kernels can keep them and it pays."""
    (m, width), n = tiles.rows.shape, tiles.columns.shape[0]
    can_keep = tiles.family.maps and tiles.mask == PLAIN and width > _NARROW
    rows = most_rows(m, n, tiles.dtype, options) if can_keep else 0
    return rows if rows and (is_keep_given(options) or keeping_pays(rows, n, width)) else 0


def size_of(rows: int, n: int) -> int:
    """Bytes of the kept exponentials of so many rows of a block of n columns."""
    return 2 * rows * kept_stride(n) + PLAN_BYTES if rows else 0


def _matrix(memory: Any, width: int) -> Any:
    """A matrix of as many rows as fit in the memory, each aligned to 16 bytes."""
    stride = kept_stride(width)
    rows = int(memory.shape[0]) // (2 * stride)
    return memory[: 2 * rows * stride].view(KEPT_DTYPE).reshape(rows, stride)[:, :width]


@dataclass(frozen=True, slots=True)
class KeptExponentials:
    """The exponentials of a block's first rows, followed by the plan of the pass that kept them.

    Attributes:
        memory: 1-d uint8, exponentials and plan: ``Statistics.kept``.
        exponentials: (rows, n) bfloat16.
        plan: the plan of the forward pass.
    """

    memory: Any
    exponentials: Any
    plan: Any

    @staticmethod
    def new(tiles: Tiles, options: Options) -> KeptExponentials | None:
        """Memory for the exponentials that a block will keep; None where it keeps none."""
        rows, n = rows_to_keep(tiles, options), tiles.columns.shape[0]
        return KeptExponentials.of(empty(size_of(rows, n), dtype="uint8"), n) if rows else None

    @staticmethod
    def of(memory: Any | None, n: int) -> KeptExponentials | None:
        """The exponentials that a block of n columns kept in this memory; None for None."""
        if memory is None:
            return None
        size = memory.shape[0] - PLAN_BYTES
        return KeptExponentials(memory, _matrix(memory[:size], n), memory[size:])

    @property
    def rows(self) -> int:
        """How many rows have kept exponentials."""
        return int(self.exponentials.shape[0])

    def place(self, width: int) -> Any:
        """The memory of the exponentials as a matrix for G of this width."""
        return _matrix(self.memory[:-PLAN_BYTES], width)

    def spend(self) -> None:
        """Invalidate the plan, because G will overwrite the exponentials."""
        # not where kernels are missing, as then no kernel overwrites them: see ``compiling.side_by_side``
        if not current_call.missing:
            self.plan.data.memset_async(255, PLAN_BYTES)

    def part(self, chunk: Chunk) -> Any:
        """The exponentials of a chunk."""
        row, column, high, wide = chunk
        return self.exponentials[row : row + high, column : column + wide]


class Factors:
    """The vectors that go with kept exponentials in a backward pass, ``u 2^(r - L)`` and ``v 2^(r - M)``."""

    def __init__(self, kept: KeptExponentials, m: int, n: int, two_sided: bool) -> None:
        self.kept = kept
        self.row, self.column = (empty(ceil_div(length, _UNIT) * _UNIT) for length in (m, n))
        if not two_sided:
            self.column.fill(0)

    def epilogue_arguments(self) -> dict[str, int | None]:
        """The arguments with which ``epilogue_scales`` writes these vectors."""
        plan, row, column = map(pointer, (self.kept.plan, self.row, self.column))
        return {"forward": plan, "row_kept": row, "column_kept": column}

    def set_positives(self, tiles: Tiles, plan: Any, entries: Any) -> None:
        """Write the positives to the kept exponentials, so that the products include G at the positives.

        Args:
            tiles: the block.
            plan: the plan of the backward pass.
            entries: G of each row's positive.
        """
        if tiles.pairs.positives is None:
            return
        rows, exponentials = self.kept.rows, self.kept.exponentials
        arguments = struct("KeptPositivesArguments")(
            m=rows,
            n=tiles.columns.shape[0],
            positives=pointer(tiles.pairs.positives),
            entries=pointer(entries),
            row_kept=pointer(self.row),
            column_kept=pointer(self.column),
            plan=pointer(plan),
            forward=pointer(self.kept.plan),
            kept=pointer(exponentials),
            kept_stride=row_stride(exponentials),
        )
        launch(instance("kept_positives", "kept_positives"), ceil_div(rows, THREADS), THREADS, arguments)

    def multiply(self, tiles: Tiles, plan: Any, out: Any, shares: int = 1, *, across: bool) -> None:
        """Write the rows' sums over all columns, (rows, d), or with ``across`` the columns' over these rows, (n, d).

        ``out`` holds ``shares`` such matrices, whose sum is the result.
        """
        lines, steps = (self.column, self.row) if across else (self.row, self.column)
        # a map of only these rows, because past them it must read zeros
        features = tiles.rows[: self.kept.rows] if across else tiles.columns
        tiles.weighted(
            self.kept.exponentials,
            features,
            shares,
            across=across,
            plan=pointer(plan),
            lines=pointer(lines),
            steps=pointer(steps),
            out=pointer(out),
            out_stride=row_stride(out),
        )
