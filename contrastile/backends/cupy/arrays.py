"""CuPy arrays with the O(b d) passes fused: they are a visible share of a whole step at small widths."""

from __future__ import annotations

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


def added(parts: Array) -> Array:
    """The sum of a list of float64, 0-d, on the current device."""
    out = empty(dtype="float64")
    arguments = struct("AddDoublesArguments")(parts=pointer(parts), length=parts.size, out=pointer(out))
    launch(instance("scale_cast", "add_doubles"), 1, ONE_BLOCK, arguments)
    return out


def scale_cast(x: Array, out: Array, factor: int | None) -> None:
    """``out = x factor`` (both (m, d)), rounded once to out's dtype; the factor lies at an address on the device."""
    arguments = struct("ScaleCastArguments")(
        x=matrix(x), out=matrix(out), rows=x.shape[0], columns=x.shape[1], factor=factor
    )
    blocks = min(ceil_div(x.size, 4 * THREADS), 8 * multiprocessors(x.device.id))
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
        given = [cupy.ascontiguousarray(x) for x in (a, b)]
        with on_device(a):
            out = cupy.empty(a.shape, dtype="float64")
            arguments = struct("MergeLseArguments")(*map(pointer, (*given, out)), length=a.size)
            launch(instance("weighted_nll", "merge_lse"), ceil_div(a.size, THREADS), THREADS, arguments)
        return out

    def weighted_nll(
        self, negative_lse: Array, positive_lse: Array, positive_sum: Array, weight: Array, target: Array
    ) -> Array:
        """``sum_i w_i loss_i``, in one pass, in float64, 0-d."""
        given = [cupy.ascontiguousarray(x) for x in (negative_lse, positive_lse, positive_sum, weight, target)]
        if weight.size == 0 or [self.dtype(x) for x in given] != _NLL_DTYPES:
            return super().weighted_nll(*given)
        with on_device(weight):
            blocks = ceil_div(weight.size, TERMS)
            parts = empty(blocks, dtype="float64")
            arguments = struct("WeightedNllArguments")(*map(pointer, given), length=weight.size, out=pointer(parts))
            launch(instance("weighted_nll", "weighted_nll"), blocks, ONE_BLOCK, arguments)
            return added(parts) if blocks > 1 else parts.reshape(())

    def scaled(self, x: Array, factor: Array, dtype: str, *, consume: bool) -> Array:
        """``x * factor`` rounded once, in one pass."""
        if x.ndim != 2 or x.size == 0 or dtype not in ELEMENTS or {self.dtype(x), self.dtype(factor)} != {"float32"}:
            return super().scaled(x, factor, dtype, consume=consume)
        with on_device(x):
            out = x if consume and self.dtype(x) == dtype else cupy.empty(x.shape, dtype=dtype)
            scale_cast(x, out, pointer(factor))
        return out
