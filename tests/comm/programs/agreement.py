"""Losses over an engine against the same ranks in one process, bit for bit, and what ranks raise that do not agree.

Started by test_engines; mismatches are printed for the test to compare over the ranks. Then come the primitives: ranks
take longer to start than either takes.
"""

from __future__ import annotations

import json
import os
import warnings
from typing import Any

import numpy as np
import primitives
import torch
from engines import PATIENCE, say, started

import contrastile
from contrastile.comm.communicator import MismatchError
from contrastile.comm.connect import connect
from contrastile.comm.inprocess import InProcessGroup

SHARDS = [7, 0, 4, 5]
WIDTH = 6


def features(rank: int, seed: int, library: str) -> Any:
    shape = (SHARDS[rank % 4], WIDTH)
    x = np.random.default_rng([seed, rank]).standard_normal(shape)
    return x.astype(np.float32) if library == "numpy" else torch.from_numpy(x).float()


def evaluated(group: Any, rank: int, exchange: str, library: str) -> list[Any]:
    """The loss, and the gradients of all that it depends on, of this rank."""
    image, text = (features(rank, seed, library) for seed in (1, 2))
    found = []
    for loss, extra in ((contrastile.clip_loss, ()), (contrastile.sigmoid_loss, (-1.5,))):
        both = contrastile.value_and_grad(loss, group=group, exchange=exchange)
        value, gradients = both(image, text, 3.0, *extra)
        found += [np.asarray(value), *map(np.asarray, gradients)]
    return found


def agrees(group: Any, rank: int, size: int) -> None:
    for library in ("numpy", "torch"):
        for exchange in ("ring", "gather"):
            expected = InProcessGroup(size).run(lambda comm: evaluated(comm, comm.rank, exchange, library))[rank]  # noqa: B023
            for _ in range(2):
                got = evaluated(group, rank, exchange, library)
                same = [x.dtype == y.dtype and x.tobytes() == y.tobytes() for x, y in zip(got, expected, strict=True)]
                assert all(same), (library, exchange, same)
    say(rank, "as in one process")


def mismatches(rank: int) -> dict[str, Any]:
    """By name: what this rank passes to the loss."""
    last = rank == 3
    empty = np.zeros((0, WIDTH), dtype=np.float32)
    image, text = (features(rank, seed, "numpy") for seed in (1, 2))
    return {
        "dtype": (image.astype(np.float64), text.astype(np.float64)) if last else (image, text),
        "empty": (empty, empty),
        "text too short": (image, text[:-1] if last else text),
    }


def refused(ranks: Any, name: str, inputs: Any) -> None:
    """The loss raises; what it says is printed."""
    try:
        value = contrastile.clip_loss(*inputs, 3.0, group=ranks.world)
    except MismatchError as error:
        say(ranks.rank, json.dumps([name, str(error)]))
    else:
        raise AssertionError(f"{name}: got {value}")


def main(ranks: Any) -> None:
    inputs = [features(ranks.rank, seed, "numpy") for seed in (1, 2)]
    for deadline in ("soon", "-3"):
        # of a group that is not connected yet
        os.environ["CONTRASTILE_DEADLINE"] = deadline if ranks.rank == 3 else str(PATIENCE)
        refused(ranks, f"deadline {deadline}", inputs)
    del os.environ["CONTRASTILE_DEADLINE"]
    connect(ranks.world, deadline=PATIENCE)
    agrees(ranks.world, ranks.rank, ranks.size)
    for name, inputs in mismatches(ranks.rank).items():
        refused(ranks, name, inputs)
    agrees(ranks.world, ranks.rank, ranks.size)
    own = ranks.part([[r] for r in range(ranks.size)])
    alone = evaluated(None, ranks.rank, "auto", "numpy") if SHARDS[ranks.rank] else []
    beside = evaluated(own, ranks.rank, "ring", "numpy") if SHARDS[ranks.rank] else []
    # the same blocks, merged by another schedule
    assert [x.shape for x in alone] == [x.shape for x in beside]


if __name__ == "__main__":
    warnings.simplefilter("error")
    world = started()
    main(world)
    # what it has left does not disturb these, which close the world
    primitives.main(world)
