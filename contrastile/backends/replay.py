# pyright: reportPrivateImportUsage=false, reportArgumentType=false
"""CUDA graphs for small problems, whose kernels take longer to launch than to run.

A call signature (shapes, dtypes, settings, stream) that repeats is captured, and replayed from then on: inputs are
copied to where the graph reads them, outputs to the caller's memory. The kernels and their order are the same, and so
are the bits. ``contrastile.autograd.steps`` does so for whole steps, ``operators`` for what a compiler calls.

Graphs of one stream share the memory between their kernels (``Pool``); it stays reserved, as do the inputs and outputs
of each graph: O(b d) bytes. At most ``MOST`` signatures are held, and CONTRASTILE_GRAPHS=0 has none captured.
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

MOST = 8
"""Signatures held; the least recently used is evicted first."""

WORTH = 4
"""A signature that is evicted before this many replays is never captured again: otherwise more signatures in turn than
are held would be captured for ever."""

_BEFORE = 2
"""Launched calls of a signature before one is captured."""

_KNOWN = 64
"""Call signatures that are counted."""

_log = logging.getLogger(__name__)
_sides: dict[Where, Any] = {}


def is_plain() -> bool:
    """Whether this call on a GPU is neither under capture nor in inference mode."""
    return (
        not torch.is_inference_mode_enabled()
        and not torch.cuda.is_current_stream_capturing()
        and hasattr(torch._C, "_cuda_getCurrentRawStream")
    )


def may_be_captured() -> bool:
    """``is_plain``, and graphs are not turned off."""
    return are_graphs_on() and is_plain()


def can_capture(x: Any) -> bool:
    """``may_be_captured``, and the tensor is on the current GPU."""
    return x.get_device() >= 0 and may_be_captured() and x.get_device() == torch.cuda.current_device()


_replays = itertools.count(1)


class Pool:
    """The memory that the graphs of one place share, and when each step of theirs was last replayed.

    A graph writes to memory that was free when it was captured, where a step that was captured later may leave what its
    gradients read: a replay of one step takes the gradients from all later ones.

    Attributes:
        memory: torch's name for it; None before the first capture.
        lock: held from the copies into a graph until those of its results. Backward passes take it in autograd's
            thread: never wait for one while holding it.
        latest: of each step, in the order of their captures, the number of its last replay.
    """

    def __init__(self) -> None:
        self.memory: Any = None
        self.lock = threading.Lock()
        self.latest: list[int] = []

    def add(self) -> int:
        """Another step: its place among them."""
        self.latest.append(0)
        return len(self.latest) - 1

    def replayed(self, step: int) -> int:
        """The number of a replay of this step, larger than those of all before it."""
        self.latest[step] = next(_replays)
        return self.latest[step]

    def has(self, step: int, number: int) -> bool:
        """Whether what this replay of a step has left is there still."""
        return max(self.latest[:step], default=0) < number


def record(where: Where, actions: Sequence[Callable[[], Tensors]], pool: Pool) -> tuple[list[Any], list[Tensors]]:
    """Capture each action in a graph of its own.

    Every action runs once before, so that nothing is loaded or compiled under capture.

    Args:
        where: device and stream. Graphs of one stream run one after the other, so they share temporary memory; not
            those of two, nor what libraries reserve for the stream that they are captured on.
        actions: each queues kernels on the current stream and gives tensors, which stay where they are.
        pool: the graphs' memory.

    Returns:
        The graphs, and what the captured actions gave.

    Raises:
        RuntimeError: something that was queued cannot be captured.
    """
    device, stream, *_ = where
    side = _sides.get((device, stream))
    if side is None:
        side = _sides[device, stream] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    graphs: list[Any] = []
    found: list[Tensors] = []
    current = torch.cuda.current_stream(device)
    side.wait_stream(current)
    try:
        with torch.cuda.stream(side):
            for action in actions:
                action()
            for action in actions:
                graph: Any = torch.cuda.CUDAGraph()
                shared = {} if pool.memory is None else {"pool": pool.memory}
                # other threads may go on allocating and synchronising
                graph.capture_begin(**shared, capture_error_mode="thread_local")
                try:
                    found.append(action())
                finally:
                    graph.capture_end()
                graphs.append(graph)
                pool.memory = graph.pool()
    finally:
        current.wait_stream(side)
    return graphs, found


class Captured:
    """The graphs of a call signature.

    Attributes:
        where: the device and the stream on which it is replayed.
        pool: their memory.
        places: where they read the tensors of a call; at first those of the call that is captured.
        replays: how many there were.
    """

    def __init__(self, where: Where, pool: Pool, tensors: Tensors) -> None:
        self.where, self.pool, self.replays = where, pool, 0
        self.places = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in tensors]
        self.copy(tensors)

    def copy(self, tensors: Tensors) -> None:
        """Fill the places."""
        for place, x in zip(self.places, tensors, strict=True):
            place.copy_(x.detach())


C = TypeVar("C", bound=Captured)


class Signatures(Generic[C]):
    """The call signatures that have been seen.

    Attributes:
        capturing: held while anything is captured: graphs of one stream are captured on one other.
        seen: how often each was called before it was captured; None where a capture failed or did not pay.
        captured: by call signature, the most recently used last.
    """

    capturing = threading.Lock()

    def __init__(self) -> None:
        self.seen: dict[Hashable, int | None] = {}
        self.captured: dict[Hashable, C] = {}
        self._counts = threading.Lock()

    def find(self, key: Hashable) -> tuple[C | None, bool]:
        """Its captured graphs, or None and whether they are due; counts this call."""
        with self._counts:
            found = self.captured.pop(key, None)
            if found is not None:
                self.captured[key] = found
                return found, False
            count = self.seen.pop(key, 0)
            self.seen[key] = None if count is None else count + 1
            if len(self.seen) > _KNOWN:
                del self.seen[next(iter(self.seen))]
            return None, count is not None and count >= _BEFORE

    def refuse(self, key: Hashable) -> None:
        """Launch it from now on."""
        with self._counts:
            self.captured.pop(key, None)
            self.seen[key] = None

    def capture(self, key: Hashable, where: Where, make: Callable[[Pool], C]) -> C | None:
        """The graphs that ``make`` captures in a pool of this place; None where it raises."""
        with self._counts:
            if len(self.captured) >= MOST:
                oldest = next(iter(self.captured))
                if self.captured.pop(oldest).replays < WORTH:
                    self.seen[oldest] = None
            # a pool is gone with the last graph that has it
            pool = next((x.pool for x in self.captured.values() if x.where == where), None) or Pool()
        try:
            found = make(pool)
        except RuntimeError as error:
            _log.debug("a call is not replayed: %s", error)
            self.refuse(key)
            return None
        with self._counts:
            self.seen.pop(key, None)
            self.captured[key] = found
        return found
