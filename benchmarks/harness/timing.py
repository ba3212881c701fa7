"""Samples in turns: every sample stands between two samples of the ceiling product, all of about the same length.

A GPU that is limited by its power runs slower the longer it works, and its clock follows the load of the last second.
Compare only what shares one sustained stretch: quote a sample's rate over that of the two ceiling samples around it.
Over several ranks a sample starts on all of them together and lasts as long as the slowest.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from contrastile.bench.sweep import in_turns, matmul
from harness.ranks import Ranks
from harness.record import said

Call = Callable[[], Any]
SIDE = {"cuda": 8192, "cpu": 512}


@dataclass(slots=True)
class Samples:
    """One call's samples.

    Attributes:
        milliseconds: of one call on the slowest rank, a mean over each sample's calls.
        host: milliseconds until the slowest rank's host had queued one call.
        calls: how many calls each sample holds.
        ceiling: TFLOP/s of the ceiling product: the mean over the ranks, and over the samples just before and after.
        first_seconds: of the first call, with all that it compiles.
    """

    calls: int
    first_seconds: float
    milliseconds: list[float] = field(default_factory=list)
    host: list[float] = field(default_factory=list)
    ceiling: list[float] = field(default_factory=list)


def own_time(ranks: Ranks, call: Call, count: int) -> tuple[float, float]:
    """Milliseconds that ``count`` calls take on this rank, and its host; the device is idle before."""
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
    whole, host = zip(*ranks.share(own_time(ranks, call, count)), strict=True)
    return max(whole), max(host)


class Captured:
    """A call in a CUDA graph: captured the first time, replayed since. What it returns is the same memory each time."""

    def __init__(self, call: Call) -> None:
        self.call = call
        self.graph: Any = None
        self.found: Any = None

    def __call__(self) -> Any:
        """Replay it."""
        if self.graph is None:
            side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(3):
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
    """The yardstick: a square product by the vendor's library on all ranks at once, 8192^3 bfloat16 on a GPU."""

    def __init__(self, ranks: Ranks, slot: float) -> None:
        side, dtype = SIDE[ranks.kind], "bfloat16" if ranks.kind == "cuda" else "float32"
        self.ranks, self.call, self.flops = ranks, matmul(side, dtype, str(ranks.device)), 2 * side**3
        self.call()
        self.count = max(1, math.ceil(1e3 * slot / max(elapsed(ranks, self.call, 4)[0] / 4, 1e-3)))

    def __call__(self) -> float:
        """TFLOP/s over about a slot, the mean over the ranks."""
        rates = self.ranks.share(self.flops * self.count / own_time(self.ranks, self.call, self.count)[0] * 1e-9)
        return float(sum(rates) / len(rates))


def no_ceiling() -> float:
    """The yardstick of calls that are compared with one another alone."""
    return math.nan


def attempt(ranks: Ranks, call: Call) -> str:
    """Make a call once on all ranks; the first reason why it failed on one, or ""."""
    reason = ""
    try:
        call()
        if ranks.kind == "cuda":
            torch.cuda.synchronize()
    except Exception as error:  # other people's code may raise anything; memory runs out on all ranks alike
        reason = said(error)
    if reason and ranks.kind == "cuda":
        torch.cuda.empty_cache()
    return ranks.failed(reason)


def paired(
    ranks: Ranks, calls: dict[str, Call], yardstick: Callable[[], float], slot: float, rounds: int, patience: float
) -> tuple[dict[str, Samples], dict[str, str]]:
    """Samples of each call, taken in turns.

    Args:
        ranks: all of them make the same calls.
        calls: by name.
        yardstick: the ceiling's rate.
        slot: seconds of a sample; of one call where that takes longer.
        rounds: samples of each.
        patience: seconds that a call may take.

    Returns:
        The samples, and why there are none for the others.
    """
    found, reasons = dict[str, Samples](), dict[str, str]()
    for name, call in calls.items():
        start = time.perf_counter()
        reason = attempt(ranks, call)
        first = time.perf_counter() - start
        one = math.inf if reason else elapsed(ranks, call, 1)[0] / 1e3
        if not reason and one > patience:
            reason = f"one call takes {one:.3g} s, over the {patience:g} s that it may take"
        if reason:
            reasons[name] = reason
            continue
        if one < slot:
            # an eager call is replayed from a graph after a few
            one = min(elapsed(ranks, call, 2)[0] / 2e3 for _ in range(2))
        found[name] = Samples(max(1, math.ceil(slot / max(one, 1e-6))), first)
    timed = {name: partial(elapsed, ranks, calls[name], samples.calls) for name, samples in found.items()}
    for samples_of_round in in_turns(timed, yardstick, rounds) if timed else ():
        for name, (whole, host), ceiling in samples_of_round:
            samples = found[name]
            samples.milliseconds.append(whole / samples.calls)
            samples.host.append(host / samples.calls)
            samples.ceiling.append(ceiling)
    return found, reasons
