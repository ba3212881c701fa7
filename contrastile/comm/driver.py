"""The calls of the CUDA driver that transfers by NCCL need, through ctypes.

The driver has one name and one interface since CUDA 12, whichever library has the arrays. Nothing here allocates from a
library's pool or waits for a device.
"""

from __future__ import annotations

import ctypes
import sys
from contextlib import AbstractContextManager, suppress
from ctypes import byref, c_int, c_uint, c_void_p
from typing import Any

from contrastile.backends.contract import Array

_NON_BLOCKING, _NO_TIMING = 1, 2
_NOT_READY = 600
_RELAXED = 2


class DriverError(RuntimeError):
    """A call of the driver failed."""


def relaxed_capture() -> None:
    """This thread's calls from now on do not invalidate a CUDA graph that another thread captures (relaxed mode)."""
    mode = c_int(_RELAXED)
    with suppress(OSError, AttributeError):
        _library().cuThreadExchangeStreamCaptureMode(byref(mode))


def _library() -> Any:
    return ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")


class Event:
    """A point in a stream; its handle is reused once nothing refers to it."""

    __slots__ = ("_gpu", "address")

    def __init__(self, address: int, gpu: Gpu) -> None:
        self.address, self._gpu = address, gpu

    def __del__(self) -> None:
        # in any thread: a stream that waits for the event keeps the point that it was recorded at
        self._gpu.spare.append(self.address)


class _Active:
    """While open, a GPU's context is the thread's."""

    __slots__ = ("_context", "_pop", "_push")

    def __init__(self, gpu: Gpu, context: c_void_p) -> None:
        self._context = context
        self._push, self._pop = gpu.found("cuCtxPushCurrent_v2"), gpu.found("cuCtxPopCurrent_v2")

    def __enter__(self) -> None:
        code = self._push(self._context)
        if code:
            raise DriverError(f"cuCtxPushCurrent_v2 gave error {code}")

    def __exit__(self, *_: object) -> None:
        self._pop(byref(c_void_p()))


class Gpu:
    """One GPU, as this process sees it. Streams and memory are numbers; all calls are made inside ``active``.

    Attributes:
        active: a context, in which the GPU's context is the thread's.

    Raises:
        DriverError: there is no driver, or it lacks a call.
    """

    def __init__(self, number: int) -> None:
        try:
            self._cuda = _library()
        except OSError as error:
            raise DriverError(f"no CUDA driver: {error}") from error
        device, self._context = c_int(), c_void_p()
        self._call("cuInit", 0)
        self._call("cuDeviceGet", byref(device), number)
        self._call("cuDevicePrimaryCtxRetain", byref(self._context), device)
        self.number = number
        self.active: AbstractContextManager[None] = _Active(self, self._context)
        self.spare: list[int] = []
        # made for every message, with numbers: conversions by the interpreter would cost more than the calls
        self._record = self._typed("cuEventRecord", c_void_p, c_void_p)
        self._follow = self._typed("cuStreamWaitEvent", c_void_p, c_void_p, c_uint)
        self._query = self._typed("cuEventQuery", c_void_p)

    def _call(self, name: str, *arguments: Any) -> None:
        code = self.found(name)(*arguments)
        if code:
            raise DriverError(f"{name} gave error {code}")

    def _typed(self, name: str, *kinds: Any) -> Any:
        """A call that is given numbers."""
        found = self.found(name)
        found.argtypes = kinds
        return found

    def found(self, name: str) -> Any:
        """A call of the driver."""
        try:
            return getattr(self._cuda, name)
        except AttributeError as error:
            raise DriverError(f"the CUDA driver has no {name}") from error

    def place(self) -> str:
        """Its PCI bus address."""
        found, device = ctypes.create_string_buffer(32), c_int()
        self._call("cuDeviceGet", byref(device), self.number)
        self._call("cuDeviceGetPCIBusId", found, c_int(len(found)), device)
        return found.value.decode()

    def stream(self) -> int:
        """A new stream, of the highest priority."""
        low, high, stream = c_int(), c_int(), c_void_p()
        self._call("cuCtxGetStreamPriorityRange", byref(low), byref(high))
        self._call("cuStreamCreateWithPriority", byref(stream), c_uint(_NON_BLOCKING), high)
        return stream.value or 0

    def current(self, x: Array) -> int:
        """The stream on which x's library works now."""
        if hasattr(x, "data_ptr"):
            torch = sys.modules["torch"]
            # the number alone, where torch has that call: a stream object costs the host several times as much
            raw = getattr(torch._C, "_cuda_getCurrentRawStream", None)
            return int(torch.cuda.current_stream(x.device).cuda_stream if raw is None else raw(self.number))
        return int(sys.modules["cupy"].cuda.get_current_stream(self.number).ptr)

    def capturing(self, stream: int) -> bool:
        """Whether what is queued on the stream goes into a CUDA graph."""
        status = c_int()
        self._call("cuStreamIsCapturing", c_void_p(stream), byref(status))
        return bool(status.value)

    def address(self, x: Array) -> int:
        """Where an array's elements begin."""
        # called for every array of every message: no checks
        return int(x.data_ptr() if hasattr(x, "data_ptr") else x.data.ptr)

    def record(self, stream: int) -> Event:
        """A point after everything that was queued on the stream so far."""
        try:
            found = Event(self.spare.pop(), self)
        except IndexError:
            event = c_void_p()
            self._call("cuEventCreate", byref(event), c_uint(_NO_TIMING))
            found = Event(event.value or 0, self)
        code = self._record(found.address, stream)
        if code:
            raise DriverError(f"cuEventRecord gave error {code}")
        return found

    def follow(self, stream: int, event: Event) -> None:
        """What is queued on the stream from now on waits for the event."""
        code = self._follow(stream, event.address, 0)
        if code:
            raise DriverError(f"cuStreamWaitEvent gave error {code}")

    def passed(self, event: Event) -> bool:
        """Whether the event has come."""
        with self.active:
            code = self._query(event.address)
        if code not in (0, _NOT_READY):
            raise DriverError(f"cuEventQuery gave error {code}")
        return bool(code == 0)
