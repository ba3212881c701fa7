"""A communicator from messages between pairs of ranks, written once for MPI and torch.distributed.

An engine provides a channel for the host, and may provide one for the device; without the latter, arrays on a device
travel through pinned host memory. Messages between pairs identify a missing rank; no engine's collectives do. The
schedules add in the order of the ranks, which no engine's reduction guarantees.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from contrastile.backends.arrays import library_of
from contrastile.backends.contract import Array
from contrastile.comm import board, buffers, watchdog
from contrastile.comm.calls import Conflict
from contrastile.comm.communicator import Communicator, Hosts, MismatchError, Parts, Pending, Posted, hosts_of
from contrastile.comm.watchdog import AbortNotice, PeerTimeout

NUMBERS = 32766
"""Message numbers are below this, because MPI guarantees tags only up to 32767, and two more are in use."""
FRAMES = NUMBERS
"""The number of all messages with frames, which have one size and arrive in order."""


class Channel(Protocol):
    """Carries arrays between pairs of ranks, in order; a host channel carries vectors of bytes."""

    @property
    def name(self) -> str: ...

    def post(self, outgoing: Parts, incoming: Parts, number: int, seconds: Callable[[], float]) -> Pending:
        """Send and receive arrays of other ranks, none of size 0.

        Args:
            outgoing: arrays by receiver.
            incoming: arrays by sender.
            number: the number of this message, the same on every rank.
            seconds: returns how long ``wait`` waits.

        Raises:
            PeerTimeout: a rank is gone; ``wait`` raises it too, and also if a rank did not answer.
            Conflict: from ``wait``: more or fewer bytes arrived than expected, if the engine can detect it.
        """
        ...

    def close(self) -> None: ...


class HostChannel(Channel, Protocol):
    """A host channel, over which a rank that gives up can still notify the others."""

    def abort(self, notice: AbortNotice, seconds: float) -> Mapping[int, AbortNotice]:
        """Send this rank's notice to the others; collect theirs for so many seconds; returns them by rank."""
        ...


class PointToPoint(Communicator):
    """A communicator over channels.

    Attributes:
        host: the channel for arrays on the host; None in a world of one.
        on_device: makes the channel for arrays on a device from one of them; None to send them through the host.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        deadline: float,
        host: HostChannel | None,
        on_device: Callable[[PointToPoint, Array], Channel | None] | None = None,
        global_ranks: Sequence[int] = (),
    ) -> None:
        super().__init__(rank, size, deadline)
        self.name = "alone" if host is None else host.name
        self.host, self.on_device = host, on_device
        self.global_ranks = global_ranks or self.global_ranks
        self._device: Channel | None = None
        self._board: board.Board | None = None

    def meet(self, hosts: Hosts) -> None:
        """Set the hosts; if all ranks are on one, their frames go through shared memory from now on."""
        self.hosts = hosts
        self._board = board.opened(self.rank, self.size, self.tell) if len(hosts) == 1 else None

    def gather_bytes(self, own: bytes) -> list[bytes]:
        if self._board is not None and len(own) <= board.ROOM:
            return self._board.gather(own, self._seconds())
        import numpy as np

        others = [r for r in range(self.size) if r != self.rank]
        received = {r: [np.zeros(len(own), np.uint8)] for r in others}
        if self.host is not None:
            own_array = np.frombuffer(own, np.uint8)
            self.host.post({r: [own_array] for r in others}, received, FRAMES, self._seconds).wait()
        return [own if r == self.rank else received[r][0].tobytes() for r in range(self.size)]

    def post(self, outgoing: Parts, incoming: Parts) -> Pending | None:
        if self.host is None:
            return None
        like = next((x for xs in (*outgoing.values(), *incoming.values()) for x in xs), None)
        if like is None:
            return None
        is_on_device = library_of(like).device(like) != "cpu"
        channel = self._device_channel(self.host, like) if is_on_device else self.host
        outgoing, incoming = self.others(outgoing), self.others(incoming)
        if not (outgoing or incoming):
            return None
        number = self.calls.messages % NUMBERS
        if channel is not self.host:
            return channel.post(outgoing, incoming, number, self._seconds)
        outgoing, incoming, copy_back = _host_parts(outgoing, incoming, is_on_device)
        pending = channel.post(outgoing, incoming, number, self._seconds)

        def wait() -> None:
            pending.wait()
            copy_back()

        return Posted(wait)

    @property
    def captures(self) -> bool:
        # a channel has ``replay`` only if a graph can hold its messages
        return super().captures or hasattr(self._device, "replay")

    def _replay(self, graph: Any, like: Array) -> None:
        if self.size == 1:
            super()._replay(graph, like)
        else:
            device: Any = self._device
            device.replay(graph, like, tuple(r for r in range(self.size) if r != self.rank))

    def _device_channel(self, host: Channel, like: Array) -> Channel:
        """The channel for arrays on a device; made at the first such message, which is the same on every rank."""
        if self._device is None:
            self._device = (self.on_device and self.on_device(self, like)) or host
            self.name = self._device.name
        return self._device

    def _seconds(self) -> float:
        return watchdog.patience(self.deadline)

    def explain(self, error: Conflict | PeerTimeout) -> str:
        if isinstance(error, Conflict):
            # every rank detects it, so none waits for another
            return super().explain(error)
        assert self.host is not None
        notice = AbortNotice(error.ranks, str(self.calls.label))
        notices = {**self.host.abort(notice, watchdog.grace(self.deadline)), self.rank: notice}
        return watchdog.describe(error, notices, self.deadline, self.global_ranks)

    def close(self) -> None:
        super().close()
        for channel in {id(x): x for x in (self.host, self._device) if x is not None}.values():
            channel.close()


def _host_parts(outgoing: Parts, incoming: Parts, is_on_device: bool) -> tuple[Parts, Parts, Callable[[], None]]:
    """The bytes to send and to receive (pinned copies for arrays on a device), and a function that copies them back."""
    if not is_on_device:
        return _raw_parts(outgoing), _raw_parts(incoming), lambda: None
    # copy an array to the host once, even if it goes to several ranks
    arrays = {id(x): x for xs in outgoing.values() for x in xs}
    copies = dict(zip(arrays, buffers.to_host(list(arrays.values())), strict=True))
    received = {r: [buffers.from_host(x) for x in xs] for r, xs in incoming.items()}

    def copy_received() -> None:
        for xs in received.values():
            for _, copy_back in xs:
                copy_back()

    sent = {r: [copies[id(x)] for x in xs] for r, xs in outgoing.items()}
    return _raw_parts(sent), _raw_parts({r: [host for host, _ in xs] for r, xs in received.items()}), copy_received


def _raw_parts(parts: Parts) -> Parts:
    return {r: [buffers.raw(x) for x in xs] for r, xs in parts.items()}


def host_name() -> str:
    """A name of this host, unique even if several hosts share a host name."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return f"{socket.gethostname()} {boot.read_text(encoding='ascii').strip() if boot.exists() else ''}"


def met(tell: Callable[[str], Sequence[str]], error: str, global_ranks: Sequence[int]) -> Hosts:
    """The ranks of each host; all ranks exchange their errors and host names while they connect.

    Raises:
        MismatchError: some rank has an error; the same on every rank.
    """
    answers = [json.loads(text) for text in tell(json.dumps([error, host_name()]))]
    for rank, (text, _) in zip(global_ranks, answers, strict=True):
        if text:
            raise MismatchError(f"rank {rank}: {text}")
    return hosts_of([name for _, name in answers])
