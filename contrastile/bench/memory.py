"""Peak extra memory of one call: the most that was live at once, less what was live before; results included.

Measured, never estimated:

* torch on the CPU: the profiler's record of every allocation and release that goes through torch's CPU allocator on
  the calling thread, those made inside C++ during backward included, replayed to a running peak. Exact to the byte.
  Workspace that BLAS or oneDNN takes for itself is not counted.
* elsewhere the meters of ``contrastile.verify``: the high-water mark of the bytes requested from torch's CUDA caching
  allocator, or from CuPy's; for NumPy ``tracemalloc``, which counts Python's own objects too, and no BLAS workspace.
  Small losses are launched for it: what a replayed CUDA graph uses was allocated when it was captured.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

from contrastile.backends.replay import SETTING
from contrastile.verify.peak import meter

COUNTED = {
    "torch-cpu": "every allocation and release of torch's CPU allocator, replayed; without BLAS workspace",
    "torch-cuda": "high-water mark of the bytes requested from torch's CUDA caching allocator",
    "numpy": "tracemalloc: NumPy buffers and Python objects; without BLAS workspace",
}


def peak_extra(call: Callable[[], Any], library: str, device: str) -> int:
    """Peak extra bytes of one call.

    Args:
        call: what to run, once.
        library: "numpy", "torch" or "cupy": whose allocations count.
        device: "cpu" or "cuda".
    """
    if (library, device) == ("torch", "cpu"):
        return torch_peak(call)
    found = [0]
    gc.collect()
    # no step comes from CUDA graphs
    with mock.patch.dict(os.environ, {SETTING: "0"}), meter(library, device)(found):
        # until the meter stops: results count
        kept = call()
    del kept
    return found[0]


def torch_peak(call: Callable[[], Any]) -> int:
    """Peak extra bytes of torch's CPU allocator during one call, exact."""
    from torch.autograd import profiler

    gc.collect()
    profile: Any = profiler.profile(profile_memory=True)
    with profile:
        # until the profile ends: results count
        kept = call()
    del kept
    live = peak = 0
    for event in sorted(profile.kineto_results.events(), key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            # the profiler knows blocks by their address alone: the release of a block that was there before is given
            # the size of a later one at its address
            live = max(0, live + event.nbytes())
            peak = max(peak, live)
    return int(peak)


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
