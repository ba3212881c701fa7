"""Communicators: how the ranks of a group exchange arrays, over threads, mpi4py, torch.distributed and NCCL.

A communicator knows nothing of losses. ``contrastile.schedules`` decides what is sent and when.
"""

from contrastile.comm.communicator import Communicator, ExchangeError, MismatchError, connect

__all__ = ["Communicator", "ExchangeError", "MismatchError", "connect"]
