"""Copies of features between their home device and the device that computes, overlapped with its work.

On CUDA each direction has its own stream and page-locked memory, and the host waits only at the end of a pass. Features
at home on the computing device, and a CPU as computing device, use the same code.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Queue:
    """A queue of work that runs in order. This class runs it on the host: every copy is done when it returns."""

    def copy(self, source: Tensor, target: Tensor) -> None:
        """Queue a copy; neither tensor's memory is reused before the copy is done."""
        target.copy_(source)

    def wait(self, event: Any) -> None:
        """Make later work wait for the event; None is an event that has happened."""

    def record(self) -> Any:
        """An event that happens when all work queued until now is done."""
        return None


class _Stream(Queue):
    """A CUDA stream."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def copy(self, source: Tensor, target: Tensor) -> None:
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
        for tensor in (source, target):
            # otherwise the pool of another stream would reuse the memory as soon as nobody holds the tensor; torch's
            # pool of page-locked memory tracks the copy itself
            if tensor.is_cuda:
                tensor.record_stream(self._stream)

    def wait(self, event: Any) -> None:
        if event is not None:
            self._stream.wait_event(event)

    def record(self) -> Any:
        return self._stream.record_event()


def queues(device: torch.device) -> tuple[Queue, Queue, Queue]:
    """The queues of a device: its current stream, copies to the device, copies from the device."""
    if device.type != "cuda":
        return Queue(), Queue(), Queue()
    copies: Any = torch.cuda.Stream
    return _Stream(torch.cuda.current_stream(device)), _Stream(copies(device)), _Stream(copies(device))


class Pinned:
    """Page-locked memory for one tensor at a time, reused once that tensor has been copied."""

    def __init__(self) -> None:
        self._memory: Tensor | None = None
        self._sent: Any = None

    def hold(self, x: Tensor) -> Tensor:
        """X itself if the device can fetch it asynchronously; else a copy in page-locked memory.

        The host waits until the tensor held before has been copied.
        """
        if x.device.type != "cpu" or (x.is_contiguous() and x.is_pinned()):
            return x
        if self._sent is not None:
            self._sent.synchronize()
        if self._memory is None or len(self._memory) < len(x):
            self._memory = torch.empty(x.shape, dtype=x.dtype, device="cpu", pin_memory=True)
        return self._memory[: len(x)].copy_(x)

    def sent(self, event: Any) -> None:
        """Set the event that ends the copy of the held tensor."""
        self._sent = event


class Buffer:
    """Memory for some rows of a matrix on the device.

    Attributes:
        memory: all rows.
        rows: the number of rows in use.
        loaded: the event after which the rows in use are loaded.
        stored: the event after which the rows last stored from the buffer may be overwritten.
        pinned: page-locked memory, through which rows are loaded that are not page-locked.
    """

    def __init__(self, memory: Tensor) -> None:
        self.memory, self.rows = memory, 0
        self.loaded: Any = None
        self.stored: Any = None
        self.pinned = Pinned()


class Staging:
    """The copies of one pass between ``home`` and ``device``; the device's current stream does the work.

    A load waits for the work and the stores queued before it, so that a buffer in use may be loaded again; a store
    waits for the work queued before it.
    """

    def __init__(self, device: torch.device, home: torch.device) -> None:
        self.device, self.home = device, home
        self._work, self._loads, self._stores = queues(device)

    def buffer(self, rows: int, width: int, dtype: str) -> Buffer:
        """A buffer on the device."""
        return Buffer(torch.empty((rows, width), dtype=getattr(torch, dtype), device=self.device))

    def kept(self, like: Tensor, dtype: str) -> Tensor:
        """Uninitialised memory of a matrix's shape at home, page-locked on the host of a CUDA device."""
        pinned = self.device.type == "cuda" and self.home.type == "cpu"
        return torch.empty(like.shape, dtype=getattr(torch, dtype), device=self.home, pin_memory=pinned)

    def load(self, source: Tensor, buffer: Buffer) -> None:
        """Start to copy rows from home into a buffer."""
        self._loads.wait(self._work.record())
        self._loads.wait(self._stores.record())
        pinned = buffer.pinned.hold(source) if self.device.type == "cuda" else source
        self._loads.copy(pinned, buffer.memory[: len(source)])
        buffer.rows, buffer.loaded = len(source), self._loads.record()
        buffer.pinned.sent(buffer.loaded)

    def arrived(self, buffer: Buffer) -> Tensor:
        """The rows in a buffer; work that is queued later waits until they are loaded."""
        self._work.wait(buffer.loaded)
        return buffer.memory[: buffer.rows]

    def zeros(self, rows: int, buffer: Buffer) -> Tensor:
        """Rows of zeros in a buffer, for the work."""
        self._work.wait(buffer.stored)
        buffer.rows = rows
        return buffer.memory[:rows].zero_()

    def store(self, x: Tensor, target: Tensor, buffer: Buffer | None = None) -> None:
        """Start to copy x home; x may be in the memory of the buffer."""
        self._stores.wait(self._work.record())
        self._stores.copy(x, target)
        if buffer is not None:
            buffer.stored = self._stores.record()

    def synchronize(self) -> None:
        """Make stored rows visible to the current stream, and to the host if they are kept there."""
        done = self._stores.record()
        self._work.wait(done)
        if self.home != self.device and done is not None:
            done.synchronize()
