"""NCCL's own calls through ctypes, for arrays on GPUs of any library.

Through torch.distributed or CuPy a call costs the host several times as much. The library is the one that torch or CuPy
has loaded; the ranks connect by messages over the host. Transfers run on a stream of their own. When a message is
posted, that stream waits for the work queued on the current stream; ``wait`` makes the current stream wait for it.
"""

from __future__ import annotations

import ctypes
import json
from collections.abc import Callable
from contextlib import suppress
from ctypes import byref, c_char_p, c_int, c_size_t, c_void_p
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from contrastile.backends.arrays import library_of
from contrastile.backends.contract import Array
from contrastile.comm.communicator import Parts, Posted
from contrastile.comm.driver import DriverError, Event, Gpu, relaxed_capture
from contrastile.comm.point_to_point import Channel, PointToPoint, host_name
from contrastile.comm.watchdog import InFlight, Watchdog

_NAME = "libnccl.so.2"
_BYTES = 1
_KEY = 128


class NCCLError(RuntimeError):
    """A call of NCCL failed."""


class _Key(ctypes.Structure):
    _fields_ = [("content", ctypes.c_byte * _KEY)]


class NCCL:
    """NCCL's calls. Communicators, streams and addresses are numbers.

    Raises:
        NCCLError: the library cannot be loaded in this process, or it lacks a function.
    """

    def __init__(self) -> None:
        try:
            self._nccl: Any = _library()
            self._nccl.ncclGetErrorString.restype = c_char_p
            self._send, self._receive = self._nccl.ncclSend, self._nccl.ncclRecv
            for call in (self._send, self._receive):
                # typed arguments save conversions by the interpreter, which cost more than the call
                call.argtypes = (c_void_p, c_size_t, c_int, c_int, c_void_p, c_void_p)
        except (OSError, AttributeError) as error:
            raise NCCLError(f"no NCCL: {error}") from error

    def _check(self, name: str, code: int) -> None:
        if code:
            text = self._nccl.ncclGetErrorString(c_int(code))
            raise NCCLError(f"{name}: {text.decode() if isinstance(text, bytes) else code}")

    def key(self) -> bytes:
        """The unique id that the ranks of a new communicator share."""
        key = _Key()
        self._check("ncclGetUniqueId", self._nccl.ncclGetUniqueId(byref(key)))
        return bytes(key.content)

    def connect(self, key: bytes, rank: int, size: int) -> int:
        """A new communicator on the thread's current GPU; it waits for the other ranks."""
        handle = c_void_p()
        unique_id = _Key((ctypes.c_byte * _KEY).from_buffer_copy(key))
        self._check("ncclCommInitRank", self._nccl.ncclCommInitRank(byref(handle), c_int(size), unique_id, c_int(rank)))
        return handle.value or 0

    def exchange(
        self, communicator: int, stream: int, outgoing: Parts, incoming: Parts, address_of: Callable[[Array], int]
    ) -> None:
        """Queue a message on a stream; ``address_of`` returns an array's address."""
        # get each address once, because an array may go to several ranks
        arrays = {id(x): x for parts in (outgoing, incoming) for xs in parts.values() for x in xs}
        spans = {identity: (address_of(x), x.nbytes) for identity, x in arrays.items()}
        self._check("ncclGroupStart", self._nccl.ncclGroupStart())
        codes = [
            call(*spans[id(x)], _BYTES, rank, communicator, stream)
            for call, parts in ((self._receive, incoming), (self._send, outgoing))
            for rank, xs in parts.items()
            for x in xs
        ]
        code = self._nccl.ncclGroupEnd()
        self._check("a message", max(codes) or code)

    def abort(self, communicator: int) -> None:
        self._check("ncclCommAbort", self._nccl.ncclCommAbort(c_void_p(communicator)))


def _library() -> Any:
    """The library that torch has loaded, or the one that CuPy was installed with."""
    with suppress(OSError):
        return ctypes.CDLL(_NAME)
    if find_spec("cupy") is not None:
        with suppress(ImportError):
            # importing it loads the library that CuPy was installed with
            import cupy.cuda.nccl  # noqa: F401
    return ctypes.CDLL(_NAME)


def channel(group: PointToPoint, like: Array) -> Channel | None:
    """NCCL between the GPUs of all ranks; None if a rank lacks NCCL, or two ranks share a GPU.

    Every rank calls this at the same message, with an array on its GPU, and the ranks decide together.
    """
    gpu_number = int(library_of(like).place(like).rpartition(":")[2])
    place, key, local = "", "", None
    with suppress(NCCLError, DriverError):
        nccl, gpu = NCCL(), Gpu(gpu_number)
        key = nccl.key().hex() if group.rank == 0 else ""
        place, local = gpu.place(), (nccl, gpu)
    answers = [json.loads(x) for x in group.tell(json.dumps([host_name(), place, key]))]
    places = {(x, y) for x, y, _ in answers}
    if local is None or not all(place for _, place in places) or len(places) < group.size:
        return None
    nccl, gpu = local
    watchdog = Watchdog(lambda: group.deadline, begin=relaxed_capture)
    connected = False
    watchdog.add(InFlight(lambda: True, lambda: connected, tuple(range(group.size))))
    with gpu.active:
        communicator = nccl.connect(bytes.fromhex(answers[0][2]), group.rank, group.size)
        # highest priority: a transfer starts before a kernel that is queued after it takes every multiprocessor
        stream = gpu.stream()
    connected = True
    return NCCLChannel(nccl, communicator, gpu, stream, watchdog)


@dataclass(slots=True, eq=False)
class NCCLChannel:
    """Arrays on GPUs; all arrays of a message are sent in one NCCL group call."""

    nccl: NCCL
    communicator: int
    gpu: Gpu
    stream: int
    watchdog: Watchdog
    _captured: bool = False

    name = "nccl"

    def post(self, outgoing: Parts, incoming: Parts, number: int, seconds: Callable[[], float]) -> Posted:
        gpu = self.gpu
        like = next(x for xs in (*outgoing.values(), *incoming.values()) for x in xs)

        def queue(ready: Event) -> Event:
            gpu.follow(self.stream, ready)
            self.nccl.exchange(self.communicator, self.stream, outgoing, incoming, gpu.address)
            return gpu.record(self.stream)

        ranks = tuple(sorted({*outgoing, *incoming}))
        end, message = self._watched(queue, like, ranks, (outgoing, incoming))

        def wait() -> None:
            with gpu.active:
                gpu.follow(gpu.current(like), end)
            # from now on stream order prevents an early reuse of the arrays' memory
            message.held = None

        return Posted(wait)

    def replay(self, graph: Any, like: Array, ranks: tuple[int, ...]) -> None:
        """Queue the replay of a graph with messages to and from these ranks; ``like`` is an array on the GPU."""
        gpu = self.gpu

        def queue(_: Event) -> Event:
            graph.replay()
            return gpu.record(gpu.current(like))

        self._watched(queue, like, ranks)

    def _watched(
        self, queue: Callable[[Event], Event], like: Array, ranks: tuple[int, ...], held: object = None
    ) -> tuple[Event, InFlight]:
        """Call ``queue(ready)``, with an event after the current work; returns its end event and the message."""
        gpu = self.gpu
        with gpu.active:
            current = gpu.current(like)
            is_capturing = gpu.capturing(current)
            self._captured |= is_capturing
            if not is_capturing:
                self.watchdog.admit()
            ready, end_events = gpu.record(current), list[Event]()

            def has_arrived() -> bool:
                # a failed transfer never arrives
                with suppress(DriverError):
                    return bool(end_events) and gpu.passed(end_events[0])
                return False

            message = InFlight(lambda: gpu.passed(ready), has_arrived, ranks, held)
            if not is_capturing:
                # watch before the call queues anything: in it, a pair's first message waits for the other rank.
                # A captured message has no events to watch: they tell nothing of a replay, and querying one fails
                self.watchdog.add(message)
            end_events.append(queue(ready))
        return end_events[0], message

    def close(self) -> None:
        self.watchdog.close()
        if not self._captured:
            # otherwise NCCL would wait until all graphs with this communicator's messages are deleted
            self.nccl.abort(self.communicator)
