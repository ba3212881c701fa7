"""What the backends with kernels of their own share: which blocks they take, chunks, pairs, gradient scaling."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

from contrastile.backends.contract import Block, Match, Pairs


def supports(block: Block) -> str | None:
    """What the kernels cannot do."""
    if block.rows.shape[1] == 0:
        return "features must have at least one column, got 0"
    return None


def own_references(dtype: str) -> bool:
    """Whether tiles take references of their own for their exponentials, and a block shares none.

    Beside a reference that a block shares exponents reach 120, and their rounding is 3e-6 of a probability. Gradients
    of 16 bits hide that. In float32 it was 20 to 100 times the error of plain PyTorch where one probability of a row
    is nearly 1; and products of float32 take so long that the second exponential costs little beside them.
    """
    return dtype == "float32"


class Chunk(NamedTuple):
    """Part of a block: its first row and column, how many rows it has and how many columns."""

    row: int
    column: int
    height: int
    width: int


def chunks(m: int, n: int, height: int, width: int, start: int = 0) -> Iterator[Chunk]:
    """The chunks of rows ``start`` to m - 1 and of all n columns, each at most (height, width), row after row."""
    for row in range(start, m, height):
        for column in range(0, n, width):
            yield Chunk(row, column, min(height, m - row), min(width, n - column))


def lines(x: Any, start: int, length: int) -> Any:
    """Rows of a matrix, or elements of a vector, from ``start`` on; x itself where these are all."""
    return x if length == x.shape[0] else x[start : start + length]


def ceil_div(a: int, b: int) -> int:
    """Rounded up. Triton's own ``cdiv`` can be called from kernels too, and takes microseconds for it."""
    return -(-a // b)


@dataclass(frozen=True, slots=True)
class PairVectors:
    """The vectors that say which pairs of a block count, contiguous; each may be None.

    Attributes:
        positives: (m,) int64; None with match = "target", where ids name the positives.
        excluded: (m,) int64.
        row_ids: (m,) int64.
        column_ids: (n,) int64.
        match: what equal ids mean; None without ids.
    """

    positives: Any
    excluded: Any
    row_ids: Any
    column_ids: Any
    match: Match | None

    @staticmethod
    def of(pairs: Pairs, contiguous: Callable[[Any], Any]) -> PairVectors:
        """The vectors of a block's pairs; ``contiguous`` closes the gaps of an array."""
        ids = pairs.row_ids is not None and pairs.column_ids is not None
        positives = pairs.positives if pairs.match == "drop" else None
        given = (positives, pairs.excluded, pairs.row_ids, pairs.column_ids)
        positives, excluded, row_ids, column_ids = (None if x is None else contiguous(x) for x in given)
        return PairVectors(positives, excluded, row_ids, column_ids, pairs.match if ids else None)


@contextmanager
def gradient_scaling(outs: Iterable[Any], dtype: str, scale: Callable[[Any, bool], None]) -> Iterator[None]:
    """Scale the accumulators that a float16 G is added to as G is scaled, and undo it: exact, by a power of two.

    Args:
        outs: the accumulators; None for one that is not wanted.
        dtype: name of G's dtype; only float16 is scaled, to keep it in range.
        scale: ``scale(x, divide)`` multiplies x by the plan's gradient scale, or divides it by that.
    """
    scaled = [x for x in outs if x is not None] if dtype == "float16" else []
    for x in scaled:
        scale(x, False)
    yield
    for x in scaled:
        scale(x, True)
