"""The exchange over CuPy's NCCL: device to device without torch, brought up over messages of the host.

CuPy arrays and torch tensors on GPUs, on a stream of its own: it waits for what the current stream has queued when a
message is posted, and the current stream waits for it when the message is waited for.
"""

from __future__ import annotations

import json
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from contrastile.backends import crossing
from contrastile.backends.arrays import library_of
from contrastile.backends.contract import Array
from contrastile.exchange.communicator import Pending
from contrastile.exchange.copies import CopyChannel
from contrastile.exchange.driver import Gpu, bystander
from contrastile.exchange.peers import Channel, Parts, Peers
from contrastile.exchange.watch import Flight, Watch


def channel(peers: Peers, like: Array) -> Channel | None:
    """NCCL between the GPUs of all ranks, and copies; None where a rank lacks NCCL, or two share a GPU.

    Every rank calls this at the same message, and they decide together.

    Args:
        peers: the ranks, who can talk to each other on the host.
        like: an array on this rank's GPU.
    """
    number = int(library_of(like).place(like).rpartition(":")[2])
    here = _gpu(number) if _has_nccl() else ""
    everywhere = [json.loads(x) for x in peers.tell(json.dumps([socket.gethostname(), here]))]
    if any(not bus for _, bus in everywhere) or len({tuple(x) for x in everywhere}) < peers.size:
        return None
    import cupy

    own = cupy.cuda.nccl.get_unique_id()
    key = type(own)(json.loads(peers.tell(json.dumps(list(own)))[0]))
    watch = Watch(lambda: peers.deadline, begin=bystander)
    connected = False
    watch.add(Flight(lambda: True, lambda: connected, tuple(range(peers.size))))
    with cupy.cuda.Device(number):
        communicator = cupy.cuda.nccl.NcclCommunicator(peers.size, key, peers.rank)
        # the highest priority: a transfer starts before a kernel queued behind it takes every multiprocessor
        stream = cupy.cuda.Stream(non_blocking=True, priority=-5)
    connected = True
    sending = NCCLChannel(communicator, stream, number, watch)
    return CopyChannel(sending, watch, peers.rank, peers.size, peers.tell, lambda: Gpu(number))


def _has_nccl() -> bool:
    if find_spec("cupy") is None:
        return False
    with suppress(ImportError):
        from cupy.cuda import nccl

        return bool(getattr(nccl, "available", True))
    return False


def _gpu(number: int) -> str:
    """The place of a GPU in its host."""
    import cupy

    return str(cupy.cuda.Device(number).pci_bus_id)


@dataclass(slots=True, eq=False)
class NCCLChannel:
    """Arrays on GPUs, all of a message in one NCCL group call.

    Attributes:
        communicator: CuPy's.
        stream: where the transfers run.
        device: this rank's GPU.
        watch: raises where the host may, and ends the process where it cannot.
    """

    communicator: Any
    stream: Any
    device: int
    watch: Watch

    name = "cupy nccl"

    def post(self, outgoing: Parts, incoming: Parts, number: int, seconds: Callable[[], float]) -> Pending:
        import cupy
        from cupy.cuda import nccl

        like = next(x for xs in (*outgoing.values(), *incoming.values()) for x in xs)
        now = _current(cupy, like, self.device)
        captured = bool(cupy.cuda.runtime.streamIsCapturing(now.ptr))
        if not captured:
            self.watch.admit()
        with cupy.cuda.Device(self.device):
            ready, done = (cupy.cuda.Event(disable_timing=True) for _ in range(2))
            ready.record(now)
            self.stream.wait_event(ready)
            nccl.groupStart()
            for call, parts in ((self.communicator.recv, incoming), (self.communicator.send, outgoing)):
                for rank, xs in parts.items():
                    for x in xs:
                        call(_address(x), int(x.nbytes), nccl.NCCL_UINT8, rank, self.stream.ptr)
            nccl.groupEnd()
            done.record(self.stream)
        ranks = tuple(sorted({*outgoing, *incoming}))
        if captured:
            # its events say nothing of any replay, and asking them is an error
            return _Queued(done, like, self.device, (outgoing, incoming))
        self.watch.add(Flight(lambda: ready.done, lambda: done.done, ranks, (outgoing, incoming)))
        return _Queued(done, like, self.device)

    def prepare(self, size: int) -> bool:
        return False

    def give_up(self, waited_for: Sequence[int], seconds: float) -> Mapping[int, Sequence[int]]:
        return {}

    def close(self) -> None:
        self.watch.close()
        self.communicator.abort()


@dataclass(slots=True, eq=False)
class _Queued:
    """A transfer that the current stream waits for."""

    done: Any
    like: Array
    device: int
    held: object = None

    def wait(self) -> None:
        import cupy

        _current(cupy, self.like, self.device).wait_event(self.done)
        self.held = None


def _current(cupy: Any, x: Array, device: int) -> Any:
    """The stream on which x's library works now, as CuPy's."""
    if library_of(x).name == "cupy":
        return cupy.cuda.get_current_stream(device)
    return crossing.current_of_torch(device, sys.modules["torch"], cupy)


def _address(x: Array) -> int:
    return int(x.data.ptr if library_of(x).name == "cupy" else x.data_ptr())
