"""Steps of a loss for a profiler: ``python -m gpu_run.step BACKEND B,D,SCALE,DTYPE,PRECISION[,LOSS] ...``.

Each named step runs warm, one call between cudaProfilerStart and cudaProfilerStop, behind a kernel of MARK's name. It
prints a line of JSON: the seconds of the first call, with all that it compiles, and of the third; at the end, how
many steps ran.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from contrastile import clip_loss, sigmoid_loss, sup_con
from gpu_run.profiler import BACKENDS, ENVIRONMENT
from gpu_run.reference import features

SAMPLES = 4
"""Of an id or a label."""


def call(backend: str, step: str) -> Callable[[], Any]:
    """One forward and backward of a step, bound to its features. The loss is the symmetric one where none is named."""
    b, d, scale, dtype, precision, *loss = step.split(",")
    given = features(int(b), int(d), float(scale), "cuda", dtype)
    os.environ.update(ENVIRONMENT.get(backend, {}))
    how = {"backend": BACKENDS[backend], "precision": precision}
    leaves: tuple[Any, ...] = given.image, given.text, given.scale
    same = torch.arange(int(b), device="cuda") // SAMPLES
    losses: dict[str, Callable[[], Any]] = {
        "": lambda: clip_loss(*leaves, **how),
        "ids": lambda: clip_loss(*leaves, ids=same, **how),
        "sigmoid": lambda: sigmoid_loss(*leaves, **how),
        "sup_con": lambda: sup_con(leaves[0], same, leaves[1], **how),
    }
    (name,) = loss or [""]
    if name == "sigmoid":
        leaves = *leaves, torch.tensor(-10.0, device="cuda", requires_grad=True)
    elif name == "sup_con":
        leaves = leaves[0], leaves[2]

    def run() -> Any:
        return torch.autograd.grad(losses[name](), leaves)

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
