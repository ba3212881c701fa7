"""Peak memory of a step, without its inputs: linear in the batch, with at most a tile of logits at once."""

from __future__ import annotations

import importlib
import os
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest import mock

import numpy as np

from contrastile import compute
from contrastile.backends.contract import Backend, Options
from contrastile.schedules import local
from contrastile.schedules.problem import Problem
from contrastile.verify.comparison import Comparisons, Worst
from contrastile.verify.execution import materialise
from contrastile.verify.rounding import round_to
from contrastile.verify.trial import SkipError, Subject

CASE = "peak-memory"


@dataclass(frozen=True, slots=True)
class _Size:
    """The largest batch of square problems, its width, the tile, and workspace bytes of the matrix-product library."""

    batch: int
    width: int
    tile: int
    libraries: int

    @property
    def budget(self) -> float:
        """Bytes that the larger problem may hold, counting every number as a float64.

        Six matrices of rows and of columns (copies in the state dtype, sums, gradients, parts of features), 32 vectors
        of each, and twelve arrays of a tile's size: far more than a kernel needs, and far less than all logits.
        """
        return 8.0 * (2 * self.batch * (6 * self.width + 32) + 12 * self.tile**2) + self.libraries


# cuBLAS has a workspace of 32 MiB on Hopper; G alone, in 16 bits, would exceed the budget
_SIZES = {"cpu": _Size(384, 8, 32, 0), "cuda": _Size(8192, 64, 256, 40 << 20)}
# for bookkeeping of the library, and rounding of its allocator
_SLACK = {"cpu": 1 << 14, "cuda": 1 << 20}
_STEPS = 12


def peak_memory(subject: Subject, case: str) -> Comparisons:
    """A step's memory grows with the batch, not with its square, holds at most one tile of logits, and is freed."""
    size, library = _SIZES[subject.device], subject.backend.arrays.name
    options = replace(subject.options, tile=(size.tile, size.tile))
    # without memory kept between the passes, which the backend chooses and limits
    backend = replace(subject.backend, keeping=None)
    for kind in ("softmax", "sigmoid"):

        def step(batch: int, kind: str = kind) -> Callable[[], object]:
            problem = _problem(kind, batch, size.width, subject.dtype, subject.seed)
            native = materialise(problem, backend, subject.dtype, subject.device)
            return lambda: _step(native, backend, options)

        # the first call fills caches and compiles
        step(size.batch // 4)()
        quarter, half, full = (peak_bytes(library, subject.device, step(size.batch // k)) for k in (4, 2, 1))
        steps = partial(repeated, step(size.batch // 4), _STEPS)
        if subject.device == "cuda":
            # repeated calls are captured as graphs, once
            steps()
        peak_of_steps, allowed_peak = peak_bytes(library, subject.device, steps), quarter + _SLACK[subject.device]
        yield f"{kind}, {_STEPS} steps", Worst(peak_of_steps / allowed_peak, "bytes", (), peak_of_steps, allowed_peak)
        allowed = linear_limit(quarter, half, 2, subject.device)
        yield f"{kind}, twice the batch", Worst(full / allowed, "bytes", (), full, allowed)
        yield f"{kind}, tile {size.tile} x {size.tile}", Worst(full / size.budget, "bytes", (), full, size.budget)


def repeated(step: Callable[[], object], times: int) -> None:
    for _ in range(times):
        step()


def linear_limit(half: float, one: float, times: float, device: str) -> float:
    """The most bytes allowed for batch b3, where b1 takes ``half``, b2 takes ``one`` and b3 - b2 = ``times`` (b2 - b1).

    With memory c + a b + q b^2 the increase is ``times`` the first one if q is 0, else more. A quarter more is allowed.
    """
    return one + times * max(0.0, one - half) * 1.25 + _SLACK[device]


def _problem(kind: str, batch: int, width: int, dtype: str, seed: int) -> Problem:
    generator = np.random.default_rng(seed)
    rows, columns = (round_to(generator.standard_normal((batch, width)) / width**0.5, dtype) for _ in range(2))
    ids, weight = generator.integers(0, batch // 2, batch), np.full(batch, 1.0 / batch)
    pairs: dict[str, Any] = {"positives": np.arange(batch), "row_ids": ids, "column_ids": ids}
    problem = Problem(rows, (columns,), np.asarray(8.0), weight, np.ones(batch), **pairs)
    if kind == "sigmoid":
        return replace(problem, kind="sigmoid", bias=np.asarray(-4.0))
    return replace(problem, column_weight=weight, column_target=np.ones(batch))


@np.errstate(all="ignore")
def _step(native: Problem, backend: Backend, options: Options) -> object:
    """Value and all gradients, by the same calls as the public functions."""
    wanted = local.Wanted.every(native)
    # with None the softmax loss keeps no exponentials: ``saved_bytes`` measures them
    forward_wanted = wanted if native.kind == "sigmoid" else None
    value, state = compute.problem_loss(native, local.Work(backend, options), forward_wanted)
    return value, compute.problem_gradients(native, state, None, wanted, local.Work(backend, options))


def peak_bytes(library: str, device: str, step: Callable[[], object]) -> float:
    """The most bytes that a step held at once, without the bytes held before it.

    Raises:
        SkipError: this library's memory cannot be measured here.
    """
    peak, meter = [0], _METERS.get((library, device))
    if meter is None:
        raise SkipError(f"nothing counts the memory of {library} on {device}")
    with meter(peak):
        # the results are held until the meter stops, so that they count
        results = step()
    del results
    return float(peak[0])


@contextmanager
def _numpy(peak: list[int]) -> Iterator[None]:
    starts_tracing = not tracemalloc.is_tracing()
    if starts_tracing:
        tracemalloc.start()
    try:
        tracemalloc.reset_peak()
        bytes_before = tracemalloc.get_traced_memory()[0]
        yield
        peak[0] = tracemalloc.get_traced_memory()[1] - bytes_before
    finally:
        if starts_tracing:
            tracemalloc.stop()


@contextmanager
def _torch(peak: list[int]) -> Iterator[None]:
    """Replay the profiler's record of this thread: torch's allocator on the host has no counters.

    The record includes allocations inside of C++, but not the workspace that BLAS or oneDNN allocates for itself.
    """
    from torch.autograd import profiler

    # keep the profiler from printing each start and end to stderr
    with mock.patch.dict(os.environ, KINETO_LOG_LEVEL="99"):
        profile: Any = profiler.profile(profile_memory=True)
        with profile:
            yield
    events = [event for event in profile.kineto_results.events() if event.name() == "[memory]"]
    held = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        # the profiler knows blocks only by address: for a block that was allocated before, the release has the size of
        # a later block at the same address
        held = max(0, held + event.nbytes())
        peak[0] = max(peak[0], held)


@contextmanager
def _torch_on_a_gpu(peak: list[int]) -> Iterator[None]:
    import torch

    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    # requested bytes, because an allocated cached block may be larger
    bytes_before = torch.cuda.memory_stats()["requested_bytes.all.current"]
    yield
    torch.cuda.synchronize()
    peak[0] = torch.cuda.memory_stats()["requested_bytes.all.peak"] - bytes_before


@contextmanager
def _cupy(peak: list[int]) -> Iterator[None]:
    cupy: Any = importlib.import_module("cupy")
    held = 0

    class Counter(cupy.cuda.MemoryHook):  # type: ignore[misc]
        name = "contrastile peak"

        def malloc_postprocess(self, **kwargs: Any) -> None:
            nonlocal held
            held += kwargs["mem_size"]
            peak[0] = max(peak[0], held)

        def free_postprocess(self, **kwargs: Any) -> None:
            nonlocal held
            held -= kwargs["mem_size"]

    with Counter():
        yield


_METERS: dict[tuple[str, str], Callable[[list[int]], AbstractContextManager[None]]] = {
    ("numpy", "cpu"): _numpy,
    ("torch", "cpu"): _torch,
    ("torch", "cuda"): _torch_on_a_gpu,
    ("cupy", "cuda"): _cupy,
}
"""The meters by library and device: tracemalloc for NumPy, the allocators or their records for the others."""
