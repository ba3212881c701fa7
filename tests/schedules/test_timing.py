"""The model of time: what each schedule sends, replayed on simulated links, and what records of GPUs say."""

from __future__ import annotations

import json
import statistics
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from in_process_worlds import Counting

import contrastile
from contrastile.backends.contract import Block
from contrastile.backends.registry import load
from contrastile.comm.communicator import Hosts
from contrastile.comm.inprocess import InProcess, InProcessGroup
from contrastile.schedules import timing
from contrastile.schedules.placement import SCHEDULES, Shards, choose_exchange
from contrastile.schedules.timing import Machine, Ranks
from contrastile.verify.worlds import simulated

ROWS, WIDTH = 8, 64
"""Of a rank in the calls that are recorded: vectors must be narrower than features."""
GRAPH = Machine(launch=0.0)
RECORD = Path(__file__).parents[2] / "docs" / "results" / "gpu_nvidia_h200_x4.json"


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> threading.local:
    """Where a rank's products are written down: ``here.events``."""
    backend, rank = load("numpy"), threading.local()
    primitives = {"lse": 2, "gradients": 6}

    def around(name: str) -> Any:
        primitive, times = getattr(backend, name), primitives[name]

        def call(block: Block, *rest: Any) -> Any:
            rank.events.append(times * block.rows.shape[0] * block.columns.shape[0] / ROWS**2)
            return primitive(block, *rest)

        return call

    calls = {name: around(name) for name in primitives}
    monkeypatch.setattr(type(backend), "__setattr__", object.__setattr__)
    for name, call in calls.items():
        monkeypatch.setattr(backend, name, call)
    return rank


def recorded(here: threading.local, exchange: str, hosts: Hosts) -> list[Counting]:
    """What each rank of these hosts does for a loss and its gradients."""

    def program(comm: InProcess) -> Counting:
        counting = Counting(comm)
        here.events = counting.events
        image, text = np.random.default_rng(comm.rank).standard_normal((2, ROWS, WIDTH)).astype("float32")
        both = contrastile.value_and_grad(contrastile.clip_loss, backend="numpy", group=counting, exchange=exchange)
        both(image, text, 1.0)
        return counting

    return InProcessGroup[Counting](sum(map(len, hosts)), hosts=hosts).run(program)


def scaled(sent: Counter[str], ranks: Ranks) -> float:
    """The bytes of a message between two ranks, of shards as large as those of ``ranks``, and of 16 bits."""
    rows, width = ranks.rows / ROWS, ranks.width / WIDTH
    # here features have 32 and their sums 64 bits, there 16 and 32
    return sent["features"] * rows * width / 2 + sent["vector"] * rows + sent["number"]


def replayed(everyone: Sequence[Counting], hosts: Hosts, ranks: Ranks, machine: Machine) -> float:
    """How long the ranks take: a rank's messages are under way one after the other, beside its products.

    A message begins at two ranks when both have posted it. It takes each of them the longer of its links' times, either
    way, and has arrived when all who send it are done.
    """
    home = {rank: number for number, host in enumerate(hosts) for rank in host}
    n, product = len(everyone), ranks.rows**2 * ranks.width / machine.flops
    left: list[Iterator[Any]] = [iter(each.events) for each in everyone]
    clocks, streams, arrived = [0.0] * n, [0.0] * n, list[list[float]]()
    while True:
        posts = list[dict[int, Counter[str]]]()
        for rank, events in enumerate(left):
            for event in events:
                if isinstance(event, dict):
                    posts.append(event)
                    break
                clocks[rank] = (
                    max(clocks[rank], arrived[event][rank])
                    if isinstance(event, int)
                    else clocks[rank] + event * product
                )
        if not posts:
            return max(clocks)
        assert len(posts) == n
        peers = [{rank, *post, *(r for r in range(n) if rank in posts[r])} for rank, post in enumerate(posts)]
        ready = [max(clock, stream) for clock, stream in zip(clocks, streams, strict=True)]
        for rank, those in enumerate(peers):
            loads = {(way, far): 0.0 for way in "io" for far in (False, True)}
            for other in those:
                for way, sent in (("o", posts[rank].get(other)), ("i", posts[other].get(rank))):
                    if sent is not None:
                        loads[way, home[rank] != home[other]] += scaled(sent, ranks)
            alpha = machine.latency_across if any(home[r] != home[rank] for r in those) else machine.latency_inside
            took = max(load / (machine.across if far else machine.inside) for (_, far), load in loads.items())
            streams[rank] = max(ready[r] for r in those) + took + alpha * (len(those) > 1)
        arrived.append([max(streams[r] for r in range(n) if r == rank or rank in posts[r]) for rank in range(n)])


WORLDS = [(1, 4), (4, 1), (2, 2), (4, 2), (2, 4), (3, 3)]


@pytest.mark.parametrize(("count", "per_host"), WORLDS)
@pytest.mark.parametrize("exchange", SCHEDULES)
def test_what_a_schedule_sends_and_computes_takes_the_time_of_the_model(
    exchange: str, count: int, per_host: int, here: threading.local
) -> None:
    hosts = simulated(count * per_host, per_host)
    everyone = recorded(here, exchange, hosts)
    for rows in (1024, 4096, 16384, 65536):
        ranks = Ranks(count, per_host, rows, 512, 2)
        said, took = timing.seconds(exchange, ranks, GRAPH), replayed(everyone, hosts, ranks, GRAPH)
        assert abs(said / took - 1) < 0.1, (rows, said, took)


@pytest.mark.parametrize(("count", "per_host"), [*WORLDS, (1, 1)])
@pytest.mark.parametrize("exchange", SCHEDULES)
def test_a_rank_sends_as_much_as_the_model_says(
    exchange: str, count: int, per_host: int, here: threading.local
) -> None:
    hosts, ranks = simulated(count * per_host, per_host), Ranks(count, per_host, ROWS, WIDTH, 2)
    home = {rank: number for number, host in enumerate(hosts) for rank in host}
    sent = Counter[tuple[int, bool]]()
    for rank, each in enumerate(recorded(here, exchange, hosts)):
        posts = [event for event in each.events if isinstance(event, dict) and event]
        for other, parts in (pair for post in posts for pair in post.items()):
            sent[rank, home[rank] != home[other]] += int(scaled(parts, ranks))
        assert len(posts) == timing.traffic(exchange, ranks)[0]
    # around the ring a rank sends to its own host or to another; gathered weights are beside what the model counts
    said = timing.traffic(exchange, ranks)[1:]
    for rank in range(len(home)):
        own = [sent[rank, False], sent[rank, True]]
        pairs = [(sum(own), sum(said))] if exchange == "ring" else zip(own, said, strict=True)
        assert all(abs(each - most) <= 0.05 * most for each, most in pairs), (own, said)


def test_the_model_s_time_is_that_of_records_of_several_gpus() -> None:
    rows = json.loads(RECORD.read_text(encoding="utf-8"))["times"]
    rows = [x for x in rows if x["name"] == "contrastile triton" and x["status"] == "measured" and not x["graph"]]
    took = {(x["n"], x["exchange"], x["b"], x["d"]): statistics.median(x["milliseconds"]) / 1e3 for x in rows}
    alone = {(b, d): 8 * b * b * d / time for (n, _, b, d), time in took.items() if n == 1}
    errors = {}
    for (n, exchange, b, d), time in took.items():
        if n > 1 and exchange in ("ring", "gather"):
            rate = statistics.median(each for (_, width), each in alone.items() if width == d)
            said = timing.seconds(exchange, Ranks(1, n, b // n, d, 2), Machine(flops=rate))
            errors[n, exchange, b // n, d] = abs(said / time - 1)
    assert len(errors) > 30
    # fewer rows are queued by the host, in a time of its own
    assert max(error for (*_, rows, _), error in errors.items() if rows >= 32768) < 0.1
    assert statistics.median(errors.values()) < 0.1


def test_on_several_hosts_the_fastest_is_chosen_that_fits() -> None:
    def chosen(rows: int, count: int, per_host: int) -> str:
        n = count * per_host
        shards = Shards((rows,) * n, ((rows,),) * n)
        return choose_exchange(shards, 512, 2, hosts=simulated(n, per_host)).exchange

    assert [chosen(rows, 8, 8) for rows in (256, 4096, 65536)] == ["gather", "two-level", "ring"]
    # with one rank per host there is nothing to give each other
    assert chosen(65536, 8, 1) == "ring"
    assert chosen(4096, 1, 8) == "gather"
