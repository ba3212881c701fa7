"""Peak memory of a step beyond its inputs: linear in the batch, with at most a tile of logits at once."""

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
    """The larger of two square problems, the tile asked for, and workspace bytes of the matrix-product library."""

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


# on Hopper cuBLAS is given 32 MiB; G alone, in 16 bits, would be more than the budget
_SIZES = {"cpu": _Size(384, 8, 32, 0), "cuda": _Size(8192, 64, 256, 40 << 20)}
# bookkeeping of the library, and rounding of its allocator
_SLACK = {"cpu": 1 << 14, "cuda": 1 << 20}
_STEPS = 12


def peak_memory(subject: Subject, case: str) -> Comparisons:
    """A step's memory grows with the batch, not with its square, holds at most one tile of logits, and is freed."""
    size, library = _SIZES[subject.device], subject.backend.arrays.name
    options = replace(subject.options, tile=(size.tile, size.tile))
    # memory kept between the passes is the backend's choice, and the backend caps it
    backend = replace(subject.backend, keeping=None)
    for kind in ("softmax", "sigmoid"):

        def step(batch: int, kind: str = kind) -> Callable[[], object]:
            problem = _problem(kind, batch, size.width, subject.dtype, subject.seed)
            native = materialise(problem, backend, subject.dtype, subject.device)
            return lambda: _step(native, backend, options)

        # first calls fill caches and compile
        step(size.batch // 4)()
        half, one, two = (peak_bytes(library, subject.device, step(size.batch // k)) for k in (4, 2, 1))
        again = partial(repeated, step(size.batch // 4), _STEPS)
        if subject.device == "cuda":
            # calls that repeat are captured, once
            again()
        several, few = peak_bytes(library, subject.device, again), half + _SLACK[subject.device]
        yield f"{kind}, {_STEPS} steps", Worst(several / few, "bytes", (), several, few)
        allowed = linear_limit(half, one, 2, subject.device)
        yield f"{kind}, twice the batch", Worst(two / allowed, "bytes", (), two, allowed)
        yield f"{kind}, tile {size.tile} x {size.tile}", Worst(two / size.budget, "bytes", (), two, size.budget)


def repeated(step: Callable[[], object], times: int) -> None:
    for _ in range(times):
        step()


def linear_limit(half: float, one: float, times: float, device: str) -> float:
    """The most bytes of a batch that is larger than the second by ``times`` as much as that is than the first.

    With memory c + a b + q b^2 it takes ``times`` as much more if q is 0, else more; a quarter is granted.
    """
    return one + times * max(0.0, one - half) * 1.25 + _SLACK[device]


def _problem(kind: str, batch: int, width: int, dtype: str, seed: int) -> Problem:
    random = np.random.default_rng(seed)
    rows, columns = (round_to(random.standard_normal((batch, width)) / width**0.5, dtype) for _ in range(2))
    ids, weight = random.integers(0, batch // 2, batch), np.full(batch, 1.0 / batch)
    pairs: dict[str, Any] = {"positives": np.arange(batch), "row_ids": ids, "column_ids": ids}
    one = Problem(rows, (columns,), np.asarray(8.0), weight, np.ones(batch), **pairs)
    if kind == "sigmoid":
        return replace(one, kind="sigmoid", bias=np.asarray(-4.0))
    return replace(one, column_weight=weight, column_target=np.ones(batch))


@np.errstate(all="ignore")
def _step(native: Problem, backend: Backend, options: Options) -> object:
    """Value and all gradients, by the calls that the public functions make."""
    wanted = local.Wanted.every(native)
    # what is kept has a measurement of its own
    told = wanted if native.kind == "sigmoid" else None
    value, state = compute.problem_loss(native, local.Work(backend, options), told)
    return value, compute.problem_gradients(native, state, None, wanted, local.Work(backend, options))


def peak_bytes(library: str, device: str, step: Callable[[], object]) -> float:
    """The most bytes that a step held at once, beyond those before it.

    Raises:
        SkipError: this library's memory cannot be measured here.
    """
    found, meter = [0], _METERS.get((library, device))
    if meter is None:
        raise SkipError(f"nothing counts the memory of {library} on {device}")
    with meter(found):
        # until the meter stops: results count
        results = step()
    del results
    return float(found[0])


@contextmanager
def _numpy(found: list[int]) -> Iterator[None]:
    mine = not tracemalloc.is_tracing()
    if mine:
        tracemalloc.start()
    try:
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
        yield
        found[0] = tracemalloc.get_traced_memory()[1] - before
    finally:
        if mine:
            tracemalloc.stop()


@contextmanager
def _torch(found: list[int]) -> Iterator[None]:
    """Torch's allocator on the host has no counters: the profiler's record of this thread is replayed, to the byte.

    It has what is made inside of C++ too, and no workspace that BLAS or oneDNN takes for itself.
    """
    from torch.autograd import profiler

    # which else tells stderr of each start and end
    with mock.patch.dict(os.environ, KINETO_LOG_LEVEL="99"):
        profile: Any = profiler.profile(profile_memory=True)
        with profile:
            yield
    events = [event for event in profile.kineto_results.events() if event.name() == "[memory]"]
    live = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        # the profiler knows blocks by their address alone: the release of a block that was there before is given the
        # size of a later one at its address
        live = max(0, live + event.nbytes())
        found[0] = max(found[0], live)


@contextmanager
def _torch_on_a_gpu(found: list[int]) -> Iterator[None]:
    import torch

    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    # requested, not allocated: a cached block may be larger than was asked for
    before = torch.cuda.memory_stats()["requested_bytes.all.current"]
    yield
    torch.cuda.synchronize()
    found[0] = torch.cuda.memory_stats()["requested_bytes.all.peak"] - before


@contextmanager
def _cupy(found: list[int]) -> Iterator[None]:
    cupy: Any = importlib.import_module("cupy")
    held = 0

    class Counter(cupy.cuda.MemoryHook):  # type: ignore[misc]
        name = "contrastile peak"

        def malloc_postprocess(self, **kwargs: Any) -> None:
            nonlocal held
            held += kwargs["mem_size"]
            found[0] = max(found[0], held)

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
"""NumPy's memory is measured by the interpreter's tracer, that of others by their allocators."""
