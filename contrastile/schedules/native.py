"""A problem in its backend's library, while that library works where the caller's does."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

from contrastile.backends.arrays import ArrayLibrary, working_for
from contrastile.backends.contract import Backend
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
    wide = torch.autocast(device, enabled=False) if torch is not None and narrowing else nullcontext()
    like = problem.rows if blocking is None else problem.scale.to(blocking.device)
    with working_for(source, backend.arrays, like), wide:
        yield convert(problem, source, backend.arrays)
