"""A backend of CuPy's arrays as one of torch's tensors: memory crosses at each primitive, all else is torch's.

Schedules over ranks work between their messages on the backend's arrays, and CUDA graphs hold torch's tensors: so a
backend becomes one of torch's where its primitives are to be replayed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from functools import wraps
from typing import Any

import torch

from contrastile.backends.arrays import ArrayLibrary, TorchArrays, transfer, working_for
from contrastile.backends.contract import Array, Backend, Block

Move = Callable[[Array], Array]


def _crossing(primitive: Callable[..., Any], ours: ArrayLibrary, theirs: ArrayLibrary) -> Callable[..., Any]:
    """The primitive, of arrays of ``theirs``, as one of ``ours``; it writes to the same memory."""

    @wraps(primitive)
    def crossed(block: Block, *more: Any) -> Any:
        with working_for(ours, theirs, block.rows):
            found = primitive(*_moved((block, *more), lambda x: transfer(x, ours, theirs)))
            return _moved(found, lambda x: transfer(x, theirs, ours))

    return crossed


def _moved(x: Any, move: Move) -> Any:
    """A primitive's arguments or results, with each array moved."""
    if x is None or isinstance(x, (bool, int, float, str)):
        return x
    if is_dataclass(x):
        return replace(x, **{each.name: _moved(getattr(x, each.name), move) for each in fields(x)})  # type: ignore[type-var]
    if isinstance(x, tuple) and hasattr(x, "_fields"):
        return type(x)(*[_moved(each, move) for each in x])
    if isinstance(x, (tuple, list)):
        return type(x)(_moved(each, move) for each in x)
    return move(x)


def over_torch(backend: Backend) -> Backend:
    """The backend itself where its arrays are torch's."""
    theirs = backend.arrays
    if theirs.name == "torch":
        return backend
    ours = TorchArrays(torch)
    names = "lse", "keeping", "gradients", "finished", "sigmoid"
    crossed: dict[str, Any] = {name: getattr(backend, name) for name in names}
    for name, primitive in crossed.items():
        crossed[name] = primitive and _crossing(primitive, ours, theirs)
    return replace(backend, arrays=ours, **crossed)
