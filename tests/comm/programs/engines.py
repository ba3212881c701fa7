"""The two ways of starting ranks, for the programs beside this file."""

from __future__ import annotations

import sys
from typing import Any

PATIENCE = 600
"""Seconds for what is no fault: a busy machine may be slow."""


class MPIRanks:
    """``mpirun -n N python -m mpi4py program.py mpi``."""

    # MPI.COMM_WORLD is never freed
    forgets = False

    def __init__(self) -> None:
        from mpi4py import MPI

        self.world: Any = MPI.COMM_WORLD
        self.rank, self.size = self.world.Get_rank(), self.world.Get_size()

    def part(self, groups: list[list[int]]) -> Any:
        """This rank's group among these, which have every rank between them; their ranks in the order given."""
        color = next(i for i, ranks in enumerate(groups) if self.rank in ranks)
        return self.world.Split(color, groups[color].index(self.rank))

    def finish(self) -> None:
        pass


class TorchRanks:
    """``torchrun --nproc-per-node N program.py torch``."""

    forgets = True

    def __init__(self) -> None:
        import torch.distributed as dist

        self.dist: Any = dist
        dist.init_process_group("gloo")
        self.world: Any = dist.group.WORLD
        self.rank, self.size = dist.get_rank(), dist.get_world_size()

    def part(self, groups: list[list[int]]) -> Any:
        made = [self.dist.new_group(ranks) for ranks in groups]
        return next(group for group, ranks in zip(made, groups, strict=True) if self.rank in ranks)

    def finish(self) -> None:
        self.world = None
        self.dist.destroy_process_group()


def started() -> Any:
    """The ranks of this program; its first argument says who started them."""
    return {"mpi": MPIRanks, "torch": TorchRanks}[sys.argv[1]]()


def say(rank: int, text: str) -> None:
    """One line, whole, also when other ranks write at the same time."""
    sys.stdout.write(f"[{rank}] {text}\n")
    sys.stdout.flush()
