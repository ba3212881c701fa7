"""Backends whose primitives are called in another way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from contrastile.backends import registry
from contrastile.backends.contract import Backend, Block, Options, UnsupportedProblemError

PRIMITIVES = ("lse", "keeping", "gradients", "finished", "finished_columns", "sigmoid")

RECORDED: list[tuple[Block, Options]] = []
"""What the primitives of a backend of the name ``contrastile.verify.wrapped:recorded@BACKEND`` were given."""


def around(backend: Backend, call: Callable[..., Any], *names: str) -> Backend:
    """Replace these primitives, or all, by ``call(primitive, block, *rest)``."""

    def wrapped(primitive: Callable[..., Any]) -> Callable[..., Any]:
        return lambda block, *rest: call(primitive, block, *rest)

    found = {name: getattr(backend, name) for name in names or PRIMITIVES}
    changed: dict[str, Any] = {name: wrapped(x) for name, x in found.items() if x is not None}
    # nothing goes around the primitives
    return replace(backend, whole=None, **changed)


def __getattr__(name: str) -> Backend:
    """The backend that ``recorded@BACKEND`` names; ``refusing``, which refuses every problem; ``older``."""
    what, at, backend = name.partition("@")
    if what not in ("recorded", "refusing", "older") or not at:
        raise AttributeError(name)
    if what == "older":
        return replace(registry.load(backend), contract=1)

    def call(primitive: Callable[..., Any], block: Block, *rest: Any) -> Any:
        if what == "refusing":
            raise UnsupportedProblemError("it refuses every problem")
        RECORDED.append((block, rest[-1]))
        return primitive(block, *rest)

    return around(registry.load(backend), call)
