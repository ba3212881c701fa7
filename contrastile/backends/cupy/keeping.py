"""Kept exponentials: 2^(x - r) of the first rows, which spare the backward pass their share of the product X.

The forward pass stores them in bfloat16. When the weights are known, the device decides whether they can be used. If
so, both second products read them, and apply the factors ``u 2^(r - L)`` and ``v 2^(r - M)`` on the way to the tensor
cores. If not, G is written over them, in the same memory. So is G of the other rows, once they have been read, unless
memory for them was asked for: they lie where G would, and a step takes no more memory for them.
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
"""Features that are so narrow leave half of each tile of the products empty, and keeping does not pay."""


def most_rows(m: int, n: int, dtype: str, options: Options) -> int:
    """How many of the first rows of a block of m rows and n columns keep their exponentials on Hopper, at most.

    Where nobody says how much is kept, it is what fits in G's workspace, if that is an eighth of the rows: of less the
    gain is less than what one more part of the pass costs. Nothing is kept with a tile of the caller's, which caps the
    memory in use.
    """
    if not (m and n and dtype == KEPT_DTYPE and options.tile is None and uses_hopper_kernels()):
        return 0
    if is_keep_given(options):
        return kept_rows(m, n, kept_bytes(options))
    rows = kept_rows(m, n, workspace_bytes(options))
    return rows if 8 * rows >= m else 0


def rows_to_keep(tiles: Tiles, options: Options) -> int:
    """How many of the first rows of a block keep their exponentials: 0 unless its kernels can and it pays."""
    (m, width), n = tiles.rows.shape, tiles.columns.shape[0]
    able = tiles.family.maps and tiles.mask == PLAIN and width > _NARROW
    rows = most_rows(m, n, tiles.dtype, options) if able else 0
    return rows if rows and (is_keep_given(options) or keeping_pays(rows, n, width)) else 0


def size_of(rows: int, n: int) -> int:
    """Bytes of what is kept of so many rows of a block of n columns."""
    return 2 * rows * kept_stride(n) + PLAN_BYTES if rows else 0


def _matrix(memory: Any, width: int) -> Any:
    """As many rows of so many elements as fit in it, each at a multiple of 16 bytes."""
    stride = kept_stride(width)
    rows = int(memory.shape[0]) // (2 * stride)
    return memory[: 2 * rows * stride].view(KEPT_DTYPE).reshape(rows, stride)[:, :width]


@dataclass(frozen=True, slots=True)
class KeptExponentials:
    """The exponentials of a block's first rows, followed by the plan of the pass that kept them.

    Attributes:
        memory: 1-d uint8, all of it: what ``Statistics.kept`` is.
        exponentials: (rows, n) bfloat16.
        plan: of the forward pass.
    """

    memory: Any
    exponentials: Any
    plan: Any

    @staticmethod
    def new(tiles: Tiles, options: Options) -> KeptExponentials | None:
        """Memory for what is to be kept of a block; None where that is nothing."""
        rows, n = rows_to_keep(tiles, options), tiles.columns.shape[0]
        return KeptExponentials.of(empty(size_of(rows, n), dtype="uint8"), n) if rows else None

    @staticmethod
    def of(memory: Any | None, n: int) -> KeptExponentials | None:
        """What was kept of a block of n columns; None for None."""
        if memory is None:
            return None
        size = memory.shape[0] - PLAN_BYTES
        return KeptExponentials(memory, _matrix(memory[:size], n), memory[size:])

    @property
    def rows(self) -> int:
        """How many rows have theirs kept."""
        return int(self.exponentials.shape[0])

    def place(self, width: int) -> Any:
        """As many rows of so many elements of G as fit in their place."""
        return _matrix(self.memory[:-PLAN_BYTES], width)

    def spend(self) -> None:
        """Nobody may take for them what is about to be written in their place."""
        # where kernels are missing nothing is written either: see ``compiling.side_by_side``
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
        """The arguments of ``epilogue_scales``, which writes them."""
        plan, row, column = map(pointer, (self.kept.plan, self.row, self.column))
        return {"forward": plan, "row_kept": row, "column_kept": column}

    def set_positives(self, tiles: Tiles, plan: Any, entries: Any) -> None:
        """Have the products give G at the positives too.

        Args:
            tiles: the block.
            plan: of the backward pass.
            entries: G of each row's positive.
        """
        if tiles.pairs.positives is None:
            return
        rows, e = self.kept.rows, self.kept.exponentials
        arguments = struct("KeptPositivesArguments")(
            m=rows,
            n=tiles.columns.shape[0],
            positives=pointer(tiles.pairs.positives),
            entries=pointer(entries),
            row_kept=pointer(self.row),
            column_kept=pointer(self.column),
            plan=pointer(plan),
            forward=pointer(self.kept.plan),
            kept=pointer(e),
            kept_stride=row_stride(e),
        )
        launch(instance("kept_positives", "kept_positives"), ceil_div(rows, THREADS), THREADS, arguments)

    def multiply(self, tiles: Tiles, plan: Any, out: Any, shares: int = 1, *, across: bool) -> None:
        """Write the rows' sums over all columns, (rows, d), or with ``across`` the columns' over these rows, (n, d).

        Out has a matrix for each of the shares, whose sum is meant.
        """
        lines, steps = (self.column, self.row) if across else (self.row, self.column)
        # a map of these rows alone: past them it must read zeros
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
