"""What the three primitives share on the host: a block's features and pair vectors as the kernels take them."""

from __future__ import annotations

from collections.abc import Iterator
from ctypes import sizeof
from dataclasses import dataclass
from functools import cache
from typing import Any

import cupy

from contrastile.backends.contract import Array, Block, Pairs
from contrastile.backends.cupy.arguments import constant, struct
from contrastile.backends.cupy.instances import DROP, ELEMENTS, EXCLUSIONS, PLAIN, TARGET
from contrastile.backends.cupy.launch import empty, pointer, row_stride

LINES, PAIRS, LANES, FOLD, THREADS, TERMS = map(constant, ("LINES", "PAIRS", "LANES", "FOLD", "THREADS", "TERMS"))
ONE_BLOCK = 1024
"""Threads of the kernels that run as one block."""

PLAN = struct("Plan")
"""What a plan is made of."""


def element(x: Array) -> str:
    """What the kernels call an array's dtype."""
    return _named(x.dtype)


@cache
def _named(dtype: Any) -> str:
    # NumPy puts a dtype's name together each time it is asked
    return ELEMENTS[dtype.name]


def ceil_div(a: int, b: int) -> int:
    """Rounded up."""
    return -(-a // b)


@dataclass(frozen=True, slots=True)
class Masks:
    """The vectors that say which pairs count, contiguous, and the mask that they make.

    Attributes:
        positives: (m,) or None; None with match = "target", where ids name the positives.
        excluded: (m,) or None.
        row_ids: (m,) or None.
        column_ids: (n,) or None.
        mask: PLAIN, EXCLUSIONS, DROP or TARGET.
    """

    positives: Any
    excluded: Any
    row_ids: Any
    column_ids: Any
    mask: int

    @staticmethod
    def of(pairs: Pairs) -> Masks:
        """The masks of a block's pairs."""
        target, given = pairs.match == "target", pairs.row_ids is not None and pairs.column_ids is not None
        positives = None if target else pairs.positives
        return Masks(
            contiguous(positives),
            contiguous(pairs.excluded),
            contiguous(pairs.row_ids),
            contiguous(pairs.column_ids),
            (TARGET if target else DROP) if given else PLAIN if pairs.excluded is None else EXCLUSIONS,
        )

    def vectors(self) -> Any:
        """As the tile kernels take them."""
        names = ("positives", "excluded", "row_ids", "column_ids")
        return struct("PairVectors")(**{name: pointer(getattr(self, name)) for name in names})


def contiguous(x: Array | None) -> Array | None:
    """X without gaps; None for None."""
    return None if x is None else cupy.ascontiguousarray(x)


def matrix(x: Array) -> Any:
    """A matrix of any strides, as the small kernels take it."""
    return struct("Matrix")(data=pointer(x), row_stride=row_stride(x), column_stride=x.strides[1] // x.itemsize)


def new_plan() -> Any:
    """Room for a plan, which a kernel writes and later ones obey."""
    return empty(plan_bytes(), dtype="uint8")


def plan_bytes() -> int:
    """Bytes of a plan."""
    return sizeof(PLAN)


def planned(plan: Any, field: str) -> int:
    """The address of a field of a plan."""
    return int(plan.data.ptr) + int(getattr(PLAN, field).offset)


def chunks(m: int, n: int, height: int, width: int, start: int = 0) -> Iterator[tuple[int, int, int, int]]:
    """First row, first column, rows and columns of each chunk of rows start..m-1, in their one order."""
    for row in range(start, m, height):
        for column in range(0, n, width):
            yield row, column, min(height, m - row), min(width, n - column)


def scalars(block: Block) -> dict[str, int | None]:
    """The scale and the bias, as the small kernels take them."""
    return {"scale": pointer(block.scale), "bias": pointer(block.bias)}
