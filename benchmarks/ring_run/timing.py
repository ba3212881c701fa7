"""Paired timing over ranks: every sample starts together and lasts as long as its slowest rank.

As on one GPU (``gpu_run.timing``) a sample stands between two of the ceiling product, which all ranks compute at once:
the cards are limited by their power, and their clocks follow the load of the last second.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from gpu_run.timing import SIDE

from contrastile.bench.sweep import matmul
from ring_run.ranks import Ranks

Call = Callable[[], Any]


@dataclass(slots=True)
class Samples:
    """One call's samples.

    Attributes:
        milliseconds: of one call on the slowest rank, a mean over each sample's calls.
        calls: how many calls each sample held.
        host: milliseconds of the host for one call on the slowest rank, until it had queued all of it.
        ceiling: TFLOP/s of the ceiling product, the mean over the ranks and over the samples just before and after.
    """

    milliseconds: list[float] = field(default_factory=list)
    host: list[float] = field(default_factory=list)
    calls: int = 1
    ceiling: list[float] = field(default_factory=list)


def own_time(ranks: Ranks, call: Call, count: int) -> tuple[float, float]:
    """Milliseconds that ``count`` calls in a row take on this rank, and its host, all ranks starting together."""
    ranks.together()
    start = time.perf_counter()
    if ranks.kind != "cuda":
        for _ in range(count):
            call()
        whole = 1e3 * (time.perf_counter() - start)
        return whole, whole
    event: Any = torch.cuda.Event
    begin, end = (event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(count):
        call()
    host = 1e3 * (time.perf_counter() - start)
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)), host


def elapsed(ranks: Ranks, call: Call, count: int) -> tuple[float, float]:
    """The slowest rank's ``own_time``."""
    everyone = ranks.share(own_time(ranks, call, count))
    whole, host = zip(*everyone, strict=True)
    return max(whole), max(host)


class Captured:
    """A call in a CUDA graph: captured the first time, replayed since.

    Args:
        call: to capture; it runs once outside of the graph before.
    """

    def __init__(self, call: Call) -> None:
        self.call, self.graph, self.found = call, None, None

    def __call__(self) -> Any:
        """Replay it; what it returned is the same memory each time."""
        if self.graph is None:
            side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                self.call()
            torch.cuda.current_stream().wait_stream(side)
            with torch.cuda.graph(graph):
                self.found = self.call()
            self.graph = graph
        self.graph.replay()
        return self.found

    def release(self) -> None:
        """Give the graph back: a communicator cannot end while one has its messages."""
        self.graph = self.found = None


class Ceiling:
    """The yardstick: 8192^3 bfloat16 by the vendor's library, on all ranks at once."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        side, dtype = SIDE[ranks.kind], "bfloat16" if ranks.kind == "cuda" else "float32"
        self.call, self.flops = matmul(side, dtype, str(ranks.device)), 2 * side**3
        self.call()
        self.one = elapsed(ranks, self.call, 4)[0] / 4

    def rate(self, slot: float) -> float:
        """TFLOP/s over about ``slot`` seconds, the mean over the ranks."""
        count = max(1, math.ceil(1e3 * slot / self.one))
        rates = self.ranks.share(self.flops * count / own_time(self.ranks, self.call, count)[0] * 1e-9)
        return sum(rates) / len(rates)


def attempt(ranks: Ranks, call: Call) -> str:
    """Make a call once on all ranks; the first reason why it failed on one, or ""."""
    reason = ""
    try:
        call()
        if ranks.kind == "cuda":
            torch.cuda.synchronize()
    except Exception as error:  # other people's code may raise anything; memory runs out on all ranks alike
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    if reason and ranks.kind == "cuda":
        torch.cuda.empty_cache()
    return ranks.failed(reason)


def paired(
    ranks: Ranks,
    calls: dict[str, Call],
    ceiling: Ceiling | None,
    slot: float,
    rounds: int,
    patience: float,
    watch: AbstractContextManager[Any] | None = None,
) -> tuple[dict[str, Samples], dict[str, str]]:
    """Samples of each call, taken in turns, each round starting with another one.

    Args:
        ranks: all of them make the same calls.
        calls: by name.
        ceiling: the yardstick; None where only the calls are compared with each other.
        slot: seconds of a sample; of one call where that takes longer.
        rounds: samples of each.
        patience: seconds that all samples of one call may take: fewer rounds of a slow one, at least one.
        watch: entered while the samples are taken.

    Returns:
        The samples, and why there are none for the others.
    """
    reasons = {name: attempt(ranks, call) for name, call in calls.items()}
    live = {name: call for name, call in calls.items() if not reasons[name]}
    found, turns = {name: Samples() for name in live}, {}
    for name, call in live.items():
        one = elapsed(ranks, call, 1)[0] / 1e3
        found[name].calls = max(1, math.ceil(slot / max(one, 1e-6)))
        turns[name] = max(1, min(rounds, int(patience / max(one, slot))))
    with watch or nullcontext():
        before = [ceiling.rate(slot) if ceiling else math.nan for _ in range(2)][-1]
        for number in range(max(turns.values(), default=0)):
            names = [name for name, most in turns.items() if number < most]
            start = number % max(1, len(names))
            for name in names[start:] + names[:start]:
                samples = found[name]
                whole, host = elapsed(ranks, live[name], samples.calls)
                samples.milliseconds.append(whole / samples.calls)
                samples.host.append(host / samples.calls)
                if ceiling:
                    after = ceiling.rate(slot)
                    samples.ceiling.append((before + after) / 2)
                    before = after
    return found, {name: reason for name, reason in reasons.items() if reason}
