"""Memory of one implementation at one size, measured in a process of its own: ``python -m contrastile.bench.child``.

In a fresh process no earlier measurement affects this one, and running out of memory ends no other.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass

from contrastile.bench.memory import peak_extra
from contrastile.bench.peers import named, use_threads
from contrastile.bench.workloads import Workload, arguments, features

WARM_ROWS = 64


@dataclass(frozen=True, slots=True)
class Request:
    """What to measure: an implementation's name, the workload, and how."""

    implementation: str
    variant: str
    batch: int
    width: int
    dtype: str
    device: str
    scale: float
    threads: int | None


class MemoryMeasurementError(RuntimeError):
    """The measuring process failed; the message says how."""


def measure_in_a_child(request: Request, timeout: float | None = None) -> int:
    """Peak extra bytes, measured in a fresh process.

    Raises:
        MemoryMeasurementError: it failed, was killed or took longer than ``timeout`` seconds.
    """
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join(path for path in sys.path if path))
    command = [sys.executable, "-m", "contrastile.bench.child", json.dumps(asdict(request))]
    try:
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=timeout, check=False)
    except subprocess.TimeoutExpired as error:
        raise MemoryMeasurementError(f"measuring its memory took more than {timeout:.0f} s") from error
    if done.returncode < 0:
        raise MemoryMeasurementError(f"measuring its memory was killed by signal {-done.returncode} (9: out of memory)")
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise MemoryMeasurementError(f"measuring its memory failed: {last}")
    return int(done.stdout.split()[-1])


def measure(request: Request) -> int:
    """Peak extra bytes, measured in this process."""
    implementation = named(request.implementation)
    use_threads(request.threads)
    workload = Workload(request.variant, request.batch, request.width)
    how = implementation.library, request.dtype, request.device, request.scale
    # what is set up once and kept (thread pools, code pages) is no cost of the call: warm up
    warm = workload.resized(min(workload.batch, WARM_ROWS))
    implementation.step(arguments(features(warm), *how))()
    step = implementation.step(arguments(features(workload), *how))
    return peak_extra(step, implementation.library, request.device)


if __name__ == "__main__":
    print(measure(Request(**json.loads(sys.argv[1]))))
