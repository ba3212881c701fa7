"""Tools for wrappers, which replace primitives of a correct backend."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from contrastile.backends.arrays import ArrayLibrary
from contrastile.backends.contract import Array, Backend, Block
from contrastile.verify.wrapped import around


@dataclass(frozen=True, slots=True)
class Wrapper:
    """A defect.

    Attributes:
        name: its name for ``contrastile mutate``.
        plant: a correct backend -> the defective one.
        needs: the only array library that it applies to; None for any.
    """

    name: str
    plant: Callable[[Backend], Backend]
    needs: str | None = None

    @property
    def about(self) -> str:
        return (self.plant.__doc__ or "").strip().removesuffix(".")


WRAPPERS: dict[str, Wrapper] = {}


def only_in(library: str | None) -> Callable[[Callable[[Backend], Backend]], Callable[[Backend], Backend]]:
    """Register a defect under its function's name, for backends of this array library (None: of any)."""

    def register(plant: Callable[[Backend], Backend]) -> Callable[[Backend], Backend]:
        name = plant.__name__.replace("_", "-")
        WRAPPERS[name] = Wrapper(name, plant, library)
        return plant

    return register


wrapper = only_in(None)
"""Register a defect for backends of any array library."""


def seeing(backend: Backend, change: Callable[[ArrayLibrary, Block], Block]) -> Backend:
    """Every primitive receives a changed block."""
    return around(backend, lambda primitive, block, *rest: primitive(change(backend.arrays, block), *rest))


def features_seen(backend: Backend, change: Callable[[Array], Array]) -> Backend:
    """Every primitive receives changed rows and columns."""
    return seeing(backend, lambda arrays, b: replace(b, rows=change(b.rows), columns=change(b.columns)))


def doubled(backend: Backend, where: Callable[[Block], bool]) -> Backend:
    """Logits are doubled on some blocks."""
    return seeing(backend, lambda arrays, b: replace(b, scale=b.scale * 2) if where(b) else b)


def adding(backend: Backend, call: Callable[..., None]) -> Backend:
    """``gradients`` replaced by ``call(primitive, block, weights, row_gradient, column_gradient, options)``."""
    plain = replace(backend, finished=None, keeping=None)
    return around(plain, call, "gradients")
