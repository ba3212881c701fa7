"""Steps of the symmetric loss for a profiler: ``python -m gpu_run.step BACKEND B,D,SCALE,DTYPE,PRECISION ...``.

Each named step runs warm, one call between cudaProfilerStart and cudaProfilerStop, behind a kernel of MARK's name. It
prints a line of JSON: the seconds of the first call, with all that it compiles, and of the third; at the end, how
many steps ran.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from contrastile import clip_loss
from gpu_run.profiler import BACKENDS
from gpu_run.reference import features


def call(backend: str, step: str) -> Callable[[], Any]:
    """One forward and backward of a step, bound to its features."""
    b, d, scale, dtype, precision = step.split(",")
    given = features(int(b), int(d), float(scale), "cuda", dtype)
    leaves = given.image, given.text, given.scale

    def run() -> Any:
        return torch.autograd.grad(clip_loss(*leaves, backend=BACKENDS[backend], precision=precision), leaves)

    return run


def mark() -> None:
    """Queue a kernel that is known by its name."""
    cuda: Any = torch.cuda
    cuda._sleep(1)


def main(backend: str, steps: list[str]) -> None:
    """Run the steps."""
    torch.zeros(1, device="cuda")
    cuda: Any = torch.cuda
    for step in steps:
        run = call(backend, step)
        seconds = [_seconds(run) for _ in range(3)]
        cuda.cudart().cudaProfilerStart()
        mark()
        _seconds(run)
        cuda.cudart().cudaProfilerStop()
        print(json.dumps({"step": step, "first": seconds[0], "third": seconds[2]}), flush=True)
    print(f"{len(steps)} steps ran")


def _seconds(run: Callable[[], Any]) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    run()
    torch.cuda.synchronize()
    return time.perf_counter() - start


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
