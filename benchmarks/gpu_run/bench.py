"""One run: which implementations may be timed, and the measurements of one point."""

from __future__ import annotations

import gc
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from contrastile.backends.registry import load
from contrastile.bench.memory import available_bytes, peak_extra
from contrastile.bench.peers import with_autograd
from contrastile.bench.sweep import FITS
from contrastile.bench.workloads import Arguments
from contrastile.verify.report import verdict
from contrastile.verify.runner import DTYPES, Row, Run, Selection
from gpu_run.machine import Watch, itemised
from gpu_run.peers import PEERS, Loss, backend_name, refusal
from gpu_run.plan import CUPY, FUSED, MORE_MEMORY, WITHOUT_GPU, Plan, Point
from gpu_run.record import Record
from gpu_run.reference import features
from gpu_run.timing import Call, Ceiling, Samples, captured, paired

QUICK_CASES = ("smoke", "ragged", "square-ragged", "hot", "all-negative", "deep", "duplicates", "large-logits")
QUICK_PROPERTIES = ("value", "gradients", "non-negative", "determinism")

TIME_KEY = ("group", "implementation", "b", "d", "scale", "what", "graph")
NO_TIME = "the run's time was up"
LEFT_OUT = "left out"
NEEDS_GPU = "needs a GPU"


@dataclass(slots=True)
class Bench:
    """A run in progress.

    Attributes:
        record: what was found.
        plan: what to measure.
        device: "cuda" or "cpu".
        slot: seconds of a sample.
        losses: what may be timed, by name, in the order of PEERS.
        absent: why the others may not.
        pace: milliseconds per b^2 d of what was timed last.
        ceiling: the yardstick, once it is needed.
        about: which of our own implementations the run is about.
    """

    record: Record
    plan: Plan
    device: str
    slot: float
    losses: dict[str, Loss] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)
    pace: dict[str, float] = field(default_factory=dict)
    ceiling: Ceiling | None = None
    about: Sequence[str] = (*FUSED, *WITHOUT_GPU[:1])

    @property
    def dtype(self) -> str:
        """bfloat16, or float32 on a CPU, where the point is only that it runs."""
        return "bfloat16" if self.device == "cuda" else "float32"

    @property
    def ours(self) -> list[str]:
        """The implementations that the run is about."""
        return [name for name in (FUSED if self.device == "cuda" else WITHOUT_GPU[:1]) if name in self.about]

    @property
    def aimed(self) -> list[str]:
        """The implementations that have aims: besides ours, one of them with more memory."""
        return [*self.ours, *MORE_MEMORY] if CUPY in self.ours else self.ours

    def yardstick(self) -> Ceiling:
        """The ceiling product, made once."""
        if self.ceiling is None:
            self.ceiling = Ceiling(self.device)
        return self.ceiling

    def tidy(self) -> None:
        """Give cached memory back, so that what is free is what the next call can have."""
        gc.collect()
        if self.device == "cuda":
            torch.cuda.empty_cache()

    def gather(self, without: Sequence[str], *, full: bool) -> bool:
        """Load every implementation and verify our own; whether none of ours failed or is missing."""
        for name, peer in PEERS.items():
            if any(part in name for part in without):
                self.absent[name] = LEFT_OUT
                continue
            if self.device != "cuda" and name not in WITHOUT_GPU:
                self.absent[name] = NEEDS_GPU
                continue
            loss, reason = refusal(peer)
            if loss is not None and peer.backend:
                reason = self._verify(name, backend_name(peer.backend), full)
            if loss is None or reason:
                self.absent[name] = reason
            else:
                self.losses[name] = loss
        wrong = {name for name, reason in self.absent.items() if reason not in (LEFT_OUT, NEEDS_GPU)}
        return not any(PEERS[name].backend for name in wrong)

    def _verify(self, name: str, backend: str, full: bool) -> str:
        """Hold a backend to the oracle; why it may not be timed, or ""."""
        chosen = load(backend)
        dtypes = [x for x in (DTYPES if full else (self.dtype,)) if x in chosen.dtypes]
        quick: dict[str, Any] = {} if full else {"cases": QUICK_CASES, "properties": QUICK_PROPERTIES}
        started = time.monotonic()
        run = Run(Selection({backend: chosen}, dtypes=dtypes, device=self.device, **quick))
        rows: list[Row] = list(run.rows())
        count = {status: sum(row["status"] == status for row in rows) for status in ("pass", "fail", "skip")}
        passed = verdict(rows) == "pass" and count["pass"] > 0
        failures = [f"{x.row['property']} {x.row['case']} {x.row['dtype']}: {x.worst}" for x in run.failures[:20]]
        found = {
            "implementation": name,
            "backend": backend,
            "full": full,
            "dtypes": dtypes,
            **count,
            "worst": max((row["ratio"] for row in rows if row["ratio"] is not None), default=None),
            "verdict": "pass" if passed else "fail",
            "failures": failures,
            "seconds": time.monotonic() - started,
        }
        self.record.add("verify", found, ("implementation", "full"))
        print(f"verify {name}: {count}, worst {found['worst']} of its bound, {found['seconds']:.0f} s", flush=True)
        for line in failures:
            print(f"  FAILED {line}", flush=True)
        return "" if passed else "verify failed: it is not timed"

    def call(self, name: str, given: Arguments, point: Point) -> Call:
        """What is timed."""
        loss = self.losses[name]
        if point.what == "forward":

            def forward() -> Any:
                with torch.no_grad():
                    return loss(given.image, given.text, given.scale)

            return forward
        if point.what == "backward":
            leaves = given.image, given.text, given.scale
            value = loss(*leaves)
            return lambda: torch.autograd.grad(value, leaves, retain_graph=True)
        step = with_autograd(lambda image, text, scale, ids: loss(image, text, scale))(given)
        return captured(step) if point.graph else step

    def times(
        self,
        group: str,
        names: Sequence[str],
        point: Point,
        rounds: int,
        patience: float = 15.0,
        aims: Mapping[str, float] | None = None,
    ) -> None:
        """Time these implementations at one point, interleaved, and add a row for each, with its aim if it has one."""
        self.tidy()
        rows: dict[str, dict[str, Any]] = {
            name: {"group": group, "implementation": name, **point.row(), "dtype": self.dtype} for name in names
        }
        for name, aim in (aims or {}).items():
            rows[name]["aim"] = aim
        reasons = {name: self.unfit(name, point, rounds, patience) for name in names}
        wanted = [name for name in names if not reasons[name]]
        calls: dict[str, Call] = {}
        given = features(point.b if wanted else 1, point.d, point.scale, self.device, self.dtype)
        for name in wanted:
            try:
                calls[name] = self.call(name, given, point)
            except Exception as error:  # a capture that is refused, a peer that does not take the size
                reasons[name] = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        watch, found = Watch(self.device), dict[str, Samples]()
        if calls:
            found, failed = paired(calls, self.yardstick(), self.slot, rounds, patience, watch)
            reasons |= failed
        for name in names:
            row = rows[name]
            if reasons[name]:
                row |= {"status": "skip", "reason": reasons[name]}
            else:
                samples = found[name]
                shares = [
                    point.flops / t * 1e-9 / top for t, top in zip(samples.milliseconds, samples.ceiling, strict=True)
                ]
                row |= {
                    "status": "measured",
                    "milliseconds": samples.milliseconds,
                    "calls": samples.calls,
                    "ceiling_tflops": samples.ceiling,
                    "fraction": shares,
                    "first_seconds": samples.first_seconds,
                    "readings": watch.summary(),
                    **self._memory(name, calls[name], point),
                }
                if point.what == "both":
                    self.pace[name] = min(samples.milliseconds) / (point.b**2 * point.d)
            self.record.add("times", row, TIME_KEY)
            _say(row)

    def unfit(self, name: str, point: Point, rounds: int, patience: float) -> str:
        """Why an implementation is not tried at a point, or ""."""
        if name in self.absent:
            return self.absent[name]
        needs, has = PEERS[name].bytes_per_pair * point.b**2, available_bytes(self.device)
        if has is not None and needs > FITS * has:
            return f"would hold about {needs / 2**30:.0f} GiB of logits, {has / 2**30:.0f} GiB are free"
        one = self.pace.get(name, 0.0) * point.b**2 * point.d / 1e3
        if one > patience:
            return f"one call would take about {one:.3g} s"
        return NO_TIME if self.record.left() < rounds * (self.slot + max(one, self.slot)) else ""

    def _memory(self, name: str, call: Call, point: Point) -> dict[str, Any]:
        """Peak extra bytes of one call, and for our own what they are."""
        if point.graph:
            return {}
        found: dict[str, Any] = {"peak_bytes": peak_extra(call, "torch", self.device)}
        if PEERS[name].backend and self.device == "cuda":
            try:
                found["peak_blocks"] = itemised(call)
            except (AttributeError, KeyError, TypeError) as error:  # the allocator's record is no public interface
                found["peak_blocks_missing"] = f"{type(error).__name__}: {error}"
        return found


def _say(row: dict[str, Any]) -> None:
    where = f"{row['group']}: {row['implementation']} b={row['b']} d={row['d']} scale={row['scale']:g} {row['what']}"
    if row["status"] == "skip":
        print(f"{where}: skipped, {row['reason']}", flush=True)
        return
    middle = sorted(row["fraction"])[len(row["fraction"]) // 2]
    ms = sorted(row["milliseconds"])[len(row["milliseconds"]) // 2]
    print(f"{where}{' graph' if row['graph'] else ''}: {ms:.4g} ms, {100 * middle:.1f} % of the ceiling", flush=True)
