"""Memory of one implementation at one size, measured in a process of its own: ``python -m contrastile.bench.child``.

In a fresh process no earlier measurement affects this one, and running out of memory ends no other.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

from contrastile.bench.memory import peak_extra
from contrastile.bench.peers import named, use_threads
from contrastile.bench.workloads import Workload, arguments, features
from contrastile.reporting import ending

WARM_ROWS = 64


class MemoryMeasurementError(RuntimeError):
    """The measuring process failed; the message says how."""


def measure_in_a_child(timeout: float | None = None, **request: Any) -> int:
    """Peak extra bytes, measured in a fresh process: the keywords are those of ``measure``.

    Raises:
        MemoryMeasurementError: it failed, was killed or took longer than ``timeout`` seconds.
    """
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join(path for path in sys.path if path))
    command = [sys.executable, "-m", "contrastile.bench.child", json.dumps(request)]
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
