"""A training loop in which one rank fails at one step; started by test_engines.

Arguments: engine, fault, rank, exchange. Every rank prints its error, and the faulty rank the time of its fault.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any

import numpy as np
from engines import PATIENCE, say, started

import contrastile
from contrastile.backends import load
from contrastile.comm.communicator import ExchangeError
from contrastile.comm.connect import connect
from contrastile.comm.watchdog import deadline_or
from contrastile.verify.worlds import simulated

STEP = 3
INSIDE = "killed", "stalls"
"""Faults in the middle of a call; the others happen between two calls."""


def fail(group: Any, fault: str) -> None:
    """Commit a fault now."""
    rank = group.rank
    say(rank, f"fails {time.time()}")
    if fault == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault == "raises":
        raise RuntimeError("this rank has a defect")
    elif fault == "leaves":
        sys.exit(0)
    elif fault == "stalls":
        time.sleep(1000)
    elif fault == "out of step":
        # a call that the other ranks do not make
        group.shift([np.zeros(0)], [np.zeros(0)]).wait()
    else:
        raise ValueError(fault)


def connect_without(ranks: Any, faulty: int) -> None:
    """Connect all ranks but the faulty one."""
    # on a busy machine the start takes long; it does not count towards the deadline
    ranks.dist.barrier()
    if ranks.rank == faulty:
        time.sleep(1000)
    try:
        connect(ranks.world)
    except ExchangeError as error:
        say(ranks.rank, str(error))
        raise


def main() -> None:
    fault, faulty = sys.argv[2], int(sys.argv[3])
    ranks = started()
    if fault == "absent":
        connect_without(ranks, faulty)
        return
    # ranks may arrive here late, which is no fault
    connect(ranks.world, deadline=PATIENCE)
    group = connect(ranks.world, deadline=deadline_or(None))
    # one rank of the same host and the ranks of the other host wait for the rank that fails
    group.hosts = simulated(group.size, 2)
    rng = np.random.default_rng(ranks.rank)
    image, text = (rng.standard_normal((20 + ranks.rank, 8)) for _ in range(2))
    compute = contrastile.value_and_grad(contrastile.clip_loss, backend="numpy", group=group, exchange=sys.argv[4])
    backend = load("numpy")
    real_gradients, step = backend.gradients, 0

    def gradients(*args: object) -> None:
        if step == STEP and fault in INSIDE and ranks.rank == faulty:
            fail(group, fault)
        real_gradients(*args)

    object.__setattr__(backend, "gradients", gradients)
    try:
        for step in range(1000):
            if step == STEP and fault not in INSIDE and ranks.rank == faulty:
                fail(group, fault)
            compute(image, text, 2.0)
    except BaseException as error:
        say(ranks.rank, f"{time.time()} {type(error).__name__}: {error}")
        raise


main()
