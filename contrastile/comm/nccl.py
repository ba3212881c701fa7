"""NCCL's own calls through ctypes, for arrays on GPUs of any library.

torch.distributed and CuPy cost the host several times what the calls themselves do. The library is the one that torch
or CuPy has loaded; the ranks connect it by messages over the host. Transfers run on a stream of their own. It waits for
what the current stream has queued when a message is posted; waiting for a message makes the current stream wait.
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
    """NCCL's calls. A communicator is a number, and so are streams and addresses.

    Raises:
        NCCLError: there is no such library in this process, or it lacks a call.
    """

    def __init__(self) -> None:
        try:
            self._nccl: Any = _library()
            self._nccl.ncclGetErrorString.restype = c_char_p
            self._send, self._receive = self._nccl.ncclSend, self._nccl.ncclRecv
            for call in (self._send, self._receive):
                # conversions by the interpreter would cost more than the call
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
        """A communicator on the thread's current GPU; it waits for the other ranks."""
        found = c_void_p()
        given = _Key((ctypes.c_byte * _KEY).from_buffer_copy(key))
        self._check("ncclCommInitRank", self._nccl.ncclCommInitRank(byref(found), c_int(size), given, c_int(rank)))
        return found.value or 0

    def exchange(
        self, communicator: int, stream: int, outgoing: Parts, incoming: Parts, at: Callable[[Array], int]
    ) -> None:
        """Queue a message on a stream; ``at`` returns an array's address."""
        # an array may go to several ranks: look its address up once
        every = {id(x): x for parts in (outgoing, incoming) for xs in parts.values() for x in xs}
        spans = {key: (at(x), x.nbytes) for key, x in every.items()}
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
            # CuPy knows where its library is
            import cupy.cuda.nccl  # noqa: F401
    return ctypes.CDLL(_NAME)


def channel(group: PointToPoint, like: Array) -> Channel | None:
    """NCCL between the GPUs of all ranks; None where a rank lacks NCCL, or two share a GPU.

    Every rank calls this at the same message, with an array on its GPU, and they decide together.
    """
    number = int(library_of(like).place(like).rpartition(":")[2])
    place, key, here = "", "", None
    with suppress(NCCLError, DriverError):
        nccl, gpu = NCCL(), Gpu(number)
        key = nccl.key().hex() if group.rank == 0 else ""
        place, here = gpu.place(), (nccl, gpu)
    everyone = [json.loads(x) for x in group.tell(json.dumps([host_name(), place, key]))]
    places = {(x, y) for x, y, _ in everyone}
    if here is None or not all(place for _, place in places) or len(places) < group.size:
        return None
    nccl, gpu = here
    watchdog = Watchdog(lambda: group.deadline, begin=relaxed_capture)
    connected = False
    watchdog.add(InFlight(lambda: True, lambda: connected, tuple(range(group.size))))
    with gpu.active:
        communicator = nccl.connect(bytes.fromhex(everyone[0][2]), group.rank, group.size)
        # of the highest priority: a transfer starts before a kernel queued behind it takes every multiprocessor
        stream = gpu.stream()
    connected = True
    return NCCLChannel(nccl, communicator, gpu, stream, watchdog)


@dataclass(slots=True, eq=False)
class NCCLChannel:
    """Arrays on GPUs, all of a message in one NCCL group call."""

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
            # from here on the order of the stream keeps the arrays' memory from being used too early
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
        """What ``queue`` queues after the event that it is given, and watches: where it ends, and its entry."""
        gpu = self.gpu
        with gpu.active:
            now = gpu.current(like)
            captured = gpu.capturing(now)
            self._captured |= captured
            if not captured:
                self.watchdog.admit()
            ready, ends = gpu.record(now), list[Event]()

            def arrived() -> bool:
                # a transfer that failed never has
                with suppress(DriverError):
                    return bool(ends) and gpu.passed(ends[0])
                return False

            message = InFlight(lambda: gpu.passed(ready), arrived, ranks, held)
            if not captured:
                # before anything is queued: pairs that meet for the first time wait for each other in the call.
                # Of a captured message the events say nothing of any replay, and asking them is an error
                self.watchdog.add(message)
            ends.append(queue(ready))
        return ends[0], message

    def close(self) -> None:
        self.watchdog.close()
        if not self._captured:
            # NCCL would wait until the graphs with this communicator's messages are deleted
            self.nccl.abort(self.communicator)
