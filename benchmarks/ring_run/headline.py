"""The largest batch, in one call: its time, its memory, and sampled rows and columns held to float64."""

from __future__ import annotations

import time
from typing import Any

import torch

from contrastile import clip_loss
from contrastile.comm import torch_group
from ring_run import checks, features
from ring_run.bench import Bench
from ring_run.plan import AUTO, LOCAL
from ring_run.stand_ins import listening
from ring_run.timing import own_time

WARM = 65_536
"""Pairs of a rank in the call whose rate says how long the largest will take."""

DEADLINE = 600.0
KEY = ("n", "pairs", "d")


def headline(bench: Bench, pairs: int, seconds: float) -> None:
    """One symmetric loss with gradients over at most so many pairs, as many as fit in so many seconds."""
    ranks, n = bench.ranks, bench.ranks.size
    asked, d, count = pairs or bench.plan.headline[0], *bench.plan.headline[1:]
    exchange = AUTO if n > 1 else LOCAL
    bench.tidy()
    if n > 1:
        # a rank is silent for as long as its largest block takes
        torch_group.of(ranks.groups[n], DEADLINE)
    small = bench.part(n, [min(WARM, asked // n)] * n, d)
    step = bench.step(small, exchange)
    step()
    taken = ranks.most(own_time(ranks, step, 1)[0]) / 1e3
    pace = taken / len(small.image) ** 2
    limit = seconds if seconds > 0 else bench.left()
    rows = asked // n
    if pace * rows**2 > limit:
        rows = int((limit / pace) ** 0.5) // features.CHUNK * features.CHUNK or min(rows, features.CHUNK)
    rows = int(ranks.decided(rows))
    ranks.say(f"headline: {n * rows:,} of {asked:,} pairs, about {pace * rows**2:.0f} s")
    del small, step
    bench.tidy()
    row = {"n": n, "pairs": n * rows, "asked": asked, "d": d, "scale": bench.plan.scale, "estimate_s": pace * rows**2}
    try:
        row |= {"status": "measured", **_measure(bench, rows, d, count, exchange)}
    except torch.OutOfMemoryError as error:
        row |= {"status": "skip", "reason": " ".join(str(error).split())[:200]}
    bench.add("headline", row, KEY)
    ranks.say(f"headline: {row}")


def _measure(bench: Bench, rows: int, d: int, count: int, exchange: str) -> dict[str, Any]:
    ranks, n, cuda = bench.ranks, bench.ranks.size, bench.ranks.kind == "cuda"
    part = bench.part(n, [rows] * n, d)
    tops = [bench.yardstick().rate(4 * bench.slot)]
    base = torch.cuda.memory_allocated() if cuda else 0
    if cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    kept: list[Any] = []
    how: dict[str, Any] = {"backend": bench.backend}
    if exchange != LOCAL:
        how |= {"group": ranks.groups[n], "exchange": exchange}
    with listening() as heard:
        forward = ranks.most(own_time(ranks, lambda: kept.append(clip_loss(*part.leaves, **how)), 1)[0])
        ranks.say(f"headline: forward {forward / 1e3:.1f} s")
        backward = ranks.most(own_time(ranks, lambda: kept.append(torch.autograd.grad(kept[0], part.leaves)), 1)[0])
    peak = ranks.most(torch.cuda.max_memory_allocated() - base) if cuda else None
    tops.append(bench.yardstick().rate(4 * bench.slot))
    rate = 8.0 * (n * rows) ** 2 * d / n / (forward + backward) * 1e-9
    found = {
        "exchange": bench.chosen(part).get("auto", LOCAL),
        "forward_ms": forward,
        "backward_ms": backward,
        "tflops": rate,
        "ceiling_tflops": tops,
        "fraction": rate / (sum(tops) / 2),
        "peak_bytes": peak,
        "features_bytes": 2 * part.image.numel() * part.image.element_size(),
        "loss": float(kept[0].detach()),
        "samples": count * n,
    }
    ranks.say(f"headline: backward {backward / 1e3:.1f} s, {rate:.0f} TFLOP/s a GPU, loss {found['loss']:.4g}")
    bench.add("headline", {"n": n, "pairs": n * rows, "d": d, "status": "measured", "ratios": None, **found}, KEY)
    started = time.monotonic()
    value, gradients = kept[0].detach(), kept[1]
    kept.clear()
    seen = checks.Found(value, gradients, heard[0])
    own = checks.hold(bench, part, seen, checks.scene(bench, part, found["exchange"]), count, every=False)
    everyone = ranks.share(own)
    ratios = {name: max(each[name] for each in everyone) for name in own}
    holds = all(ratio < 1 for ratio in ratios.values())
    return found | {"ratios": ratios, "holds": holds, "check_s": time.monotonic() - started}
