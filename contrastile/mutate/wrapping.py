"""Tools for wrappers, which replace primitives of a correct backend."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from contrastile.backends.arrays import ArrayLibrary
from contrastile.backends.contract import Array, Backend, Block
from contrastile.verify.wrapped import around

Plant = Callable[[Backend], Backend]
"""A correct backend -> the defective one."""


@dataclass(frozen=True, slots=True)
class Wrapper:
    """A defect.

    Attributes:
        about: what is wrong.
        plant: plants it.
        needs: the only array library that it applies to; None for any.
    """

    about: str
    plant: Plant
    needs: str | None = None


WRAPPERS: dict[str, Wrapper] = {}
"""The defects, by their names for ``contrastile mutate``."""


def defect(name: str, about: str, plant: Plant, needs: str | None = None) -> None:
    """Register a defect."""
    WRAPPERS[name] = Wrapper(about, plant, needs)


def planted(make: Callable[[Any], Plant], needs: str | None = None) -> Callable[[Any], None]:
    """Register under a function's name the defect that ``make`` makes of it; its docstring says what is wrong."""

    def register(function: Any) -> None:
        about = (function.__doc__ or "").strip().removesuffix(".")
        defect(function.__name__.replace("_", "-"), about, make(function), needs)

    return register


def seeing(backend: Backend, change: Callable[[ArrayLibrary, Block], Block]) -> Backend:
    """Every primitive receives a changed block."""
    return around(backend, lambda primitive, block, *rest: primitive(change(backend.arrays, block), *rest))


def seen(change: Callable[[ArrayLibrary, Block], Block]) -> Plant:
    """Every primitive receives a changed block."""
    return lambda backend: seeing(backend, change)


def features_seen(change: Callable[[ArrayLibrary, Array], Array]) -> Plant:
    """Every primitive receives changed rows and columns."""
    return seen(lambda arrays, b: replace(b, rows=change(arrays, b.rows), columns=change(arrays, b.columns)))


def doubled(where: Callable[[Block], bool]) -> Plant:
    """Logits are doubled on some blocks."""
    return seen(lambda arrays, b: replace(b, scale=b.scale * 2) if where(b) else b)


def calling(*names: str) -> Callable[[Callable[..., Any]], Plant]:
    """These primitives, or all, are replaced by ``call(primitive, block, *rest)``."""
    return lambda call: lambda backend: around(backend, call, *names)


def adding(call: Callable[..., Any]) -> Plant:
    """``gradients`` is replaced by ``call(primitive, block, weights, row_gradient, column_gradient, options)``."""
    return lambda backend: around(replace(backend, finished=None, keeping=None), call, "gradients")


def stateful(*names: str) -> Callable[[Callable[[], Callable[..., Any]]], Plant]:
    """The same by what the function returns, anew for each backend."""
    return lambda make: lambda backend: around(backend, make(), *names)


def set_where(arrays: ArrayLibrary, there: Array, value: float, x: Array) -> Array:
    """Set x to a number at some places."""
    return arrays.cast(arrays.where(there, value, x), arrays.dtype(x))


def rounded(arrays: ArrayLibrary, x: Array, dtype: str) -> Array:
    """Round x to a dtype, and return it in its own."""
    return arrays.cast(arrays.cast(x, dtype), arrays.dtype(x))
