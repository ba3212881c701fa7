"""A device whose copies run as late as they may, and on which every access of memory is checked for a race.

Each queue counts what it does and knows of the others what it has waited for. Two accesses of the same memory by two
queues, one of them a write, are a race unless the later one's queue knows that the earlier is done. A copy is made when
the work, or the host, waits for it; until then what it is to fill holds NaN.
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


class Range(NamedTuple):
    """Some memory, and how a queue uses it."""

    queue: str
    start: int
    stop: int
    writes: bool


@dataclass
class World:
    """The queues of one device.

    Attributes:
        clocks: of each queue, what it knows of all.
        latest: of each use of some storage, when it was last.
        pending: copies that nobody has waited for: queue, its time, the copy.
        log: copies and computed blocks, in the order in which they were queued.
        races: what was not ordered.
        held: what was copied; freed, its memory would be taken for its next owner's.
        busy: whether a copy is being made, which is no work.
    """

    clocks: dict[str, Clock] = field(default_factory=dict)
    latest: dict[int, dict[Range, int]] = field(default_factory=dict)
    pending: list[tuple[str, int, Callable[[], Any]]] = field(default_factory=list)
    log: list[str] = field(default_factory=list)
    races: set[str] = field(default_factory=set)
    held: list[Tensor] = field(default_factory=list)
    busy: bool = False

    def use(self, queue: str, x: Tensor, writes: bool) -> None:
        start, clock = x.data_ptr(), self.clocks[queue]
        mine = Range(queue, start, start + x.numel() * x.element_size(), writes)
        uses = self.latest.setdefault(x.untyped_storage().data_ptr(), {})
        for other, time in uses.items():
            apart = other.queue == queue or other.stop <= mine.start or mine.stop <= other.start
            if not apart and (writes or other.writes) and clock.get(other.queue, 0) < time:
                self.races.add(f"{queue} {'writes' if writes else 'reads'}, {other.queue} uses")
        uses[mine] = clock[queue]

    def reach(self, clock: Clock) -> None:
        """Make the copies that are done at these times."""
        due = [each for each in self.pending if each[1] <= clock.get(each[0], 0)]
        self.pending = [each for each in self.pending if each not in due]
        for _, _, copy in due:
            self.quietly(copy)

    def quietly(self, act: Callable[[], Any]) -> None:
        self.busy = True
        act()
        self.busy = False


class Queue:
    """One of them."""

    def __init__(self, world: World, name: str) -> None:
        self.world, self.name, self.clock = world, name, world.clocks.setdefault(name, {name: 0})

    def copy(self, source: Tensor, target: Tensor) -> None:
        self.clock[self.name] += 1
        self.world.log.append(f"{self.name} {len(target)}")
        self.world.held += [source, target]
        self.world.use(self.name, source, writes=False)
        self.world.use(self.name, target, writes=True)
        # it may begin as soon as what its queue has waited for is done
        self.world.reach(self.clock)
        self.world.quietly(lambda: target.fill_(float("nan")))
        self.world.pending.append((self.name, self.clock[self.name], lambda: target.copy_(source)))

    def wait(self, event: Event | None) -> None:
        for name, time in () if event is None else event.clock.items():
            self.clock[name] = max(self.clock.get(name, 0), time)
        if self.name == "work":
            self.world.reach(self.clock)

    def record(self) -> Event:
        return Event(self.world, dict(self.clock))


@dataclass
class Event:
    world: World
    clock: Clock

    def synchronize(self) -> None:
        self.world.reach(self.clock)


class Work(TorchDispatchMode):
    """While open, what torch computes is the work of the device."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self.world = world

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        world = self.world
        if not world.busy and not function.is_view and "work" in world.clocks:
            world.clocks["work"]["work"] += 1
            for argument, given in zip(function._schema.arguments, args, strict=False):
                writes = argument.alias_info is not None and argument.alias_info.is_write
                for x in tree_leaves(given):
                    if isinstance(x, Tensor) and x.numel():
                        world.use("work", x, writes)
        return function(*args, **(kwargs or {}))


@contextmanager
def late_copies() -> Iterator[World]:
    """While open, every ``Staging`` is of such a device."""
    world = World()

    def queues(device: torch.device) -> Any:
        return tuple(Queue(world, name) for name in ("work", "loads", "stores"))

    with mock.patch.object(staging, "queues", queues), Work(world):
        yield world
