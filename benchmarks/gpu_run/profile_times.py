"""Time of each kernel of a step, by torch's profiler, in one sustained stretch with what it is held to.

Stretches of the step stand between stretches of cuBLAS and of a large copy, so that all share the clock to which their
power holds the card. Nothing is replayed, and durations are the device's own.
"""

from __future__ import annotations

import json
import math
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch

from contrastile.bench.sweep import matmul
from gpu_run.profiler import MARK, STEPS, kernel
from gpu_run.step import call, mark
from gpu_run.timing import SIDE, elapsed

ROUNDS = 3
SLOT, WARM = 0.08, 0.3
"""Seconds of a stretch, and of cuBLAS before the first."""

COPIES = 4
COPIED = 2**30
DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
Call = Callable[[], Any]
Rows = list[dict[str, Any]]


def kernel_times(backend: str, steps: Sequence[str] = ()) -> tuple[Rows, Rows]:
    """Launches and nanoseconds of each kernel in one call of each step; and the rates that it is held to.

    Returns:
        Rows of backend, step, kernel, launches, ns; rows of backend, step and the ceilings measured beside that step:
        FLOP a nanosecond of cuBLAS 8192^3 in ``bfloat16`` (and ``tf32`` for float32), bytes a nanosecond of a ``copy``.
    """
    times: Rows = []
    rates: Rows = []
    for step in steps or STEPS[backend]:
        found, ceilings = _measured(call(backend, step), _ceilings("float32" in step))
        times += [{"backend": backend, "step": step, **row} for row in found]
        rates.append({"backend": backend, "step": step, **ceilings})
    return times, rates


@cache
def _ceilings(tf32: bool) -> dict[str, tuple[Call, float]]:
    """Calls, and the work of each: FLOP of a product, bytes read and written by a copy."""
    side = SIDE["cuda"]
    flops = 2.0 * side**3
    found = {"bfloat16": (matmul(side, "bfloat16", "cuda"), flops)}
    if tf32:
        product = matmul(side, "float32", "cuda")

        def rounded() -> None:
            kept = torch.get_float32_matmul_precision()
            torch.set_float32_matmul_precision("high")
            product()
            torch.set_float32_matmul_precision(kept)

        found["tf32"] = rounded, flops
    left, right = (torch.empty(COPIED, dtype=torch.uint8, device="cuda") for _ in range(2))
    found["copy"] = (lambda: left.copy_(right)), 2.0 * COPIED
    return found


def _measured(step: Call, ceilings: dict[str, tuple[Call, float]]) -> tuple[Rows, dict[str, float]]:
    for run in (step, step, *(run for run, _ in ceilings.values())):
        run()
    counts = {name: COPIES if name == "copy" else _count(run) for name, (run, _) in ceilings.items()}
    counts["step"] = _count(step)
    calls = {name: run for name, (run, _) in ceilings.items()} | {"step": step}
    order = [*([*ceilings, "step"] * ROUNDS), *ceilings]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as seen:
        for _ in range(math.ceil(WARM / SLOT) * counts["bfloat16"]):
            calls["bfloat16"]()
        for name in order:
            mark()
            for _ in range(counts[name]):
                calls[name]()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        seen.export_chrome_trace(str(path))
        found = stretches(json.loads(path.read_text(encoding="utf-8"))["traceEvents"], order)
    rates = {name: work * counts[name] * (ROUNDS + 1) / total(found[name]) for name, (_, work) in ceilings.items()}
    return by_kernel(found["step"], counts["step"] * ROUNDS), rates


def _count(run: Call) -> int:
    return max(1, math.ceil(1e3 * SLOT / elapsed(run, 2, "cuda") * 2))


def stretches(events: Iterable[dict[str, Any]], order: Sequence[str]) -> dict[str, list[dict[str, Any]]]:
    """What ran on the device in the stretches of each name, which marks divide; host calls are left out.

    Raises:
        RuntimeError: the trace has lost a mark.
    """
    device = sorted((event for event in events if event.get("cat") in DEVICE), key=lambda event: float(event["ts"]))
    found: dict[str, list[dict[str, Any]]] = defaultdict(list)
    names = iter(order)
    name = ""
    for event in device:
        if MARK in event["name"]:
            name = next(names, "")
        elif name:
            found[name].append(event)
    if next(names, None) is not None or not name:
        raise RuntimeError(f"the profiler's trace must have {len(order)} marks")
    return found


def total(events: Iterable[dict[str, Any]]) -> float:
    """Nanoseconds."""
    return sum(1e3 * event["dur"] for event in events)


def by_kernel(events: Iterable[dict[str, Any]], calls: int) -> Rows:
    """Launches and nanoseconds in one of ``calls`` calls."""
    found: dict[str, list[float]] = {}
    for event in events:
        own = found.setdefault(kernel(event["name"]), [0, 0.0])
        own[0] += 1
        own[1] += 1e3 * event["dur"]
    return [
        {"kernel": name, "launches": round(launches / calls), "ns": round(ns / calls, 1)}
        for name, (launches, ns) in found.items()
    ]
