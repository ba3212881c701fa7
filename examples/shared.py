"""What the examples share: the training step, and around it progress, recall, records and figures."""

from __future__ import annotations

import functools
import itertools
import json
import math
import sys
import time
from abc import ABC, abstractmethod
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import contrastile
from contrastile import training
from contrastile.environment import measurement_environment
from contrastile.reporting import progress

LARGEST_SCALE = 100.0  # of the logits, as in CLIP


class Task(ABC):
    """A model with its data.

    Attributes:
        device: where it is trained.
        chunk: what is encoded at a time.
        pairs: how many there are to train on.
        model: has a parameter ``log_scale``.
        encode: one callable per tower: a chunk of its input -> (samples, d) of unit length.
    """

    device: torch.device
    chunk: int | training.Budget
    pairs: int
    model: Any
    encode: Sequence[Callable[[Any], Tensor]]

    @abstractmethod
    def reset(self) -> None:
        """Make the model anew; what is random comes from torch's seed."""

    @abstractmethod
    def batch(self, rows: Tensor) -> tuple[tuple[training.Stream, training.Stream], Tensor]:
        """The inputs of the two towers for these training pairs, as streams of chunks, and the pairs' ids."""

    @abstractmethod
    def evaluate(self) -> dict[str, float]:
        """Recall on what was held out; the model is in eval mode."""

    def stream(self, x: Tensor) -> training.Stream:
        """Chunks on the device."""
        return training.stream(x, self.chunk, self.device)

    def embed(self, encode: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """Embeddings in float32, chunk by chunk."""
        with autocast(self.device):
            return torch.cat([encode(chunk).float() for chunk, _ in self.stream(x)])


def arguments(parser: ArgumentParser, *, out: str, batch: int, samples: int, lr: float) -> Namespace:
    """Add the options that the examples share, and parse the command line."""
    parser.add_argument("--batch", type=int, nargs="+", default=[batch], help="pairs in a step; several: several runs")
    parser.add_argument("--seed", type=int, nargs="+", default=[0], help="several: several runs for each batch")
    parser.add_argument("--samples", type=int, default=samples, help="pairs seen in a run, whatever its batch")
    parser.add_argument("--lr", type=float, default=lr, help="learning rate at a batch of 512, times sqrt(batch / 512)")
    parser.add_argument("--evaluations", type=int, default=16, help="log lines and points of a curve")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:1")
    parser.add_argument(
        "--record", type=Path, default=Path(out), metavar="STEM", help="where STEM.json and STEM.svg go"
    )
    parser.add_argument("--note", default="", help="a remark for the record")
    options = parser.parse_args()
    for name, given in (("batch", min(options.batch)), ("samples", options.samples), ("chunk", options.chunk)):
        if given < 1:
            parser.error(f"--{name} must be at least 1, got {given}")
    options.device = torch.device(
        options.device if options.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    )
    if options.device.index is not None:  # plain "cuda" is the current one, and set_device takes none without a number
        torch.cuda.set_device(options.device)
    return options


def autocast(device: torch.device) -> Any:
    """bfloat16 on a GPU, float32 on a CPU."""
    return torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")


def step(task: Task, rows: Tensor, device: torch.device) -> Any:
    """Add the gradients of one batch; returns a dict of its loss and the seconds that went to the loss."""
    inputs, ids = task.batch(rows)  # of the two towers, each a training.stream
    with autocast(device):  # bfloat16 on a GPU
        return training.cached_step(
            task.encode,
            inputs,
            functools.partial(contrastile.clip_loss, ids=ids),
            scale=task.model.log_scale.exp,
            metrics=("loss_seconds",),
        )


def now(device: torch.device) -> float:
    """Seconds on the host's clock, once the device has done its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


@functools.lru_cache(maxsize=2)
def _permutation(pairs: int, seed: int, epoch: int) -> Tensor:
    return torch.randperm(pairs, generator=torch.Generator().manual_seed(seed * 100_003 + epoch))


def rows_of(position: int, batch: int, pairs: int, seed: int) -> Tensor:
    """The batch that begins at this position of the shuffled epochs, laid end to end: the state is one number."""
    epochs = range(position // pairs, (position + batch - 1) // pairs + 1)
    rows = torch.cat([_permutation(pairs, seed, epoch) for epoch in epochs])
    start = position - epochs[0] * pairs
    return rows[start : start + batch]


def train(task: Task, options: Namespace, batch: int, seed: int) -> dict[str, Any]:
    """One run; returns its record."""
    torch.manual_seed(seed)
    task.reset()
    device = options.device
    kinds = [[p for p in task.model.parameters() if (p.ndim > 1) == decays] for decays in (True, False)]
    lr = options.lr * math.sqrt(batch / 512)
    optimiser = torch.optim.AdamW(
        [{"params": p, "weight_decay": decay} for p, decay in zip(kinds, (0.01, 0.0), strict=True)], lr=lr
    )
    steps = max(1, options.samples // batch)
    reports = {round(steps * (i + 1) / options.evaluations) for i in range(options.evaluations)} | {steps}
    curve = [{"samples": 0, **evaluate(task)}]
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    title = f"b = {batch:,}, seed {seed}"
    found, start = [], now(device)
    with progress(shown=sys.stdout.isatty()) as report:
        for i in range(steps):
            for group in optimiser.param_groups:
                group["lr"] = lr * min((i + 1) / max(1, steps // 10), 1 - i / steps)  # up for a tenth, then down to 0
            found.append(step(task, rows_of(i * batch, batch, task.pairs, seed), device))
            optimiser.step()
            optimiser.zero_grad()
            with torch.no_grad():
                task.model.log_scale.clamp_(max=math.log(LARGEST_SCALE))
            report(i + 1, steps, title)
            if i + 1 not in reports:
                continue
            curve.append(_point((i + 1) * batch, task, found, now(device) - start, batch))
            print(f"{title}, step {i + 1} of {steps}: {line(curve[-1])}", flush=True)
            found, start = [], now(device)
    return {"batch": batch, "seed": seed, "curve": curve}


def evaluate(task: Task) -> dict[str, float]:
    """The task's recall, in eval mode."""
    task.model.eval()
    with torch.no_grad():
        found = task.evaluate()
    task.model.train()
    return {name: round(value, 5) for name, value in found.items()}


def _point(samples: int, task: Task, steps: list[dict[str, Tensor]], seconds: float, batch: int) -> dict[str, Any]:
    """A point of the curve: means over the steps since the last one, and recall now."""
    loss, own = (torch.stack([found[name] for found in steps]).mean().item() for name in ("loss", "loss_seconds"))
    device = task.model.log_scale.device
    return {
        "samples": samples,
        "loss": round(loss, 5),
        "scale": round(task.model.log_scale.exp().item(), 3),
        **evaluate(task),
        "pairs_per_second": round(batch * len(steps) / seconds, 1),
        "loss_share": round(own * len(steps) / seconds, 5),
        **({"peak_mib": torch.cuda.max_memory_allocated(device) // 2**20} if device.type == "cuda" else {}),
    }


def line(point: dict[str, Any]) -> str:
    """A point of the curve as a log line."""
    shares = ", ".join(f"{name} {value:.3f}" for name, value in point.items() if "@" in name)
    return (
        f"loss {point['loss']:.3f}, scale {point['scale']:.1f}, {shares}; "
        f"{point['pairs_per_second']:,.0f} pairs/s, the loss {point['loss_share']:.1%} of the step"
    )


def recall(query: Tensor, key: Tensor, own: Tensor, name: str = "recall", tile: int = 4096) -> dict[str, float]:
    """Share of queries whose own key is among the nearest 1 and 10; a tie counts against it.

    Args:
        query: (m, d), float32.
        key: (n, d); all of them are compared, ``tile`` queries at a time.
        own: (m,) int64, each query's row of ``key``.
        name: what the shares are called, before @1 and @10.
        tile: queries at a time.
    """
    ranks = []
    for low in range(0, len(query), tile):
        scores = query[low : low + tile] @ key.T
        right = scores.gather(1, own[low : low + tile, None])
        ranks.append((scores >= right).sum(dim=1))
    rank = torch.cat(ranks)
    return {f"{name}@{k}": (rank <= k).double().mean().item() for k in (1, 10)}


def runs(task: Task, options: Namespace, title: str, about: dict[str, Any]) -> None:
    """Every batch with every seed; writes the record and its figure after each. The task keeps the last model."""
    about = {**about, "samples": options.samples, "lr": options.lr, "evaluations": options.evaluations}
    facts = measurement_environment(options.device.type)
    record: dict[str, Any] = {"title": title, "environment": facts, "settings": about, "note": options.note, "runs": []}
    options.record.parent.mkdir(parents=True, exist_ok=True)
    for batch in options.batch:
        for seed in options.seed:
            record["runs"].append(train(task, options, batch, seed))
            options.record.with_suffix(".json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
            figure(record, options.record.with_suffix(".svg"))


def figure(record: dict[str, Any], path: Path) -> None:
    """Loss and recall over the pairs seen and, with several batches, recall at the end over the batch."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    found = record["runs"]
    batches = sorted({run["batch"] for run in found})
    names = [name for name in found[0]["curve"][0] if "@" in name]
    panels = ["loss", *dict.fromkeys(name.partition("@")[0] for name in names)]
    with matplotlib.rc_context({"svg.hashsalt": "contrastile", "font.size": 9}):
        width = len(panels) + (len(batches) > 1)
        shown, axes = plt.subplots(1, width, figsize=(4 * width, 3.6), layout="constrained", squeeze=False)
        for axis, panel in zip(axes[0], panels, strict=False):
            for run, name in itertools.product(found, ["loss", *names]):
                if name.partition("@")[0] != panel:
                    continue
                points = [(point["samples"], point[name]) for point in run["curve"] if name in point]
                colour, dashed = f"C{batches.index(run['batch'])}", name.endswith("@10")
                label = None if dashed else f"b = {run['batch']:,}"
                axis.plot(*zip(*points, strict=True), "--" if dashed else "-", color=colour, label=label)
            axis.set(xlabel="pairs seen", ylabel="loss" if panel == "loss" else f"{panel}@1, dashed @10")
            axis.set_ylim(bottom=0)
            axis.locator_params(axis="x", nbins=5)
            handles, labels = axis.get_legend_handles_labels()
            once = dict(zip(labels, handles, strict=True))  # the seeds of a batch share a colour
            axis.legend(once.values(), once.keys(), fontsize="small")
        if len(batches) > 1:
            last = axes[0][-1]
            for name in names:
                points = [(run["batch"], run["curve"][-1][name]) for run in found]
                last.plot(*zip(*points, strict=True), "s" if name.endswith("@10") else "o", label=name)
            last.set(xlabel="batch b", ylabel="recall at the end, each seed", xscale="log")
            last.set_xticks(batches, [f"{b:,}" for b in batches])
            last.minorticks_off()
            last.set_ylim(bottom=0)
            last.legend(fontsize="small")
        shown.suptitle(f"{record['title']}, {record['environment']['device']}")
        shown.savefig(path, metadata={"Date": None})
        plt.close(shown)
