"""A model of the time of a step over GPUs of several hosts, and what ``exchange="auto"`` chooses.

A message of b bytes to k ranks takes ``alpha + k b / beta``. The links inside a host and between hosts work at once,
so the slower one counts. The messages of a step are sent one after another, while the blocks of that step are computed:
the step takes the longer of both. A call takes the sum of its steps, or the time in which its host queues them, if that
is longer. The loss has two directions, and the ranks have equal shards.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from contrastile.backends.settings import fits
from contrastile.comm.communicator import Hosts
from contrastile.schedules.placement import Schedule, Shards

_VECTOR_BYTES = 48
"""The most bytes that travel for each column beside its features: N, P and their sum, or a weight and a target."""

HIDDEN = 0.9
"""A schedule hides its messages if products take at least this share of the step."""

GATHERED_MIB = 2048
"""The most memory of the columns, their gradient and the other ranks' parts of it, on each rank, with ``auto``.

On one host gathering was at least as fast as the ring in every measurement (``docs/benchmarks/many-gpus.md``), because
it sends fewer messages. The ring is for batches so large that no rank should hold all columns, or all of a host's.
"""

REPLICATED = {True: 1 << 37, False: 1 << 33}
"""The most rows x columns x width of a loss that ``auto`` replicates, for 16-bit features (True) and for others.

2^37 takes an H200 two milliseconds: 16,384 pairs of width 512.
"""


@dataclass(frozen=True, slots=True)
class Machine:
    """The assumed speed of each GPU and of its links, in each direction.

    Attributes:
        tflops: 1e12 operations per second in the products, as a rank alone reaches them.
        gbs_inside: 1e9 bytes per second to the ranks of its host.
        gbs_across: 1e9 bytes per second to other hosts.
        us_inside: microseconds of a message inside a host.
        us_across: microseconds of a message between hosts.
        host_ms: milliseconds in which the host queues a block and its messages; a call needs those of two more blocks.
            The value is from the records of 2 and 4 GPUs; it is 0 for a captured CUDA graph.
    """

    tflops: float = 600.0
    gbs_inside: float = 370.0
    gbs_across: float = 45.0
    us_inside: float = 10.0
    us_across: float = 20.0
    host_ms: float = 0.93


@dataclass(frozen=True, slots=True)
class Ranks:
    """The ranks, each with ``rows`` pairs of ``width`` features of ``itemsize`` bytes."""

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
    """The products that a rank computes, in units of rows x rows x width, and the messages under way meanwhile."""

    products: float
    messages: Sequence[Message] = ()


def steps(exchange: str, ranks: Ranks) -> Iterator[Step]:
    """The steps in which a rank computes the loss and its gradients, in order."""
    n, near = ranks.size, ranks.per_host - 1
    far, rows = n - ranks.per_host, ranks.rows
    vector_bytes, feature_bytes = rows * _VECTOR_BYTES, rows * ranks.width * ranks.itemsize
    sum_bytes, scalar_step = rows * ranks.width * max(4, ranks.itemsize), Step(0, [Message(near, far, 8)])
    if exchange == "two-level" and 1 in (ranks.hosts, ranks.per_host):
        exchange = "gather" if ranks.hosts == 1 else "ring"
    if exchange == "replicate":
        # features, weights and targets
        yield Step(0, [Message(near, far, 2 * feature_bytes + 16 * rows)])
        yield Step(8 * n * n)
        return
    if exchange == "gather":
        yield Step(0, [Message(near, far, feature_bytes)])
        yield Step(2 * n)
        # every rank sends its statistics of all columns
        yield Step(0, [Message(near, far, n * vector_bytes)])
        yield Step(6 * n)
        yield Step(0, [Message(near, far, sum_bytes)])
        return
    for products, sent, returned in ((2, feature_bytes, vector_bytes), (6, feature_bytes + vector_bytes, sum_bytes)):
        yield from (_ring if exchange == "ring" else _two_level)(ranks, products, sent, returned)
        yield scalar_step


def _ring(ranks: Ranks, products: int, sent: int, returned: int) -> Iterator[Step]:
    """A pass over the ring; the slowest hop counts."""
    n, hop = ranks.size, (int(ranks.hosts == 1), int(ranks.hosts > 1))
    is_halved = products > 2 and n > 1
    for step in range(n):
        messages = [Message(*hop, sent)] * (step + 1 < n) + [Message(*hop, returned)] * (step > 0)
        yield Step(products / 2 if is_halved and step == 0 else products, messages)
    yield Step(products / 2 if is_halved else 0, [Message(*hop, returned)] * (n > 1))


def _two_level(ranks: Ranks, products: int, sent: int, returned: int) -> Iterator[Step]:
    """A pass over the ring of hosts: the rank's own shard, those of its host's other ranks, those of other hosts."""
    hosts, near = ranks.hosts, ranks.per_host - 1
    for step in range(hosts + 3):
        messages = [Message(near, int(step + 1 < hosts), sent)] * (step < hosts)
        # a carrier sends on the results that its host's ranks have sent it one step before
        if step > 1:
            messages.append(Message(near * (step < hosts + 2), int(step > 2 and hosts > 1), returned))
        yield Step(products * (1, near)[step] if step < 2 else products * ranks.per_host * (step <= hosts), messages)


def replaying(machine: Machine, rows: int, columns: int, width: int, *, on_gpus: bool) -> Machine:
    """The machine for a problem of this size: small ones on GPUs are replayed from CUDA graphs, without the host."""
    return replace(machine, host_ms=0.0) if on_gpus and fits(rows, columns, width) else machine


def seconds(exchange: str, ranks: Ranks, machine: Machine) -> float:
    block_time = ranks.rows * ranks.rows * ranks.width / machine.tflops / 1e12
    total, blocks = 0.0, 0
    for step in steps(exchange, ranks):
        total += max(step.products * block_time, sum(_message_seconds(message, machine) for message in step.messages))
        blocks += step.products > 0
    # the kernels of a replicated problem come from CUDA graphs
    return max(total, 1e-3 * machine.host_ms * (2 + blocks * (exchange != "replicate")))


def traffic(exchange: str, ranks: Ranks) -> tuple[int, int, int]:
    """The messages that a rank sends for the loss and its gradients, its bytes inside the host, and those to others."""
    messages = [x for step in steps(exchange, ranks) for x in step.messages if x.inside or x.across]
    inside, across = (sum(getattr(x, side) * x.bytes for x in messages) for side in ("inside", "across"))
    return len(messages), inside, across


def _message_seconds(message: Message, machine: Machine) -> float:
    inside, across = message.inside / machine.gbs_inside, message.across / machine.gbs_across
    alpha = machine.us_across if message.across else machine.us_inside if message.inside else 0.0
    return 1e-6 * alpha + 1e-9 * message.bytes * max(inside, across)


def hidden_from(exchange: str, ranks: Ranks, machine: Machine) -> int | None:
    """The least number of rows of a rank at which the schedule hides its messages; None if it never does."""
    fewest, most = 0, 1 << 32
    if share(exchange, replace(ranks, rows=most), machine) < HIDDEN:
        return None
    while most - fewest > 1:
        rows = (fewest + most) // 2
        is_hidden = share(exchange, replace(ranks, rows=rows), machine) >= HIDDEN
        fewest, most = (fewest, rows) if is_hidden else (rows, most)
    return most


def share(exchange: str, ranks: Ranks, machine: Machine) -> float:
    """The share of the step that the needed products take."""
    operations = 8 * ranks.size * ranks.rows**2 * ranks.width
    return operations / machine.tflops / 1e12 / seconds(exchange, ranks, machine)


@dataclass(frozen=True, slots=True)
class Choice:
    exchange: Schedule
    reason: str


@lru_cache(maxsize=64)
def choose_exchange(shards: Shards, width: int, itemsize: int, *, on_gpus: bool = False, hosts: Hosts = ()) -> Choice:
    """The choice of ``exchange="auto"``. It depends only on values that the ranks share, so every rank makes the same.

    On several hosts it is the fastest, by the model, of the schedules that keep within ``GATHERED_MIB``.

    Args:
        shards: the shards of all ranks.
        width: number of features of a column.
        itemsize: bytes of a feature.
        on_gpus: whether the features are on GPUs: then each rank may compute the whole loss, and small steps replay.
        hosts: the ranks of each host; empty for one host.
    """
    total = sum(shards.widths)
    products, limit = sum(shards.rows) * total * width, REPLICATED[itemsize <= 2]
    if on_gpus and products <= limit:
        return Choice("replicate", f"all {total:,} columns take a GPU less time than the messages of a gather")
    # the features, and in the state dtype their gradient and the other ranks' part of it
    mib = total * width * (itemsize + 2 * max(4, itemsize)) / 2**20
    memory = f"all {total:,} columns and their gradients take {mib:,.0f} MiB on each rank"
    if len(hosts) > 1:
        per_host, columns = max(map(len, hosts)), max(shards.widths)
        ranks = Ranks(len(hosts), per_host, columns, width, itemsize)
        candidates: list[Schedule] = ["ring"]
        if mib <= GATHERED_MIB:
            candidates.append("gather")
        # the shards of two hosts, and three gradients of a host's shards
        host_mib = per_host * columns * width * (2 * itemsize + 3 * max(4, itemsize)) / 2**20
        if per_host > 1 and host_mib <= GATHERED_MIB:
            candidates.append("two-level")
        machine = replaying(Machine(), max(shards.rows), total, width, on_gpus=on_gpus)
        times = {schedule: seconds(schedule, ranks, machine) for schedule in candidates}
        best = min(candidates, key=lambda schedule: times[schedule])
        milliseconds = ", ".join(f"{name} {1e3 * time:,.1f}" for name, time in times.items())
        return Choice(best, f"milliseconds a step by the model: {milliseconds}")
    if mib <= GATHERED_MIB:
        return Choice("gather", f"{memory}, within {GATHERED_MIB:,}, and gathering needs the fewest messages")
    return Choice("ring", f"{memory}, more than {GATHERED_MIB:,}")
