"""The ranks of a run: their groups, and what they tell each other outside of what is measured."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

PATIENCE = timedelta(minutes=15)
"""A rank may wait this long for another that compiles or checks."""


@dataclass(slots=True)
class Ranks:
    """This rank among the others.

    Attributes:
        device: its own.
        control: a gloo group of all ranks; what it carries meets no measured message.
        groups: by size, the group of consecutive ranks that this rank is in; None stands for a process alone. All
            groups of one size do the same at the same time, so that every GPU is at work.
    """

    device: torch.device
    control: Any
    groups: dict[int, Any] = field(default_factory=dict)

    @staticmethod
    def join(device: str, *, crowded: bool = False) -> Ranks:
        """Take this process's place, as torchrun has told it.

        Args:
            device: kind of device, "cuda" or "cpu".
            crowded: ranks may share a GPU, which NCCL does not allow; their messages go through the host.
        """
        place = torch.device(device)
        if device == "cuda":
            place = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
            torch.cuda.set_device(place)
        # not bound to a device: groups of some ranks would then be split from this one, which takes all of them
        dist.init_process_group("nccl" if device == "cuda" and not crowded else "gloo", timeout=PATIENCE)
        ranks = Ranks(place, dist.new_group(backend="gloo", timeout=PATIENCE))
        size = ranks.size
        for n in (n for n in range(1, size + 1) if (size % n == 0 and n & (n - 1) == 0) or n == size):
            whole = dist.group.WORLD
            ranks.groups[n] = None if n == 1 else whole if n == size else dist.new_subgroups(n, timeout=PATIENCE)[0]
        return ranks

    @property
    def rank(self) -> int:
        """This rank's number among all."""
        return dist.get_rank()

    @property
    def size(self) -> int:
        """How many there are."""
        return dist.get_world_size()

    @property
    def kind(self) -> str:
        """Kind of device, "cuda" or "cpu"."""
        return self.device.type

    def share(self, value: Any) -> list[Any]:
        """Everybody's value, by rank."""
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, value, group=self.control)
        return found

    def most(self, value: float) -> float:
        """The largest of everybody's numbers."""
        return max(self.share(value))

    def decided(self, value: Any) -> Any:
        """Rank 0's value, on all."""
        return self.share(value)[0]

    def failed(self, reason: str) -> str:
        """The first reason that any rank has, or ""."""
        return next((f"rank {r}: {x}" for r, x in enumerate(self.share(reason)) if x), "")

    def together(self) -> None:
        """Every device is idle and every rank is here; on GPUs what is queued next starts together on all of them."""
        if self.kind == "cuda":
            torch.cuda.synchronize()
        dist.barrier(group=self.control)
        if self.kind == "cuda":
            dist.all_reduce(torch.zeros(1, device=self.device))

    def joined(self, own: torch.Tensor, n: int) -> torch.Tensor:
        """The vectors of the n ranks of this rank's group, joined in their order, on the device."""
        first = self.rank // n * n
        return torch.cat(self.share(own.cpu())[first : first + n]).to(self.device)

    def say(self, text: str) -> None:
        """Print a line, once."""
        if self.rank == 0:
            print(text, flush=True)

    def leave(self) -> None:
        """End; a rank that leaves early would take the others' messages with it."""
        dist.barrier(group=self.control)
        sys.stdout.flush()
        dist.destroy_process_group()
