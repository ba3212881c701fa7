"""Communicators: how the ranks of a group exchange arrays, over threads, mpi4py, torch.distributed and NCCL.

A communicator knows nothing of losses: ``contrastile.schedules`` decides what is sent and when. ``connect`` leads from
a group to its communicator. ``docs/how-to/write-communicator.md`` shows how to write one.
"""
