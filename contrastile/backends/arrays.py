"""Array libraries: the few operations that code above the primitives needs, over NumPy, CuPy and torch.

Every operation costs O(m + n) or O((m + n) d): backends do the O(m n) work. Reductions to a scalar are taken in
float64, so that a mean over millions of rows costs no accuracy.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

from contrastile.backends import crossing
from contrastile.backends.eager import imported
from contrastile.backends.objectives import added, terms
from contrastile.backends.pairs import merged_pairs

Array = Any
ITEMSIZE = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}
"""Bytes of a feature, by its dtype."""
FLOATS = tuple(ITEMSIZE)


class ArrayLibrary:
    """The operations over NumPy or a module with its interface; subclasses override them for other libraries.

    Attributes:
        module: the library.
        name: its import name.
    """

    def __init__(self, module: Any) -> None:
        self.module = module
        self.name = str(module.__name__)

    def owns(self, x: Array) -> bool:
        """Whether x is an array of this library."""
        return isinstance(x, self.module.ndarray | self.module.generic)

    def dtype(self, x: Array) -> str:
        """The dtype's name: "float32", "int64", ..."""
        return crossing.dtype_name(x.dtype)

    def device(self, x: Array) -> str:
        """The kind of device: "cpu" or "cuda"."""
        return "cpu"

    def place(self, x: Array) -> str:
        """The exact device: "cpu", "cuda:1"."""
        return "cpu"

    def full(self, shape: tuple[int, ...], value: float, dtype: str, like: Array) -> Array:
        """An array of one value."""
        return self.module.full(shape, value, dtype=dtype)

    def empty(self, shape: tuple[int, ...], dtype: str, like: Array) -> Array:
        """An uninitialised array."""
        return self.module.empty(shape, dtype=dtype)

    def arange(self, start: int, stop: int, like: Array) -> Array:
        """Consecutive int64 values."""
        return self.module.arange(start, stop, dtype="int64")

    def asarray(self, x: Any, dtype: str, like: Array) -> Array:
        """X as an array of this dtype beside ``like``; scalars become 0-d."""
        return self.module.asarray(x, dtype=dtype)

    def cast(self, x: Array, dtype: str) -> Array:
        """X in another dtype; x itself when it already has it."""
        return x.astype(dtype, copy=False)

    def where(self, condition: Array, a: Array, b: Array | float) -> Array:
        """Elementwise choice."""
        return self.module.where(condition, a, b)

    def maximum(self, x: Array, floor: float) -> Array:
        """Elementwise max with a number; NaN stays NaN."""
        return self.module.maximum(x, floor)

    def merge(self, a: Array, b: Array) -> Array:
        """Inf-CL Eq. 4, guarded: log(exp a + exp b), -inf when both are -inf, exactly a when b is -inf.

        Both are of one shape, (m,), or (m, 2) as in ``contract.SideStatistics``.
        """
        return self.module.logaddexp(a, b) if a.ndim == 1 else merged_pairs(self.module, a, b)

    def softplus(self, x: Array) -> Array:
        """log(1 + exp x), to full relative accuracy also where it is tiny."""
        return self.module.maximum(x, 0.0) + self.module.log1p(self.module.exp(-self.module.abs(x)))

    def concat(self, xs: list[Array]) -> Array:
        """The arrays, joined along the first axis."""
        return xs[0] if len(xs) == 1 else self.module.concatenate(xs)

    def contiguous(self, x: Array) -> Array:
        """X in row order without gaps; x itself when it is so already."""
        return self.module.ascontiguousarray(x)

    def total(self, x: Array, axis: int | None = None) -> Array:
        """The sum of all elements, in float64, 0-d; or along the first axis, 0."""
        return self.module.asarray(x.sum(axis, dtype="float64"))

    def add(self, a: Array, b: Array, into: Array) -> None:
        """``into = a + b``, elementwise, rounded once more where into's dtype is narrower; ``into`` may be a or b."""
        self.module.add(a, b, out=into)

    def loss(self, dtype: str, *sides: Sequence[Array]) -> Array:
        """``sum_i w_i nll_i`` over one or two sides in float64, 0-d, rounded to ``dtype``: ``objectives.SOFTMAX``.

        A side is N, P and S of ``contract.SideStatistics``, float64, and weights and targets, state dtype, (l,) each.
        """
        return added(self, [terms("softmax").total(self, *side) for side in sides], dtype)

    def in_one_kernel(self, function: Callable[..., Any], fixed: tuple[Any, ...], *operands: Array) -> Any:
        """``function(library, *fixed, *operands)``, in one kernel where the library can.

        The function is elementwise, and may end in a sum along an axis.
        """
        return function(self, *fixed, *operands)

    def inner(self, a: Array, b: Array) -> Array:
        """``sum_ik a_ik b_ik``: products in the wider of the two dtypes, the sum over rows in float64, 0-d."""
        return self.total(self.module.einsum("ik,ik->i", a, b, dtype=self.module.result_type(a, b)))

    def detached(self, x: Array) -> Array:
        """X without its gradient."""
        return x

    def row_dots(self, a: Array, b: Array, dtype: str) -> Array:
        """``sum_k a_ik b_ik``, (m,), in this dtype and without a gradient; chunks bound the temporary."""
        a, b = self.detached(a), self.detached(b)
        rows = max((1 << 22) // max(a.shape[1], 1), 1)
        parts = [(a[start : start + rows], b[start : start + rows]) for start in range(0, max(a.shape[0], 1), rows)]
        return self.concat([self.cast((self.cast(x, dtype) * y).sum(1), dtype) for x, y in parts])

    def scaled(self, x: Array, factor: Array, dtype: str, *, consume: bool) -> Array:
        """``x * factor`` rounded once to ``dtype``; with ``consume``, x may be overwritten to save memory."""
        return self.module.multiply(x, factor, out=x if consume else None).astype(dtype, copy=False)

    def sorted(self, x: Array) -> tuple[Array, Array]:
        """The elements in rising order, and the index of each in x; equal elements keep their order."""
        order = self.module.argsort(x, kind="stable")
        return x[order], order

    def take(self, x: Array, rows: Array) -> Array:
        """A copy of the rows of x with these indices."""
        return x[rows]

    def put(self, x: Array, places: Array) -> Array:
        """A copy of x whose row i is at ``places[i]``, a permutation: ``put(take(x, p), p)`` is x."""
        out = self.module.empty_like(x)
        out[places] = x
        return out

    def count_in(self, needles: Array, haystack: Array) -> Array:
        """How many elements of ``haystack``, which must be in rising order, equal each needle, int64; O(m log n)."""
        right = self.module.searchsorted(haystack, needles, side="right")
        return right - self.module.searchsorted(haystack, needles, side="left")

    def to_numpy(self, x: Array) -> Any:
        """A NumPy array of the values (bfloat16 becomes float32)."""
        # NumPy turns 0-d results into scalars, which are not arrays
        return self.module.asarray(x)

    def from_numpy(self, x: Any) -> Array:
        """An array of this library, on the host where the library has arrays there."""
        return x


class CupyArrays(ArrayLibrary):
    """CuPy, any GPU; an array made like another is on its device.

    bfloat16 is the dtype that ml_dtypes registers with NumPy and that CuPy takes from version 14 on: strides, views and
    copies work as for any other dtype.
    """

    def owns(self, x: Array) -> bool:
        # cupy.generic is NumPy's: a NumPy scalar is no array on a GPU
        return isinstance(x, self.module.ndarray)

    def device(self, x: Array) -> str:
        return "cuda"

    def place(self, x: Array) -> str:
        return f"cuda:{x.device.id}"

    def full(self, shape: tuple[int, ...], value: float, dtype: str, like: Array) -> Array:
        with like.device:
            # the copy engine sets zeros several times as fast as CuPy fills
            return self.module.full(shape, value, dtype=dtype) if value else self.module.zeros(shape, dtype=dtype)

    def empty(self, shape: tuple[int, ...], dtype: str, like: Array) -> Array:
        with like.device:
            return self.module.empty(shape, dtype=dtype)

    def arange(self, start: int, stop: int, like: Array) -> Array:
        with like.device:
            return self.module.arange(start, stop, dtype="int64")

    def asarray(self, x: Any, dtype: str, like: Array) -> Array:
        if isinstance(x, int | float):
            # a fill instead of a copy from the host: nothing waits, and a graph can capture it
            return self.full((), x, dtype, like)
        with like.device:
            return self.module.asarray(x, dtype=dtype)

    def in_one_kernel(self, function: Callable[..., Any], fixed: tuple[Any, ...], *operands: Array) -> Any:
        return _fused_kernel(function, fixed)(*operands)

    def merge(self, a: Array, b: Array) -> Array:
        # cupy.logaddexp(-inf, -inf) is NaN
        high = self.module.maximum(a, b)
        shift = self.module.where(self.module.isfinite(high), high, 0)
        return shift + self.module.log(self.module.exp(a - shift) + self.module.exp(b - shift))

    def total(self, x: Array, axis: int | None = None) -> Array:
        if axis is None:
            return x.sum(dtype="float64")
        # along the first axis: CuPy sums a column in one block of threads, and there are few columns
        length = len(x) // 64
        parts, rest = x[: 64 * length].reshape(64, length, *x.shape[1:]), x[64 * length :]
        total = parts.sum(1, dtype="float64").sum(0)
        return total + rest.sum(0, dtype="float64") if len(rest) else total

    def inner(self, a: Array, b: Array) -> Array:
        # CuPy has no product of two dtypes; chunks bound the temporary
        wide = self.module.promote_types(a.dtype, b.dtype)
        out = self.full((), 0.0, "float64", a)
        for start in range(0, a.shape[0], 4096):
            left, right = (x[start : start + 4096].astype(wide, copy=False) for x in (a, b))
            out = out + (left * right).sum(dtype="float64")
        return out

    def to_numpy(self, x: Array) -> Any:
        values = x.get()
        return values.astype("float32") if self.dtype(x) == "bfloat16" else values

    def from_numpy(self, x: Any) -> Array:
        return self.module.asarray(x)


@cache
def _fused_kernel(function: Callable[..., Any], fixed: tuple[Any, ...]) -> Any:
    """One CuPy kernel of the function's operations, compiled for the dtypes of its first call."""
    cupy = sys.modules["cupy"]
    return cupy.fuse(kernel_name=function.__name__)(lambda *operands: function(CupyArrays(cupy), *fixed, *operands))


class TorchArrays(ArrayLibrary):
    """PyTorch, any device."""

    def owns(self, x: Array) -> bool:
        return isinstance(x, self.module.Tensor)

    def dtype(self, x: Array) -> str:
        return str(x.dtype).removeprefix("torch.")

    def device(self, x: Array) -> str:
        return str(x.device.type)

    def place(self, x: Array) -> str:
        return str(x.device)

    def full(self, shape: tuple[int, ...], value: float, dtype: str, like: Array) -> Array:
        return self.module.full(shape, value, dtype=getattr(self.module, dtype), device=like.device)

    def empty(self, shape: tuple[int, ...], dtype: str, like: Array) -> Array:
        return self.module.empty(shape, dtype=getattr(self.module, dtype), device=like.device)

    def arange(self, start: int, stop: int, like: Array) -> Array:
        return self.module.arange(start, stop, device=like.device)

    def asarray(self, x: Any, dtype: str, like: Array) -> Array:
        # a tuple of types: torch 2.6 compiles no union of them
        if isinstance(x, (int, float)):
            return self.full((), x, dtype, like)
        return self.module.as_tensor(x, dtype=getattr(self.module, dtype), device=like.device)

    def cast(self, x: Array, dtype: str) -> Array:
        return x.to(getattr(self.module, dtype))

    def maximum(self, x: Array, floor: float) -> Array:
        return x.clamp_min(floor)

    def softplus(self, x: Array) -> Array:
        # beyond 40 the logarithm is below half an ulp of x
        return self.module.nn.functional.softplus(x, threshold=40.0)

    def contiguous(self, x: Array) -> Array:
        return x.contiguous()

    def total(self, x: Array, axis: int | None = None) -> Array:
        return x.sum(axis, dtype=self.module.float64)

    def inner(self, a: Array, b: Array) -> Array:
        # no bmm, which would follow a global tf32 switch
        m, width = a.shape
        rows = self.inner_rows(width, a.device.type == "cpu")
        if m <= rows:
            return self.total((a * b).sum(1))
        sums = self.module.empty(m, dtype=self.module.promote_types(a.dtype, b.dtype), device=a.device)
        for start in range(0, m, rows):
            left, right = (x[start : start + rows] for x in (a, b))
            self.module.sum(left * right, 1, out=sums[start : start + rows])
        return self.total(sums)

    def detached(self, x: Array) -> Array:
        return x.detach()

    def row_dots(self, a: Array, b: Array, dtype: str) -> Array:
        # the diagonals of small products of 32 rows
        size = 32
        full_rows = a.shape[0] // size * size
        is_mixed = a.is_cuda and a.dtype == b.dtype and a.itemsize == 2 and hasattr(self.module.ops.aten.bmm, "dtype")
        # a compiler makes one kernel of the elementwise product and its sum
        if not (is_mixed and full_rows and dtype == "float32") or self.module.compiler.is_compiling():
            return super().row_dots(a, b, dtype)
        # small products take a fifth of the time, and no temporary of the features' size
        left, right = (x[:full_rows].detach().unflatten(0, (-1, size)) for x in (a, b))
        dots = self.module.bmm(left, right.mT, out_dtype=self.module.float32).diagonal(dim1=1, dim2=2).flatten()
        remainder = [super().row_dots(a[full_rows:], b[full_rows:], dtype)] if a.shape[0] > full_rows else []
        return self.concat([dots, *remainder])

    def inner_rows(self, width: int, host: bool) -> int:
        """Rows that ``inner`` multiplies at a time: they bound its temporary, which should fit the host's caches."""
        return max(1, self.module.get_num_threads() * 2**16 // width) if host else 4096

    def scaled(self, x: Array, factor: Array, dtype: str, *, consume: bool) -> Array:
        return (x.mul_(factor) if consume else x * factor).to(getattr(self.module, dtype))

    def sorted(self, x: Array) -> tuple[Array, Array]:
        values, order = x.sort(stable=True)
        return values, order

    def take(self, x: Array, rows: Array) -> Array:
        return x.index_select(0, rows)

    def count_in(self, needles: Array, haystack: Array) -> Array:
        # torch warns of strided arguments
        haystack, needles = haystack.contiguous(), needles.contiguous()
        right = self.module.searchsorted(haystack, needles, right=True)
        return right - self.module.searchsorted(haystack, needles)

    def to_numpy(self, x: Array) -> Any:
        x = x.detach().cpu().resolve_neg()
        return (x.float() if x.dtype == self.module.bfloat16 else x).numpy()

    def from_numpy(self, x: Any) -> Array:
        # torch takes no read-only memory, and no strides that are negative or part of a number, as in record fields
        x = x if x.flags.behaved and min(x.strides, default=0) >= 0 else x.copy()
        if str(x.dtype) == "bfloat16":
            # torch does not know the dtype of ml_dtypes
            return self.module.from_numpy(x.view("i2")).view(self.module.bfloat16)
        return self.module.from_numpy(x)


def library_of(x: Any) -> ArrayLibrary:
    """The array library that owns x; no library is imported to find out.

    Raises:
        TypeError: x is of no known library.
    """
    if imported("torch"):
        import torch

        # a torch that is still being imported has no tensors yet
        if isinstance(x, getattr(torch, "Tensor", ())):
            return TorchArrays(torch)
    # under a compiler only NumPy arrays come this far
    for name, kind in (("cupy", CupyArrays), ("numpy", ArrayLibrary)):
        if imported(name) and hasattr(sys.modules[name], "ndarray"):
            library = kind(sys.modules[name])
            if library.owns(x):
                return library
    raise TypeError(
        f"features must be torch tensors, CuPy arrays or NumPy arrays, got {type(x).__name__}; convert them"
    )


_CROSSINGS = {("torch", "cupy"): crossing.to_cupy, ("cupy", "torch"): crossing.to_torch}


def transfer(x: Array | None, source: ArrayLibrary, target: ArrayLibrary, dtype: str | None = None) -> Array | None:
    """X in another library, in ``dtype`` when given; x itself where the target owns it already, None for None.

    Between torch and CuPy the result shares x's memory on the GPU; between others it is a copy on the host.
    """
    if x is None or source.name == target.name or target.owns(x):
        return x
    if modules := _modules_on_one_gpu(source, target, x):
        converted = _CROSSINGS[source.name, target.name](x, *modules)
    else:
        converted = target.from_numpy(source.to_numpy(x))
    return converted if dtype is None or target.dtype(converted) == dtype else target.cast(converted, dtype)


def working_for(source: ArrayLibrary, target: ArrayLibrary, like: Array) -> AbstractContextManager[Any]:
    """While open, ``target`` works on like's device, on source's current stream there.

    CuPy that works for torch also takes its memory from torch's pool.
    """
    modules = _modules_on_one_gpu(source, target, like)
    if modules is not None:
        return (crossing.cupy_for_torch if target.name == "cupy" else crossing.torch_for_cupy)(like, *modules)
    if isinstance(source, CupyArrays):
        device: AbstractContextManager[Any] = like.device
        return device
    return nullcontext()


def _modules_on_one_gpu(source: ArrayLibrary, target: ArrayLibrary, x: Array) -> tuple[Any, Any] | None:
    """The modules torch and cupy, if source and target are these two and x is on a GPU."""
    shares_gpu = (source.name, target.name) in _CROSSINGS and source.device(x) == "cuda"
    return (sys.modules["torch"], sys.modules["cupy"]) if shares_gpu else None
