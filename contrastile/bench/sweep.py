"""Takes the measurements: check, predict, count bytes, then time all implementations in turn.

Rounds are interleaved, so that a machine whose speed drifts drifts for all alike: in each round every implementation
and variant of one size is timed once, starting with another one each time, with a matrix product timed before the
first and after each. A sample's matrix-product rate is that of the two products around it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from contrastile.backends.contract import BackendUnavailableError
from contrastile.bench import child
from contrastile.bench.agreement import Agreement, check
from contrastile.bench.cases import Arguments, Case, arguments, features
from contrastile.bench.display import Advance
from contrastile.bench.environment import environment
from contrastile.bench.memory import available_bytes
from contrastile.bench.peers import CHECK_ROWS, PLAIN, Implementation, named, use_threads
from contrastile.bench.results import Row, Settings, Sweep

PROBE_ROWS = 1024
"""Pairs at which speed is first felt out."""

MEMORY_RUNS = 2
FITS = 0.8
"""Share of the available memory that a prediction may take."""

ITEMSIZE = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}
_SIDES = {"cpu": (4096, 2048, 1024, 512, 256), "cuda": (8192, 4096, 2048, 1024)}


def run(settings: Settings, advance: Advance) -> Sweep:
    """The whole sweep, smallest sizes first; what was found until then, if it is interrupted.

    Args:
        settings: what to measure.
        advance: told what is being done, and how many of ``steps`` are behind.

    Raises:
        ValueError, TypeError: a backend's name leads nowhere.
        BackendUnavailableError: a backend that was named cannot be loaded.
    """
    implementations, absent = _load(settings)
    use_threads(settings.threads)
    found = Sweep(settings, environment(settings.device))
    try:
        _run(implementations, absent, found, advance)
    except KeyboardInterrupt:
        found.interrupted = True
        for row in found.rows:
            row.reason = row.reason or (None if row.seconds else "interrupted")
    return found


def _run(implementations: list[Implementation], absent: dict[str, str], found: Sweep, advance: Advance) -> None:
    """Check and measure all of them."""
    settings, sound = found.settings, []
    for implementation in implementations:
        advance(f"checking {implementation.name} against the oracle", 0)
        agreement = _checked(implementation, settings)
        found.agreements.append(agreement)
        if agreement.agrees:
            sound.append(implementation)
        else:
            absent[implementation.name] = _reason(agreement)
    pace: dict[tuple[str, str, int], float] = {}
    for width in settings.widths:
        for batch in sorted(settings.batches):
            cases = [Case(variant, batch, width) for variant in settings.variants]
            found.rows += [Row(name, case, reason=reason) for case in cases for name, reason in absent.items()]
            advance("skipped", len(cases) * len(absent) * (settings.repeat + 1))
            _measure(cases, sound, pace, found, advance)


def steps(settings: Settings) -> int:
    """How many steps ``run`` will report."""
    sizes = len(settings.batches) * len(settings.widths) * len(settings.variants)
    return sizes * (len(settings.backends) + 1) * (settings.repeat + 1)


def _load(settings: Settings) -> tuple[list[Implementation], dict[str, str]]:
    """The implementations, the plain loss last, and why that one is absent where it is."""
    found, absent = [_named(name) for name in settings.backends], {}
    try:
        found.append(named(PLAIN))
    except ImportError:
        absent[PLAIN] = "needs torch; run: pip install 'contrastile[torch]'"
    return found, absent


def _named(name: str) -> Implementation:
    try:
        return named(name)
    except (Exception, SystemExit) as error:
        # importing other people's code may raise anything
        if str(error).startswith("backend "):
            raise
        raise BackendUnavailableError(f"backend {name!r} raised {_said(error)}") from error


def _said(error: BaseException) -> str:
    """An error in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def _checked(implementation: Implementation, settings: Settings) -> Agreement:
    """The check against the oracle; other people's code may raise anything in it."""
    try:
        return check(implementation, settings.dtype, settings.device, settings.scale)
    except (Exception, SystemExit) as error:
        return Agreement(implementation.name, None, CHECK_ROWS, f"raised {_said(error)}")


def _reason(agreement: Agreement) -> str:
    if agreement.ratio is None:
        return agreement.reason
    return f"disagrees with the oracle: {agreement.ratio:.3g} x the bound at {agreement.reason}"


def _measure(
    cases: list[Case],
    implementations: list[Implementation],
    pace: dict[tuple[str, str, int], float],
    found: Sweep,
    advance: Advance,
) -> None:
    """All implementations on all variants of one size. ``pace`` holds seconds per squared batch, and learns."""
    settings, work = found.settings, []
    for case in cases:
        for implementation in implementations:
            row = Row(implementation.name, case)
            found.rows.append(row)
            advance(f"{_label(row)}: memory", 1)
            row.reason = _does_not_fit(implementation, case, settings, pace)
            if row.reason is None and settings.memory:
                _count_bytes(row, settings)
            if row.reason is None:
                work.append((implementation, row))
            else:
                advance(f"{_label(row)}: skipped, {row.reason}", settings.repeat)
    if work:
        _time(work, found, advance)
    for implementation, row in work:
        pace[_pace_key(implementation, row.case)] = float(np.median(row.seconds)) / row.case.batch**2


def _does_not_fit(
    implementation: Implementation, case: Case, settings: Settings, pace: dict[tuple[str, str, int], float]
) -> str | None:
    """Why a case is not tried: predicted memory or time. Time grows with the square of the batch."""
    needs, has = implementation.predicted_bytes(case, ITEMSIZE[settings.dtype]), available_bytes(settings.device)
    if has is not None and needs > FITS * has:
        return f"needs about {needs / 2**30:.1f} GiB, {has / 2**30:.1f} GiB are available"
    key = _pace_key(implementation, case)
    if key not in pace:
        small = case.resized(min(case.batch, PROBE_ROWS))
        step = implementation.step(_given(implementation, small, settings))
        _seconds(step, settings.device)
        pace[key] = _seconds(step, settings.device) / small.batch**2
    runs = settings.repeat + (settings.repeat > 1) + MEMORY_RUNS * settings.memory
    predicted = pace[key] * case.batch**2 * runs
    if predicted > settings.budget:
        return (
            f"{runs} runs would take about {predicted:.3g} s, over the budget of {settings.budget:.0f} s; "
            "raise --budget or lower --repeat"
        )
    return None


def _pace_key(implementation: Implementation, case: Case) -> tuple[str, str, int]:
    return implementation.name, case.variant, case.width


def _count_bytes(row: Row, settings: Settings) -> None:
    case = row.case
    request = child.Request(
        row.implementation,
        case.variant,
        case.batch,
        case.width,
        settings.dtype,
        settings.device,
        settings.scale,
        settings.threads,
    )
    try:
        measured = child.ask(request, timeout=60 + 2 * settings.budget)
    except child.MemoryMeasurementError as error:
        row.reason = str(error)
        return
    row.peak_bytes, row.resident_bytes = measured.peak_bytes, measured.resident_bytes


def _time(work: list[tuple[Implementation, Row]], found: Sweep, advance: Advance) -> None:
    """The rounds. One warm-up each, at full size, unless there is but one round."""
    settings = found.settings
    jobs = [(row, implementation.step(_given(implementation, row.case, settings))) for implementation, row in work]
    side = matmul_side(min(row.case.flops for row, _ in jobs), settings.device)
    product = matmul(side, settings.dtype, settings.device)
    _seconds(product, settings.device)
    if settings.repeat > 1:
        for row, step in jobs:
            advance(f"{_label(row)}: warm-up", 0)
            _seconds(step, settings.device)
    for number in range(settings.repeat):
        start = number % len(jobs)
        before = _seconds(product, settings.device)
        samples = []
        for row, step in jobs[start:] + jobs[:start]:
            advance(f"{_label(row)}: round {number + 1}", 1)
            taken = _seconds(step, settings.device)
            after = _seconds(product, settings.device)
            samples.append((row, taken, 2 * 2 * side**3 / (before + after)))
            before = after
        # all of a round, or nothing: ratios compare samples of the same round
        for row, taken, rate in samples:
            row.seconds.append(taken)
            row.matmul.append(rate)
            row.matmul_side = side
            found.order.append(_label(row))


def _given(implementation: Implementation, case: Case, settings: Settings) -> Arguments:
    return arguments(features(case), implementation.library, settings.dtype, settings.device, settings.scale)


def _label(row: Row) -> str:
    return f"{row.implementation} {row.case.variant} b={row.case.shape[0]} d={row.case.shape[1]}"


def _seconds(call: Callable[[], Any], device: str) -> float:
    """Wall-clock seconds of one call, its results still alive; on a GPU until it is done."""
    wait: Callable[[], Any] = _nothing
    if device == "cuda":
        import torch

        wait = torch.cuda.synchronize
    wait()
    start = time.perf_counter()
    kept = call()
    wait()
    taken = time.perf_counter() - start
    del kept
    return taken


def _nothing() -> None:
    return None


def matmul_side(flops: int, device: str) -> int:
    """Side of the square product that is timed beside a sample: the largest that costs at most half of it."""
    sides = _SIDES[device]
    return next((side for side in sides if 4 * side**3 <= flops), sides[-1])


def matmul(side: int, dtype: str, device: str) -> Callable[[], Any]:
    """A square matrix product into memory that is already there; torch's, or NumPy's where torch is missing."""
    random = np.random.default_rng(side)
    a, b = (random.standard_normal((side, side), dtype=np.float32) for _ in range(2))
    try:
        import torch
    except ImportError:
        left, right = (x.astype(np.dtype(dtype)) for x in (a, b))
        result = np.empty_like(left)
        return lambda: np.matmul(left, right, out=result)
    x, y = (torch.from_numpy(each).to(device, getattr(torch, dtype)) for each in (a, b))
    out = torch.empty_like(x)
    return lambda: torch.mm(x, y, out=out)
