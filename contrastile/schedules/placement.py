"""Where a rank's part lies in the global batch, and which schedule walks it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate
from typing import Literal, get_args

from contrastile.comm.calls import Label
from contrastile.comm.communicator import Communicator, Hosts

Schedule = Literal["ring", "two-level", "gather", "replicate"]
SCHEDULES: tuple[Schedule, ...] = get_args(Schedule)
Exchange = Literal["auto", "ring", "two-level", "gather", "replicate", "local"]
Reduction = Literal["mean", "sum"]


@dataclass(frozen=True, slots=True)
class Shards:
    """How many rows and columns each rank holds. Columns are numbered rank by rank, and block by block within one.

    Attributes:
        rows: rows of each rank.
        columns: sizes of each rank's column blocks; every rank has as many blocks.
        widths: columns of each rank, its blocks together.
    """

    rows: tuple[int, ...]
    columns: tuple[tuple[int, ...], ...]
    widths: tuple[int, ...] = field(init=False, compare=False)

    def __post_init__(self) -> None:
        # read dozens of times in a step
        object.__setattr__(self, "widths", tuple(map(sum, self.columns)))

    def start(self, rank: int) -> int:
        """The number of a rank's first column."""
        return sum(self.widths[:rank])

    def blocks(self, rank: int) -> Iterator[slice]:
        """The place of each block among a rank's own columns."""
        ends = list(accumulate(self.columns[rank]))
        for size, end in zip(self.columns[rank], ends, strict=True):
            yield slice(end - size, end)


@dataclass(frozen=True, slots=True)
class Route:
    """Who carries whose shards.

    Attributes:
        hosts: the ranks of each host.
        homes: of each rank its host's number, and its own there.
        rank: this one.
    """

    hosts: Hosts
    homes: Mapping[int, tuple[int, int]]
    rank: int

    @staticmethod
    @lru_cache(maxsize=64)
    def of(hosts: Hosts, rank: int) -> Route:
        return Route(hosts, {r: (i, lane) for i, ranks in enumerate(hosts) for lane, r in enumerate(ranks)}, rank)

    @property
    def flat(self) -> bool:
        """Whether every host has one rank."""
        return len(self.hosts) == len(self.homes)

    def behind(self, distance: int) -> tuple[int, ...]:
        """The ranks of the host so far behind this one; of a negative distance, ahead."""
        return self.hosts[(self.homes[self.rank][0] - distance) % len(self.hosts)]

    def peers(self) -> tuple[int, ...]:
        """The other ranks of this host, from this one on."""
        here, lane = self.behind(0), self.homes[self.rank][1]
        return here[lane + 1 :] + here[:lane]

    def carrier(self, host: tuple[int, ...], owner: int) -> int:
        return host[self.homes[owner][1] % len(host)]

    def carried(self, carrier: int, host: tuple[int, ...]) -> list[int]:
        """The ranks of a host whose shards a rank of this one carries."""
        here = self.behind(0)
        return [owner for owner in host if self.carrier(here, owner) == carrier]


@dataclass(frozen=True, slots=True)
class Placement:
    """This rank's place in a global problem.

    Attributes:
        communicator: of all ranks.
        exchange: the schedule.
        reduction: what the trainer does with the parameters' gradients over the ranks, "mean" or "sum".
        shards: of every rank.
        call: of the forward pass.
        unread: whether the scale or the bias is on a device, where this call is to compare it: see ``scalars``.
        agreed: whether the ranks agree on each phase before it begins, as on the replay of a graph, and not within.
    """

    communicator: Communicator
    exchange: Schedule
    reduction: Reduction
    shards: Shards
    call: Label = field(default_factory=Label)
    unread: bool = False
    agreed: bool = False

    @property
    def rank(self) -> int:
        return self.communicator.rank

    @property
    def size(self) -> int:
        return self.communicator.size

    @property
    def route(self) -> Route:
        """How shards come to this rank: over a ring each rank is a host of its own, and for a gather all are one's."""
        every = tuple(range(self.size))
        hosts = {"ring": tuple((r,) for r in every), "gather": (every,)}.get(self.exchange, self.communicator.hosts)
        return Route.of(hosts, self.rank)

    @property
    def start(self) -> int:
        return self.shards.start(self.rank)

    @property
    def factor(self) -> float:
        """The factor on the features' gradient of the global loss.

        A parameter's gradient is the sum of what each rank's features send back. A trainer that takes the mean over
        the n ranks divides that by n, which this factor undoes; one that takes the sum does not. The gradients of
        scale and bias, which every rank holds whole, are those of the global loss under a mean, and 1 / n of them
        under a sum.
        """
        return float(self.size) if self.reduction == "mean" else 1.0
