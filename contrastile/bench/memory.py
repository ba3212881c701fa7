"""Peak extra memory of one call: the most that was live at once, less what was live before; results included.

Measured, never estimated:

* torch on the CPU: the profiler's record of every allocation and release that goes through torch's CPU allocator on
  the calling thread, those made inside C++ during backward included, replayed to a running peak. Exact to the byte.
  Workspace that BLAS or oneDNN takes for itself is not counted.
* torch on CUDA: the caching allocator's own high-water mark of allocated (not reserved) bytes. Small losses are
  launched for it: what a replayed CUDA graph uses was allocated when it was captured.
* NumPy: ``tracemalloc``, to which NumPy reports its buffers. Python's own objects count too; BLAS workspace does not.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any
from unittest import mock

from contrastile.verify.peak import numpy_meter


def peak_extra(call: Callable[[], Any], library: str, device: str) -> int:
    """Peak extra bytes of one call.

    Args:
        call: what to run, once.
        library: "numpy" or "torch": whose allocations count.
        device: "cpu" or "cuda".
    """
    if library == "numpy":
        return numpy_peak(call)
    return cuda_peak(call) if device == "cuda" else torch_peak(call)


def torch_peak(call: Callable[[], Any]) -> int:
    """Peak extra bytes of torch's CPU allocator during one call, exact."""
    return replay(size for _, size in sorted(_events(call), key=lambda event: event[0]))


def replay(sizes: Iterable[int]) -> int:
    """The largest running sum of allocations (positive) and releases (negative), which is never below 0.

    The profiler knows blocks by their address alone, and forgets none that were released while it was off: the release
    of an earlier allocation at such an address is given the size of another.
    """
    live = peak = 0
    for size in sizes:
        live = max(0, live + size)
        peak = max(peak, live)
    return peak


def _events(call: Callable[[], Any]) -> list[tuple[int, int]]:
    """(time in ns, signed bytes) of each event; the release of an earlier allocation has size 0."""
    from torch.autograd import profiler

    gc.collect()
    profile: Any = profiler.profile(profile_memory=True)
    with profile:
        # until the profile ends: results count
        kept = call()
    del kept
    events = profile.kineto_results.events()
    return [(event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]"]


def cuda_peak(call: Callable[[], Any]) -> int:
    """Peak extra bytes of torch's CUDA allocator on the current device during one call."""
    import torch

    from contrastile.backends.replay import SETTING

    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    # no step comes from CUDA graphs
    with mock.patch.dict(os.environ, {SETTING: "0"}):
        kept = call()
    torch.cuda.synchronize()
    del kept
    return int(torch.cuda.max_memory_allocated() - before)


def numpy_peak(call: Callable[[], Any]) -> int:
    """Peak extra bytes of NumPy's buffers and Python's objects during one call."""
    gc.collect()
    found = [0]
    with numpy_meter(found):
        # until the meter stops: results count
        kept = call()
    del kept
    return found[0]


def available_bytes(device: str) -> int | None:
    """Bytes available to new allocations; None if not known."""
    if device == "cuda":
        import torch

        return int(torch.cuda.mem_get_info()[0])
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)
