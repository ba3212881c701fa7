"""The kernels that a call lacks, compiled side by side, and a line for whoever waits for them.

A call meets its kernels one by one. ``side_by_side`` goes through one that lacks some without launches, has all of them
compiled, in threads, and then makes it.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor, wait
from functools import wraps
from typing import ParamSpec, TypeVar

PATIENCE = 2.0
"""Seconds before the line."""

_P = ParamSpec("_P")
_T = TypeVar("_T")
_Missing = dict[Hashable, Callable[[], object]]
_log = logging.getLogger(__name__)


class _Call(threading.local):
    # what compiles each kernel that this thread's call lacks; None outside of ``side_by_side``. While there are any
    # nothing may be launched: what it reads may not have been written
    missing: _Missing | None = None


here = _Call()


def side_by_side(primitive: Callable[_P, _T]) -> Callable[_P, _T]:
    """Decorates a function whose arguments are written by kernels alone, and whose host reads nothing they write.

    It adds to nothing: it may be called twice, and the first time cuBLAS multiplies what no kernel has written.
    """

    @wraps(primitive)
    def call(*args: _P.args, **named: _P.kwargs) -> _T:
        missing: _Missing = {}
        here.missing = missing
        try:
            found = primitive(*args, **named)
        finally:
            here.missing = None
        if not missing:
            return found
        del found
        _compile(missing)
        return primitive(*args, **named)

    return call


def postponed(key: Hashable, compile_one: Callable[[], object]) -> bool:
    """Whether a launch is left out until its kernel is compiled; outside of ``side_by_side`` that is done now."""
    if here.missing is None:
        _compile({key: compile_one})
        return False
    here.missing[key] = compile_one
    return True


def _compile(missing: _Missing) -> None:
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        begun = [pool.submit(compile_one) for compile_one in missing.values()]
        # they hold arguments of launches
        missing.clear()
        if left := len(wait(begun, PATIENCE).not_done):
            line = f"compiling {left} kernel{'s' * (left > 1)}, kept on disk for later runs"
            if _log.isEnabledFor(logging.INFO):
                _log.info(line)
            elif sys.stderr is not None and sys.stderr.isatty():
                print(f"contrastile: {line}", file=sys.stderr, flush=True)
    for each in begun:
        each.result()
