"""The position of a rank's part in the global batch, and the schedule that computes it."""

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
    """How many rows and columns each rank holds. Columns are numbered rank by rank, and block by block within a rank.

    Attributes:
        rows: the number of rows of each rank.
        columns: the sizes of each rank's column blocks; all ranks have the same number of blocks.
        widths: the number of columns of each rank, in all its blocks.
    """

    rows: tuple[int, ...]
    columns: tuple[tuple[int, ...], ...]
    widths: tuple[int, ...] = field(init=False, compare=False)

    def __post_init__(self) -> None:
        # computed once, because a step reads them dozens of times
        object.__setattr__(self, "widths", tuple(map(sum, self.columns)))

    def start(self, rank: int) -> int:
        """The index of a rank's first column."""
        return sum(self.widths[:rank])

    def blocks(self, rank: int) -> Iterator[slice]:
        """The span of each block among a rank's own columns."""
        ends = list(accumulate(self.columns[rank]))
        for size, end in zip(self.columns[rank], ends, strict=True):
            yield slice(end - size, end)


@dataclass(frozen=True, slots=True)
class Route:
    """Which rank carries which shards: see ``hosts``.

    Attributes:
        hosts: the ranks of each host.
        homes: for each rank the index of its host, and its index among that host's ranks, its lane.
        rank: this rank.
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
        """The ranks of the host at this distance behind this rank's host; a negative distance is ahead."""
        return self.hosts[(self.homes[self.rank][0] - distance) % len(self.hosts)]

    def peers(self) -> tuple[int, ...]:
        """The other ranks of this host, in cyclic order from this rank on."""
        host, lane = self.behind(0), self.homes[self.rank][1]
        return host[lane + 1 :] + host[:lane]

    def carrier(self, host: tuple[int, ...], owner: int) -> int:
        return host[self.homes[owner][1] % len(host)]

    def carried(self, carrier: int, host: tuple[int, ...]) -> list[int]:
        """The ranks of ``host`` whose shards a rank of this host carries."""
        own_host = self.behind(0)
        return [owner for owner in host if self.carrier(own_host, owner) == carrier]


@dataclass(frozen=True, slots=True)
class Placement:
    """This rank's place in a global problem.

    Attributes:
        communicator: the communicator of all ranks.
        exchange: the schedule.
        reduction: how the trainer reduces the parameters' gradients over the ranks, "mean" or "sum".
        shards: the shards of all ranks.
        call: the label of the forward pass.
        unread: whether this call must compare the scale or the bias on a device: see ``scalars``.
        agreed: whether the ranks agree on a phase before it begins, as for the replay of a graph, and not within it.
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
        """How shards reach this rank. For a ring each rank counts as a host; for a gather all ranks count as one."""
        ranks = tuple(range(self.size))
        hosts = {"ring": tuple((r,) for r in ranks), "gather": (ranks,)}.get(self.exchange, self.communicator.hosts)
        return Route.of(hosts, self.rank)

    @property
    def start(self) -> int:
        return self.shards.start(self.rank)

    @property
    def factor(self) -> float:
        """The factor on the features' gradient of the global loss.

        A parameter's gradient is the sum of the contributions of all ranks' features. A trainer that takes the mean
        over the n ranks divides the sum by n, which this factor undoes; a trainer that takes the sum needs no factor.
        Every rank computes the complete gradients of scale and bias: they are those of the global loss for a mean, and
        1 / n of them for a sum.
        """
        return float(self.size) if self.reduction == "mean" else 1.0
