"""Computes one problem with one backend."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Literal

import numpy as np

from contrastile import compute
from contrastile.backends.arrays import FLOATS, ArrayLibrary
from contrastile.backends.contract import Array, Backend, Options
from contrastile.oracle.arrays import FloatArray
from contrastile.schedules import local
from contrastile.schedules.problem import Problem
from contrastile.verify.truth import Outcome

DTYPES = ("float32", *(dtype for dtype in FLOATS if dtype != "float32"))
"""Dtypes of features, in the order in which they are tested."""

Want = local.Wanted | Literal["every"] | None
"""The requested gradients; None requests only the value."""


def putter(arrays: ArrayLibrary, device: str) -> Callable[[Any, str], Array]:
    """A function that copies NumPy arrays to this library and device, in a given dtype."""
    prototype = arrays.from_numpy(np.zeros(1))
    prototype = prototype if arrays.device(prototype) == device else prototype.to(device)
    return lambda x, dtype: None if x is None else arrays.asarray(np.array(x, order="C"), dtype, prototype)


def materialise(problem: Problem, backend: Backend, dtype: str, device: str = "cpu") -> Problem:
    """The NumPy float64 problem in the backend's arrays: features in ``dtype``, weights in the state dtype.

    Every array is a copy, so that no backend can modify the problem that the oracle reads.
    """
    state, put = backend.state(dtype), putter(backend.arrays, device)
    return replace(
        problem,
        rows=put(problem.rows, dtype),
        columns=tuple(put(x, dtype) for x in problem.columns),
        **{name: put(getattr(problem, name), dtype) for name in GUIDES},
        **{name: put(getattr(problem, name), state) for name in _STATE},
        **{name: put(getattr(problem, name), "int64") for name in _INDICES},
    )


_NO_GRADIENTS = local.Gradients(None, (), None, None)
_STATE = ("scale", "bias", "row_weight", "row_target", "column_weight", "column_target", "row_limits", "column_limits")
GUIDES = ("row_guide", "column_guide")
_INDICES = ("positives", "excluded", "row_ids", "column_ids")


@np.errstate(all="ignore")
def outcome(
    problem: Problem,
    backend: Backend,
    dtype: str,
    device: str = "cpu",
    options: Options = Options(),  # noqa: B008 (frozen)
    upstream: float | FloatArray = 1.0,
    want: Want = "every",
) -> Outcome:
    """The backend's loss and gradients of ``upstream * loss``, of NumPy float64 features that ``dtype`` holds exactly.

    Returns:
        The results, converted to NumPy float64; unrequested results are None. Of a problem with a placement, only this
        rank's part.

    Raises:
        UnsupportedProblemError: the backend refuses the problem.
    """
    arrays = backend.arrays
    native = materialise(problem, backend, dtype, device)
    # bars are float64
    upstream_gradient = arrays.asarray(upstream, "float64" if np.ndim(upstream) else backend.state(dtype), native.scale)
    wanted = local.Wanted.every(native) if want == "every" else want
    loss, state = compute.problem_loss(native, local.Work(backend, options), wanted)
    gradients = _NO_GRADIENTS
    if wanted is not None:
        gradients = compute.problem_gradients(native, state, upstream_gradient, wanted, local.Work(backend, options))

    def take(x: Array | None) -> Any:
        return None if x is None else np.array(arrays.to_numpy(x), dtype=np.float64)

    return Outcome(
        loss=take(loss),
        rows=take(gradients.rows),
        columns=tuple(take(x) for x in gradients.columns),
        scale=take(gradients.scale),
        bias=take(gradients.bias),
    )


@contextmanager
def one_thread(arrays: ArrayLibrary, enabled: bool) -> Iterator[None]:
    """A context in which torch uses one thread, if ``enabled``: tiny products gain nothing from several threads.

    On busy cores, waiting for other threads would make tiny products many times slower.
    """
    if arrays.name != "torch" or not enabled:
        yield
        return
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
