"""A communicator from messages between pairs of ranks, written once for MPI and torch.distributed.

An engine provides a channel for the host, and may provide one for the device; without one, arrays on a device travel
through pinned host memory. Messages between pairs let a missing rank be named, which no engine's collective does. The
schedules add up in the order of the ranks, which no engine's reduction promises.
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
"""Messages are numbered below this: MPI promises tags up to the next number but one."""
FRAMES = NUMBERS
"""The number of every message with frames, which have one size and arrive in order."""


class Channel(Protocol):
    """Carries arrays between pairs of ranks, in order; a channel of the host carries vectors of bytes."""

    @property
    def name(self) -> str: ...

    def post(self, outgoing: Parts, incoming: Parts, number: int, seconds: Callable[[], float]) -> Pending:
        """Send and receive by rank; never this rank's own, never an array of size 0.

        Args:
            outgoing: by receiver.
            incoming: by sender.
            number: of this message, the same on every rank.
            seconds: how long its ``wait`` waits.

        Raises:
            PeerTimeout: a rank is gone; so does ``wait`` of what it returns, also when a rank did not answer.
            Conflict: from ``wait``: more or fewer bytes came than were expected, where the engine can see that.
        """
        ...

    def close(self) -> None: ...


class HostChannel(Channel, Protocol):
    """A channel of the host, over which ranks that give up can still tell each other so."""

    def abort(self, notice: AbortNotice, seconds: float) -> Mapping[int, AbortNotice]:
        """Tell the others whom this rank waited for, and where; collect their notices for so long, by rank."""
        ...


class PointToPoint(Communicator):
    """A communicator over channels.

    Attributes:
        host: carries arrays on the host, None in a world of one.
        on_device: makes the channel of arrays on a device, given one of them; None to send them through the host.
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
        """Learn where the ranks are; those of one host share memory for their frames from then on."""
        self.hosts = hosts
        self._board = board.opened(self.rank, self.size, self.tell) if len(hosts) == 1 else None

    def gather_bytes(self, own: bytes) -> list[bytes]:
        if self._board is not None and len(own) <= board.ROOM:
            return self._board.gather(own, self._seconds())
        import numpy as np

        others = [r for r in range(self.size) if r != self.rank]
        arrived = {r: [np.zeros(len(own), np.uint8)] for r in others}
        if self.host is not None:
            mine = np.frombuffer(own, np.uint8)
            self.host.post({r: [mine] for r in others}, arrived, FRAMES, self._seconds).wait()
        return [own if r == self.rank else arrived[r][0].tobytes() for r in range(self.size)]

    def post(self, outgoing: Parts, incoming: Parts) -> Pending | None:
        if self.host is None:
            return None
        like = next((x for xs in (*outgoing.values(), *incoming.values()) for x in xs), None)
        if like is None:
            return None
        on_device = library_of(like).device(like) != "cpu"
        channel = self._for_device(self.host, like) if on_device else self.host
        outgoing, incoming = self.others(outgoing), self.others(incoming)
        if not (outgoing or incoming):
            return None
        number = self.calls.messages % NUMBERS
        if channel is not self.host:
            return channel.post(outgoing, incoming, number, self._seconds)
        outgoing, incoming, arrived = _on_host(outgoing, incoming, on_device)
        pending = channel.post(outgoing, incoming, number, self._seconds)

        def wait() -> None:
            pending.wait()
            arrived()

        return Posted(wait)

    @property
    def captures(self) -> bool:
        # only a channel whose messages a graph holds replays one
        return super().captures or hasattr(self._device, "replay")

    def _replay(self, graph: Any, like: Array) -> None:
        if self.size == 1:
            super()._replay(graph, like)
        else:
            device: Any = self._device
            device.replay(graph, like, tuple(r for r in range(self.size) if r != self.rank))

    def _for_device(self, host: Channel, like: Array) -> Channel:
        """The channel of arrays on a device; made at the first such message, which is the same on every rank."""
        if self._device is None:
            self._device = (self.on_device and self.on_device(self, like)) or host
            self.name = self._device.name
        return self._device

    def _seconds(self) -> float:
        return watchdog.patience(self.deadline)

    def explain(self, error: Conflict | PeerTimeout) -> str:
        if isinstance(error, Conflict):
            # every rank sees it: none waits for another
            return super().explain(error)
        assert self.host is not None
        notice = AbortNotice(error.ranks, str(self.calls.label))
        notices = {**self.host.abort(notice, watchdog.grace(self.deadline)), self.rank: notice}
        return watchdog.describe(error, notices, self.deadline, self.global_ranks)

    def close(self) -> None:
        super().close()
        for channel in {id(x): x for x in (self.host, self._device) if x is not None}.values():
            channel.close()


def _on_host(outgoing: Parts, incoming: Parts, on_device: bool) -> tuple[Parts, Parts, Callable[[], None]]:
    """The bytes to send and to receive (pinned copies for arrays on a device), and what copies them back."""
    if not on_device:
        return _raw(outgoing), _raw(incoming), lambda: None
    # what goes to several ranks leaves the device once
    leaving = {id(x): x for xs in outgoing.values() for x in xs}
    copies = dict(zip(leaving, buffers.to_host(list(leaving.values())), strict=True))
    landings = {r: [buffers.from_host(x) for x in xs] for r, xs in incoming.items()}

    def arrived() -> None:
        for xs in landings.values():
            for _, copy_back in xs:
                copy_back()

    sent = {r: [copies[id(x)] for x in xs] for r, xs in outgoing.items()}
    return _raw(sent), _raw({r: [host for host, _ in xs] for r, xs in landings.items()}), arrived


def _raw(parts: Parts) -> Parts:
    return {r: [buffers.raw(x) for x in xs] for r, xs in parts.items()}


def host_name() -> str:
    """A name of this host, unique where several share a host name."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return f"{socket.gethostname()} {boot.read_text(encoding='ascii').strip() if boot.exists() else ''}"


def met(tell: Callable[[str], Sequence[str]], error: str, global_ranks: Sequence[int]) -> Hosts:
    """The ranks of each host, from what all ranks tell each other while they connect.

    Raises:
        MismatchError: some rank has told of an error; the same on every rank.
    """
    told = [json.loads(text) for text in tell(json.dumps([error, host_name()]))]
    for rank, (text, _) in zip(global_ranks, told, strict=True):
        if text:
            raise MismatchError(f"rank {rank}: {text}")
    return hosts_of([name for _, name in told])
