"""The model of time: what each schedule sends, replayed on simulated links, and what records of GPUs say."""

from __future__ import annotations

import json
import statistics
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import page_tables
import pytest
from in_process_worlds import PRODUCTS, Counting

import contrastile
from contrastile.comm.communicator import Hosts
from contrastile.comm.inprocess import InProcess, InProcessGroup
from contrastile.schedules import timing
from contrastile.schedules.placement import SCHEDULES, Shards
from contrastile.schedules.timing import Machine, Ranks, choose_exchange
from contrastile.verify.worlds import simulated

ROWS, WIDTH = 8, 64
"""Of a rank in the calls that are recorded: vectors must be narrower than features."""
GRAPH = Machine(host_ms=0.0)
CLOSE = 0.1
"""What the model promises."""
RECORD = Path(__file__).parents[2] / "docs" / "results" / "gpu_nvidia_h200_x4.json"


def recorded(exchange: str, hosts: Hosts) -> list[Counting]:
    """What each rank of these hosts does for a loss and its gradients."""

    def program(comm: InProcess) -> Counting:
        counting = Counting(comm)
        PRODUCTS.events = counting.events
        how: dict[str, Any] = {"backend": "in_process_worlds:RECORDING", "group": counting, "exchange": exchange}
        image, text = np.random.default_rng(comm.rank).standard_normal((2, ROWS, WIDTH)).astype("float32")
        contrastile.value_and_grad(contrastile.clip_loss, **how)(image, text, 1.0)
        return counting

    return InProcessGroup[Counting](sum(map(len, hosts)), hosts=hosts).run(program)


def scaled(post: Sequence[tuple[str, int]], ranks: Ranks) -> float:
    """The bytes of a message between two ranks, of shards as large as those of ``ranks``, and of 16 bits."""
    rows, width = ranks.rows / ROWS, ranks.width / WIDTH
    # here features have 32 and their sums 64 bits, there 16 and 32
    factors = {"features": rows * width / 2, "number": 1.0}
    return sum(factors.get(kind, rows) * size for kind, size in post)


def replayed(everyone: Sequence[Counting], hosts: Hosts, ranks: Ranks, machine: Machine) -> float:
    """How long the ranks take: a rank's messages are under way one after the other, beside its products.

    A message begins at two ranks when both have posted it. It takes each of them the longer of its links' times, either
    way, and has arrived when all who send it are done.
    """
    home = {rank: number for number, host in enumerate(hosts) for rank in host}
    n, product = len(everyone), ranks.rows**2 / ROWS**2 * ranks.width / machine.tflops / 1e12
    left = [iter(each.events) for each in everyone]
    clocks, streams, arrived = [0.0] * n, [0.0] * n, list[list[float]]()

    def advance(rank: int) -> None:
        """To the rank's next message, or its end."""
        for event in left[rank]:
            if isinstance(event, dict):
                return
            # of a wait the number of its message, or products
            clock = clocks[rank]
            clocks[rank] = max(clock, arrived[event][rank]) if isinstance(event, int) else clock + event * product

    for posts in zip(*(each.posts for each in everyone), strict=True):
        for rank in range(n):
            advance(rank)
        ready = list(map(max, clocks, streams))
        for rank, post in enumerate(posts):
            peers = {*post, *(other for other in range(n) if rank in posts[other])}
            loads = Counter[tuple[str, bool]]()
            for other in peers:
                far = home[other] != home[rank]
                loads["out", far] += scaled(post.get(other, ()), ranks)  # type: ignore[assignment]
                loads["in", far] += scaled(posts[other].get(rank, ()), ranks)  # type: ignore[assignment]
            took = [
                1e-9 * load / (machine.gbs_across if far else machine.gbs_inside) for (_, far), load in loads.items()
            ]
            alpha = machine.us_across if any(far for _, far in loads) else machine.us_inside
            streams[rank] = max(ready[r] for r in (rank, *peers)) + (1e-6 * alpha + max(took) if took else 0.0)
        senders = [[r for r in range(n) if r == rank or rank in posts[r]] for rank in range(n)]
        arrived.append([max(streams[r] for r in those) for those in senders])
    for rank in range(n):
        advance(rank)
    return max(clocks)


WORLDS = [(1, 4), (2, 1), (4, 1), (2, 2), (4, 2), (2, 4), (3, 3)]


@pytest.mark.parametrize(("count", "per_host"), [*WORLDS, (1, 1)])
@pytest.mark.parametrize("exchange", SCHEDULES)
def test_a_schedule_takes_the_time_and_sends_the_bytes_of_the_model(exchange: str, count: int, per_host: int) -> None:
    hosts = simulated(count * per_host, per_host)
    everyone = recorded(exchange, hosts)
    for rows in (1024, 4096, 16384, 65536):
        ranks = Ranks(count, per_host, rows, 512, 2)
        said, took = timing.seconds(exchange, ranks, GRAPH), replayed(everyone, hosts, ranks, GRAPH)
        assert abs(said / took - 1) < CLOSE, (rows, said, took)
    ranks = Ranks(count, per_host, ROWS, WIDTH, 2)
    messages, *said = timing.traffic(exchange, ranks)
    for rank, each in enumerate(everyone):
        host = next(ranks for ranks in hosts if rank in ranks)
        sent = [(other in host, scaled(parts, ranks)) for post in each.posts for other, parts in post.items()]
        found = [sum(size for inside, size in sent if inside is where) for where in (True, False)]
        assert sum(bool(post) for post in each.posts) == messages
        # around the ring a rank sends to its own host or to another
        pairs = [(sum(found), sum(said))] if exchange == "ring" else zip(found, said, strict=True)
        # a few vectors are beside what the model counts
        assert all(abs(size - model) <= CLOSE * model for size, model in pairs), (found, said)


def test_the_model_s_time_is_that_of_records_of_several_gpus() -> None:
    errors = page_tables.model_errors(json.loads(RECORD.read_text(encoding="utf-8")))
    assert len(errors) > 30
    # fewer rows are queued by the host, in a time of its own
    assert max(error for (*_, rows, _), error in errors.items() if rows >= 32768) < CLOSE
    assert statistics.median(errors.values()) < CLOSE


def chosen(rows: int, hosts: int, per_host: int, blocks: int = 1, itemsize: int = 2, **how: bool) -> str:
    n = hosts * per_host
    shards = Shards((rows,) * n, ((rows // blocks,) * blocks,) * n)
    return choose_exchange(shards, 512, itemsize, hosts=simulated(n, per_host), **how).exchange


def test_on_several_hosts_the_fastest_is_chosen_that_fits() -> None:
    assert [chosen(rows, 8, 8) for rows in (256, 1024, 4096, 65536)] == ["gather", "gather", "two-level", "ring"]
    # from a graph more messages take the host no longer
    assert [chosen(rows, 8, 8, on_gpus=True) for rows in (256, 1024, 4096)] == ["replicate", *["two-level"] * 2]
    # with one rank per host there is nothing to give each other
    assert chosen(65536, 8, 1) == "ring"
    assert chosen(4096, 1, 8) == "gather"


def test_small_problems_of_gpus_are_replicated_by_auto() -> None:
    assert chosen(64, 1, 2) == "gather"
    for rows, blocks, itemsize, expected in (
        (8192, 1, 2, "replicate"),
        (8200, 1, 2, "gather"),
        (64, 2, 2, "replicate"),
        (2048, 1, 4, "replicate"),
        (2056, 1, 4, "gather"),
    ):
        assert chosen(rows, 1, 2, blocks, itemsize, on_gpus=True) == expected
    assert timing.REPLICATED[True] == 16384**2 * 512
