"""Backends whose primitives are called in another way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from contrastile.backends.contract import Backend

PRIMITIVES = ("lse", "keeping", "gradients", "finished", "sigmoid")


def around(backend: Backend, call: Callable[..., Any], *names: str) -> Backend:
    """Replace these primitives, or all, by ``call(primitive, block, *rest)``."""

    def wrapped(primitive: Callable[..., Any]) -> Callable[..., Any]:
        return lambda block, *rest: call(primitive, block, *rest)

    found = {name: getattr(backend, name) for name in names or PRIMITIVES}
    changed: dict[str, Any] = {name: wrapped(x) for name, x in found.items() if x is not None}
    return replace(backend, **changed)
