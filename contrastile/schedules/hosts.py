"""How shards travel: from host to host around a ring, and among the ranks of each host.

At distance j a host has the shards of the host j behind it. Each shard is received by one of the host's ranks, its
carrier, which sends it to the other ranks of the host and, in the same message, to the next host. The carrier combines
the results of the host's ranks for a shard before they leave the host. So nothing crosses between two hosts twice.

With one rank per host this is a ring without messages inside a host; on one host it is a gather.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import reduce
from typing import NamedTuple

from contrastile.backends.arrays import ArrayLibrary
from contrastile.backends.contract import Array
from contrastile.comm import buffers
from contrastile.comm.communicator import Pending
from contrastile.schedules.placement import Placement

Sizes = Callable[[int], Sequence[int]]
"""A rank -> the leading sizes of its arrays."""

Results = Mapping[int, Sequence[Array]]
"""Results for shards, sums or statistics, by the rank that owns the shard."""


class Run(NamedTuple):
    """The shards of consecutive ranks: the arrays of all owners, joined."""

    owners: Sequence[int]
    arrays: Sequence[Array]

    def parted(self, sizes: Sizes, arrays: Sequence[Array] | None = None) -> dict[int, Sequence[Array]]:
        """The run's arrays, or others with as many rows, split by owner; views."""
        joined = self.arrays if arrays is None else arrays
        if len(self.owners) == 1:
            return {self.owners[0]: joined}
        counts = [sizes(owner) for owner in self.owners]
        parts = [buffers.split(x, [count[i] for count in counts]) for i, x in enumerate(joined)]
        return {owner: [split[i] for split in parts] for i, owner in enumerate(self.owners)}


def add_in_place(sums: Sequence[Array], terms: Sequence[Array]) -> Sequence[Array]:
    """Add the terms to the sums in place; returns the sums."""
    for x, y in zip(sums, terms, strict=True):
        x += y
    return sums


def _unwritten(arrays: ArrayLibrary, like: Sequence[Array], sizes: Sequence[int]) -> list[Array]:
    """Uninitialised arrays of these leading sizes; their other sizes and dtypes are those of ``like``."""
    return [arrays.empty((k, *x.shape[1:]), arrays.dtype(x), x) for k, x in zip(sizes, like, strict=True)]


def _runs(arrays: ArrayLibrary, owners: Sequence[int], like: Sequence[Array], sizes: Sizes) -> list[Run]:
    groups: list[list[int]] = []
    for owner in owners:
        if groups and owner == groups[-1][-1] + 1:
            groups[-1].append(owner)
        else:
            groups.append([owner])
    return [Run(run, _unwritten(arrays, like, [sum(x) for x in zip(*map(sizes, run), strict=True)])) for run in groups]


def visits(
    placement: Placement, arrays: ArrayLibrary, own: Sequence[Array], sizes: Sizes, count: int | None = None
) -> Iterator[tuple[int, Sequence[Run]]]:
    """This rank's shard, then the shards of its host's other ranks, then those of each host behind, with the distance.

    While the caller uses one step's shards, the message with the next step's is under way.

    Args:
        placement: the placement of the problem.
        arrays: the library of ``own``.
        own: this rank's arrays, contiguous; the caller must not change them before the third step.
        sizes: the leading sizes of each rank's arrays.
        count: the number of hosts to visit; None for all.
    """
    route, rank = placement.route, placement.rank
    count = len(route.hosts) if count is None else count
    this_host, next_host, previous_host = route.behind(0), route.behind(-1), route.behind(1)
    shards: dict[int, Sequence[Array]] = {rank: own}
    runs, runs_distance = [Run((rank,), own)], 0
    for distance in range(count):
        outgoing: dict[int, list[Array]] = {}
        incoming: dict[int, list[Array]] = {}
        source, upcoming, inside = route.behind(distance), dict[int, Sequence[Array]](), list[Run]()
        if not route.flat:
            inside = _runs(arrays, [owner for owner in source if owner != rank], own, sizes)
            views = {owner: xs for run in inside for owner, xs in run.parted(sizes).items()}
            for peer in this_host:
                # to itself this rank copies the shards that it carries, except its own
                outgoing[peer] = [x for owner, xs in shards.items() if peer != rank or owner != rank for x in xs]
                incoming[peer] = [x for owner in route.carried(peer, source) if owner != rank for x in views[owner]]
        if distance + 1 < count:
            for owner, xs in shards.items():
                outgoing.setdefault(route.carrier(next_host, owner), []).extend(xs)
            for owner in route.carried(rank, route.behind(distance + 1)):
                upcoming[owner] = _unwritten(arrays, own, sizes(owner))
                incoming.setdefault(route.carrier(previous_host, owner), []).extend(upcoming[owner])
        pending = placement.communicator.exchange(outgoing, incoming) if inside or upcoming or not route.flat else None
        yield runs_distance, runs
        if pending is not None:
            pending.wait()
        shards, runs_distance = upcoming, distance + route.flat
        runs = [Run((owner,), xs) for owner, xs in shards.items()] if route.flat else inside
    if not route.flat:
        yield runs_distance, runs


class Returns:
    """Returns the results that ranks compute for each other's shards to their owners, one step behind the shards.

    A host's ranks send results to the shard's carrier, which combines them and sends them on with the next message:
    around the ring, where the next host's carrier combines them with its host's results, or straight to the owner.
    """

    def __init__(
        self,
        placement: Placement,
        arrays: ArrayLibrary,
        sizes: Callable[[int, int], Sequence[int] | None],
        combine: Callable[[Sequence[Array], Sequence[Array]], Sequence[Array]],
        take: Callable[[int, Sequence[Array]], None] | None = None,
    ) -> None:
        """``sizes(rank, owner)`` are the leading sizes of a rank's results for an owner's shard; None if it has none.

        ``combine(first, second)`` combines the results of two ranks. ``take(rank, results)`` is called with the results
        of a rank, or of all its host, for this rank's shard; without it ``finish`` returns them from the ring.
        """
        self.placement, self.arrays, self.route = placement, arrays, placement.route
        self.sizes, self.combine, self.take = sizes, combine, take
        self._pending: Pending | None = None
        self._template: Sequence[Array] = ()
        # of the message under way: the arrays that it sends; the results for this rank's shard, with their sender;
        # the results that this rank combines as a carrier; and the distance of the host that owns their shards
        self._sent: Sequence[Results] = ()
        self._own_results: list[tuple[int, Sequence[Array]]] = []
        self._parts: dict[int, list[Sequence[Array]]] = {}
        self._distance: int | None = None
        self._held_back: Results = {}

    def send(self, distance: int, results: Results) -> None:
        """Send the results of a step of ``visits``; every rank must call it at the same steps."""
        if self.take is None and not (self.route.flat or distance or self._held_back):
            # send them with the results for the host's other shards
            self._held_back = results
            return
        results, self._held_back = ({**self._held_back, **results}, {}) if distance == 0 else (results, {})
        combined_distance, combined = self._settle()
        if self.placement.size == 1:
            self._parts = {owner: [xs] for owner, xs in results.items()}
        elif self.route.flat:
            merged = {x: self.combine(combined[x], xs) if x in combined else xs for x, xs in results.items()}
            self._post(distance, merged, None, {})
        else:
            self._post(combined_distance, combined, distance, results)

    def finish(self) -> Results:
        """Wait for the last results; without ``take``, returns all ranks' results for this rank's shard."""
        combined_distance, combined = self._settle()
        if len(self.route.hosts) > 1 and not self.route.flat:
            self._post(combined_distance, combined, None, {})
            combined = self._settle()[1]
        return combined

    def _post(self, combined_distance: int | None, combined: Results, distance: int | None, results: Results) -> None:
        """Send ``combined`` on, and ``results`` to carriers; the distances are those of the shards' hosts."""
        route, rank = self.route, self.placement.rank
        self._sent, self._template = (combined, results), next(iter((results or combined).values()), self._template)
        self._distance = distance
        outgoing: dict[int, list[Array]] = {}
        incoming: dict[int, list[Array]] = {}

        def receive(source: int, owner: int) -> Sequence[Array]:
            lengths = self.sizes(source, owner)
            if lengths is None:
                return ()
            arrived = _unwritten(self.arrays, self._template, lengths)
            incoming.setdefault(source, []).extend(arrived)
            return arrived

        if combined_distance is not None and self.take is None:
            for owner, xs in combined.items():
                outgoing.setdefault(route.carrier(route.behind(-1), owner), []).extend(xs)
            for owner in route.carried(rank, route.behind(combined_distance + 1)):
                self._parts[owner] = [receive(route.carrier(route.behind(1), owner), owner)]
        elif combined_distance:
            outgoing = {owner: list(xs) for owner, xs in combined.items()}
            source = route.carrier(route.behind(-combined_distance), rank)
            self._own_results.append((source, receive(source, rank)))
        for owner in () if distance is None else route.behind(distance):
            carrier = route.carrier(route.behind(0), owner)
            if carrier != rank:
                if owner in results:
                    outgoing.setdefault(carrier, []).extend(results[owner])
                continue
            parts = [(peer, receive(peer, owner)) for peer in route.peers()]
            if owner in results:
                self._parts.setdefault(owner, []).extend([results[owner], *(xs for _, xs in parts)])
            else:
                self._own_results += [part for part in parts if part[1]]
        self._pending = self.placement.communicator.exchange(outgoing, incoming)

    def _settle(self) -> tuple[int | None, Results]:
        """Receive the message under way; returns the combined results, and first the distance of their shards' host."""
        if self._pending is not None:
            self._pending.wait()
        for source, results in self._own_results:
            assert self.take is not None
            self.take(source, results)
        combined = {owner: reduce(self.combine, parts) for owner, parts in self._parts.items()}
        distance, self._distance = self._distance, None
        self._pending, self._sent, self._own_results, self._parts = None, (), [], {}
        return distance, combined
