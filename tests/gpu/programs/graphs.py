"""Shows that steps with a group replay from CUDA graphs, the caller's or our own, with the bits of eager ones.

``torchrun --nproc-per-node N tests/gpu/programs/graphs.py torch [BACKEND ...]``, or ``mpirun -n N python -m mpi4py
tests/gpu/programs/graphs.py mpi ...`` for MPI's ranks. Torch tensors, uneven shards. The last replays and eager steps
come more than a deadline after the capture. One line per check.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch
from capturing import captured, stepped, unit_features
from exchange import SECONDS, join

import contrastile
from contrastile.autograd.steps import STEPS
from contrastile.backends.settings import GRAPHS
from contrastile.comm.connect import connect

BACKENDS, WIDTH = ["triton", "torch", "cupy"], 72


def features(comm: Any, seed: int) -> list[Any]:
    """This rank's pairs."""
    return unit_features(2, 300 + 17 * comm.rank, WIDTH, seed=100 * seed + comm.rank)


def replayed(graph: Any, found: list[Any], expected: list[Any]) -> bool:
    """Whether three replays have these bits."""
    same = True
    for _ in range(3):
        for x in found:
            x.zero_()
        graph.replay()
        same &= all(map(torch.equal, found, expected))
    return same


def check(comm: Any, backend: str, exchange: str) -> Callable[[], bool]:
    """Capture a step and hold its replays to eager steps; a check that can be repeated later."""
    leaves = [x.requires_grad_() for x in (*features(comm, 0), torch.tensor(14.25, device="cuda"))]

    step = partial(stepped, contrastile.clip_loss, leaves, backend=backend, group=comm, exchange=exchange)
    graph, found = captured(step)

    def again() -> bool:
        same = True
        for seed in (0, 1):
            with torch.no_grad():
                for held, x in zip(leaves, features(comm, seed), strict=False):
                    held.copy_(x)
            same &= replayed(graph, found, step())
        return same

    return again


def repeated(group: Any, comm: Any, backend: str, exchange: str, loss: Callable[..., Any]) -> list[Any]:
    """Losses and gradients of calls in turn, of which only the last is differentiated at once."""
    calls = []
    for seed in range(6):
        leaves = [x.requires_grad_() for x in (*features(comm, seed), torch.tensor(20.0 + seed, device="cuda"))]
        calls.append((loss(*leaves, backend=backend, group=group, exchange=exchange), leaves))
    for value, _ in reversed(calls):
        (-1.5 * value).backward()
    return [x for value, leaves in calls for x in (value.detach(), *(each.grad for each in leaves))]


def replays(group: Any, comm: Any, backend: str, exchange: str, loss: Callable[..., Any]) -> bool:
    """Whether steps are replayed by themselves, where graphs hold messages, with the bits of launched ones."""
    if not comm.captures:
        return True
    STEPS.captured.clear()
    STEPS.seen.clear()
    os.environ[GRAPHS] = "0"
    launched = repeated(group, comm, backend, exchange, loss)
    os.environ[GRAPHS] = "1"
    found = repeated(group, comm, backend, exchange, loss)
    return len(STEPS.captured) > 0 and all(map(torch.equal, found, launched))


def of_ids(image: Any, text: Any, scale: Any, **how: Any) -> Any:
    """A loss with vectors, which differ from call to call."""
    ids = torch.arange(len(image), device="cuda") % 50
    return contrastile.clip_loss(image, text, scale, ids=ids, weights=image.detach()[:, 0].abs().float(), **how)


def main() -> None:
    """All backends and both schedules, twice."""
    faulthandler.dump_traceback_later(SECONDS, exit=True)
    engine = sys.argv[1]
    group, number, leave = join(engine)
    torch.cuda.set_device(number % torch.cuda.device_count())
    comm = connect(group)
    # the first word is an engine, which may have a backend's name
    backends = [name for name in BACKENDS if name in sys.argv[2:]] or BACKENDS
    checks = {f"{b} {how}": check(comm, b, how) for b in backends for how in ("ring", "gather")}
    for loss in (contrastile.clip_loss, of_ids, contrastile.nt_xent):
        for b in backends:
            for how in ("replicate", "ring", "gather"):
                checks[f"{b} {how} {loss.__name__}, by itself"] = partial(replays, group, comm, b, how, loss)
    for when in ("at once", "after more than a deadline"):
        for name, again in checks.items():
            everybody = comm.agree(np.array([again()], dtype=np.int64))
            if comm.rank == 0:
                print(f"{'pass' if everybody.all() else 'FAIL'} {engine} {name}: replays {when}", flush=True)
        if when == "at once":
            time.sleep(1.2 * comm.deadline)
    torch.cuda.synchronize()
    checks.clear()
    leave()


if __name__ == "__main__":
    main()
