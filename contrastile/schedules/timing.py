"""A model of the time of a step over GPUs of several hosts, and what ``exchange="auto"`` chooses.

A message of b bytes to k ranks takes ``alpha + k b / beta``, of the link inside a host or of that between hosts,
whichever is slower; both work at once. What a schedule posts at one step is under way one after the other, while the
blocks of that step are computed. So a step takes the longer of both, and a call the sum of its steps; or as long as its
host needs to queue it, if that is longer. The loss has two directions, and the ranks have equal shards.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from contrastile.backends.settings import fits
from contrastile.comm.communicator import Hosts
from contrastile.schedules.placement import Schedule, Shards

_VECTORS = 48
"""Bytes of each column that travel beside its features at most: N, P and their sum, or a weight and a target."""

HIDDEN = 0.9
"""A schedule hides its messages where products take this share of the step."""


GATHERED_MIB = 2048
"""What columns, their gradient and the other ranks' parts of it may take on each rank with ``auto``.

On one host gathering is at least as fast as the ring wherever it was measured (``docs/benchmarks/many-gpus.md``):
its messages are fewer. The ring is for batches of which no rank is to hold all columns, or all of a host's.
"""

REPLICATED = {True: 1 << 37, False: 1 << 33}
"""Rows x columns x width of the whole loss that each rank computes with ``auto``, of 16-bit features or others.

2^37 takes an H200 two milliseconds: 16,384 pairs of width 512.
"""


@dataclass(frozen=True, slots=True)
class Machine:
    """What is assumed of each GPU and of its links, each way.

    Attributes:
        tflops: 1e12 operations of the products per second, as a rank alone reaches them.
        gbs_inside: 1e9 bytes per second to the ranks of its host.
        gbs_across: likewise, to other hosts.
        us_inside: microseconds of a message.
        us_across: likewise, between hosts.
        host_ms: milliseconds in which the host queues a block and its messages; a call takes it those of two blocks
            more. It is that of the records of 2 and 4 GPUs, and 0 for a captured CUDA graph.
    """

    tflops: float = 600.0
    gbs_inside: float = 370.0
    gbs_across: float = 45.0
    us_inside: float = 10.0
    us_across: float = 20.0
    host_ms: float = 0.93


@dataclass(frozen=True, slots=True)
class Ranks:
    """What every rank has: ``rows`` pairs, of ``width`` features of ``itemsize`` bytes each."""

    hosts: int
    per_host: int
    rows: int
    width: int
    itemsize: int

    @property
    def size(self) -> int:
        return self.hosts * self.per_host


@dataclass(frozen=True, slots=True)
class Message:
    """Bytes that a rank sends to each of some ranks of its host, and to each of some ranks of other hosts."""

    inside: int
    across: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Step:
    """Blocks that a rank computes, ``products`` times rows x rows x width, and the messages under way meanwhile."""

    products: float
    messages: Sequence[Message] = ()


def steps(exchange: str, ranks: Ranks) -> Iterator[Step]:
    """What a rank computes and sends for the loss and its gradients, in order."""
    n, near = ranks.size, ranks.per_host - 1
    far, rows = n - ranks.per_host, ranks.rows
    vectors, features = rows * _VECTORS, rows * ranks.width * ranks.itemsize
    sums, number = rows * ranks.width * max(4, ranks.itemsize), Step(0, [Message(near, far, 8)])
    if exchange == "two-level" and 1 in (ranks.hosts, ranks.per_host):
        exchange = "gather" if ranks.hosts == 1 else "ring"
    if exchange == "replicate":
        # with weights and targets
        yield Step(0, [Message(near, far, 2 * features + 16 * rows)])
        yield Step(8 * n * n)
        return
    if exchange == "gather":
        yield Step(0, [Message(near, far, features)])
        yield Step(2 * n)
        # every rank's rows give every column statistics
        yield Step(0, [Message(near, far, n * vectors)])
        yield Step(6 * n)
        yield Step(0, [Message(near, far, sums)])
        return
    for each, sent, found in ((2, features, vectors), (6, features + vectors, sums)):
        yield from (_ring if exchange == "ring" else _two_level)(ranks, each, sent, found)
        yield number


def _ring(ranks: Ranks, each: int, sent: int, found: int) -> Iterator[Step]:
    """A pass over the ring: of all hops the slowest counts."""
    n, hop = ranks.size, (int(ranks.hosts == 1), int(ranks.hosts > 1))
    halved = each > 2 and n > 1
    for step in range(n):
        messages = [Message(*hop, sent)] * (step + 1 < n) + [Message(*hop, found)] * (step > 0)
        yield Step(each / 2 if halved and step == 0 else each, messages)
    yield Step(each / 2 if halved else 0, [Message(*hop, found)] * (n > 1))


def _two_level(ranks: Ranks, each: int, sent: int, found: int) -> Iterator[Step]:
    """A pass over the ring of hosts: this rank's own shard, the rest of its host's, and those of the other hosts."""
    hosts, near = ranks.hosts, ranks.per_host - 1
    for step in range(hosts + 3):
        messages = [Message(near, int(step + 1 < hosts), sent)] * (step < hosts)
        # a carrier passes on what its host's ranks have sent it a step before
        if step > 1:
            messages.append(Message(near * (step < hosts + 2), int(step > 2 and hosts > 1), found))
        yield Step(each * (1, near)[step] if step < 2 else each * ranks.per_host * (step <= hosts), messages)


def seconds(exchange: str, ranks: Ranks, machine: Machine) -> float:
    product = ranks.rows * ranks.rows * ranks.width / machine.tflops / 1e12
    total, blocks = 0.0, 0
    for step in steps(exchange, ranks):
        total += max(step.products * product, sum(_under_way(message, machine) for message in step.messages))
        blocks += step.products > 0
    # the kernels of a replicated problem come from CUDA graphs
    return max(total, 1e-3 * machine.host_ms * (2 + blocks * (exchange != "replicate")))


def traffic(exchange: str, ranks: Ranks) -> tuple[int, int, int]:
    """How many messages a rank sends for the loss and its gradients, and bytes to its own host and to others."""
    every = [each for step in steps(exchange, ranks) for each in step.messages if each.inside or each.across]
    inside, across = (sum(getattr(each, where) * each.bytes for each in every) for where in ("inside", "across"))
    return len(every), inside, across


def _under_way(message: Message, machine: Machine) -> float:
    inside, across = message.inside / machine.gbs_inside, message.across / machine.gbs_across
    alpha = machine.us_across if message.across else machine.us_inside if message.inside else 0.0
    return 1e-6 * alpha + 1e-9 * message.bytes * max(inside, across)


def hidden_from(exchange: str, ranks: Ranks, machine: Machine) -> int | None:
    """The fewest rows of a rank from which the schedule hides its messages; None where it never does."""
    fewest, most = 0, 1 << 32
    if share(exchange, replace(ranks, rows=most), machine) < HIDDEN:
        return None
    while most - fewest > 1:
        middle = (fewest + most) // 2
        hides = share(exchange, replace(ranks, rows=middle), machine) >= HIDDEN
        fewest, most = (fewest, middle) if hides else (middle, most)
    return most


def share(exchange: str, ranks: Ranks, machine: Machine) -> float:
    """How much of the step its products take, those that are needed."""
    operations = 8 * ranks.size * ranks.rows**2 * ranks.width
    return operations / machine.tflops / 1e12 / seconds(exchange, ranks, machine)


@dataclass(frozen=True, slots=True)
class Choice:
    exchange: Schedule
    reason: str


@lru_cache(maxsize=64)
def choose_exchange(shards: Shards, width: int, itemsize: int, *, on_gpus: bool = False, hosts: Hosts = ()) -> Choice:
    """The choice of ``exchange="auto"``. It depends on what the ranks have in common: every rank makes the same.

    On several hosts the fastest is chosen, by the model, of those that keep within ``GATHERED_MIB``.

    Args:
        shards: of every rank.
        width: features of a column.
        itemsize: bytes of one.
        on_gpus: whether the features are: then each rank may compute the whole loss, and small steps are replayed.
        hosts: the ranks of each host; empty for one.
    """
    total = sum(shards.widths)
    work, most = sum(shards.rows) * total * width, REPLICATED[itemsize <= 2]
    if on_gpus and work <= most:
        return Choice("replicate", f"all {total:,} columns take a GPU less time than the messages of a gather")
    # features; and in the state dtype their gradient, and what the other ranks found of it
    mib = total * width * (itemsize + 2 * max(4, itemsize)) / 2**20
    what = f"all {total:,} columns and their gradients take {mib:,.0f} MiB on each rank"
    if len(hosts) > 1:
        per_host, most = max(map(len, hosts)), max(shards.widths)
        ranks = Ranks(len(hosts), per_host, most, width, itemsize)
        known: list[Schedule] = ["ring"]
        if mib <= GATHERED_MIB:
            known.append("gather")
        # two hosts' shards, and their gradient thrice
        of_host = per_host * most * width * (2 * itemsize + 3 * max(4, itemsize)) / 2**20
        if per_host > 1 and of_host <= GATHERED_MIB:
            known.append("two-level")
        replayed = on_gpus and fits(max(shards.rows), total, width)
        machine = Machine(host_ms=0.0) if replayed else Machine()
        found = {each: seconds(each, ranks, machine) for each in known}
        best = min(known, key=lambda each: found[each])
        each = ", ".join(f"{name} {1e3 * time:,.1f}" for name, time in found.items())
        return Choice(best, f"milliseconds a step by the model: {each}")
    if mib <= GATHERED_MIB:
        return Choice("gather", f"{what}, within {GATHERED_MIB:,}, and gathering needs the fewest messages")
    return Choice("ring", f"{what}, more than {GATHERED_MIB:,}")
