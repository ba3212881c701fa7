"""Backends whose arguments are first copied into other buffers: between guard bands, or with unusual strides.

Inputs are surrounded by NaN, so that an out-of-bounds read shows in the result; accumulators are surrounded by a finite
number, so that an out-of-bounds addition shows too. A call must not change the bits around its arguments.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import Any

from contrastile.backends.arrays import ArrayLibrary
from contrastile.backends.contract import Array, Backend, Block, SideWeights, Weights
from contrastile.verify.wrapped import around

Layout = Callable[[ArrayLibrary, Array, float], tuple[Array, Array]]
"""(arrays, x, fill) -> a buffer full of ``fill``, and the view of it that x is copied to."""

# odd widths of bands, so that no vector load stays aligned
_ROWS, _WIDTH = 3, 5
_AROUND_SUMS = 1.5


def guard_bands(arrays: ArrayLibrary, x: Array, fill: float) -> tuple[Array, Array]:
    pads = (_ROWS, _WIDTH)[-len(x.shape) :]
    buffer = _filled(arrays, tuple(size + 2 * pad for size, pad in zip(x.shape, pads, strict=True)), fill, x)
    return buffer, buffer[tuple(slice(pad, pad + size) for size, pad in zip(x.shape, pads, strict=True))]


def transposed(arrays: ArrayLibrary, x: Array, fill: float) -> tuple[Array, Array]:
    """Column-major matrices; vectors stay as they are."""
    buffer = _filled(arrays, tuple(reversed(x.shape)), fill, x)
    return buffer, buffer.swapaxes(0, -1)


def every_other(arrays: ArrayLibrary, x: Array, fill: float) -> tuple[Array, Array]:
    """Stride 2 along each axis."""
    buffer = _filled(arrays, tuple(2 * size for size in x.shape), fill, x)
    return buffer, buffer[tuple(slice(None, None, 2) for _ in x.shape)]


def backwards(arrays: ArrayLibrary, x: Array, fill: float) -> tuple[Array, Array]:
    buffer = _filled(arrays, tuple(x.shape), fill, x)
    return buffer, buffer[tuple(slice(None, None, -1) for _ in x.shape)]


def _filled(arrays: ArrayLibrary, shape: tuple[int, ...], value: float, like: Array) -> Array:
    dtype = arrays.dtype(like)
    # integers have no NaN; index 0 is the most harmful value to read, since that column exists
    return arrays.full(shape, 0 if dtype == "int64" else value, dtype, like)


@dataclass(slots=True)
class _Relocated:
    """The arguments of one call in their new buffers, and the checks to run after it."""

    arrays: ArrayLibrary
    layout: Layout
    checks: list[Callable[[], str | None]] = field(default_factory=list)

    def read(self, x: Any, name: str) -> Any:
        """A copy of an input; the call must leave its whole buffer unchanged."""
        if x is None or not x.shape:
            return x
        buffer, view = self.layout(self.arrays, x, float("nan"))
        view[...] = x
        bits = self._bits(buffer)
        self.checks.append(
            lambda: (
                None if self._bits(buffer) == bits else f"{name} is an input, and it or memory around it was written"
            )
        )
        return view

    def add(self, x: Any, name: str) -> Any:
        """A copy of an accumulator between guard bands; the check after the call copies the result back to x."""
        buffer, view = guard_bands(self.arrays, x, _AROUND_SUMS)
        view[...] = 0
        bits = self._bits(buffer)
        view[...] = x

        def check() -> str | None:
            x[...] = view
            view[...] = 0
            return None if self._bits(buffer) == bits else f"out-of-bounds write around {name}"

        self.checks.append(check)
        return view

    def block(self, block: Block) -> Block:
        pairs = block.pairs
        names = [attribute.name for attribute in fields(pairs) if attribute.type == "Array | None"]
        copies = {name: self.read(getattr(pairs, name), name) for name in names}
        return replace(
            block,
            rows=self.read(block.rows, "rows"),
            columns=self.read(block.columns, "columns"),
            pairs=replace(pairs, **copies),
        )

    def argument(self, x: Any) -> Any:
        """Relocate an argument after the block: weights and vectors are inputs, a matrix is an accumulator."""
        if isinstance(x, Weights):
            # kept exponentials stay, because they are in the backend's own layout
            columns = None if x.columns is None else self._side(x.columns, "column")
            return replace(x, rows=self._side(x.rows, "row"), columns=columns)
        axes = len(getattr(x, "shape", ()))
        return self.add(x, f"a gradient of {x.shape[0]} rows") if axes == 2 else self.read(x, "a weight") if axes else x

    def _side(self, side: SideWeights, name: str) -> SideWeights:
        vectors = {vector: self.read(getattr(side, vector), f"{name}_{vector}") for vector in side._fields[:4]}
        return side._replace(**vectors)

    def _bits(self, x: Array) -> bytes:
        return bytes(self.arrays.to_numpy(x).tobytes())


def relocated(backend: Backend, layout: Layout, violations: list[str]) -> Backend:
    """The backend with its arguments copied to another layout before each call, accumulators between guard bands.

    ``violations`` receives one line for each buffer that a call has changed against the contract.
    """

    def call(primitive: Callable[..., Any], block: Block, *arguments: Any) -> Any:
        relocation = _Relocated(backend.arrays, layout)
        relocated_block = relocation.block(block)
        backend.check(relocated_block)
        result = primitive(relocated_block, *map(relocation.argument, arguments))
        violations.extend(filter(None, (check() for check in relocation.checks)))
        return result

    return around(backend, call)


def called_twice(backend: Backend) -> Backend:
    def twice(primitive: Callable[..., Any], *arguments: Any) -> Any:
        primitive(*arguments)
        return primitive(*arguments)

    # ``finished`` has no accumulators, and with it ``keeping`` keeps exponentials for ``finished`` only
    keeping = backend.keeping if backend.finished is None else None
    return around(
        replace(backend, finished=None, finished_columns=None, keeping=keeping), twice, "gradients", "sigmoid"
    )


def expanded(backend: Backend) -> Backend:
    """The backend given features whose rows are all the first row, with stride 0."""
    # numpy, torch and cupy all have broadcast_to
    module: Any = importlib.import_module(backend.arrays.name)

    def expand(x: Array) -> Array:
        return module.broadcast_to(x[:1], tuple(x.shape)) if x.shape[0] else x

    def call(primitive: Callable[..., Any], block: Block, *arguments: Any) -> Any:
        expanded_block = replace(block, rows=expand(block.rows), columns=expand(block.columns))
        backend.check(expanded_block)
        return primitive(expanded_block, *arguments)

    return around(backend, call)
