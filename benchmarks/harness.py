"""What the benchmarks share: the ranks of a run, samples in turns beside a ceiling, and records.

Every sample stands between two samples of the ceiling product, all of about the same length. A GPU that is limited by
its power runs slower the longer it works, and its clock follows the load of the last second: compare only what shares
one sustained stretch, and quote a sample's rate over that of the two ceiling samples around it. Over several ranks a
sample starts on all of them together and lasts as long as the slowest.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from contrastile.backends.registry import installed_version
from contrastile.bench.sweep import in_turns, matmul, seconds
from contrastile.environment import measurement_environment
from contrastile.reporting import one_line

PATIENCE = timedelta(minutes=15)
"""A rank may wait this long for another that compiles or checks."""


@dataclass(slots=True)
class Ranks:
    """This rank among the others; a world of one needs no process group.

    Attributes:
        device: this rank's device.
        groups: for each size, the group of consecutive ranks that this rank is in; None for size 1. All groups of one
            size work at the same time, so every GPU is busy.
        control: a gloo group of all ranks, or None in a world of one.
    """

    device: torch.device
    groups: dict[int, Any]
    control: Any = None

    @staticmethod
    def join(kind: str) -> Ranks:
        """Join the process group, if there is one, on device kind "cuda" or "cpu"."""
        if "RANK" not in os.environ:
            return Ranks(torch.device(kind, 0) if kind == "cuda" else torch.device(kind), {1: None})
        device = torch.device(kind)
        if kind == "cuda":
            device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
            torch.cuda.set_device(device)
        # no device_id, because a group of some ranks would then be split from this one, a collective of all ranks
        dist.init_process_group("nccl" if kind == "cuda" else "gloo", timeout=PATIENCE)
        ranks = Ranks(device, {1: None}, dist.new_group(backend="gloo", timeout=PATIENCE))
        for n in (n for n in range(2, ranks.size + 1) if (ranks.size % n == 0 and n & (n - 1) == 0) or n == ranks.size):
            is_world = n == ranks.size
            ranks.groups[n] = dist.group.WORLD if is_world else dist.new_subgroups(n, timeout=PATIENCE)[0]
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
        """The number of ranks."""
        return 1 if self.control is None else dist.get_world_size()

    def share(self, value: Any) -> list[Any]:
        """The values of all ranks, in their order."""
        if self.control is None:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.control)
        return values

    def failed(self, reason: str) -> str:
        """The first reason that a rank gives, or ""."""
        return next((x if self.size == 1 else f"rank {r}: {x}" for r, x in enumerate(self.share(reason)) if x), "")

    def together(self) -> None:
        """Wait until every device is idle and every rank is here."""
        if self.kind == "cuda":
            torch.cuda.synchronize()
        if self.control is not None:
            dist.barrier(group=self.control)
            if self.kind == "cuda":
                # a collective, after which all GPUs start together
                dist.all_reduce(torch.zeros(1, device=self.device))

    def say(self, text: str) -> None:
        """Print a line, once."""
        if self.rank == 0:
            print(text, flush=True)

    def leave(self) -> None:
        """Leave the process group together with all ranks, because other ranks may still need this one."""
        if self.control is not None:
            dist.barrier(group=self.control)
            sys.stdout.flush()
            dist.destroy_process_group()


Call = Callable[[], Any]
SIDE = {"cuda": 8192, "cpu": 512}


def elapsed(ranks: Ranks, call: Call, count: int) -> float:
    """Seconds that ``count`` calls take on the slowest rank; all begin together, with idle devices."""
    ranks.together()
    return float(max(ranks.share(seconds(call, ranks.kind, count))))


def ceiling(ranks: Ranks, slot: float) -> Callable[[], float]:
    """A function that times a square product of the vendor's library on all ranks at once, 8192^3 bfloat16 on a GPU.

    Each call takes about a slot, and returns the mean of the ranks' TFLOP/s.
    """
    side, dtype = SIDE[ranks.kind], "bfloat16" if ranks.kind == "cuda" else "float32"
    product = matmul(side, dtype, str(ranks.device))
    product()
    count = max(1, math.ceil(slot / max(elapsed(ranks, product, 4) / 4, 1e-6)))

    def rate() -> float:
        ranks.together()
        rates = ranks.share(2e-12 * side**3 * count / seconds(product, ranks.kind, count))
        return float(sum(rates) / len(rates))

    return rate


def paired(
    ranks: Ranks, calls: dict[str, Call], yardstick: Callable[[], float], slot: float, rounds: int, patience: float
) -> dict[str, dict[str, Any]]:
    """Samples of each call, taken in turns.

    Args:
        ranks: all of them make the same calls.
        calls: by name.
        yardstick: returns the ceiling's rate; NaN if calls are compared with one another alone.
        slot: seconds of a sample, unless a single call takes longer.
        rounds: samples of each call.
        patience: seconds that a call may take.

    Returns:
        The record of each call: its status; the reason of a skip; else the calls of a sample, the seconds of the first
        call, which compiles, the milliseconds of a call on the slowest rank in each sample, and the ceiling's TFLOP/s
        around it.
    """
    rows = dict[str, dict[str, Any]]()
    for name, call in calls.items():
        reason, first_seconds = "", 0.0
        try:
            first_seconds = seconds(call, ranks.kind)
        except Exception as error:  # other people's code may raise anything; memory runs out on all ranks alike
            reason = one_line(error)[:200]
            if ranks.kind == "cuda":
                torch.cuda.empty_cache()
        reason = ranks.failed(reason)
        call_seconds = math.inf if reason else elapsed(ranks, call, 1)
        if not reason and call_seconds > patience:
            reason = f"one call takes {call_seconds:.3g} s, over the {patience:g} s that it may take"
        if call_seconds < slot:
            # time it again, because a call may be replayed from a graph after a few eager calls
            call_seconds = min(elapsed(ranks, call, 2) / 2 for _ in range(2))
        rows[name] = {"status": "skip", "reason": reason}
        if not reason:
            count = max(1, math.ceil(slot / max(call_seconds, 1e-6)))
            rows[name] = {"status": "measured", "calls": count, "first_seconds": first_seconds}
            rows[name] |= {"milliseconds": [], "ceiling_tflops": []}
    timed = {name: partial(elapsed, ranks, calls[name], row["calls"]) for name, row in rows.items() if "calls" in row}
    for samples in in_turns(timed, yardstick, rounds) if timed else ():
        for name, sample_seconds, rate in samples:
            rows[name]["milliseconds"].append(1e3 * sample_seconds / rows[name]["calls"])
            rows[name]["ceiling_tflops"].append(rate)
    return rows


PACKAGES = ("triton", "cupy-cuda13x", "inf-cl", "cut-cross-entropy", "liger-kernel", "quack-kernels", "open-clip-torch")
PACKAGES += ("transformers", "sentence-transformers", "gradcache")


def facts(ranks: Ranks, commit: str | None) -> dict[str, Any]:
    """The environment of the measurement: machine, versions, and the commit (as given if there is no checkout)."""
    environment = measurement_environment(ranks.kind)
    environment |= {name: installed_version(name) for name in PACKAGES}
    environment |= {"commit": commit or environment["commit"], "ranks": ranks.size}
    if ranks.kind == "cuda":
        environment["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return environment


def write(path: Path | None, data: dict[str, Any]) -> None:
    """JSON with one row a line, so that changes can be read; floats keep six digits."""
    if path is not None:
        rounded = json.loads(json.dumps(data, allow_nan=False), parse_float=lambda x: float(f"{float(x):.6g}"))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(rounded).replace("}, {", "},\n{") + "\n", encoding="utf-8")
