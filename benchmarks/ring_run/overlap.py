"""Do messages and products share a GPU? One block beside one message, its kernels launched in several ways.

A persistent kernel takes every multiprocessor. Behind it a kernel that sends waits; before it, the programs that found
no place start late with a full share of the tiles, and the whole kernel ends that much later. What NCCL is told by its
environment is the row's ``setting``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from contrastile.backends.contract import Backend, Block, Options, Pairs, Weights
from contrastile.backends.registry import load
from contrastile.comm.connect import connect
from ring_run.bench import Bench, Part
from ring_run.timing import Call

ROUNDS = 5
Transfer = Callable[[], Callable[[], None]]
"""Posts a message and returns what waits for it."""


@contextmanager
def launching(waves: int, spared: int) -> Iterator[None]:
    """The triton backend's persistent kernels start otherwise than with as many programs as fit at once.

    Args:
        waves: times as many programs: each has less to do, and one that starts late is made up for by the others.
        spared: multiprocessors that are left to others.
    """
    if (waves, spared) == (1, 0):
        yield
        return
    from contrastile.backends.triton import launch

    real = launch._multiprocessors
    launch._multiprocessors = lambda device: waves * (real(device) - spared)  # type: ignore[assignment]
    try:
        yield
    finally:
        launch._multiprocessors = real


def blocks(bench: Bench, backend: Backend, part: Part) -> dict[str, Call]:
    """One block's forward and backward, as a ring calls them on a shard that is not its own."""
    image, text, scale = (x.detach() for x in part.leaves)
    rows, d = image.shape
    nowhere = torch.full((rows,), -1, dtype=torch.int64, device=image.device)
    block, options = Block(image, text, scale, None, Pairs(positives=nowhere)), Options()
    found = backend.lse(block, True, options)
    assert found.column_negative_lse is not None
    weight = torch.full((rows,), 0.5 / rows, dtype=scale.dtype, device=image.device)
    one = torch.ones_like(weight)
    own = found.row_negative_lse, found.row_positive_lse, weight, one
    weights = Weights(*own, found.column_negative_lse, found.column_positive_lse, weight, one)
    sums = [torch.zeros((rows, d), dtype=scale.dtype, device=image.device) for _ in range(2)]
    return {
        "lse": lambda: backend.lse(block, True, options),
        "gradients": lambda: backend.gradients(block, weights, sums[0], sums[1], options),
    }


def transfers(bench: Bench, part: Part, *, gradients: bool) -> dict[str, Transfer]:
    """A shift of the shard, and of its gradient sums, by the communicator."""
    sent = [part.text.detach().clone()]
    if gradients:
        sent.append(torch.zeros(part.text.shape, dtype=torch.float32, device=part.text.device))
    arriving = [torch.empty_like(x) for x in sent]
    comm = connect(bench.ranks.groups[bench.ranks.size])
    return {"message": lambda: comm.shift(sent, arriving).wait}


def overlap(bench: Bench) -> None:
    """A block, a message, and both, the message first; on one rank the block alone."""
    n = bench.ranks.size
    backend = load(bench.backend)
    grids = bench.plan.grids if bench.backend == "triton" else ((1, 0),)
    for rows, d in bench.plan.overlap:
        bench.tidy()
        part = bench.even(n, rows, d)
        for what, block in blocks(bench, backend, part).items():
            calls: dict[str, tuple[Call, dict[str, Any]]] = {}
            row = {"n": n, "rows": rows, "d": d, "what": what}
            ways = transfers(bench, part, gradients=what == "gradients") if n > 1 else {}
            for way, post in ways.items():
                calls[f"{way} alone"] = _alone(post), row | {"transfer": way}
            for waves, spared in grids:
                grid, name = {"waves": waves, "spared": spared}, f"{waves} waves, {spared} spared"
                calls[f"block, {name}"] = _launched(waves, spared, block), row | grid
                for way, post in ways.items():
                    both = _launched(waves, spared, _beside(block, post))
                    calls[f"block beside {way}, {name}"] = both, row | grid | {"transfer": way}
            bench.times("overlap", calls, ROUNDS, slot=0.08 * bench.slot, paced=False)
    bench.tidy()


def _alone(post: Transfer) -> Call:
    return lambda: post()()


def _beside(block: Call, post: Transfer) -> Call:
    def call() -> None:
        wait = post()
        block()
        wait()

    return call


def _launched(waves: int, spared: int, call: Call) -> Call:
    def launched() -> None:
        with launching(waves, spared):
            call()

    return launched
