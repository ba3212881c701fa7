"""The ranks that a distributed property runs on: threads of this process, or the processes of a launcher.

Every process of a launcher runs the same properties in the same order. What is drawn is drawn by the leader; what
a program returns is known to all, so that all come to the same verdict.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

from contrastile.comm.communicator import Communicator, Hosts, hosts_of
from contrastile.comm.inprocess import InProcessGroup

T = TypeVar("T")

LARGEST = 8
"""Ranks of one process, at most."""

PER_HOST = 2
"""Ranks of one process that stand for those of a host, where nobody says how many."""


def simulated(ranks: int, per_host: int) -> Hosts:
    """Hosts of so many ranks each, and of what is left; of an even number of ranks they have them in turn."""
    hosts = -(-ranks // per_host)
    return hosts_of([str(rank // per_host if ranks % 2 else rank % hosts) for rank in range(ranks)])


class World:
    """Ranks that run one program.

    Attributes:
        size: the number of ranks.
        name: what ``--world`` calls it.
        per_host: how many ranks stand for those of one host; None where nobody said so.
        hosts: the ranks of each host.
        launch: the words that start ``contrastile`` on these ranks.
        leads: whether this process draws, prints and writes.
        can_be_late: whether messages can be made to arrive at the last moment.
    """

    size: int
    name: str
    per_host: int | None
    hosts: Hosts
    launch: Sequence[str]
    leads: bool
    can_be_late: bool

    def run(self, program: Callable[[Communicator], T], *, late: bool = False) -> list[T]:
        """What the program returns on each rank.

        Raises:
            BaseException: what it raised on some rank.
        """
        raise NotImplementedError

    def share(self, x: T) -> T:
        """What the leader has."""
        raise NotImplementedError


def judged(world: World, judge: Callable[[], T]) -> T:
    """What ``judge`` returns, or raises, on the leader: the others need not compute a truth and bounds of their own."""
    found: Any = None
    if world.leads:
        try:
            found = judge(), None
        except Exception as error:
            found = None, portable(error)
    value, failure = world.share(found)
    if failure is not None:
        raise failure
    return cast("T", value)


def portable(error: Exception) -> Exception:
    """The error, or one with the same message that can be pickled."""
    try:
        back = pickle.loads(pickle.dumps(error))
    except Exception:
        back = None
    return error if type(back) is type(error) else RuntimeError(f"{type(error).__name__}: {error}")


@dataclass
class Threads(World):
    """All ranks in this process; every run has a group of its own."""

    size: int
    per_host: int | None = field(default=None, kw_only=True)

    leads, can_be_late = True, True

    def __post_init__(self) -> None:
        self.name, self.launch = str(self.size), ["contrastile"]
        self.hosts = simulated(self.size, self.per_host or PER_HOST)

    def run(self, program: Callable[[Any], T], *, late: bool = False) -> list[T]:
        return InProcessGroup[T](self.size, late, hosts=self.hosts).run(program)

    def share(self, x: T) -> T:
        return x
