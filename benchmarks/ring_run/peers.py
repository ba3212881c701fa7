"""Other people's losses over all ranks, by the timing rule of our own: forward and backward of the symmetric loss."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from contrastile.bench.memory import available_bytes
from contrastile.bench.sweep import FITS
from ring_run.bench import Bench, Part
from ring_run.plan import AUTO, COMPILED, GATHER, INF_CL, OPEN_CLIP, OURS, RING
from ring_run.timing import Call

Loss = Callable[[Any, Any, Any], Any]
BYTES_PER_PAIR = {OPEN_CLIP: 8, COMPILED: 8}
"""At the peak, for each of the (b / n) x b pairs: logits of both directions and their logarithms, two bytes each."""


def _gathered(x: Any) -> Any:
    nn = importlib.import_module("torch.distributed.nn")
    return torch.cat(nn.all_gather(x), dim=0)


def _local_loss(image: Any, text: Any, all_image: Any, all_text: Any, scale: Any, first: int) -> Any:
    """Cross entropies of this rank's rows of both matrices of logits, halved."""
    cross_entropy = torch.nn.functional.cross_entropy
    target = torch.arange(first, first + image.shape[0], device=image.device)
    per_image, per_text = scale * image @ all_text.T, scale * text @ all_image.T
    return (cross_entropy(per_image, target) + cross_entropy(per_text, target)) / 2


def formula(compiled: bool) -> Loss:
    """open_clip's ``ClipLoss(local_loss=True, gather_with_grad=True)`` in plain PyTorch; gathered outside the graph."""
    # each size is compiled for itself: shapes known in advance are the fastest that the compiler can do
    inner = torch.compile(_local_loss, dynamic=False) if compiled and torch.cuda.is_available() else _local_loss

    def loss(image: Any, text: Any, scale: Any) -> Any:
        return inner(image, text, _gathered(image), _gathered(text), scale, dist.get_rank() * image.shape[0])

    return loss


def _open_clip() -> tuple[Loss, str]:
    """The package's own loss where it is installed, else its formula; and which of the two."""
    found = importlib.util.find_spec("open_clip")
    if found is None or not found.submodule_search_locations:
        return formula(compiled=False), "formula"
    # the one module, which needs torch alone: the package itself brings every model along
    place = Path(found.submodule_search_locations[0]) / "loss.py"
    spec = importlib.util.spec_from_file_location("open_clip_loss", place)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    place_in_world = {"rank": dist.get_rank(), "world_size": dist.get_world_size()}
    return module.ClipLoss(local_loss=True, gather_with_grad=True, **place_in_world), "open_clip's ClipLoss"


def _inf_cl() -> tuple[Loss, str]:
    one = importlib.import_module("inf_cl").cal_inf_loss

    def loss(image: Any, text: Any, scale: Any) -> Any:
        return (one(image, text, scale=scale) + one(text, image, scale=scale)) / 2

    return loss, "inf_cl's cal_inf_loss"


LOADERS: dict[str, Callable[[], tuple[Loss, str]]] = {
    OPEN_CLIP: _open_clip,
    COMPILED: lambda: (formula(compiled=True), "formula, torch.compile"),
    INF_CL: _inf_cl,
}


def _step(loss: Loss, part: Part) -> Call:
    def call() -> Any:
        value = loss(*part.leaves)
        return value.detach(), torch.autograd.grad(value, part.leaves)

    return call


PATIENCE = 5.0
"""Seconds that the samples of one of them may take at one size."""


def peers(bench: Bench, without: tuple[str, ...] = ()) -> None:
    """Ours and everybody else's, in turns, at each size."""
    n, losses, absent = bench.ranks.size, dict[str, tuple[Loss, str]](), dict[str, str]()
    for name, load in LOADERS.items():
        try:
            if any(word in name for word in without):
                raise RuntimeError("left out")
            losses[name], reason = load(), ""
        except Exception as error:  # as above
            reason = f"{type(error).__name__}: {' '.join(str(error).split())[:150]}"
        absent[name] = bench.ranks.failed(reason)
    pace = dict[str, float]()
    for b, d in bench.plan.peers:
        bench.tidy()
        rows = b // n
        part = bench.even(n, rows, d)
        where = {"n": n, "rows": rows, "d": d, "what": "step"}
        own = where | bench.chosen(part)
        calls = {f"{OURS}, {how}": (bench.step(part, how), own | {"exchange": how}) for how in _ours(n)}
        for name in LOADERS:
            reason = absent[name] or bench.ranks.failed(_too_large(bench, name, rows * b))
            if not reason and (one := pace.get(name, 0.0) * b * b) > PATIENCE:
                reason = f"one call would take about {one:.3g} s"
            if reason:
                row = {"part": "peers", "name": name, "setting": bench.setting, **where}
                bench.add("times", row | {"status": "skip", "reason": reason}, ("part", "name", "n", "rows", "d"))
                bench.ranks.say(f"peers {name}: rows={rows} skipped, {reason}")
                continue
            loss, source = losses[name]
            calls[name] = _step(loss, part), where | {"source": source}
        calls |= bench.in_graphs({name: calls[name] for name in (f"{OURS}, {AUTO}", OPEN_CLIP) if name in calls})
        found = bench.times("peers", calls, 3, patience=PATIENCE, memory=True)
        pace |= {name: min(samples.milliseconds) / 1e3 / b**2 for name, samples in found.items() if name in LOADERS}
    bench.tidy()


def _ours(n: int) -> tuple[str, ...]:
    return (AUTO, RING, GATHER) if n > 1 else (AUTO,)


def _too_large(bench: Bench, name: str, pairs: int) -> str:
    needs, has = BYTES_PER_PAIR.get(name, 0) * pairs, available_bytes(bench.ranks.kind)
    if has is not None and needs > FITS * has:
        return f"would hold about {needs / 2**30:.0f} GiB of logits, {has / 2**30:.0f} GiB are free"
    return ""
