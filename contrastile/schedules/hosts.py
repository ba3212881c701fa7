"""How shards travel: from host to host around a ring, and among the ranks of a host that they reach.

At distance j a host has the shards of the host j behind it. Each of them comes to one of its ranks, the carrier, which
sends it to the other ranks of its host and, in the same message, on to the next host. What a host's ranks find of a
shard is combined by its carrier before it leaves. So nothing crosses between two hosts twice.

With one rank per host that is a ring, and nothing is sent inside; on one host it is a gather.
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
"""A rank's number -> the leading sizes of its arrays."""

Found = Mapping[int, Sequence[Array]]
"""Arrays by the rank whose shard they belong to."""


class Run(NamedTuple):
    """The shards of ranks that follow each other: arrays of all of them, joined."""

    owners: Sequence[int]
    arrays: Sequence[Array]

    def parted(self, sizes: Sizes, arrays: Sequence[Array] | None = None) -> dict[int, Sequence[Array]]:
        """The run's arrays, or others of as many rows, by owner; views."""
        whole = self.arrays if arrays is None else arrays
        if len(self.owners) == 1:
            return {self.owners[0]: whole}
        counts = [sizes(owner) for owner in self.owners]
        parts = [buffers.split(x, [count[i] for count in counts]) for i, x in enumerate(whole)]
        return {owner: [each[i] for each in parts] for i, owner in enumerate(self.owners)}


def added(before: Sequence[Array], here: Sequence[Array]) -> Sequence[Array]:
    """The first, with the second added in place."""
    for x, y in zip(before, here, strict=True):
        x += y
    return before


def _unwritten(arrays: ArrayLibrary, like: Sequence[Array], sizes: Sequence[int]) -> list[Array]:
    """Unwritten arrays of these leading sizes, and otherwise like those given."""
    return [arrays.empty((k, *x.shape[1:]), arrays.dtype(x), x) for k, x in zip(sizes, like, strict=True)]


def _runs(arrays: ArrayLibrary, owners: Sequence[int], like: Sequence[Array], sizes: Sizes) -> list[Run]:
    found: list[list[int]] = []
    for owner in owners:
        if found and owner == found[-1][-1] + 1:
            found[-1].append(owner)
        else:
            found.append([owner])
    return [Run(run, _unwritten(arrays, like, [sum(x) for x in zip(*map(sizes, run), strict=True)])) for run in found]


def visits(
    placement: Placement, arrays: ArrayLibrary, own: Sequence[Array], sizes: Sizes, count: int | None = None
) -> Iterator[tuple[int, Sequence[Run]]]:
    """This rank's shard, then those of its host's other ranks, then those of the hosts behind, each with its distance.

    The message that brings the next ones is under way until the next step.

    Args:
        placement: of the problem.
        arrays: their library.
        own: this rank's arrays, contiguous; not to be changed before the third step.
        sizes: of each rank's arrays.
        count: of how many hosts; None for all.
    """
    way, me = placement.route, placement.rank
    count = len(way.hosts) if count is None else count
    here, ahead, before = way.behind(0), way.behind(-1), way.behind(1)
    carried: dict[int, Sequence[Array]] = {me: own}
    complete, at = [Run((me,), own)], 0
    for distance in range(count):
        outgoing: dict[int, list[Array]] = {}
        incoming: dict[int, list[Array]] = {}
        there, following, inside = way.behind(distance), dict[int, Sequence[Array]](), list[Run]()
        if not way.flat:
            inside = _runs(arrays, [owner for owner in there if owner != me], own, sizes)
            views = {owner: xs for run in inside for owner, xs in run.parted(sizes).items()}
            for peer in here:
                # what this rank carries is copied; its own shard is where it is
                outgoing[peer] = [x for owner, xs in carried.items() if peer != me or owner != me for x in xs]
                incoming[peer] = [x for owner in way.carried(peer, there) if owner != me for x in views[owner]]
        if distance + 1 < count:
            for owner, xs in carried.items():
                outgoing.setdefault(way.carrier(ahead, owner), []).extend(xs)
            for owner in way.carried(me, way.behind(distance + 1)):
                following[owner] = _unwritten(arrays, own, sizes(owner))
                incoming.setdefault(way.carrier(before, owner), []).extend(following[owner])
        pending = placement.communicator.exchange(outgoing, incoming) if inside or following or not way.flat else None
        yield at, complete
        if pending is not None:
            pending.wait()
        carried, at = following, distance + way.flat
        complete = [Run((owner,), xs) for owner, xs in carried.items()] if way.flat else inside
    if not way.flat:
        yield at, complete


class Returns:
    """What ranks find of each other's shards, on its way home, one step behind the shards.

    A host's ranks send it to the shard's carrier, which combines it and sends it on with the next message: around the
    ring, where the next host's carrier adds what is found there, or straight to the owner.
    """

    def __init__(
        self,
        placement: Placement,
        arrays: ArrayLibrary,
        sizes: Callable[[int, int], Sequence[int] | None],
        combine: Callable[[Sequence[Array], Sequence[Array]], Sequence[Array]],
        take: Callable[[int, Sequence[Array]], None] | None = None,
    ) -> None:
        """``sizes(rank, owner)`` are those of what a rank finds of an owner's shard; None for nothing.

        ``combine(before, here)`` combines what ranks have found. ``take(rank, found)`` is called with what a rank, or
        all of its host, has found of this rank's shard; without it everything goes around the ring, to ``finish``.
        """
        self.placement, self.arrays, self.route = placement, arrays, placement.route
        self.sizes, self.combine, self.take = sizes, combine, take
        self._pending: Pending | None = None
        self._like: Sequence[Array] = ()
        # of the message under way, which owns what it sends: what comes home, from whom; what comes to this rank as a
        # carrier; and the distance of the host whose shards these parts are of
        self._sent: Sequence[Found] = ()
        self._home: list[tuple[int, Sequence[Array]]] = []
        self._parts: dict[int, list[Sequence[Array]]] = {}
        self._inside: int | None = None
        self._own: Found = {}

    def send(self, distance: int, found: Found) -> None:
        """Send what was found at a step of ``visits``. All ranks send alike."""
        if self.take is None and not (self.route.flat or distance or self._own):
            # with what is found of its host's other shards
            self._own = found
            return
        found, self._own = ({**self._own, **found}, {}) if distance == 0 else (found, {})
        between, combined = self._settle()
        if self.placement.size == 1:
            self._parts = {owner: [xs] for owner, xs in found.items()}
        elif self.route.flat:
            whole = {x: self.combine(combined[x], xs) if x in combined else xs for x, xs in found.items()}
            self._post(distance, whole, None, {})
        else:
            self._post(between, combined, distance, found)

    def finish(self) -> Found:
        """Wait for the last of it; what all ranks have found of this rank's shard, where that came around the ring."""
        between, combined = self._settle()
        if len(self.route.hosts) > 1 and not self.route.flat:
            self._post(between, combined, None, {})
            combined = self._settle()[1]
        return combined

    def _post(self, between: int | None, combined: Found, inside: int | None, found: Found) -> None:
        """Send on what was found of the host ``between`` behind, and to carriers what was of the one ``inside``."""
        way, me = self.route, self.placement.rank
        self._sent, self._like = (combined, found), next(iter((found or combined).values()), self._like)
        self._inside = inside
        outgoing: dict[int, list[Array]] = {}
        incoming: dict[int, list[Array]] = {}

        def arriving(source: int, owner: int) -> Sequence[Array]:
            sizes = self.sizes(source, owner)
            if sizes is None:
                return ()
            there = _unwritten(self.arrays, self._like, sizes)
            incoming.setdefault(source, []).extend(there)
            return there

        if between is not None and self.take is None:
            for owner, xs in combined.items():
                outgoing.setdefault(way.carrier(way.behind(-1), owner), []).extend(xs)
            for owner in way.carried(me, way.behind(between + 1)):
                self._parts[owner] = [arriving(way.carrier(way.behind(1), owner), owner)]
        elif between:
            outgoing = {owner: list(xs) for owner, xs in combined.items()}
            source = way.carrier(way.behind(-between), me)
            self._home.append((source, arriving(source, me)))
        for owner in () if inside is None else way.behind(inside):
            carrier = way.carrier(way.behind(0), owner)
            if carrier != me:
                if owner in found:
                    outgoing.setdefault(carrier, []).extend(found[owner])
                continue
            parts = [(peer, arriving(peer, owner)) for peer in way.peers()]
            if owner in found:
                self._parts.setdefault(owner, []).extend([found[owner], *(xs for _, xs in parts)])
            else:
                self._home += [each for each in parts if each[1]]
        self._pending = self.placement.communicator.exchange(outgoing, incoming)

    def _settle(self) -> tuple[int | None, Found]:
        """Take what has come home; the distance of the host of which this rank now has all that its host found."""
        if self._pending is not None:
            self._pending.wait()
        for source, found in self._home:
            assert self.take is not None
            self.take(source, found)
        combined = {owner: reduce(self.combine, parts) for owner, parts in self._parts.items()}
        inside, self._inside = self._inside, None
        self._pending, self._sent, self._home, self._parts = None, (), [], {}
        return inside, combined
