"""Paired timing: every sample stands between two samples of the ceiling product, all of about the same length.

A card that is limited by its power runs slower the longer it works, and its clock follows the load of the last second.
Only what shares one sustained stretch can be compared: the figure to quote is a sample's rate over that of the two
ceiling samples around it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch

from contrastile.bench.sweep import matmul

Call = Callable[[], Any]
SIDE = {"cuda": 8192, "cpu": 512}


@dataclass(slots=True)
class Samples:
    """One call's samples.

    Attributes:
        milliseconds: of one call, a mean over each sample's calls.
        calls: how many calls each sample held.
        ceiling: TFLOP/s of the ceiling product, the mean of the samples just before and just after each sample.
        first_seconds: of the first call, with all that it compiles.
    """

    milliseconds: list[float] = field(default_factory=list)
    calls: int = 1
    ceiling: list[float] = field(default_factory=list)
    first_seconds: float = 0.0


def elapsed(call: Call, count: int, device: str) -> float:
    """Milliseconds of ``count`` calls in a row, the device idle before: launches are paid for, never queued ahead."""
    if device != "cuda":
        start = time.perf_counter()
        for _ in range(count):
            call()
        return 1e3 * (time.perf_counter() - start)
    event: Any = torch.cuda.Event
    begin, end = (event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begin.record()
    for _ in range(count):
        call()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end))


class Ceiling:
    """The yardstick: a square product by the vendor's library, 8192^3 bfloat16 on a GPU."""

    def __init__(self, device: str) -> None:
        self.device, self.side = device, SIDE[device]
        self.call = matmul(self.side, "bfloat16" if device == "cuda" else "float32", device)
        self.flops = 2 * self.side**3
        self.call()
        self.one = max(elapsed(self.call, 4, device) / 4, 1e-3)

    def rate(self, slot: float) -> float:
        """TFLOP/s over about ``slot`` seconds."""
        count = max(1, math.ceil(1e3 * slot / self.one))
        return self.flops * count / elapsed(self.call, count, self.device) * 1e-9


def first(call: Call, device: str) -> tuple[float, float]:
    """Seconds of the first call, and of one more."""
    taken = elapsed(call, 1, device) / 1e3
    return taken, elapsed(call, 1, device) / 1e3


def paired(
    calls: dict[str, Call],
    ceiling: Ceiling,
    slot: float,
    rounds: int,
    patience: float,
    watch: AbstractContextManager[Any],
) -> tuple[dict[str, Samples], dict[str, str]]:
    """Samples of each call, taken in turns, each round starting with another one.

    Args:
        calls: by name.
        ceiling: the yardstick.
        slot: seconds of a sample; of one call where that takes longer.
        rounds: samples of each.
        patience: seconds that all samples of one call may take; fewer rounds are taken of a slow one, and none of one
            whose single call takes longer.
        watch: entered while the samples are taken.

    Returns:
        The samples, and why there are none for the others.
    """
    found, reasons = {name: Samples() for name in calls}, {}
    turns = {}
    for name, call in calls.items():
        try:
            found[name].first_seconds, one = first(call, ceiling.device)
        except Exception as error:  # other people's kernels may raise anything
            reasons[name] = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
            _recover()
            continue
        if one > patience:
            reasons[name] = f"one call takes {one:.3g} s, over the {patience:g} s that its samples may take"
            continue
        found[name].calls = max(1, math.ceil(slot / max(one, 1e-6)))
        turns[name] = max(1, min(rounds, int(patience / max(one, slot))))
    with watch:
        _rounds(calls, turns, found, ceiling, slot)
    return {name: found[name] for name in turns}, reasons


def _rounds(
    calls: dict[str, Call], turns: dict[str, int], found: dict[str, Samples], ceiling: Ceiling, slot: float
) -> None:
    # the card warms up
    ceiling.rate(slot)
    for number in range(max(turns.values(), default=0)):
        names = [name for name, most in turns.items() if number < most]
        start = number % max(1, len(names))
        before = ceiling.rate(slot) if names else 0.0
        for name in names[start:] + names[:start]:
            samples = found[name]
            samples.milliseconds.append(elapsed(calls[name], samples.calls, ceiling.device) / samples.calls)
            after = ceiling.rate(slot)
            samples.ceiling.append((before + after) / 2)
            before = after


def _recover() -> None:
    """Give back what a call that failed for lack of memory left behind."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def captured(call: Call) -> Call:
    """The call as a CUDA graph: each replay repeats its kernels without a launch of their own.

    Raises:
        RuntimeError: the call waits for the device, or does what cannot be captured.
    """
    stream: Any = torch.cuda.Stream
    side = stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = call()

    def replay() -> Any:
        graph.replay()
        return kept

    return replay
