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
"""The most ranks of one process."""

PER_HOST = 2
"""The default number of ranks per simulated host, for ranks of one process."""


def simulated(ranks: int, per_host: int) -> Hosts:
    """Hosts of ``per_host`` ranks each, and one of the rest; an even number of ranks is dealt to the hosts in turn."""
    hosts = -(-ranks // per_host)
    return hosts_of([str(rank // per_host if ranks % 2 else rank % hosts) for rank in range(ranks)])


class World:
    """Ranks that run one program.

    Attributes:
        size: the number of ranks.
        name: the value of ``--world`` that selects it.
        per_host: the number of ranks per simulated host; None if not given.
        hosts: the ranks of each host.
        launch: the words that start ``contrastile`` on these ranks.
        leads: whether this process draws, prints and writes.
        can_be_late: whether the world can deliver messages at the last moment.
    """

    size: int
    name: str
    per_host: int | None
    hosts: Hosts
    launch: Sequence[str]
    leads: bool
    can_be_late: bool

    def run(self, program: Callable[[Communicator], T], *, late: bool = False) -> list[T]:
        """Run the program on each rank, and return the results by rank.

        Raises:
            BaseException: the error of the program on some rank.
        """
        raise NotImplementedError

    def share(self, x: T) -> T:
        """The leader's x."""
        raise NotImplementedError


def judged(world: World, judge: Callable[[], T]) -> T:
    """Call ``judge`` on the leader only, which then alone needs a truth; all processes return or raise its result."""
    result: Any = None
    if world.leads:
        try:
            result = judge(), None
        except Exception as error:
            result = None, portable(error)
    value, failure = world.share(result)
    if failure is not None:
        raise failure
    return cast("T", value)


def portable(error: Exception) -> Exception:
    """The error, or a RuntimeError with its message if the error cannot be pickled."""
    try:
        copy = pickle.loads(pickle.dumps(error))
    except Exception:
        copy = None
    return error if type(copy) is type(error) else RuntimeError(f"{type(error).__name__}: {error}")


@dataclass
class Threads(World):
    """All ranks as threads of this process; every run has a group of its own."""

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
