"""The parts of a run: what is verified, timed and held to float64, and one row of the record for each.

One process is n = 1, whose ``exchange`` is "local"; on several ranks it stands for every rank with a batch of its own.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from contrastile.backends.arrays import library_of, transfer, working_for
from contrastile.backends.contract import Block, Options, Pairs
from contrastile.backends.registry import load
from contrastile.verify.launched import Launched
from contrastile.verify.report import verdict
from contrastile.verify.runner import Row, Run
from contrastile.verify.selection import DTYPES, Selection
from harness import float64
from harness.bench import NO_TIME, Bench, Job, Part
from harness.peers import LOCAL, OPEN_CLIP, Loss, loads
from harness.plan import Point
from harness.ranks import Ranks
from harness.record import said
from harness.timing import own_time

AUTO, RING, GATHER = "auto", "ring", "gather"
QUICK_CASES = ("smoke", "ragged", "square-ragged", "hot", "all-negative", "deep", "duplicates", "large-logits")
QUICK_PROPERTIES = {False: ("value", "gradients", "non-negative", "determinism"), True: (RING, GATHER, "agreement")}


def verify(bench: Bench, *, full: bool) -> bool:
    """Hold our own backends to the oracle, over the ranks where there are several; those that fail are not timed."""
    ranks, passed = bench.ranks, True
    world = None
    if ranks.size > 1:
        # as ``contrastile verify --world torch`` makes its groups
        group = partial(dist.new_group, backend="cpu:gloo,cuda:nccl" if ranks.kind == "cuda" else "gloo")
        world = Launched("torch", ["torchrun"], ranks.rank, ranks.size, ranks.share, group, None)
    for name in list(bench.backends):
        started, reason = time.monotonic(), ranks.failed(loads(name))
        row: dict[str, Any] = {"name": f"contrastile {name}", "backend": name, "n": ranks.size, "full": full}
        if reason:
            row |= {"verdict": "absent", "reason": reason}
        else:
            backend = load(name)
            dtypes = [x for x in (DTYPES if full else (bench.dtype,)) if x in backend.dtypes]
            quick: dict[str, Any] = {"cases": QUICK_CASES, "properties": QUICK_PROPERTIES[world is not None]}
            chosen = Selection(
                {name: backend}, dtypes=dtypes, device=ranks.kind, world=world, **({} if full else quick)
            )
            run = Run(chosen)
            rows: list[Row] = list(run.rows())
            counts = {status: sum(x["status"] == status for x in rows) for status in ("pass", "fail", "skip")}
            holds = verdict(rows) == "pass" and counts["pass"] > 0
            worst = max((x["ratio"] for x in rows if x["ratio"] is not None), default=None)
            failures = [f"{x.row['property']} {x.row['case']} {x.row['dtype']}: {x.worst}" for x in run.failures[:20]]
            row |= {"dtypes": dtypes, **counts, "worst": worst, "verdict": "pass" if holds else "fail"}
            row |= {"failures": failures, "seconds": time.monotonic() - started}
        if row["verdict"] != "pass":
            bench.backends.remove(name)
            passed = False
        bench.record.add("verify", row, ("name", "n", "full"))
        ranks.say(f"verify: {row}")
    return passed


def steps(bench: Bench) -> None:
    """Our own: on one process at every point, on several ranks by every exchange on every number of them."""
    sizes = list(bench.ranks.groups)
    if sizes == [1]:
        for point in bench.plan.steps:
            bench.times("steps", point, bench.own([1], [LOCAL]))
        return
    for point in bench.plan.scaling:
        jobs = [*bench.own(sizes, (RING, GATHER)), *bench.own(sizes[-1:], (AUTO,))]
        bench.times("steps", point, jobs)


def peers(bench: Bench) -> None:
    """Ours and everybody else's, in turns."""
    for point in bench.plan.peers:
        # a capture that fails in other people's kernels can take the process with it
        others = [job for job in bench.others() if job.name == OPEN_CLIP or not point.graph]
        jobs = [*bench.own([bench.ranks.size], (AUTO, RING, GATHER)), *others]
        bench.times("peers", point, jobs, patience=5.0)


def _relative(ranks: Ranks, got: torch.Tensor, want: torch.Tensor) -> float:
    """``|got - want| / |want|`` in the Frobenius norm over all ranks."""
    got, want = (x.detach().double() for x in (got, want))
    wrong, size = zip(*ranks.share((float((got - want).square().sum()), float(want.square().sum()))), strict=True)
    return math.sqrt(sum(wrong) / sum(size))


def big(bench: Bench) -> None:
    """One call each at the largest batches, its time and memory, and sampled rows and columns held to float64."""
    ranks, n = bench.ranks, bench.ranks.size
    for pairs, count in bench.plan.big[n > 1]:
        point = Point(pairs // n, bench.plan.peers[0].d, each=True)
        for job in bench.own([n], (AUTO,)):
            bench.tidy()
            row: dict[str, Any] = {"name": job.name, "exchange": job.exchange, **point.row(n)}
            backend = job.name.removeprefix("contrastile ")
            needed = (
                1.5 * bench.ms_per_flop.get(job.name, 1e-11 if ranks.kind == "cuda" else 0.0) * point.flops(n) / 1e3
            )
            try:
                if bench.left() < needed:
                    row |= {"status": "skip", "reason": NO_TIME}
                else:
                    row |= {"status": "measured", **_big(bench, job, backend, point, count)}
            except torch.OutOfMemoryError as error:
                row |= {"status": "skip", "reason": said(error)}
            bench.record.add("big", row, ("name", "n", "b", "d"))
            ranks.say(f"big: {row}")


def _big(bench: Bench, job: Job, backend: str, point: Point, count: int) -> dict[str, Any]:
    ranks, n, cuda = bench.ranks, bench.ranks.size, bench.ranks.kind == "cuda"
    small = Point(min(point.b, 8192), point.d, each=True)
    bench.call(job, small, bench.part(small, n))()
    part, kept = bench.part(point, n), list[Any]()
    ceilings = [bench.yardstick().rate(2 * bench.slot)]
    base = torch.cuda.memory_allocated() if cuda else 0
    if cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    assert job.loss is not None
    loss: Loss = job.loss
    forward = ranks.most(own_time(ranks, lambda: kept.append(loss(*part.leaves)), 1)[0])
    backward = ranks.most(own_time(ranks, lambda: kept.append(torch.autograd.grad(kept[0], part.leaves)), 1)[0])
    peak = ranks.most(torch.cuda.max_memory_allocated() - base) if cuda else None
    ceilings.append(bench.yardstick().rate(2 * bench.slot))
    rate = point.flops(n) / (forward + backward) * 1e-9
    found = {
        "forward_ms": forward,
        "backward_ms": backward,
        "ceiling_tflops": ceilings,
        "fraction": rate / (sum(ceilings) / 2),
        "peak_bytes": peak,
        "samples": count,
        "loss": float(kept[0].detach()),
    }
    b, s = point.rows(n) * n, float(part.scale.detach())
    image, text = float64.pairs(0, b, point.d, ranks.device, part.image.dtype)
    row_lse, column_lse = log_sums(ranks, backend, part, text)
    own = float64.sample(point.rows(n), max(2, count // n), ranks.device)
    index = own + part.first
    for side, rows, columns, mine, other, gradient in (
        ("image", image, text, row_lse, column_lse, kept[1][0]),
        ("text", text, image, column_lse, row_lse, kept[1][1]),
    ):
        exact = float64.lse_rows(rows, columns, index, s)
        found[f"{side}_lse"] = ranks.most(float((mine[index] - exact).abs().max()))
        want = float64.gradient_rows(rows, columns, index, s, exact, other)
        found[f"d_{side}"] = _relative(ranks, gradient[own] / n, want)
    return found


def log_sums(ranks: Ranks, backend: str, part: Part, text: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(b,) log-sum-exps of all rows and columns, from one forward pass of the backend over this rank's rows."""
    chosen, torch_arrays = load(backend), library_of(text)
    numbers = torch.arange(part.first, part.first + len(part.image), device=text.device)

    def put(x: torch.Tensor) -> Any:
        return transfer(x.detach(), torch_arrays, chosen.arrays)

    def joined(name: str) -> torch.Tensor:
        one, other = (getattr(found, f"{name}_{kind}_lse") for kind in ("negative", "positive"))
        taken: list[Any] = [transfer(x, chosen.arrays, torch_arrays) for x in (one, other)]
        return torch.logaddexp(*(x.detach().cpu() for x in taken))

    with working_for(torch_arrays, chosen.arrays, text):
        block = Block(put(part.image), put(text), put(part.scale), None, Pairs(positives=put(numbers)))
        found = chosen.lse(block, True, Options())
        own = joined("row"), joined("column")
    first, n = ranks.rank // part.n * part.n, part.n
    everyone = ranks.share(own)[first : first + n]
    rows, columns = torch.cat([x for x, _ in everyone]), torch.stack([x for _, x in everyone]).logsumexp(0)
    return rows.to(text.device), columns.to(text.device)


PARTS: dict[str, Callable[[Bench], None]] = {
    "steps": steps,
    "peers": peers,
    "big": big,
}
"""By name, in the order in which they run by default."""
