"""Peak extra memory of one call: the most that was live at once, less what was live before; results included.

Measured, never estimated, by the meters of ``contrastile.verify``:

* torch on the CPU: every allocation and release that goes through torch's CPU allocator, those made inside C++ during
  backward included. Exact to the byte. Workspace that BLAS or oneDNN takes for itself is not counted.
* elsewhere: the high-water mark of the bytes requested from torch's CUDA caching allocator, or from CuPy's; for NumPy
  ``tracemalloc``, which counts Python's own objects too, and no BLAS workspace. Small losses are launched for it: what
  a replayed CUDA graph uses was allocated when it was captured.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

from contrastile.backends.replay import SETTING
from contrastile.verify.peak import peak_bytes


def peak_extra(call: Callable[[], Any], library: str, device: str) -> int:
    """Peak extra bytes of one call.

    Args:
        call: what to run, once.
        library: "numpy", "torch" or "cupy": whose allocations count.
        device: "cpu" or "cuda".
    """
    gc.collect()
    # no step comes from CUDA graphs
    with mock.patch.dict(os.environ, {SETTING: "0"}):
        return int(peak_bytes(library, device, call))


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
