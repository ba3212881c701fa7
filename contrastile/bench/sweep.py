"""Takes the measurements: check, predict cost, count bytes, then time all implementations in turn.

Rounds are interleaved, so that a drift of the machine's speed affects all implementations alike. Each round times every
implementation and variant of one size once, and each round starts with the next one. A matrix product is timed before
the first sample and after each; the mean of the two around a sample is its matrix-product rate.
"""

from __future__ import annotations

import gc
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any, TypeVar
from unittest import mock

import numpy as np

from contrastile.backends.arrays import ITEMSIZE
from contrastile.backends.contract import BackendUnavailableError
from contrastile.backends.settings import GRAPHS
from contrastile.bench.agreement import CHECK_ROWS, Agreement, check
from contrastile.bench.peers import PLAIN, Implementation, Workload, ours, plain
from contrastile.environment import available_bytes, measurement_environment
from contrastile.reporting import one_line
from contrastile.verify.peak import peak_bytes

PROBE_ROWS = 1024
"""Pairs of the first, short run that predicts the time of larger ones."""

Sample = TypeVar("Sample")

Advance = Callable[[str, int], None]
"""A callback (label, steps): the current work, and the number of ``steps`` that it completes."""

STEADY = 0.1
"""Times are steady if the middle half of an implementation's times spans less than this share of their median."""

FITS = 0.8
"""Largest share of the available memory that a workload may be predicted to need."""

SecondsPerLogit = dict[tuple[str, str, int], float]
"""Seconds per logit (there are b^2) in the last run of each implementation, variant and width."""

_SIDES = {"cpu": (4096, 2048, 1024, 512, 256), "cuda": (8192, 4096, 2048, 1024)}


@dataclass(frozen=True, slots=True)
class SweepSettings:
    """What to measure: the options of ``contrastile bench``, with their defaults.

    There are ``repeat`` rounds, or up to ``most`` while the times of an implementation vary by ``STEADY`` or more.
    """

    backends: tuple[str, ...]
    batches: tuple[int, ...] = (4096, 8192)
    widths: tuple[int, ...] = (512,)
    variants: tuple[str, ...] = ("aligned",)
    dtype: str = "float32"
    scale: float = 100.0
    repeat: int = 5
    most: int = 0
    device: str = "cpu"
    budget: float = 300.0
    memory: bool = True


@dataclass(slots=True)
class Measurement:
    """One implementation on one workload.

    Attributes:
        reason: why it was not measured, or None.
        seconds: the time of each round.
        matmul: mean FLOP/s of the matrix products before and after each sample.
        peak_bytes: peak extra memory by allocations.
    """

    reason: str | None = None
    seconds: list[float] = field(default_factory=list)
    matmul: list[float] = field(default_factory=list)
    peak_bytes: int | None = None

    @property
    def spread(self) -> float:
        """The interquartile range of the times over their median."""
        lower, middle, upper = np.quantile(self.seconds, (0.25, 0.5, 0.75)).tolist()
        return float((upper - lower) / middle)

    def times_of(self, other: Measurement | None) -> float | None:
        """Median over the rounds of this time / the other's time in the same round; None if the other is missing."""
        if other is None or not other.seconds:
            return None
        return statistics.median(a / b for a, b in zip(self.seconds, other.seconds, strict=True))


@dataclass(slots=True)
class Sweep:
    """All results. An interrupted sweep omits its unfinished rounds."""

    settings: SweepSettings
    environment: dict[str, Any]
    agreements: list[Agreement] = field(default_factory=list)
    rows: dict[tuple[str, Workload], Measurement] = field(default_factory=dict)
    interrupted: bool = False

    def record(self) -> dict[str, Any]:
        """The record that ``--json`` writes."""
        return {
            "environment": self.environment,
            "settings": asdict(self.settings),
            # JSON has no inf: such a ratio becomes null beside "agrees": false.
            "agreements": [
                {**asdict(x), "ratio": x.ratio if math.isfinite(x.ratio or 0.0) else None, "agrees": x.agrees}
                for x in self.agreements
            ],
            "rows": [self._row(*key) for key in self.rows],
            "interrupted": self.interrupted,
        }

    def _row(self, name: str, workload: Workload) -> dict[str, Any]:
        row, (b, d), flops = self.rows[name, workload], workload.shape, workload.flops
        data = {"implementation": name, "variant": workload.variant, "nominal_batch": workload.batch, "batch": b}
        data |= {"width": d, "dtype": self.settings.dtype, "status": "skip", "reason": row.reason}
        if not row.seconds:
            return data
        lower, middle, upper = np.quantile(row.seconds, (0.25, 0.5, 0.75)).tolist()
        plain = self.rows.get((PLAIN, workload))
        # The same implementation and size, aligned and without ids.
        aligned = self.rows.get((name, replace(workload, variant="aligned")))
        memory_of_plain = plain and plain.peak_bytes
        return data | {
            "status": "measured",
            "seconds": {"lower": lower, "median": middle, "upper": upper, "samples": row.seconds},
            "spread": row.spread,
            "steady": row.spread < STEADY,
            "gflops": flops / middle / 1e9,
            "matmul_gflops": [rate / 1e9 for rate in row.matmul],
            "share_of_matmul": statistics.median(flops / t / x for t, x in zip(row.seconds, row.matmul, strict=True)),
            "time_over_plain": row.times_of(plain),
            "time_over_aligned": row.times_of(aligned),
            "peak_extra_bytes": row.peak_bytes,
            "memory_over_plain": row.peak_bytes / memory_of_plain if memory_of_plain and row.peak_bytes else None,
        }


def run(settings: SweepSettings, advance: Advance) -> Sweep:
    """Run the sweep, smallest sizes first. An interruption ends it early; the measurements until then are returned.

    Raises:
        ValueError, TypeError: a name is no backend.
        BackendUnavailableError: a named backend cannot be loaded.
    """
    implementations, skipped = [_load(name) for name in settings.backends], dict[str, str]()
    try:
        implementations.append(plain())
    except ImportError:
        skipped[PLAIN] = "needs torch; run: pip install 'contrastile[torch]'"
    sweep = Sweep(settings, measurement_environment(settings.device))
    try:
        for implementation in implementations:
            advance(f"checking {implementation.name} against the oracle", 0)
            sweep.agreements.append(agreement := _check(implementation, settings))
            if not agreement.agrees:
                ratio = agreement.ratio
                prefix = "" if ratio is None else f"disagrees with the oracle: {ratio:.3g} x the bound at "
                skipped[implementation.name] = prefix + agreement.reason
        agreeing = [implementation for implementation in implementations if implementation.name not in skipped]
        seconds_per_logit: SecondsPerLogit = {}
        for width in settings.widths:
            for batch in sorted(settings.batches):
                workloads = [Workload(variant, batch, width) for variant in settings.variants]
                sweep.rows |= {(name, w): Measurement(reason) for w in workloads for name, reason in skipped.items()}
                advance("skipped", sum(w.flops for w in workloads) * len(skipped) * (settings.repeat + 1))
                _measure(workloads, agreeing, seconds_per_logit, sweep, advance)
    except KeyboardInterrupt:
        sweep.interrupted = True
        for row in sweep.rows.values():
            row.reason = row.reason or (None if row.seconds else "interrupted")
    return sweep


def steps(settings: SweepSettings) -> int:
    """The total of all steps, each weighted by its FLOPs, so that the remaining time follows from the work done."""
    sizes = [(batch, width) for batch in settings.batches for width in settings.widths]
    flops = sum(Workload(variant, *size).flops for size in sizes for variant in settings.variants)
    return flops * (len(settings.backends) + 1) * (settings.repeat + 1)


def _load(name: str) -> Implementation:
    try:
        return ours(name)
    except (Exception, SystemExit) as error:
        # Importing a third-party backend may raise any exception.
        if str(error).startswith("backend "):
            raise
        raise BackendUnavailableError(f"backend {name!r} raised {one_line(error)}") from error


def _check(implementation: Implementation, settings: SweepSettings) -> Agreement:
    try:
        return check(implementation, settings.dtype, settings.device, settings.scale)
    except (Exception, SystemExit) as error:  # a third-party backend may raise any exception
        return Agreement(implementation.name, None, CHECK_ROWS, f"raised {one_line(error)}")


def _measure(
    workloads: list[Workload],
    implementations: list[Implementation],
    seconds_per_logit: SecondsPerLogit,
    sweep: Sweep,
    advance: Advance,
) -> None:
    """Measure memory, warm up each implementation unless there is one round, and time the rounds of all that fit."""
    settings, device, steps = sweep.settings, sweep.settings.device, dict[str, Callable[[], Any]]()
    rows, sizes = dict[str, Measurement](), dict[str, Workload]()
    for workload in workloads:
        for implementation in implementations:
            row = sweep.rows[implementation.name, workload] = Measurement()
            label = f"{implementation.name} {workload.variant} b={workload.shape[0]} d={workload.shape[1]}"
            advance(f"{label}: memory", workload.flops)
            try:
                row.reason = _skip_reason(implementation, workload, settings, seconds_per_logit)
                if row.reason is None:
                    step = implementation.step(workload, settings.dtype, device, settings.scale)
                    row.peak_bytes = peak_extra(step, implementation.library, device) if settings.memory else None
                    rows[label], sizes[label], steps[label] = row, workload, step
            except Exception as error:  # memory may run out, and a third-party backend may raise any exception
                row.reason = f"raised {one_line(error)}"
            if row.reason is not None:
                advance(f"{label}: skipped, {row.reason}", workload.flops * settings.repeat)
    if not steps:
        return
    side = matmul_side(min(size.flops for size in sizes.values()), device)
    product = matmul(side, settings.dtype, device)
    seconds(product, device)
    if settings.repeat > 1:
        for label, step in steps.items():
            advance(f"{label}: warm-up", 0)
            seconds(step, device)

    def take_sample(label: str) -> float:
        number = len(rows[label].seconds) + 1
        advance(f"{label}: round {number}", sizes[label].flops if number <= settings.repeat else 0)
        return seconds(steps[label], device)

    calls = {label: partial(take_sample, label) for label in steps}
    # Keep complete rounds only, because ratios compare samples of the same round.
    rounds = max(settings.repeat, settings.most)
    for done, samples in enumerate(in_turns(calls, lambda: 2 * side**3 / seconds(product, device), rounds), 1):
        for label, duration, rate in samples:
            rows[label].seconds.append(duration)
            rows[label].matmul.append(rate)
        if done >= settings.repeat and all(rows[label].spread < STEADY for label in steps):
            break
    for label, size in sizes.items():
        key = label.partition(" ")[0], size.variant, size.width
        seconds_per_logit[key] = statistics.median(rows[label].seconds) / size.batch**2


def _skip_reason(
    implementation: Implementation, workload: Workload, settings: SweepSettings, seconds_per_logit: SecondsPerLogit
) -> str | None:
    """Why a workload is skipped: predicted memory or time. Time grows with the square of the batch."""
    needed = implementation.predicted_bytes(workload, ITEMSIZE[settings.dtype])
    free = available_bytes(settings.device)
    if free is not None and needed > FITS * free:
        return f"needs about {needed / 2**30:.1f} GiB, {free / 2**30:.1f} GiB are available"
    key = implementation.name, workload.variant, workload.width
    if key not in seconds_per_logit:
        probe = replace(workload, batch=min(workload.batch, PROBE_ROWS))
        step = implementation.step(probe, settings.dtype, settings.device, settings.scale)
        seconds(step, settings.device)
        seconds_per_logit[key] = seconds(step, settings.device) / probe.batch**2
    runs = settings.repeat + (settings.repeat > 1) + settings.memory
    predicted = seconds_per_logit[key] * workload.batch**2 * runs
    if predicted > settings.budget:
        return (
            f"{runs} runs would take about {predicted:.3g} s, over the budget of {settings.budget:.0f} s; "
            "raise --budget or lower --repeat"
        )
    return None


def peak_extra(call: Callable[[], Any], library: str, device: str) -> int:
    """Peak extra bytes of one call: the most bytes live at once, results included, less those live before the call.

    ``verify.peak`` meters them: torch on a CPU to the byte, inside C++ too; other arrays by the high-water mark of the
    bytes requested from an allocator, NumPy's by ``tracemalloc``. Memory that BLAS or oneDNN allocates does not count.
    CUDA graphs are off, because a replayed graph allocates nothing: its memory dates from the capture.
    """
    gc.collect()
    with mock.patch.dict(os.environ, {GRAPHS: "0"}):
        return int(peak_bytes(library, device, call))


def in_turns(
    calls: Mapping[str, Callable[[], Sample]], yardstick: Callable[[], float], rounds: int
) -> Iterator[list[tuple[str, Sample, float]]]:
    """Yield the samples of each round: name, sample, and the mean of the yardstick before and after it.

    Every round starts with the next call, so that a drift of the machine's speed affects all calls alike.
    """
    names = list(calls)
    before = yardstick()
    for number in range(rounds):
        start, samples = number % len(names), []
        for name in names[start:] + names[:start]:
            sample = calls[name]()
            after = yardstick()
            samples.append((name, sample, (before + after) / 2))
            before = after
        yield samples


def seconds(call: Callable[[], Any], device: str, count: int = 1) -> float:
    """Wall-clock seconds of ``count`` calls, on a GPU until they are done. The last result is freed afterwards."""
    wait: Callable[[], Any] = (lambda: None) if device == "cpu" else sys.modules["torch"].cuda.synchronize
    wait()
    result, start = None, time.perf_counter()
    for _ in range(count):
        result = call()
    wait()
    duration = time.perf_counter() - start
    del result
    return duration


def matmul_side(flops: int, device: str) -> int:
    """Side of the square matrix product timed beside a sample: the largest that costs at most half of the sample."""
    sides = _SIDES[device]
    return next((side for side in sides if 4 * side**3 <= flops), sides[-1])


def matmul(side: int, dtype: str, device: str) -> Callable[[], Any]:
    """A square matrix product into preallocated memory; torch's, or NumPy's where torch is missing."""
    random = np.random.default_rng(side)
    a, b = (random.standard_normal((side, side), dtype=np.float32) for _ in range(2))
    try:
        import torch
    except ImportError:
        left, right = (x.astype(np.dtype(dtype)) for x in (a, b))
        result = np.empty_like(left)
        return lambda: np.matmul(left, right, out=result)
    x, y = (torch.from_numpy(array).to(device, getattr(torch, dtype)) for array in (a, b))
    out = torch.empty_like(x)
    return lambda: torch.mm(x, y, out=out)
