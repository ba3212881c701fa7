"""One run: a rank's part of a batch, what may be timed, and the measurements of one point."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from contrastile.bench.memory import available_bytes, peak_extra
from contrastile.bench.sweep import FITS
from harness import float64
from harness.machine import Watch
from harness.peers import LOCAL, PEERS, Loss, ours, refusal
from harness.plan import Plan, Point
from harness.ranks import Ranks
from harness.record import Record, said
from harness.timing import Call, Captured, Ceiling, Samples, paired

KEY = ("part", "name", "n", "b", "d", "scale", "what", "graph", "exchange")
NO_TIME = "the run's time was up"


@dataclass(frozen=True, slots=True)
class Part:
    """This rank's part of a batch of n ranks: the number of its first pair, and leaves that require gradients."""

    n: int
    first: int
    image: torch.Tensor
    text: torch.Tensor
    scale: torch.Tensor

    @property
    def leaves(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """What gradients are taken for."""
        return self.image, self.text, self.scale


@dataclass(frozen=True, slots=True)
class Job:
    """One implementation on n ranks."""

    name: str
    loss: Loss | None
    n: int
    exchange: str
    bytes_per_pair: int = 0
    reason: str = ""


@dataclass(slots=True)
class Bench:
    """A run in progress.

    Attributes:
        ranks: all of them.
        record: what was found; rank 0 writes it.
        plan: what to measure.
        backends: of the package, by name, that may be timed; ``verify`` removes the others.
        slot: seconds of a sample.
        rounds: samples of each call.
        without: words in the names of peers that are left out.
        ms_per_flop: milliseconds for each FLOP of what was timed last, by name.
        ceiling: the yardstick, once it is needed.
    """

    ranks: Ranks
    record: Record
    plan: Plan
    backends: list[str]
    slot: float
    rounds: int
    without: Sequence[str] = ()
    ms_per_flop: dict[str, float] = field(default_factory=dict)
    ceiling: Ceiling | None = None
    peers: list[Job] | None = None

    @property
    def dtype(self) -> str:
        """bfloat16, or float32 on a CPU, where the point is only that it runs."""
        return "bfloat16" if self.ranks.kind == "cuda" else "float32"

    def left(self) -> float:
        """Seconds of the budget that are left, by rank 0's clock."""
        return float(self.ranks.share(self.record.left())[0])

    def yardstick(self) -> Ceiling:
        """The ceiling product, made once."""
        self.ceiling = self.ceiling or Ceiling(self.ranks)
        return self.ceiling

    def tidy(self) -> None:
        """Give cached memory back, so that what is free is what the next call can have."""
        gc.collect()
        if self.ranks.kind == "cuda":
            torch.cuda.empty_cache()

    def part(self, point: Point, n: int) -> Part:
        """This rank's part of a point's batch."""
        rows, device = point.rows(n), self.ranks.device
        first = self.ranks.rank % n * rows
        image, text = float64.pairs(first, rows, point.d, device, getattr(torch, self.dtype))
        scale = torch.tensor(point.scale, device=device, requires_grad=True)
        return Part(n, first, image.requires_grad_(), text.requires_grad_(), scale)

    def own(self, sizes: Sequence[int], exchanges: Sequence[str]) -> list[Job]:
        """Our own backends on these numbers of ranks."""
        return [
            Job(f"contrastile {name}", ours(name, self.ranks.groups[n], how), n, how)
            for name in self.backends
            for n in sizes
            for how in (exchanges if n > 1 else (LOCAL,))
        ]

    def others(self) -> list[Job]:
        """Other people's, on all ranks; loaded once."""
        if self.peers is None:
            self.peers = []
            n = self.ranks.size
            for name, peer in PEERS.items():
                if n > 1 and not peer.several:
                    continue
                left_out = any(word in name for word in self.without)
                loss, reason = (None, "left out") if left_out else refusal(peer, several=n > 1, kind=self.ranks.kind)
                how = "" if n > 1 else LOCAL
                self.peers.append(Job(name, loss, n, how, peer.bytes_per_pair, reason))
        return self.peers

    def unfit(self, job: Job, point: Point, patience: float) -> str:
        """Why an implementation is not tried at a point, or ""."""
        rows = point.rows(job.n)
        needs, has = job.bytes_per_pair * rows * rows * job.n, available_bytes(self.ranks.kind)
        reason = job.reason
        if not reason and has is not None and needs > FITS * has:
            reason = f"would hold about {needs / 2**30:.0f} GiB of logits, {has / 2**30:.0f} GiB are free"
        one = self.ms_per_flop.get(job.name, 0.0) * point.flops(job.n) / 1e3
        if not reason and one > patience:
            reason = f"one call would take about {one:.3g} s"
        if not reason and self.left() < self.rounds * (self.slot + max(one, self.slot)):
            reason = NO_TIME
        return self.ranks.failed(reason)

    def call(self, job: Job, point: Point, part: Part) -> Call:
        """What is timed."""
        loss, leaves = job.loss, part.leaves
        assert loss is not None
        if point.what == "forward":
            return lambda: torch.no_grad()(loss)(*leaves)
        if point.what == "backward":
            value = loss(*leaves)
            return lambda: torch.autograd.grad(value, leaves, retain_graph=True)

        def step() -> Any:
            value = loss(*leaves)
            return value.detach(), torch.autograd.grad(value, leaves)

        return Captured(step) if point.graph else step

    def times(self, part: str, point: Point, jobs: Sequence[Job], patience: float = 15.0) -> None:
        """Time these implementations at one point, in turns, and add a row for each."""
        self.tidy()
        calls, reasons, given = dict[str, Call](), dict[str, str](), dict[int, Part]()
        labels = {f"{job.name} {job.exchange} on {job.n}": job for job in jobs}
        for label, job in labels.items():
            reasons[label] = self.unfit(job, point, patience)
            if reasons[label]:
                continue
            reason = ""
            try:
                given.setdefault(job.n, self.part(point, job.n))
                calls[label] = self.call(job, point, given[job.n])
            except Exception as error:  # a peer that does not take the size
                reason = said(error)
            reasons[label] = self.ranks.failed(reason)
        calls = {label: call for label, call in calls.items() if not reasons[label]}
        watch, found = Watch(self.ranks.kind if self.ranks.rank == 0 else "cpu"), dict[str, Samples]()
        if calls:
            ranks, ceiling = self.ranks, self.yardstick()
            found, failed = paired(ranks, calls, ceiling, self.slot, self.rounds, patience, watch)
            reasons |= failed
        for label, job in labels.items():
            row = {"part": part, "name": job.name, "exchange": job.exchange, **point.row(job.n), "dtype": self.dtype}
            if reasons[label]:
                row |= {"status": "skip", "reason": reasons[label]}
            else:
                row |= {"status": "measured", **self._figures(found[label], job, point), "readings": watch.summary()}
                row |= {} if point.graph else {"peak_bytes": self._peak(calls[label])}
            self.record.add("times", row, KEY)
            self.ranks.say(line(row))
        for call in calls.values():
            if isinstance(call, Captured):
                call.release()

    def _figures(self, samples: Samples, job: Job, point: Point) -> dict[str, Any]:
        flops, times = point.flops(job.n), samples.milliseconds
        if point.what == "both":
            self.ms_per_flop[job.name] = min(times) / flops
        return {
            "milliseconds": times,
            "host_ms": samples.host,
            "calls": samples.calls,
            "ceiling_tflops": samples.ceiling,
            "fraction": [flops / t * 1e-9 / top for t, top in zip(times, samples.ceiling, strict=True)],
            "first_seconds": samples.first_seconds,
        }

    def _peak(self, call: Call) -> int:
        """Peak extra bytes of one call on the rank that holds most, gradients included."""
        return int(self.ranks.most(peak_extra(call, "torch", self.ranks.kind)))


def line(row: dict[str, Any]) -> str:
    """A timed row in words."""
    where = f"{row['part']}: {row['name']} {row['exchange']} n={row['n']} b={row['b']} d={row['d']} {row['what']}"
    where += f" scale={row['scale']:g}{' graph' if row['graph'] else ''}"
    if row["status"] == "skip":
        return f"{where}: skipped, {row['reason']}"
    ms, share = (sorted(row[name])[len(row[name]) // 2] for name in ("milliseconds", "fraction"))
    return f"{where}: {ms:.4g} ms, {100 * share:.1f} % of the ceiling"
