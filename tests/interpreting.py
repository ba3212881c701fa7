"""Triton's interpreter, spared what it does again and again."""

from __future__ import annotations

from types import ModuleType
from typing import Any


def patch_once(interpreter: Any) -> None:
    """Let Triton's interpreter prepare its language once for a launch.

    It goes through all of ``triton.language`` at every call of a function in a kernel, though nothing has changed since
    the kernel's own start; that was two fifths of the time. A version that does it by other names is left as it is.
    """
    patch, launch = getattr(interpreter, "_patch_lang", None), getattr(interpreter, "GridExecutor", None)
    if patch is None or launch is None:
        return
    prepared: set[frozenset[int]] = set()
    call = launch.__call__

    class Prepared:
        def restore(self) -> None:
            pass

    def once(function: Any) -> Any:
        # what is prepared depends on which of the language's modules a function sees
        modules = (x for x in function.__globals__.values() if isinstance(x, ModuleType))
        seen = frozenset(id(x) for x in modules if x in (interpreter.tl, interpreter.tl.core))
        if seen in prepared:
            return Prepared()
        prepared.add(seen)
        return patch(function)

    def begun(self: Any, *given: Any, **named: Any) -> Any:
        prepared.clear()
        return call(self, *given, **named)

    interpreter._patch_lang, launch.__call__ = once, begun
