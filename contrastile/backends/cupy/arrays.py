"""CuPy arrays with fused O(b d) passes, which take a considerable share of a step at small widths."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import cupy

from contrastile.backends.arrays import CupyArrays
from contrastile.backends.cupy.arguments import struct
from contrastile.backends.cupy.common import LINES, ONE_BLOCK, TERMS, THREADS, element, matrix
from contrastile.backends.cupy.instances import ELEMENTS, instance
from contrastile.backends.cupy.launch import empty, launch, multiprocessors, on_device, pointer
from contrastile.backends.passes import ceil_div

Array = Any

_NLL_DTYPES = ["float64"] * 3 + ["float32"] * 2


def added(parts: Array, dtype: str = "float64") -> Array:
    """The sum of a float64 vector, 0-d, rounded once to ``dtype``, float64 or float32; on the current device."""
    out = empty(dtype=dtype)
    output = {"out" if dtype == "float64" else "rounded": pointer(out)}
    arguments = struct("AddDoublesArguments")(parts=pointer(parts), length=parts.size, **output)
    launch(instance("scale_cast", "add_doubles"), 1, ONE_BLOCK, arguments)
    return out


def scale_cast(x: Array, out: Array, factor: int | None, shares: int = 1) -> None:
    """``out = x factor``, both contiguous, rounded once to out's dtype.

    Args:
        x: of out's shape, or (shares, *shape), whose shares are added.
        out: the result.
        factor: the factor's address on the device.
        shares: the number of shares.
    """
    arguments = struct("ScaleCastArguments")(
        x=pointer(x), out=pointer(out), size=out.size, factor=factor, shares=shares
    )
    blocks = min(ceil_div(out.size, 4 * THREADS), 8 * multiprocessors(x.device.id))
    launch(instance("scale_cast", "scale_cast", element(x), element(out)), blocks, THREADS, arguments)


class FusedArrays(CupyArrays):
    """``CupyArrays`` whose O(b d) operations read and write each element once."""

    def __init__(self) -> None:
        super().__init__(cupy)

    def inner(self, a: Array, b: Array) -> Array:
        """``sum_ik a_ik b_ik``: products in float32, their sums in float64, 0-d."""
        if a.size == 0 or self.dtype(a) not in ELEMENTS or self.dtype(b) != "float32":
            return super().inner(a, b)
        with on_device(a):
            a, b = map(cupy.ascontiguousarray, (a, b))
            blocks = ceil_div(a.shape[0], LINES)
            parts = empty(blocks, dtype="float64")
            dots = struct("RowDotsArguments")(
                a=matrix(a), b=matrix(b), m=a.shape[0], depth=a.shape[1], out=pointer(parts)
            )
            launch(instance("scale_cast", "row_dots", element(a), element(b)), blocks, THREADS, dots)
            return added(parts)

    def merge(self, a: Array, b: Array) -> Array:
        """``log(exp a + exp b)``, guarded, in one kernel in place of ten."""
        if a.size == 0 or a.shape != b.shape or {self.dtype(a), self.dtype(b)} != {"float64"}:
            return super().merge(a, b)
        lses = [cupy.ascontiguousarray(x) for x in (a, b)]
        with on_device(a):
            out = cupy.empty(a.shape, dtype="float64")
            arguments = struct("MergeLseArguments")(*map(pointer, (*lses, out)), length=a.size)
            launch(instance("weighted_nll", "merge_lse"), ceil_div(a.size, THREADS), THREADS, arguments)
        return out

    def loss(self, dtype: str, *sides: Sequence[Array]) -> Array:
        """``sum_i w_i nll_i`` over one or two sides: partial sums over a few rows, and the sum of these."""
        contiguous_sides = [[cupy.ascontiguousarray(x) for x in side] for side in sides]
        lengths = [side[0].size for side in contiguous_sides]
        if 0 in lengths or any([self.dtype(x) for x in side] != _NLL_DTYPES for side in contiguous_sides):
            return super().loss(dtype, *contiguous_sides)
        with on_device(contiguous_sides[0][0]):
            blocks = sum(ceil_div(length, TERMS) for length in lengths)
            parts = empty(blocks, dtype="float64")
            structs = [
                struct("LossSide")(*map(pointer, side), length=length)
                for side, length in zip(contiguous_sides, lengths, strict=True)
            ]
            arguments = struct("WeightedNllArguments")(*structs, out=pointer(parts))
            launch(instance("weighted_nll", "weighted_nll"), blocks, ONE_BLOCK, arguments)
            return added(parts, dtype)

    def scaled(self, x: Array, factor: Array, dtype: str, *, consume: bool) -> Array:
        """``x * factor`` rounded once, in one pass."""
        if x.ndim != 2 or x.size == 0 or dtype not in ELEMENTS or {self.dtype(x), self.dtype(factor)} != {"float32"}:
            return super().scaled(x, factor, dtype, consume=consume)
        with on_device(x):
            x = cupy.ascontiguousarray(x)
            out = x if consume and self.dtype(x) == dtype else cupy.empty(x.shape, dtype=dtype)
            scale_cast(x, out, pointer(factor))
        return out


ARRAYS = FusedArrays()
