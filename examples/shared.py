"""What a training program on real data needs: options, the training step and the loop around it, and recall.

A task has a ``model`` with a parameter ``log_scale``; ``encode``, a callable for each tower; ``pairs``, their number;
``batch(rows)``, which gives both towers' inputs as streams of chunks and the pairs' ids; and ``evaluate()``, the recall
of what was held out.
"""

from __future__ import annotations

import argparse
import functools
import math
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import contrastile
from contrastile import training

LARGEST_SCALE = 100.0  # of the logits, as in CLIP
REPORTS = 16


def options(**defaults: Any) -> argparse.Namespace:
    """The command line: an option for each keyword, of its default's type; and the device."""
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    for name, value in defaults.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value, help=" ")
    parser.add_argument("--device", type=torch.device, default="cuda" if torch.cuda.is_available() else "cpu", help=" ")
    return parser.parse_args()


def autocast(device: torch.device) -> Any:
    """bfloat16 on a GPU, float32 on a CPU."""
    return torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")


def step(task: Any, rows: Tensor, device: torch.device) -> Any:
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


@functools.lru_cache(maxsize=2)
def _permutation(pairs: int, epoch: int) -> Tensor:
    return torch.randperm(pairs, generator=torch.Generator().manual_seed(epoch))


def rows_of(position: int, batch: int, pairs: int) -> Tensor:
    """The batch that begins at this position of the shuffled epochs, laid end to end."""
    epochs = range(position // pairs, (position + batch - 1) // pairs + 1)
    start = position - epochs[0] * pairs
    return torch.cat([_permutation(pairs, epoch) for epoch in epochs])[start : start + batch]


def train(task: Any, options: argparse.Namespace) -> list[dict[str, float]]:
    """Train on ``options.samples`` pairs, and print the loss and the recall now and then; returns what it printed."""
    batch, device = options.batch, options.device
    steps = max(1, options.samples // batch)
    kinds = [[p for p in task.model.parameters() if (p.ndim > 1) == decays] for decays in (True, False)]
    groups = [{"params": p, "weight_decay": decay} for p, decay in zip(kinds, (0.01, 0.0), strict=True)]
    optimiser = torch.optim.AdamW(groups, lr=options.lr * math.sqrt(batch / 512))
    # up for a tenth of the steps, then down to 0
    rate = torch.optim.lr_scheduler.LambdaLR(optimiser, lambda i: min((i + 1) / max(1, steps // 10), 1 - i / steps))
    curve, losses, seconds, start = [{"samples": 0, **evaluate(task)}], [], 0.0, time.perf_counter()
    for i in range(1, steps + 1):
        found = step(task, rows_of((i - 1) * batch, batch, task.pairs), device)
        optimiser.step()
        optimiser.zero_grad()
        rate.step()
        with torch.no_grad():
            task.model.log_scale.clamp_(max=math.log(LARGEST_SCALE))
        losses.append(found["loss"])
        seconds += float(found["loss_seconds"])
        if i % max(1, steps // REPORTS) == 0 or i == steps:
            point = {"samples": i * batch, "loss": torch.stack(losses).mean().item()}
            share = seconds / (time.perf_counter() - start)
            curve.append({**point, "loss's share of the time": share, **evaluate(task)})
            print(", ".join(f"{name} {value:,.4g}" for name, value in curve[-1].items()), flush=True)
            losses, seconds, start = [], 0.0, time.perf_counter()
    return curve


def evaluate(task: Any) -> dict[str, float]:
    """The task's recall, in eval mode."""
    task.model.eval()
    with torch.no_grad(), autocast(task.model.log_scale.device):
        found: dict[str, float] = task.evaluate()
    task.model.train()
    return found


def embed(encode: Callable[[Any], Tensor], chunks: training.Stream) -> Tensor:
    """Embeddings in float32, chunk by chunk."""
    return torch.cat([encode(chunk).float() for chunk, _ in chunks])


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
