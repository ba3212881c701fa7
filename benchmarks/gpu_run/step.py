"""Steps of the symmetric loss for a profiler: ``python -m gpu_run.step B,D,SCALE,DTYPE,PRECISION ...``.

Each named step runs warm, one call between cudaProfilerStart and cudaProfilerStop, behind a kernel of MARK's name. It
prints a line of JSON: the seconds of the first call, with all that it compiles, and of the third.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import torch

from contrastile import clip_loss
from gpu_run.reference import features

MARK = "spin_kernel"


def main(steps: list[str]) -> None:
    """Run the steps."""
    torch.zeros(1, device="cuda")
    for step in steps:
        b, d, scale, dtype, precision = step.split(",")
        given = features(int(b), int(d), float(scale), "cuda", dtype)
        seconds = [_seconds(given, precision) for _ in range(3)]
        cuda: Any = torch.cuda
        cuda.cudart().cudaProfilerStart()
        cuda._sleep(1)
        _seconds(given, precision)
        cuda.cudart().cudaProfilerStop()
        print(json.dumps({"step": step, "first": seconds[0], "third": seconds[2]}), flush=True)


def _seconds(given: Any, precision: str) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    leaves = given.image, given.text, given.scale
    torch.autograd.grad(clip_loss(*leaves, backend="triton", precision=precision), leaves)
    torch.cuda.synchronize()
    return time.perf_counter() - start


if __name__ == "__main__":
    main(sys.argv[1:])
