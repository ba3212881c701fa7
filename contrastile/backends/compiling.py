"""Parallel compilation of the kernels that a call lacks, with a message where it takes long.

A call requests its kernels one by one. ``side_by_side`` runs a call that lacks some without launching them, compiles
all missing kernels in threads, and then runs the call again.
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
"""Seconds before the message."""

_P = ParamSpec("_P")
_T = TypeVar("_T")
_Missing = dict[Hashable, Callable[[], object]]
_log = logging.getLogger(__name__)


class _CurrentCall(threading.local):
    # a function that compiles it for each kernel that this thread's call lacks; None outside ``side_by_side``.
    # While a kernel is missing, no later one may be launched: its inputs may not have been written
    missing: _Missing | None = None


current_call = _CurrentCall()


def side_by_side(primitive: Callable[_P, _T]) -> Callable[_P, _T]:
    """Decorates a function that may be called twice, and does not read on the host what its kernels write.

    It must not add to its arguments. In the first call cuBLAS may multiply memory that no kernel has written.
    """

    @wraps(primitive)
    def call(*args: _P.args, **named: _P.kwargs) -> _T:
        missing: _Missing = {}
        current_call.missing = missing
        try:
            result = primitive(*args, **named)
        finally:
            current_call.missing = None
        if not missing:
            return result
        del result
        _compile_all(missing)
        return primitive(*args, **named)

    return call


def postpone(key: Hashable, compile_one: Callable[[], object]) -> bool:
    """Whether a launch must be skipped until its kernel is compiled; outside ``side_by_side``, compile it now."""
    if current_call.missing is None:
        _compile_all({key: compile_one})
        return False
    current_call.missing[key] = compile_one
    return True


def _compile_all(missing: _Missing) -> None:
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        futures = [pool.submit(compile_one) for compile_one in missing.values()]
        # the functions hold arguments of launches
        missing.clear()
        if pending := len(wait(futures, PATIENCE).not_done):
            message = f"compiling {pending} kernel{'s' * (pending > 1)}, kept on disk for later runs"
            if _log.isEnabledFor(logging.INFO):
                _log.info(message)
            elif sys.stderr is not None and sys.stderr.isatty():
                print(f"contrastile: {message}", file=sys.stderr, flush=True)
    for future in futures:
        future.result()
