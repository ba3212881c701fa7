"""The ranks that a distributed property runs on: threads of this process, or the processes of a launcher.

Every process of a launcher runs the same properties in the same order. What is drawn is drawn by the leader; what
a program returns is known to all, so that all come to the same verdict.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, cast

from contrastile.comm.communicator import Communicator
from contrastile.comm.inprocess import InProcessGroup

T = TypeVar("T")

LARGEST = 8
"""Ranks of one process, at most."""


class WorldError(ValueError):
    """There is no such world, or it is not available here; the message says what to do."""


class World(Protocol):
    """Ranks that run one program."""

    @property
    def size(self) -> int:
        """The number of ranks."""
        ...

    @property
    def name(self) -> str:
        """What ``--world`` calls it."""
        ...

    @property
    def launch(self) -> list[str]:
        """The words that start ``contrastile`` on these ranks."""
        ...

    @property
    def leads(self) -> bool:
        """Whether this process draws, prints and writes."""
        ...

    @property
    def can_be_late(self) -> bool:
        """Whether messages can be made to arrive at the last moment."""
        ...

    def begin(self) -> None:
        """Another test begins: no message of the last one may meet one of its own."""
        ...

    def run(self, program: Callable[[Communicator], T], *, late: bool = False) -> list[T]:
        """What the program returns on each rank.

        Raises:
            BaseException: what it raised on some rank.
        """
        ...

    def share(self, x: T) -> T:
        """What the leader has."""
        ...


def judged(world: World, judge: Callable[[], T]) -> T:
    """What ``judge`` returns, or raises, on the leader: the others need not compute a truth and bounds of their own."""
    found: Any = None
    if world.leads:
        try:
            found = judge(), None
        except Exception as error:
            found = None, error
    value, failure = world.share(found)
    if failure is not None:
        raise failure
    return cast("T", value)


@dataclass(frozen=True, slots=True)
class Threads:
    """All ranks in this process.

    Attributes:
        size: the number of ranks.
    """

    size: int

    leads = True
    can_be_late = True

    @property
    def name(self) -> str:
        """The number of ranks."""
        return str(self.size)

    @property
    def launch(self) -> list[str]:
        """See ``World``."""
        return ["contrastile"]

    def begin(self) -> None:
        """See ``World``. Every run has a group of its own."""

    def run(self, program: Callable[[Any], T], *, late: bool = False) -> list[T]:
        """See ``World``."""
        return InProcessGroup[T](self.size, late=late).run(program)

    def share(self, x: T) -> T:
        """See ``World``."""
        return x
