# pyright: reportPrivateImportUsage=false, reportArgumentType=false
"""CUDA graphs for small problems, whose kernels take longer to launch than to run.

A call signature (shapes, dtypes, settings, stream) that repeats is captured, and replayed from then on: inputs are
copied to the memory that the graph reads, outputs to the caller's memory. The kernels and their order are the same, and
so are the bits. ``contrastile.autograd.steps`` captures whole steps, ``operators`` the operators of compiled code.

Graphs of one stream share the memory between their kernels (``Pool``); it stays reserved, as do the inputs and outputs
of each graph and what it keeps for gradients. ``MOST`` and ``ROOM`` bound how many signatures are held;
CONTRASTILE_GRAPHS=0 turns capture off.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Generic, TypeVar

import torch

from contrastile.backends.settings import are_graphs_on

Tensors = Sequence[Any]
"""Tensors on one GPU; None stays None."""

Where = tuple[Any, ...]
"""A device, a stream and, over ranks, their communicator."""

MOST, ROOM = 64, 4 << 30
"""The most signatures that are held, and the bytes reserved by their captures from which on no more are."""

IDLE = 500
"""The number of calls of other signatures after which a held one gives its place to another, if there is no more room.
After fewer calls, too many signatures in turn would be captured again and again."""

_CALLS_BEFORE_CAPTURE = 2
"""Launched calls of a signature before a call is captured."""

_MAX_COUNTED = 256
"""Call signatures whose calls are counted."""

_log = logging.getLogger(__name__)
_capture_streams: dict[Where, Any] = {}


def is_plain() -> bool:
    """Whether this call on a GPU is neither under capture nor in inference mode."""
    return (
        not torch.is_inference_mode_enabled()
        and not torch.cuda.is_current_stream_capturing()
        and hasattr(torch._C, "_cuda_getCurrentRawStream")
    )


def may_be_captured() -> bool:
    """Whether this call ``is_plain`` and graphs are not turned off."""
    return are_graphs_on() and is_plain()


def can_capture(x: Any) -> bool:
    """Whether this call ``may_be_captured`` and the tensor is on the current GPU."""
    return x.get_device() >= 0 and may_be_captured() and x.get_device() == torch.cuda.current_device()


_replays = itertools.count(1)


class Pool:
    """The memory that the graphs of one place share, and when each of their steps was last replayed.

    A graph writes to memory that was free when it was captured. A step that was captured later may store there what its
    gradients read, so a replay of one step invalidates the gradients of all later ones.

    Attributes:
        memory: torch's handle of the memory pool; None before the first capture.
        lock: held from the copies into a graph until the copies of its results. Backward passes acquire it in
            autograd's thread: never wait for a backward pass while holding it.
        latest: the number of each step's last replay, in the order of the captures.
    """

    def __init__(self) -> None:
        self.memory: Any = None
        self.lock = threading.Lock()
        self.latest: list[int] = []

    def add(self) -> int:
        """Add a step, and return its index."""
        self.latest.append(0)
        return len(self.latest) - 1

    def replayed(self, step: int) -> int:
        """Record a replay of this step, and return its number, larger than those of all earlier replays."""
        self.latest[step] = next(_replays)
        return self.latest[step]

    def has(self, step: int, number: int) -> bool:
        """Whether the memory still holds what this replay of a step stored."""
        return max(self.latest[:step], default=0) < number


def record(where: Where, actions: Sequence[Callable[[], Tensors]], pool: Pool) -> tuple[list[Any], list[Tensors]]:
    """Capture each action in a graph of its own.

    Every action runs once before, so that nothing is loaded or compiled under capture.

    Args:
        where: device and stream. Graphs of one stream run one after the other, so they share temporary memory. Graphs
            of two streams do not share it, nor the memory that libraries reserve for the stream of the capture.
        actions: each queues kernels on the current stream and returns tensors, whose memory does not move.
        pool: the graphs' memory.

    Returns:
        The graphs, and the tensors that the captured actions returned.

    Raises:
        RuntimeError: a queued operation cannot be captured.
    """
    device, stream, *_ = where
    capture_stream = _capture_streams.get((device, stream))
    if capture_stream is None:
        capture_stream = _capture_streams[device, stream] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    graphs: list[Any] = []
    outputs: list[Tensors] = []
    current = torch.cuda.current_stream(device)
    capture_stream.wait_stream(current)
    try:
        with torch.cuda.stream(capture_stream):
            for action in actions:
                action()
            for action in actions:
                graph: Any = torch.cuda.CUDAGraph()
                pool_options = {} if pool.memory is None else {"pool": pool.memory}
                # other threads may go on allocating and synchronising
                graph.capture_begin(**pool_options, capture_error_mode="thread_local")
                try:
                    outputs.append(action())
                finally:
                    graph.capture_end()
                graphs.append(graph)
                pool.memory = graph.pool()
    finally:
        current.wait_stream(capture_stream)
    return graphs, outputs


class Captured:
    """The graphs of a call signature.

    Attributes:
        where: the device and the stream on which the graphs are replayed.
        pool: the graphs' memory.
        places: tensors that the graphs read; at first, copies of the tensors of the captured call.
        used: when it was last called, in calls of all signatures.
        reserved: the bytes that its capture has reserved, and those of the signatures whose place it has.
    """

    def __init__(self, where: Where, pool: Pool, tensors: Tensors) -> None:
        self.where, self.pool = where, pool
        self.used = self.reserved = 0
        self.places = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in tensors]
        self.copy(tensors)

    def copy(self, tensors: Tensors) -> None:
        """Copy a call's tensors to the places."""
        for place, x in zip(self.places, tensors, strict=True):
            place.copy_(x.detach())


C = TypeVar("C", bound=Captured)


class Signatures(Generic[C]):
    """The call signatures that have been seen.

    Attributes:
        capturing: held during a capture, because all graphs of a device and stream are captured on one other stream.
        seen: the number of calls of each signature before its capture; None where a capture failed.
        captured: by call signature, the most recently used last.
    """

    capturing = threading.Lock()

    def __init__(self) -> None:
        self.seen: dict[Hashable, int | None] = {}
        self.captured: dict[Hashable, C] = {}
        self._calls = 0
        self._counts = threading.Lock()

    def find(self, key: Hashable) -> tuple[C | None, bool]:
        """The captured graphs of a signature, or None and whether to capture now; counts this call."""
        with self._counts:
            self._calls += 1
            captured = self.captured.pop(key, None)
            if captured is not None:
                captured.used = self._calls
                self.captured[key] = captured
                return captured, False
            count = self.seen.pop(key, 0)
            self.seen[key] = None if count is None else count + 1
            if len(self.seen) > _MAX_COUNTED:
                del self.seen[next(iter(self.seen))]
            is_due = count is not None and count >= _CALLS_BEFORE_CAPTURE
            return None, is_due and (not self._is_full() or self._has_idle())

    def _is_full(self) -> bool:
        return len(self.captured) >= MOST or sum(x.reserved for x in self.captured.values()) >= ROOM

    def _has_idle(self) -> bool:
        return next(iter(self.captured.values())).used + IDLE <= self._calls

    def refuse(self, key: Hashable) -> None:
        """Launch the calls of this signature from now on."""
        with self._counts:
            self.captured.pop(key, None)
            self.seen[key] = None

    def capture(self, key: Hashable, where: Where, make: Callable[[Pool], C]) -> C | None:
        """The graphs that ``make`` captures in the pool of this place; None where it raises."""
        with self._counts:
            # the pool of an evicted signature keeps its memory, and gives it to later captures
            evicted = self.captured.pop(next(iter(self.captured))).reserved if self._is_full() else 0
            # a pool is freed with the last graph that holds it
            pool = next((x.pool for x in self.captured.values() if x.where == where), None) or Pool()
        before = torch.cuda.memory_reserved(where[0])
        try:
            captured = make(pool)
        except RuntimeError as error:
            _log.debug("a call is not replayed: %s", error)
            self.refuse(key)
            return None
        captured.reserved = evicted + max(torch.cuda.memory_reserved(where[0]) - before, 0)
        with self._counts:
            captured.used = self._calls
            self.seen.pop(key, None)
            self.captured[key] = captured
        return captured
