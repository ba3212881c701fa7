"""A call compiles its missing kernels in parallel before it launches any, and reports a long wait."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from contrastile.backends import compiling


@compiling.side_by_side
def call(
    compile_one: Callable[[], object], compiled: set[str], launched: list[str], begin: Callable[[], object] = bool
) -> None:
    begin()
    for name in ("known", "a", "known", "b", "a"):
        if name != "known" and name not in compiled:
            assert compiling.postpone(name, lambda name=name: (compile_one(), compiled.add(name)))
        elif not compiling.current_call.missing:
            launched.append(name)


def test_calls_in_two_threads_compile_in_parallel_and_launch_when_all_kernels_exist() -> None:
    begin, meeting, logs = threading.Barrier(2), threading.Barrier(4), [list[str](), list[str]()]
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda log: call(lambda: meeting.wait(20), set(), log, lambda: begin.wait(20)), logs))
    # kernels before the first missing one are launched twice
    assert logs == [["known", "known", "a", "known", "b", "a"]] * 2


@pytest.mark.parametrize("place", ["terminal", "log", "file"])
def test_a_long_wait_is_reported_once_and_the_call_raises_the_error_of_its_compilation(
    place: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> None:
        time.sleep(0.3)
        raise RuntimeError("cannot compile")

    monkeypatch.setattr(compiling, "PATIENCE", 0.01)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: place == "terminal")
    caplog.set_level(logging.INFO if place == "log" else logging.WARNING)
    with pytest.raises(RuntimeError, match="cannot compile"):
        call(fail, set(), [])
    call(bool, {"a"}, [])
    line = "compiling 2 kernels, kept on disk for later runs"
    assert capsys.readouterr().err == (f"contrastile: {line}\n" if place == "terminal" else "")
    assert caplog.messages == ([line] if place == "log" else [])
