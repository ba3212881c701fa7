"""Backends with wrapped primitives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from contrastile.backends import registry
from contrastile.backends.contract import Backend, Block, Options, UnsupportedProblemError

PRIMITIVES = ("lse", "keeping", "gradients", "finished", "finished_columns", "sigmoid")

RECORDED: list[tuple[Block, Options]] = []
"""The blocks and options that ``contrastile.verify.wrapped:recorded@BACKEND`` has passed to its primitives."""


def around(backend: Backend, call: Callable[..., Any], *names: str) -> Backend:
    """Replace these primitives, or all, by ``call(primitive, block, *rest)``."""

    def wrapped(primitive: Callable[..., Any]) -> Callable[..., Any]:
        return lambda block, *rest: call(primitive, block, *rest)

    primitives = {name: getattr(backend, name) for name in names or PRIMITIVES}
    changed: dict[str, Any] = {name: wrapped(x) for name, x in primitives.items() if x is not None}
    # without ``whole`` every computation goes through the primitives
    return replace(backend, whole=None, **changed)


def __getattr__(name: str) -> Backend:
    """``recorded@BACKEND`` records calls, ``refusing@`` refuses every problem, ``older@`` has an old contract."""
    kind, separator, backend = name.partition("@")
    if kind not in ("recorded", "refusing", "older") or not separator:
        raise AttributeError(name)
    if kind == "older":
        return replace(registry.load(backend), contract=1)

    def call(primitive: Callable[..., Any], block: Block, *rest: Any) -> Any:
        if kind == "refusing":
            raise UnsupportedProblemError("it refuses every problem")
        RECORDED.append((block, rest[-1]))
        return primitive(block, *rest)

    return around(registry.load(backend), call)
