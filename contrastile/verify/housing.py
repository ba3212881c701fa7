"""A backend whose every argument is first moved somewhere awkward: between guard bands, or under odd strides.

What surrounds the values is NaN around inputs, so that reading it shows in the result, and a plain number around
accumulators, so that adding to it shows too. After each call the surroundings must be bit for bit what they were.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from contrastile.backends.arrays import ArrayLibrary
from contrastile.backends.contract import (
    Array,
    Backend,
    Block,
    ColumnForm,
    Finished,
    LseFunction,
    Options,
    Statistics,
    Weights,
)

Layout = Callable[[ArrayLibrary, Array, float], tuple[Array, Array]]

# 3 and 5 elements: no vector load stays aligned
_ROWS, _WIDTH = 3, 5
_AROUND_SUMS = 1.5


def bands(arrays: ArrayLibrary, x: Array, around: float) -> tuple[Array, Array]:
    """A wider, longer buffer and the place inside it where x goes."""
    pads = (_ROWS, _WIDTH)[-len(x.shape) :]
    buffer = _filled(arrays, tuple(size + 2 * pad for size, pad in zip(x.shape, pads, strict=True)), around, x)
    return buffer, buffer[tuple(slice(pad, pad + size) for size, pad in zip(x.shape, pads, strict=True))]


def transposed(arrays: ArrayLibrary, x: Array, around: float) -> tuple[Array, Array]:
    """A buffer that holds a matrix column by column; vectors lie as they are."""
    buffer = _filled(arrays, tuple(reversed(x.shape)), around, x)
    return buffer, buffer.T if len(x.shape) > 1 else buffer


def every_other(arrays: ArrayLibrary, x: Array, around: float) -> tuple[Array, Array]:
    """A buffer twice as long along each axis, of which every other element is x's."""
    buffer = _filled(arrays, tuple(2 * size for size in x.shape), around, x)
    return buffer, buffer[tuple(slice(None, None, 2) for _ in x.shape)]


def backwards(arrays: ArrayLibrary, x: Array, around: float) -> tuple[Array, Array]:
    """A buffer that holds x from its last element to its first: every stride is negative."""
    buffer = _filled(arrays, tuple(x.shape), around, x)
    return buffer, buffer[tuple(slice(None, None, -1) for _ in x.shape)]


def _filled(arrays: ArrayLibrary, shape: tuple[int, ...], value: float, like: Array) -> Array:
    dtype = arrays.dtype(like)
    # an index has no NaN; 0 is the most harmful thing to read, being a column that exists
    return arrays.full(shape, 0 if dtype == "int64" else value, dtype, like)


@dataclass(slots=True)
class _Movers:
    """The arguments of one call in their new places."""

    arrays: ArrayLibrary
    layout: Layout
    settle: list[Callable[[], str | None]] = field(default_factory=list)

    def read(self, x: Any, name: str) -> Any:
        """X's values in a new place, which the call must leave as it is."""
        if x is None or not x.shape:
            return x
        buffer, view = self.layout(self.arrays, x, float("nan"))
        view[...] = x
        before = self._bits(buffer)
        self.settle.append(lambda: None if self._bits(buffer) == before else f"{name} or its surroundings were written")
        return view

    def add(self, x: Any, name: str) -> Any:
        """An accumulator in a new place; what the call makes of it comes back to x."""
        if x is None:
            return None
        buffer, view = bands(self.arrays, x, _AROUND_SUMS)
        view[...] = 0
        before = self._bits(buffer)
        view[...] = x

        def check() -> str | None:
            x[...] = view
            view[...] = 0
            return None if self._bits(buffer) == before else f"the surroundings of {name} were written"

        self.settle.append(check)
        return view

    def block(self, block: Block) -> Block:
        pairs = block.pairs
        names = ("positives", "excluded", "row_ids", "column_ids")
        moved = {name: self.read(getattr(pairs, name), name) for name in names}
        return replace(
            block,
            rows=self.read(block.rows, "rows"),
            columns=self.read(block.columns, "columns"),
            pairs=replace(pairs, **moved),
        )

    def weights(self, weights: Weights) -> Weights:
        # what was kept is for the backend to read and to write, wherever it put it
        names = [name for name in Weights.__slots__ if name != "kept"]
        return replace(weights, **{name: self.read(getattr(weights, name), name) for name in names})

    def _bits(self, x: Array) -> bytes:
        return bytes(self.arrays.to_numpy(x).tobytes())


def rehoused(backend: Backend, layout: Layout, trespasses: list[str]) -> Backend:
    """The backend, its arguments moved by ``layout`` before each call; what it must not have written is reported.

    Args:
        backend: the backend's record.
        layout: gives a buffer filled with a number and the view of it where an array's values go.
        trespasses: receives one line for each buffer found changed.
    """

    def movers() -> _Movers:
        return _Movers(backend.arrays, layout)

    def settle(moved: _Movers) -> None:
        trespasses.extend(filter(None, (check() for check in moved.settle)))

    def surveyed(lse: LseFunction) -> LseFunction:
        def function(block: Block, columns: bool, options: Options) -> Statistics:
            moved = movers()
            there = moved.block(block)
            backend.check(there)
            found = lse(there, columns, options)
            settle(moved)
            return found

        return function

    def gradients(block: Block, weights: Weights, rows: Array, columns: Array, options: Options) -> None:
        moved = movers()
        to = moved.add(rows, "row_gradient"), moved.add(columns, "column_gradient")
        backend.gradients(moved.block(block), moved.weights(weights), *to, options)
        settle(moved)

    def finished(
        block: Block, weights: Weights, upstream: Array | None, columns: ColumnForm | None, options: Options
    ) -> Finished:
        assert backend.finished is not None
        moved = movers()
        found = backend.finished(moved.block(block), moved.weights(weights), upstream, columns, options)
        settle(moved)
        return found

    def sigmoid(block: Block, weight: Array, rows: Array, columns: Array, options: Options) -> tuple[Array, Array]:
        moved = movers()
        there = moved.block(block)
        backend.check(there)
        to = moved.add(rows, "row_gradient"), moved.add(columns, "column_gradient")
        found = backend.sigmoid(there, moved.read(weight, "row_weight"), *to, options)
        settle(moved)
        return found

    whole = None if backend.finished is None else finished
    keeping = None if backend.keeping is None else surveyed(backend.keeping)
    changes: dict[str, Any] = {"lse": surveyed(backend.lse), "gradients": gradients, "sigmoid": sigmoid}
    return replace(backend, **changes, finished=whole, keeping=keeping)


def repeated(backend: Backend) -> Backend:
    """The backend with everything added to its accumulators twice."""

    def gradients(*call: Any) -> None:
        backend.gradients(*call)
        backend.gradients(*call)

    def sigmoid(*call: Any) -> tuple[Array, Array]:
        backend.sigmoid(*call)
        return backend.sigmoid(*call)

    # what is finished is nobody's accumulator
    return replace(backend, gradients=gradients, sigmoid=sigmoid, finished=None, keeping=None)


def expanded(backend: Backend) -> Backend:
    """The backend given features whose rows are all one row, without a copy of it: stride 0."""
    # numpy, torch and cupy spell it alike
    module: Any = importlib.import_module(backend.arrays.name)

    def flat(x: Array) -> Array:
        return module.broadcast_to(x[:1], tuple(x.shape)) if x.shape[0] else x

    def house(block: Block) -> Block:
        there = replace(block, rows=flat(block.rows), columns=flat(block.columns))
        backend.check(there)
        return there

    finished, keeping = backend.finished, backend.keeping
    return replace(
        backend,
        keeping=None if keeping is None else lambda block, *call: keeping(house(block), *call),
        finished=None if finished is None else lambda block, *call: finished(house(block), *call),
        lse=lambda block, *call: backend.lse(house(block), *call),
        gradients=lambda block, *call: backend.gradients(house(block), *call),
        sigmoid=lambda block, *call: backend.sigmoid(house(block), *call),
    )
