"""A rank that never calls the loss; started by test_faults."""

from __future__ import annotations

import time

from engines import say, started

from contrastile.comm.communicator import ExchangeError
from contrastile.comm.connect import connect

ranks = started()
# a start takes long on a busy machine, and is not counted
ranks.dist.barrier()
if ranks.rank == 2:
    time.sleep(1000)
try:
    connect(ranks.world)
except ExchangeError as error:
    say(ranks.rank, str(error))
    raise
