"""The two engines that start ranks, for the programs in this folder."""

from __future__ import annotations

import sys
from typing import Any

PATIENCE = 600
"""A deadline in seconds where no rank fails: a busy machine may be slow."""


class MPIRanks:
    """``mpirun -n N python -m mpi4py program.py mpi``."""

    # MPI.COMM_WORLD is never freed, so its communicators stay alive
    frees_groups = False

    def __init__(self) -> None:
        from mpi4py import MPI

        self.world: Any = MPI.COMM_WORLD
        self.rank, self.size = self.world.Get_rank(), self.world.Get_size()

    def part(self, groups: list[list[int]]) -> Any:
        """The group of this rank; ``groups`` partition all ranks, and the ranks of a group keep their order."""
        color = next(i for i, ranks in enumerate(groups) if self.rank in ranks)
        return self.world.Split(color, groups[color].index(self.rank))

    def finish(self) -> None:
        pass


class TorchRanks:
    """``torchrun --nproc-per-node N program.py torch``."""

    frees_groups = True

    def __init__(self) -> None:
        import torch.distributed as dist

        self.dist: Any = dist
        dist.init_process_group("gloo")
        self.world: Any = dist.group.WORLD
        self.rank, self.size = dist.get_rank(), dist.get_world_size()

    def part(self, groups: list[list[int]]) -> Any:
        new_groups = [self.dist.new_group(ranks) for ranks in groups]
        return next(group for group, ranks in zip(new_groups, groups, strict=True) if self.rank in ranks)

    def finish(self) -> None:
        self.world = None
        self.dist.destroy_process_group()


def started() -> Any:
    """The ranks of this program; its first argument names the engine that started them."""
    return {"mpi": MPIRanks, "torch": TorchRanks}[sys.argv[1]]()


def say(rank: int, text: str) -> None:
    """Write one line at once, so that lines of other ranks cannot break it."""
    sys.stdout.write(f"[{rank}] {text}\n")
    sys.stdout.flush()
