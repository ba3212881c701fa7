"""The calls of the CUDA driver that transfers by NCCL need, through ctypes.

Since CUDA 12 the driver has one name and one interface for all array libraries. No function here allocates from a
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
    """Set relaxed mode: this thread's later calls do not invalidate a CUDA graph that another thread captures."""
    mode = c_int(_RELAXED)
    with suppress(OSError, AttributeError):
        _library().cuThreadExchangeStreamCaptureMode(byref(mode))


def _library() -> Any:
    return ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")


class Event:
    """A point in a stream; its handle is reused when nothing refers to the event any more."""

    __slots__ = ("_gpu", "address")

    def __init__(self, address: int, gpu: Gpu) -> None:
        self.address, self._gpu = address, gpu

    def __del__(self) -> None:
        # any thread may run this: a stream that waits for the event keeps the point at which it was recorded
        self._gpu.spare.append(self.address)


class _ContextScope:
    """While open, a GPU's context is the thread's current one."""

    __slots__ = ("_context", "_pop", "_push")

    def __init__(self, gpu: Gpu, context: c_void_p) -> None:
        self._context = context
        self._push, self._pop = gpu.function("cuCtxPushCurrent_v2"), gpu.function("cuCtxPopCurrent_v2")

    def __enter__(self) -> None:
        code = self._push(self._context)
        if code:
            raise DriverError(f"cuCtxPushCurrent_v2 gave error {code}")

    def __exit__(self, *_: object) -> None:
        self._pop(byref(c_void_p()))


class Gpu:
    """One GPU, as this process sees it. Streams and addresses are numbers; all calls are made inside ``active``.

    Attributes:
        active: a context manager, inside which the GPU's context is the thread's current one.

    Raises:
        DriverError: there is no driver, or it lacks a function.
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
        self.active: AbstractContextManager[None] = _ContextScope(self, self._context)
        self.spare: list[int] = []
        # called for every message: typed arguments save conversions by the interpreter, which cost more than a call
        self._record = self._typed("cuEventRecord", c_void_p, c_void_p)
        self._follow = self._typed("cuStreamWaitEvent", c_void_p, c_void_p, c_uint)
        self._query = self._typed("cuEventQuery", c_void_p)

    def _call(self, name: str, *arguments: Any) -> None:
        code = self.function(name)(*arguments)
        if code:
            raise DriverError(f"{name} gave error {code}")

    def _typed(self, name: str, *argument_types: Any) -> Any:
        """A function of the driver with argument types, which takes numbers."""
        function = self.function(name)
        function.argtypes = argument_types
        return function

    def function(self, name: str) -> Any:
        """A function of the driver."""
        try:
            return getattr(self._cuda, name)
        except AttributeError as error:
            raise DriverError(f"the CUDA driver has no {name}") from error

    def place(self) -> str:
        """The GPU's PCI bus address."""
        address_buffer, device = ctypes.create_string_buffer(32), c_int()
        self._call("cuDeviceGet", byref(device), self.number)
        self._call("cuDeviceGetPCIBusId", address_buffer, c_int(len(address_buffer)), device)
        return address_buffer.value.decode()

    def stream(self) -> int:
        """A new stream of the highest priority."""
        low, high, stream = c_int(), c_int(), c_void_p()
        self._call("cuCtxGetStreamPriorityRange", byref(low), byref(high))
        self._call("cuStreamCreateWithPriority", byref(stream), c_uint(_NON_BLOCKING), high)
        return stream.value or 0

    def current(self, x: Array) -> int:
        """The current stream of x's library."""
        if hasattr(x, "data_ptr"):
            torch = sys.modules["torch"]
            # get only the number if torch can, because a stream object costs the host several times as much
            raw = getattr(torch._C, "_cuda_getCurrentRawStream", None)
            return int(torch.cuda.current_stream(x.device).cuda_stream if raw is None else raw(self.number))
        return int(sys.modules["cupy"].cuda.get_current_stream(self.number).ptr)

    def capturing(self, stream: int) -> bool:
        """Whether the stream is being captured into a CUDA graph."""
        status = c_int()
        self._call("cuStreamIsCapturing", c_void_p(stream), byref(status))
        return bool(status.value)

    def address(self, x: Array) -> int:
        """The address of an array's first element."""
        # without checks, because it is called for every array of every message
        return int(x.data_ptr() if hasattr(x, "data_ptr") else x.data.ptr)

    def record(self, stream: int) -> Event:
        """An event after all work that has been queued on the stream so far."""
        try:
            event = Event(self.spare.pop(), self)
        except IndexError:
            handle = c_void_p()
            self._call("cuEventCreate", byref(handle), c_uint(_NO_TIMING))
            event = Event(handle.value or 0, self)
        code = self._record(event.address, stream)
        if code:
            raise DriverError(f"cuEventRecord gave error {code}")
        return event

    def follow(self, stream: int, event: Event) -> None:
        """Work that is queued on the stream from now on waits for the event."""
        code = self._follow(stream, event.address, 0)
        if code:
            raise DriverError(f"cuStreamWaitEvent gave error {code}")

    def passed(self, event: Event) -> bool:
        """Whether the stream has reached the event."""
        with self.active:
            code = self._query(event.address)
        if code not in (0, _NOT_READY):
            raise DriverError(f"cuEventQuery gave error {code}")
        return bool(code == 0)
