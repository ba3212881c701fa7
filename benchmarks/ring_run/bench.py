"""One run: this rank's part of a batch, what is called, and the measurements of one group of calls."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from gpu_run.machine import Watch
from gpu_run.record import Record

from contrastile import clip_loss
from contrastile.bench.memory import peak_extra
from contrastile.schedules.placement import Shards, choose_exchange
from ring_run import features
from ring_run.plan import IN_A_GRAPH, LOCAL, Plan
from ring_run.ranks import Ranks
from ring_run.timing import Call, Captured, Ceiling, Samples, attempt, paired

Calls = dict[str, tuple[Call, dict[str, Any]]]
KEY = ("part", "name", "n", "rows", "d", "what", "setting")
NO_TIME = "the run's time was up"


@dataclass(frozen=True)
class Part:
    """A rank's part of a batch of n ranks.

    Attributes:
        n: ranks that share the batch.
        sizes: pairs of each.
        place: this rank's among them.
        image: (rows, d) features; they want a gradient.
        text: (rows, d) likewise.
        scale: 0-d likewise.
    """

    n: int
    sizes: tuple[int, ...]
    place: int
    image: torch.Tensor
    text: torch.Tensor
    scale: torch.Tensor

    @property
    def first(self) -> int:
        """The number of this rank's first pair."""
        return sum(self.sizes[: self.place])

    @property
    def leaves(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """What gradients are taken for."""
        return self.image, self.text, self.scale

    def shards(self) -> Shards:
        """As the exchange sees it."""
        return Shards(self.sizes, tuple((size,) for size in self.sizes))


@dataclass(slots=True)
class Bench:
    """A run in progress.

    Attributes:
        ranks: all of them.
        record: what was found; None on all ranks but the first.
        plan: what to measure.
        backend: its name.
        slot: seconds of a sample.
        setting: what was set for the messages of this run.
        ceiling: the yardstick, once it is needed.
    """

    ranks: Ranks
    record: Record | None
    plan: Plan
    backend: str
    slot: float
    setting: str = ""
    ceiling: Ceiling | None = None
    _parts: dict[tuple[Any, ...], Part] = field(default_factory=dict)

    def yardstick(self) -> Ceiling:
        """The ceiling product, made once."""
        if self.ceiling is None:
            self.ceiling = Ceiling(self.ranks)
        return self.ceiling

    def left(self) -> float:
        """Seconds of the budget that are left, by rank 0's clock."""
        return float(self.ranks.decided(self.record.left() if self.record else 0.0))

    def part(self, n: int, sizes: Sequence[int], d: int, scale: float | None = None) -> Part:
        """This rank's part of a batch that n ranks share; drawn anew."""
        place, device = self.ranks.rank % n, self.ranks.device
        first = sum(sizes[:place])
        image, text = features.pairs(first, sizes[place], d, device, getattr(torch, self.plan.dtype))
        s = torch.tensor(self.plan.scale if scale is None else scale, device=device, requires_grad=True)
        return Part(n, tuple(sizes), place, image.requires_grad_(), text.requires_grad_(), s)

    def even(self, n: int, rows: int, d: int) -> Part:
        """This rank's part of equal ones; kept until ``tidy``."""
        key = (n, rows, d)
        if key not in self._parts:
            self._parts[key] = self.part(n, [rows] * n, d)
        return self._parts[key]

    def tidy(self) -> None:
        """Give memory back, so that what is free is what the next call can have."""
        self._parts.clear()
        gc.collect()
        if self.ranks.kind == "cuda":
            torch.cuda.empty_cache()

    def step(self, part: Part, exchange: str, *, group: Any = None, backend: str = "") -> Call:
        """One forward and backward through the front door.

        Args:
            part: of this rank.
            exchange: "local" for no group at all.
            group: in place of the ranks' own.
            backend: in place of the run's.
        """
        how: dict[str, Any] = {"backend": backend or self.backend}
        if exchange != LOCAL:
            how |= {"group": self.ranks.groups[part.n] if group is None else group, "exchange": exchange}

        def call() -> Any:
            loss = clip_loss(*part.leaves, **how)
            return loss.detach(), torch.autograd.grad(loss, part.leaves)

        return call

    def in_graphs(self, calls: Calls) -> Calls:
        """The same calls in CUDA graphs, where there are any and the host's share is worth it."""
        if self.ranks.kind != "cuda":
            return {}
        found: Calls = {}
        for name, (call, row) in calls.items():
            if row["rows"] <= self.plan.graphs:
                said = {key: value for key, value in row.items() if key != "exchange"}
                found[name + IN_A_GRAPH] = Captured(call), said | {"captured": row.get("exchange", "")}
        return found

    def chosen(self, part: Part) -> dict[str, str]:
        """What ``exchange="auto"`` stands for here, and why."""
        if part.n == 1:
            return {}
        found = choose_exchange(part.shards(), part.image.shape[1], part.image.element_size())
        return {"auto": found.exchange, "reason": found.reason}

    def times(
        self,
        part: str,
        calls: Calls,
        rounds: int,
        *,
        patience: float = 8.0,
        memory: bool = False,
        slot: float = 0.0,
        paced: bool = True,
    ) -> dict[str, Samples]:
        """Time calls in turns and add a row for each.

        Args:
            part: of the run.
            calls: by a name within this group: the call, and what its row says besides what was measured.
            rounds: samples of each.
            patience: seconds that one call's samples may take.
            memory: whether the peak of one call is taken too.
            slot: seconds of a sample; 0 for the run's.
            paced: whether the ceiling product runs between the samples.

        Returns:
            The samples of what was timed.
        """
        slot = slot or self.slot
        watch = Watch(self.ranks.kind if self.ranks.rank == 0 and paced else "cpu")
        ready = {name: call for name, (call, _) in calls.items()}
        if self.left() < rounds * slot * len(calls) * (2 if paced else 1):
            found, failed = dict[str, Samples](), dict.fromkeys(ready, NO_TIME)
        else:
            ceiling = self.yardstick() if paced else None
            found, failed = paired(self.ranks, ready, ceiling, slot, rounds, patience, watch)
        for name, (call, row) in calls.items():
            full = {"part": part, "name": name, "setting": self.setting, **row}
            if name in failed:
                full |= {"status": "skip", "reason": failed[name]}
            else:
                full |= {"status": "measured", **self._figures(found[name], row)}
                full |= {"readings": watch.summary()} if paced else {}
                if memory and not isinstance(call, Captured):
                    full["peak_bytes"] = self.peak(call)
            self.add("times", full, KEY)
            self.ranks.say(line(full))
            if isinstance(call, Captured):
                call.release()
        return found

    def _figures(self, samples: Samples, row: dict[str, Any]) -> dict[str, Any]:
        found: dict[str, Any] = {"milliseconds": samples.milliseconds, "calls": samples.calls, "host_ms": samples.host}
        if samples.ceiling:
            found["ceiling_tflops"] = samples.ceiling
            if row.get("rows") and row.get("what") == "step":
                # 8 b^2 d / n for each GPU
                flops = 8.0 * (row["rows"] * row["n"]) ** 2 * row["d"] / row["n"]
                both = zip(samples.milliseconds, samples.ceiling, strict=True)
                found["fraction"] = [flops / t * 1e-9 / top for t, top in both]
        return found

    def peak(self, call: Call) -> int | None:
        """Peak extra bytes of one call on the rank that holds most, gradients included."""
        sizes = list[int]()
        reason = attempt(self.ranks, lambda: sizes.append(peak_extra(call, "torch", self.ranks.kind)))
        return None if reason else int(self.ranks.most(sizes[0]))

    def add(self, part: str, row: dict[str, Any], key: tuple[str, ...]) -> None:
        """Add a row to the record, where there is one."""
        if self.record is not None:
            self.record.add(part, row, key)


def line(row: dict[str, Any]) -> str:
    """A row in words."""
    where = f"{row['part']} {row['name']}: n={row.get('n')} rows={row.get('rows')} d={row.get('d')}"
    if row["status"] == "skip":
        return f"{where}: skipped, {row['reason']}"
    ms, host = (sorted(row[name])[len(row[name]) // 2] for name in ("milliseconds", "host_ms"))
    share = ""
    if "fraction" in row:
        share = f", {100 * sorted(row['fraction'])[len(row['fraction']) // 2]:.1f} % of the ceiling"
    held = f", {row['peak_bytes'] / 2**20:.0f} MiB" if row.get("peak_bytes") else ""
    return f"{where}: {ms:.4g} ms, host {host:.4g}{share}{held}"
