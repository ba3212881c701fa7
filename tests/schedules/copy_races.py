"""A stand-in for a device whose copies run as late as possible and whose memory accesses are checked for races.

Each queue has a vector clock: it counts its own operations and holds the counts of other queues that it waited for. Two
accesses of the same memory by two queues, one of them a write, are a race unless the later queue's clock includes the
earlier access. A copy runs when the work queue or the host waits for it; until then its target holds NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from contrastile.backends import staging

Clock = dict[str, int]


class Access(NamedTuple):
    """An access of a queue to a range of addresses."""

    queue: str
    start: int
    stop: int
    writes: bool


@dataclass
class Device:
    """The queues of one device.

    Attributes:
        clocks: the vector clock of each queue.
        latest: for each storage, the last time of each access.
        pending: copies that nobody has waited for: the queue, its time, and the function that copies.
        log: copies and computed blocks, in the order in which they were queued.
        races: descriptions of accesses without an order.
        copied_tensors: kept alive, so that no other tensor gets their memory.
        is_copying: whether a copy runs, whose operations are no work of the device.
    """

    clocks: dict[str, Clock] = field(default_factory=dict)
    latest: dict[int, dict[Access, int]] = field(default_factory=dict)
    pending: list[tuple[str, int, Callable[[], Any]]] = field(default_factory=list)
    log: list[str] = field(default_factory=list)
    races: set[str] = field(default_factory=set)
    copied_tensors: list[Tensor] = field(default_factory=list)
    is_copying: bool = False

    def record_access(self, queue: str, x: Tensor, writes: bool) -> None:
        address, clock = x.data_ptr(), self.clocks[queue]
        access = Access(queue, address, address + x.numel() * x.element_size(), writes)
        times = self.latest.setdefault(x.untyped_storage().data_ptr(), {})
        for earlier, time in times.items():
            is_disjoint = earlier.queue == queue or earlier.stop <= access.start or access.stop <= earlier.start
            if not is_disjoint and (writes or earlier.writes) and clock.get(earlier.queue, 0) < time:
                self.races.add(f"{queue} {'writes' if writes else 'reads'}, {earlier.queue} uses")
        times[access] = clock[queue]

    def run_copies(self, clock: Clock) -> None:
        """Run the copies that a queue with this clock has waited for."""
        finished = [copy for copy in self.pending if copy[1] <= clock.get(copy[0], 0)]
        self.pending = [copy for copy in self.pending if copy not in finished]
        for _, _, run_copy in finished:
            self.run_unchecked(run_copy)

    def run_unchecked(self, action: Callable[[], Any]) -> None:
        self.is_copying = True
        action()
        self.is_copying = False


class Queue:
    """A queue of the device."""

    def __init__(self, device: Device, name: str) -> None:
        self.device, self.name, self.clock = device, name, device.clocks.setdefault(name, {name: 0})

    def copy(self, source: Tensor, target: Tensor) -> None:
        self.clock[self.name] += 1
        self.device.log.append(f"{self.name} {len(target)}")
        self.device.copied_tensors += [source, target]
        self.device.record_access(self.name, source, writes=False)
        self.device.record_access(self.name, target, writes=True)
        # the copy may begin as soon as the operations that its queue waited for are done
        self.device.run_copies(self.clock)
        self.device.run_unchecked(lambda: target.fill_(float("nan")))
        self.device.pending.append((self.name, self.clock[self.name], lambda: target.copy_(source)))

    def wait(self, event: Event | None) -> None:
        for name, time in () if event is None else event.clock.items():
            self.clock[name] = max(self.clock.get(name, 0), time)
        if self.name == "work":
            self.device.run_copies(self.clock)

    def record(self) -> Event:
        return Event(self.device, dict(self.clock))


@dataclass
class Event:
    device: Device
    clock: Clock

    def synchronize(self) -> None:
        self.device.run_copies(self.clock)


class Work(TorchDispatchMode):
    """While open, every operation of torch is work of the device."""

    def __init__(self, device: Device) -> None:
        super().__init__()
        self.device = device

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        device = self.device
        if not device.is_copying and not function.is_view and "work" in device.clocks:
            device.clocks["work"]["work"] += 1
            for argument, value in zip(function._schema.arguments, args, strict=False):
                writes = argument.alias_info is not None and argument.alias_info.is_write
                for x in tree_leaves(value):
                    if isinstance(x, Tensor) and x.numel():
                        device.record_access("work", x, writes)
        return function(*args, **(kwargs or {}))


@contextmanager
def late_copies() -> Iterator[Device]:
    """While open, every ``Staging`` copies on this device."""
    device = Device()

    def queues(_: torch.device) -> Any:
        return tuple(Queue(device, name) for name in ("work", "loads", "stores"))

    with mock.patch.object(staging, "queues", queues), Work(device):
        yield device
