"""Host code that the three primitives share: plans, matrices and scalars as the kernels take them."""

from __future__ import annotations

from ctypes import sizeof
from typing import Any

import cupy

from contrastile.backends.contract import Array, Block
from contrastile.backends.crossing import dtype_name
from contrastile.backends.cupy.arguments import constant, struct
from contrastile.backends.cupy.instances import ELEMENTS
from contrastile.backends.cupy.launch import empty, pointer, row_stride

LINES, PAIRS, LANES, FOLD, THREADS, TERMS = map(constant, ("LINES", "PAIRS", "LANES", "FOLD", "THREADS", "TERMS"))
ONE_BLOCK = 1024
"""Threads of the kernels that run as one block."""

PLAN = struct("Plan")
"""The plan's layout."""

PLAN_BYTES = sizeof(PLAN)


def element(x: Array) -> str:
    """The C++ name of an array's dtype."""
    return ELEMENTS[dtype_name(x.dtype)]


def contiguous(x: Array | None) -> Array | None:
    """X, contiguous; None for None."""
    return None if x is None else cupy.ascontiguousarray(x)


def matrix(x: Array) -> Any:
    """A matrix of unit stride along rows, as the small kernels take it."""
    return struct("Matrix")(data=pointer(x), row_stride=row_stride(x))


def new_plan() -> Any:
    """Memory for a plan, which one kernel writes and later ones read."""
    return empty(PLAN_BYTES, dtype="uint8")


def plan_field(plan: Any, field: str) -> int:
    """The address of a field of a plan."""
    return int(plan.data.ptr) + int(getattr(PLAN, field).offset)


def scalars(block: Block) -> dict[str, int | None]:
    """The scale and the bias, as the small kernels take them."""
    return {"scale": pointer(block.scale), "bias": pointer(block.bias)}
