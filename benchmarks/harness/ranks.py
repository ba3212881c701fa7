"""The processes of a run: one, or those that torchrun started. What they tell each other meets no measured message."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

PATIENCE = timedelta(minutes=15)
"""A rank may wait this long for another that compiles or checks."""


@dataclass(slots=True)
class Ranks:
    """This rank among the others; a world of one needs no process group.

    Attributes:
        device: this rank's own.
        groups: by size, the group of consecutive ranks that this rank is in; None for a process alone. All groups of
            one size work at the same time, so that every GPU is busy.
        control: a gloo group of all ranks, or None in a world of one.
    """

    device: torch.device
    groups: dict[int, Any]
    control: Any = None

    @staticmethod
    def join(kind: str) -> Ranks:
        """Take this process's place, on device kind "cuda" or "cpu"."""
        if "RANK" not in os.environ:
            return Ranks(torch.device(kind, 0) if kind == "cuda" else torch.device(kind), {1: None})
        device = torch.device(kind)
        if kind == "cuda":
            device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
            torch.cuda.set_device(device)
        # not bound to a device: groups of some ranks would then be split from this one, which takes all of them
        dist.init_process_group("nccl" if kind == "cuda" else "gloo", timeout=PATIENCE)
        ranks = Ranks(device, {1: None}, dist.new_group(backend="gloo", timeout=PATIENCE))
        for n in (n for n in range(2, ranks.size + 1) if (ranks.size % n == 0 and n & (n - 1) == 0) or n == ranks.size):
            whole = n == ranks.size
            ranks.groups[n] = dist.group.WORLD if whole else dist.new_subgroups(n, timeout=PATIENCE)[0]
        return ranks

    @property
    def kind(self) -> str:
        """Kind of device, "cuda" or "cpu"."""
        return self.device.type

    @property
    def rank(self) -> int:
        """This rank's number among all."""
        return 0 if self.control is None else dist.get_rank()

    @property
    def size(self) -> int:
        """How many there are."""
        return 1 if self.control is None else dist.get_world_size()

    def share(self, value: Any) -> list[Any]:
        """Everybody's value, by rank."""
        if self.control is None:
            return [value]
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, value, group=self.control)
        return found

    def most(self, value: float) -> float:
        """The largest of everybody's numbers."""
        return max(self.share(value))

    def failed(self, reason: str) -> str:
        """The first reason that any rank has, or ""."""
        return next((x if self.size == 1 else f"rank {r}: {x}" for r, x in enumerate(self.share(reason)) if x), "")

    def together(self) -> None:
        """Wait until every device is idle and every rank is here."""
        if self.kind == "cuda":
            torch.cuda.synchronize()
        if self.control is not None:
            dist.barrier(group=self.control)
            if self.kind == "cuda":
                # what is queued next starts together on all GPUs
                dist.all_reduce(torch.zeros(1, device=self.device))

    def say(self, text: str) -> None:
        """Print a line, once."""
        if self.rank == 0:
            print(text, flush=True)

    def leave(self) -> None:
        """End; a rank that leaves early would take the others' messages with it."""
        if self.control is not None:
            dist.barrier(group=self.control)
            sys.stdout.flush()
            dist.destroy_process_group()
