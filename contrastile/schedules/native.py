"""A problem in its backend's library, while that library works where the caller's does."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from contrastile.backends.arrays import ArrayLibrary, transfer, working_for
from contrastile.backends.contract import Array, Backend
from contrastile.schedules.local import Gradients
from contrastile.schedules.problem import Problem, convert


@contextmanager
def native(problem: Problem, source: ArrayLibrary, backend: Backend) -> Iterator[Problem]:
    """The caller's problem in the backend's library; results are moved back before it closes.

    Raises:
        UnsupportedProblemError: the backend does not run where the features are.
    """
    blocking = problem.blocking
    device = source.device(problem.rows) if blocking is None else blocking.device.type
    backend.check_device(device)
    torch = sys.modules["torch"] if source.name == "torch" else None
    # the features have the dtype that they are to be multiplied in: no product is narrowed
    narrowing = torch is not None and torch.is_autocast_enabled(device)
    if source.name == backend.arrays.name != "cupy" and not narrowing:
        yield convert(problem, source, backend.arrays)
        return
    with working_for(source, backend.arrays, problem.rows if blocking is None else problem.scale.to(blocking.device)):
        if torch is None or not narrowing:
            yield convert(problem, source, backend.arrays)
            return
        with torch.autocast(device, enabled=False):
            yield convert(problem, source, backend.arrays)


def returned(found: Gradients, problem: Problem, source: ArrayLibrary, target: ArrayLibrary) -> Gradients:
    """Gradients moved from the backend's library to the caller's, with the dtypes of the caller's problem."""
    if source.name == target.name:
        return found
    features, number = target.dtype(problem.rows), target.dtype(problem.scale)

    def moved(x: Array | None, dtype: str) -> Array | None:
        return transfer(x, source, target, dtype)

    columns = tuple(moved(x, features) for x in found.columns)
    return Gradients(moved(found.rows, features), columns, moved(found.scale, number), moved(found.bias, number))
