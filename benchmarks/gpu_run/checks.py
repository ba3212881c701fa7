"""What is checked rather than timed: errors against float64, equal bits, a loss that is never negative, big batches."""

from __future__ import annotations

from itertools import product
from typing import Any

import torch

from contrastile.bench.peers import with_autograd
from gpu_run import reference, spy
from gpu_run.bench import NO_TIME, Bench
from gpu_run.peers import PEERS
from gpu_run.plan import CUPY, TORCH, TRITON, Point
from gpu_run.timing import elapsed

ERROR_KEY = ("implementation", "b", "scale")
NEARLY_ALIKE = 0.99
_SPIED = {TRITON: "triton", CUPY: "cupy", TORCH: "torch"}


def _step(bench: Bench, name: str, given: Any) -> Any:
    loss = bench.losses[name]
    return with_autograd(lambda image, text, scale, ids: loss(image, text, scale))(given)


def errors(bench: Bench) -> None:
    """Loss and gradients of every implementation against float64 on the same rounded features."""
    for b, scale, count in bench.plan.errors:
        if bench.record.left() < 0:
            return
        given = reference.features(b, bench.plan.peer_width, scale, bench.device, bench.dtype)
        exact, index = reference.whole(given), reference.sample(b, count, bench.device)
        for name in PEERS:
            bench.tidy()
            row = {"implementation": name, "b": b, "d": bench.plan.peer_width, "scale": scale, "samples": len(index)}
            reason = bench.unfit(name, Point(b, bench.plan.peer_width, scale), 1, 30.0)
            if not reason:
                try:
                    loss, gradients = _step(bench, name, given)()
                    row |= {"status": "measured", **reference.errors(given, exact, index, loss, gradients)}
                    loss = gradients = None
                except Exception as error:
                    reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
            if reason:
                row |= {"status": "skip", "reason": reason}
            bench.record.add("errors", row, ERROR_KEY)
            print(f"error: {row}", flush=True)


def repeats(bench: Bench) -> None:
    """The same call again and again: the loss and every gradient equal to the last bit."""
    for (b, times), name in product(bench.plan.repeats, bench.aimed):
        if name in bench.absent or bench.record.left() < 0:
            continue
        step = _step(bench, name, reference.features(b, bench.plan.peer_width, 100.0, bench.device, bench.dtype))
        loss, gradients = step()
        equal = 1
        for _ in range(times - 1):
            again, others = step()
            same = torch.equal(loss, again) and all(torch.equal(x, y) for x, y in zip(gradients, others, strict=True))
            equal += same
        _check(bench, name, f"{times} repeats at b = {b}, equal bits", equal == times, f"{equal} of {times}")


def pairs(bench: Bench) -> None:
    """A trained model's pairs are alike and its loss goes to 0: it must not go below."""
    for b, name in product(bench.plan.pairs, bench.aimed):
        if name in bench.absent or bench.record.left() < 0:
            continue
        for cosine in (1.0, NEARLY_ALIKE):
            given = reference.features(b, bench.plan.peer_width, 100.0, bench.device, bench.dtype, cosine=cosine)
            loss = float(bench.losses[name](given.image, given.text, given.scale).detach())
            _check(
                bench, name, f"loss of pairs of cosine {cosine:g} at b = {b}, not negative", loss >= 0, f"{loss:.3g}"
            )


def _check(bench: Bench, name: str, what: str, holds: bool, found: str) -> None:
    row = {"implementation": name, "check": what, "holds": holds, "found": found}
    bench.record.add("checks", row, ("implementation", "check"))
    print(f"check: {name}: {what}: {'yes' if holds else 'NO'} ({found})", flush=True)


def big(bench: Bench) -> None:
    """One call each at the largest batches, sampled rows and columns held to float64."""
    for (b, count), name in product(bench.plan.big, bench.ours):
        if name not in _SPIED:
            continue
        row: dict[str, Any] = {"implementation": name, "b": b, "d": bench.plan.peer_width, "scale": 100.0}
        needed = 1.3 * bench.pace.get(name, 2e-11) * b * b * row["d"] / 1e3
        reason = bench.absent.get(name) or (NO_TIME if bench.record.left() < needed else "")
        try:
            found = {"status": "skip", "reason": reason} if reason else _big(bench, name, b, count)
            row |= {"status": "measured"} | found
        except torch.OutOfMemoryError as error:
            row |= {"status": "skip", "reason": " ".join(str(error).split())[:200]}
        bench.record.add("big", row, ("implementation", "b"))
        print(f"big: {row}", flush=True)


def _big(bench: Bench, ours: str, b: int, count: int) -> dict[str, Any]:
    from contrastile import clip_loss

    cuda, d = bench.device == "cuda", bench.plan.peer_width
    name = f"gpu_run.spy:{_SPIED[ours]}"
    small = reference.features(min(b, 8192), d, 100.0, bench.device, bench.dtype)
    torch.autograd.grad(clip_loss(small.image, small.text, small.scale, backend=name), small.image)
    ceiling = bench.yardstick()
    given = reference.features(b, d, 100.0, bench.device, bench.dtype)
    leaves, kept = (given.image, given.text, given.scale), []
    tops = [ceiling.rate(2 * bench.slot)]
    base = torch.cuda.memory_allocated() if cuda else 0
    if cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    forward = elapsed(lambda: kept.append(clip_loss(*leaves, backend=name)), 1, bench.device)
    backward = elapsed(lambda: kept.append(torch.autograd.grad(kept[0], leaves)), 1, bench.device)
    peak = torch.cuda.max_memory_allocated() - base if cuda else None
    tops.append(ceiling.rate(2 * bench.slot))
    loss, (d_image, d_text, _) = kept
    found = {
        "forward_ms": forward,
        "backward_ms": backward,
        "ceiling_tflops": tops,
        "fraction": 8 * b * b * d / (forward + backward) * 1e-9 / (sum(tops) / 2),
        "peak_bytes": peak,
        "samples": count,
        "loss": float(loss.detach()),
    }
    index = reference.sample(b, count, bench.device)
    image, text = given.image.detach(), given.text.detach()
    statistics: Any = spy.seen[0]
    row_lse = torch.logaddexp(statistics.row_negative_lse, statistics.row_positive_lse)
    column_lse = torch.logaddexp(statistics.column_negative_lse, statistics.column_positive_lse)
    for side, rows, columns, own, other, gradient in (
        ("image", image, text, row_lse, column_lse, d_image),
        ("text", text, image, column_lse, row_lse, d_text),
    ):
        exact = reference.lse_rows(rows, columns, index, 100.0)
        found[f"{side}_lse"] = float((own.detach()[index].double() - exact).abs().max())
        found[f"d_{side}"] = reference.relative(
            gradient[index], reference.gradient_rows(rows, columns, index, 100.0, exact, other)
        )
    return found
