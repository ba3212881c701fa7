"""Several threads of each rank, each with a group of its own, connect these at once; started by test_engines."""

from __future__ import annotations

import sys
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from engines import PATIENCE, say, started

import contrastile
from contrastile.comm import torch_group
from contrastile.comm.connect import connect
from contrastile.comm.inprocess import InProcessGroup

GROUPS, CALLS = 4, 5


def evaluated(group: Any, rank: int, number: int) -> list[Any]:
    """The loss and gradients of several calls over this group."""
    both = contrastile.value_and_grad(contrastile.clip_loss, group=group, exchange=("ring", "gather")[number % 2])
    found = []
    for call in range(CALLS):
        draw = np.random.default_rng([rank, number, call])
        image, text = draw.standard_normal((2, 4 + rank, 6)).astype(np.float32)
        value, gradients = both(image, text, 3.0)
        found += [np.asarray(value), *map(np.asarray, gradients)]
    return found


def main() -> None:
    ranks = started()
    if "no clones" in sys.argv:
        # as before torch 2.8
        torch_group._CLONES = False
    groups = [ranks.part([list(range(ranks.size))]) for _ in range(GROUPS)]
    together = threading.Barrier(GROUPS)

    def first(number: int) -> list[Any]:
        together.wait(PATIENCE)
        return evaluated(groups[number], ranks.rank, number)

    def connected(group: Any) -> Any:
        together.wait(PATIENCE)
        return connect(group)

    with ThreadPoolExecutor(GROUPS) as pool:
        found = list(pool.map(first, range(GROUPS)))
        for number, got in enumerate(found):
            expected = InProcessGroup[Any](ranks.size).run(lambda comm: evaluated(comm, comm.rank, number))[ranks.rank]  # noqa: B023
            assert [x.tobytes() for x in got] == [x.tobytes() for x in expected], number
        say(ranks.rank, "as in one process")
        # one more group, that all threads want first
        fresh = ranks.part([list(range(ranks.size))])
        assert len({id(x) for x in pool.map(connected, [fresh] * GROUPS)}) == 1
        say(ranks.rank, "one for each group")
    ranks.finish()
    say(ranks.rank, "done")


warnings.simplefilter("error")
main()
