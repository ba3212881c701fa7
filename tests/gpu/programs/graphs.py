"""Check that steps with a group replay from CUDA graphs, the caller's or the package's, with the bits of eager steps.

``torchrun --nproc-per-node N tests/gpu/programs/graphs.py torch [BACKEND ...]``, or ``mpirun -n N python -m mpi4py
tests/gpu/programs/graphs.py mpi ...`` for MPI's ranks. Shards are uneven. The last replays and eager steps come more
than a deadline after the capture. It prints one line per check.
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
from capturing import capture, unit_features, value_and_gradients
from exchange import SECONDS, join

import contrastile
from contrastile.autograd.steps import STEPS
from contrastile.backends.settings import GRAPHS
from contrastile.comm.connect import connect

BACKENDS, WIDTH = ["triton", "torch", "cupy"], 72


def features(comm: Any, seed: int) -> list[Any]:
    """The pairs of this rank."""
    return unit_features(2, 300 + 17 * comm.rank, WIDTH, seed=100 * seed + comm.rank)


def replays_equal(graph: Any, outputs: list[Any], expected: list[Any]) -> bool:
    """Whether three replays have the expected bits."""
    are_equal = True
    for _ in range(3):
        for x in outputs:
            x.zero_()
        graph.replay()
        are_equal &= all(map(torch.equal, outputs, expected))
    return are_equal


def check(comm: Any, backend: str, exchange: str) -> Callable[[], bool]:
    """Capture a step; return a function that compares its replays with eager steps, now or later."""
    leaves = [x.requires_grad_() for x in (*features(comm, 0), torch.tensor(14.25, device="cuda"))]

    step = partial(value_and_gradients, contrastile.clip_loss, leaves, backend=backend, group=comm, exchange=exchange)
    graph, outputs = capture(step)

    def repeat() -> bool:
        are_equal = True
        for seed in (0, 1):
            with torch.no_grad():
                for leaf, x in zip(leaves, features(comm, seed), strict=False):
                    leaf.copy_(x)
            are_equal &= replays_equal(graph, outputs, step())
        return are_equal

    return repeat


def run_calls(group: Any, comm: Any, backend: str, exchange: str, loss: Callable[..., Any]) -> list[Any]:
    """Losses and gradients of successive calls. The backward passes follow all calls, in reverse order."""
    calls = []
    for seed in range(6):
        leaves = [x.requires_grad_() for x in (*features(comm, seed), torch.tensor(20.0 + seed, device="cuda"))]
        calls.append((loss(*leaves, backend=backend, group=group, exchange=exchange), leaves))
    for value, _ in reversed(calls):
        (-1.5 * value).backward()
    return [x for value, leaves in calls for x in (value.detach(), *(leaf.grad for leaf in leaves))]


def check_own_graphs(group: Any, comm: Any, backend: str, exchange: str, loss: Callable[..., Any]) -> bool:
    """Whether the package replays steps with the bits of launched ones; true if graphs cannot hold messages."""
    if not comm.captures:
        return True
    STEPS.captured.clear()
    STEPS.seen.clear()
    os.environ[GRAPHS] = "0"
    launched = run_calls(group, comm, backend, exchange, loss)
    os.environ[GRAPHS] = "1"
    replayed = run_calls(group, comm, backend, exchange, loss)
    return len(STEPS.captured) > 0 and all(map(torch.equal, replayed, launched))


def of_ids(image: Any, text: Any, scale: Any, **options: Any) -> Any:
    """A loss with vectors that differ between calls."""
    ids = torch.arange(len(image), device="cuda") % 50
    return contrastile.clip_loss(image, text, scale, ids=ids, weights=image.detach()[:, 0].abs().float(), **options)


def main() -> None:
    """Run all checks for all backends and schedules, twice."""
    faulthandler.dump_traceback_later(SECONDS, exit=True)
    engine = sys.argv[1]
    group, local_rank, close_group = join(engine)
    torch.cuda.set_device(local_rank % torch.cuda.device_count())
    comm = connect(group)
    # the first argument is an engine, which may have the name of a backend
    backends = [name for name in BACKENDS if name in sys.argv[2:]] or BACKENDS
    checks = {f"{b} {how}": check(comm, b, how) for b in backends for how in ("ring", "gather")}
    for loss in (contrastile.clip_loss, of_ids, contrastile.nt_xent):
        for b in backends:
            for how in ("replicate", "ring", "gather"):
                checks[f"{b} {how} {loss.__name__}, by itself"] = partial(check_own_graphs, group, comm, b, how, loss)
    for when in ("at once", "after more than a deadline"):
        for name, repeat in checks.items():
            results = comm.agree(np.array([repeat()], dtype=np.int64))
            if comm.rank == 0:
                print(f"{'pass' if results.all() else 'FAIL'} {engine} {name}: replays {when}", flush=True)
        if when == "at once":
            time.sleep(1.2 * comm.deadline)
    torch.cuda.synchronize()
    checks.clear()
    close_group()


if __name__ == "__main__":
    main()
