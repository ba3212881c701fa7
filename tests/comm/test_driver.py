"""The driver's calls, made to a driver that is made up: what is passed, and what an error becomes."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import pytest
from made_libraries import Made

from contrastile.comm import driver
from contrastile.comm.driver import DriverError, Gpu


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Made]:
    def make(**facts: Any) -> Made:
        library = Made(**facts)
        monkeypatch.setattr(ctypes, "CDLL", lambda name: library)
        return library

    return make


def test_without_a_driver_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    with pytest.raises(DriverError, match=r"no CUDA driver: .*cannot open"):
        Gpu(0)


def test_an_old_driver_and_a_call_that_fails_are_named(made: Callable[..., Made]) -> None:
    made(lacks="cuStreamIsCapturing")
    with pytest.raises(DriverError, match="the CUDA driver has no cuStreamIsCapturing"):
        Gpu(0).capturing(0)
    made(cuStreamCreateWithPriority=217)
    with pytest.raises(DriverError, match="cuStreamCreateWithPriority gave error 217"):
        Gpu(0).stream()


@pytest.mark.parametrize(("code", "passed"), [(0, True), (600, False)])
def test_an_event_has_come_or_not_and_its_handle_is_used_again(
    made: Callable[..., Made], code: int, passed: bool
) -> None:
    library = made(cuEventQuery=code)
    gpu = Gpu(0)
    first, second = gpu.record(0), gpu.record(0)
    assert gpu.passed(first) is passed
    assert len(library.named("cuCtxPushCurrent_v2")) == len(library.named("cuCtxPopCurrent_v2")) == 1
    handle = first.address
    del first
    # not the one that somebody may still ask for
    assert gpu.record(0).address == handle != second.address
    again = gpu.record(0)
    assert gpu.record(0).address != again.address == handle
    assert (len(library.named("cuEventCreate")), len(library.named("cuEventRecord"))) == (3, 5)


def test_an_event_whose_work_failed_is_an_error(made: Callable[..., Made]) -> None:
    made(cuEventQuery=700)
    gpu = Gpu(0)
    with pytest.raises(DriverError, match="cuEventQuery gave error 700"):
        gpu.passed(gpu.record(0))


def test_a_thread_stays_out_of_what_others_capture(made: Callable[..., Made]) -> None:
    library = made()
    driver.relaxed_capture()
    assert [name for name, _ in library.calls] == ["cuThreadExchangeStreamCaptureMode"]
    # without a driver nothing is captured either
    made(lacks="cuThreadExchangeStreamCaptureMode")
    driver.relaxed_capture()
