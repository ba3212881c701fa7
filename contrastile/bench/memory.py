"""Peak extra memory of one call: the most that was live at once, less what was live before; results included.

Measured, never estimated, by the meters of ``contrastile.verify``:

* torch on the CPU: every allocation and release that goes through torch's CPU allocator, those made inside C++ during
  backward included. Exact to the byte. Workspace that BLAS or oneDNN takes for itself is not counted.
* elsewhere: the high-water mark of the bytes requested from torch's CUDA caching allocator, or from CuPy's; for NumPy
  ``tracemalloc``, which counts Python's own objects too, and no BLAS workspace. Small losses are launched for it: what
  a replayed CUDA graph uses was allocated when it was captured.

``python -m contrastile.bench.memory`` is a process of its own that measures one implementation at one size: no earlier
measurement affects it, and running out of memory ends no other.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

from contrastile.backends.replay import SETTING
from contrastile.bench.peers import named, use_threads
from contrastile.bench.workloads import Workload, arguments, features
from contrastile.reporting import ending
from contrastile.verify.peak import peak_bytes

WARM_ROWS = 64


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


class MemoryMeasurementError(RuntimeError):
    """The measuring process failed; the message says how."""


def measure_in_a_child(timeout: float | None = None, **request: Any) -> int:
    """Peak extra bytes, measured in a process of its own: the keywords are those of ``measure``.

    Raises:
        MemoryMeasurementError: it failed, was killed or took longer than ``timeout`` seconds.
    """
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join(path for path in sys.path if path))
    command = [sys.executable, "-m", "contrastile.bench.memory", json.dumps(request)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=timeout, check=False)
    except subprocess.TimeoutExpired as error:
        raise MemoryMeasurementError(f"measuring its memory took more than {timeout:.0f} s") from error
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        how = f"failed: {last}" if done.returncode > 0 else f"{ending(done.returncode)} (SIGKILL: out of memory)"
        raise MemoryMeasurementError(f"measuring its memory {how}")
    return int(done.stdout.split()[-1])


def measure(
    implementation: str, workload: tuple[str, int, int], dtype: str, device: str, scale: float, threads: int | None
) -> int:
    """Peak extra bytes of an implementation on a workload (variant, batch, width), measured in this process."""
    measured, size = named(implementation), Workload(*workload)
    use_threads(threads)
    how = measured.library, dtype, device, scale
    # what is set up once and kept (thread pools, code pages) is no cost of the call: warm up
    measured.step(arguments(features(size.resized(min(size.batch, WARM_ROWS))), *how))()
    return peak_extra(measured.step(arguments(features(size), *how)), measured.library, device)


if __name__ == "__main__":
    print(measure(**json.loads(sys.argv[1])))
