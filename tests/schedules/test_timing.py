"""The model of time against the messages of each schedule, replayed on simulated links, and against records of GPUs."""

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
from in_process_worlds import PRODUCTS, Recorder

import contrastile
from contrastile.comm.communicator import Hosts
from contrastile.comm.inprocess import InProcess, InProcessGroup
from contrastile.schedules import timing
from contrastile.schedules.placement import SCHEDULES, Shards
from contrastile.schedules.timing import Machine, Ranks, choose_exchange
from contrastile.verify.worlds import simulated

ROWS, WIDTH = 8, 64
"""The features of a rank in recorded calls; vectors must be narrower than features."""
GRAPH = Machine(host_ms=0.0)
TOLERANCE = 0.1
"""The relative error that the model promises."""
RECORD = Path(__file__).parents[2] / "docs" / "results" / "gpu_nvidia_h200_x4.json"


def record_calls(exchange: str, hosts: Hosts) -> list[Recorder]:
    """The messages and products of each rank of these hosts for a loss and its gradients."""

    def program(comm: InProcess) -> Recorder:
        recorder = Recorder(comm)
        PRODUCTS.events = recorder.events
        options: dict[str, Any] = {"backend": "in_process_worlds:RECORDING", "group": recorder, "exchange": exchange}
        image, text = np.random.default_rng(comm.rank).standard_normal((2, ROWS, WIDTH)).astype("float32")
        contrastile.value_and_grad(contrastile.clip_loss, **options)(image, text, 1.0)
        return recorder

    return InProcessGroup[Recorder](sum(map(len, hosts)), hosts=hosts).run(program)


def scaled_bytes(post: Sequence[tuple[str, int]], ranks: Ranks) -> float:
    """The bytes of a message between two ranks whose shards have the size of ``ranks`` and 16 bits."""
    rows, width = ranks.rows / ROWS, ranks.width / WIDTH
    # recorded features and sums have 32 and 64 bits, scaled ones 16 and 32
    factors = {"features": rows * width / 2, "number": 1.0}
    return sum(factors.get(kind, rows) * size for kind, size in post)


def replay_seconds(recorders: Sequence[Recorder], hosts: Hosts, ranks: Ranks, machine: Machine) -> float:
    """The time of all ranks. A rank transfers its messages one after the other, while it computes products.

    A message between two ranks begins when both have posted it. It takes a rank the longest of the times of its links,
    in either direction, and has arrived when all its senders are done.
    """
    host_of = {rank: number for number, host in enumerate(hosts) for rank in host}
    n, cost = len(recorders), ranks.rows**2 / ROWS**2 * ranks.width / machine.tflops / 1e12
    remaining = [iter(recorder.events) for recorder in recorders]
    clocks, streams, arrived = [0.0] * n, [0.0] * n, list[list[float]]()

    def advance(rank: int) -> None:
        """Advance the clock of a rank to its next post, or to its end."""
        for event in remaining[rank]:
            if isinstance(event, dict):
                return
            # an integer is a wait for the message of this number; a float is the cost of products
            clock = clocks[rank]
            clocks[rank] = max(clock, arrived[event][rank]) if isinstance(event, int) else clock + event * cost

    for posts in zip(*(recorder.posts for recorder in recorders), strict=True):
        for rank in range(n):
            advance(rank)
        ready = list(map(max, clocks, streams))
        for rank, post in enumerate(posts):
            peers = {*post, *(other for other in range(n) if rank in posts[other])}
            loads = Counter[tuple[str, bool]]()
            for other in peers:
                remote = host_of[other] != host_of[rank]
                loads["out", remote] += scaled_bytes(post.get(other, ()), ranks)  # type: ignore[assignment]
                loads["in", remote] += scaled_bytes(posts[other].get(rank, ()), ranks)  # type: ignore[assignment]
            rates = {True: machine.gbs_across, False: machine.gbs_inside}
            seconds = [1e-9 * load / rates[remote] for (_, remote), load in loads.items()]
            alpha = machine.us_across if any(remote for _, remote in loads) else machine.us_inside
            streams[rank] = max(ready[r] for r in (rank, *peers)) + (1e-6 * alpha + max(seconds) if seconds else 0.0)
        senders = [[r for r in range(n) if r == rank or rank in posts[r]] for rank in range(n)]
        arrived.append([max(streams[r] for r in group) for group in senders])
    for rank in range(n):
        advance(rank)
    return max(clocks)


WORLDS = [(1, 4), (2, 1), (4, 1), (2, 2), (4, 2), (2, 4), (3, 3)]


@pytest.mark.parametrize(("count", "per_host"), [*WORLDS, (1, 1)])
@pytest.mark.parametrize("exchange", SCHEDULES)
def test_a_schedule_takes_the_time_and_sends_the_bytes_of_the_model(exchange: str, count: int, per_host: int) -> None:
    hosts = simulated(count * per_host, per_host)
    recorders = record_calls(exchange, hosts)
    for rows in (1024, 4096, 16384, 65536):
        ranks = Ranks(count, per_host, rows, 512, 2)
        predicted, replayed = timing.seconds(exchange, ranks, GRAPH), replay_seconds(recorders, hosts, ranks, GRAPH)
        assert abs(predicted / replayed - 1) < TOLERANCE, (rows, predicted, replayed)
    ranks = Ranks(count, per_host, ROWS, WIDTH, 2)
    messages, *predicted = timing.traffic(exchange, ranks)
    for rank, recorder in enumerate(recorders):
        host = next(ranks for ranks in hosts if rank in ranks)
        sent = [(other in host, scaled_bytes(xs, ranks)) for post in recorder.posts for other, xs in post.items()]
        sums = [sum(size for inside, size in sent if inside is where) for where in (True, False)]
        assert sum(bool(post) for post in recorder.posts) == messages
        # in a ring a rank sends either within its host or to another one
        pairs = [(sum(sums), sum(predicted))] if exchange == "ring" else zip(sums, predicted, strict=True)
        # the model neglects a few vectors
        assert all(abs(size - model) <= TOLERANCE * model for size, model in pairs), (sums, predicted)


def test_the_model_predicts_the_times_of_records_of_several_gpus() -> None:
    errors = page_tables.model_errors(json.loads(RECORD.read_text(encoding="utf-8")))
    assert len(errors) > 30
    # the time of fewer rows is that of the host, which queues them
    assert max(error for (*_, rows, _), error in errors.items() if rows >= 32768) < TOLERANCE
    assert statistics.median(errors.values()) < TOLERANCE


def chosen(rows: int, hosts: int, per_host: int, blocks: int = 1, itemsize: int = 2, **options: bool) -> str:
    n = hosts * per_host
    shards = Shards((rows,) * n, ((rows // blocks,) * blocks,) * n)
    return choose_exchange(shards, 512, itemsize, hosts=simulated(n, per_host), **options).exchange


def test_on_several_hosts_auto_chooses_the_fastest_exchange() -> None:
    assert [chosen(rows, 8, 8) for rows in (256, 1024, 4096, 65536)] == ["gather", "gather", "two-level", "ring"]
    # a graph queues more messages at no cost for the host
    assert [chosen(rows, 8, 8, on_gpus=True) for rows in (256, 1024, 4096)] == ["replicate", *["two-level"] * 2]
    # with one rank per host the two levels are one
    assert chosen(65536, 8, 1) == "ring"
    assert chosen(4096, 1, 8) == "gather"


def test_auto_replicates_small_problems_of_gpus() -> None:
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
