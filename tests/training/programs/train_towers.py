"""Two towers for trainers, and the gradients that their parameters must have under DDP and FSDP2.

Where the chunks are the same, so are the features' bits, those of the loss, and what each chunk sends to a parameter:
see ``chunked_graphs``. That the mean over the ranks is the global loss's is held by ``contrastile verify --world``.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.extend(str(Path(__file__).resolve().parents[2] / room) for room in ("training", "comm/programs"))

import torch
import torch.distributed as dist
from chunked_graphs import Step, graphs_kept
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import contrastile
from contrastile.verify.arithmetic import gamma
from contrastile.verify.rounding import UNIT

SHARDS = {2: (9, 14), 3: (9, 0, 14)}
CHUNK, INPUTS, HIDDEN, WIDTH, SCALE = 4, 5, 7, 9, 10.0
calls: list[int] = []
"""One for each reduction."""


class Towers(nn.Module):
    """Features of both sides, and the scale of the logits, from parameters that training changes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(23)
        self.image, self.text = (
            nn.Sequential(nn.Linear(INPUTS, HIDDEN, bias=False), nn.ReLU(), nn.Linear(HIDDEN, WIDTH, bias=False))
            for _ in range(2)
        )
        # FSDP2 takes no parameters without an axis
        self.logit_scale = nn.Parameter(torch.zeros(1))
        self.double()

    def forward(self, images: Tensor, texts: Tensor) -> tuple[Tensor, ...]:
        return self.image(images), self.text(texts), self.scale()

    def scale(self) -> Tensor:
        return SCALE * self.logit_scale.exp()


def clip(image: Tensor, text: Tensor, scale: Tensor, **settings: Any) -> Tensor:
    """The loss, as open_clip's own training makes it."""
    place = {"rank": dist.get_rank(), "world_size": dist.get_world_size()}
    made = contrastile.nn.ClipLoss(local_loss=True, gather_with_grad=True, cache_labels=True, **place, **settings)
    loss = made(image, text, scale)
    assert isinstance(loss, Tensor)
    return loss


def given() -> tuple[Tensor, Tensor]:
    """This rank's images and texts."""
    draw = torch.Generator().manual_seed(dist.get_rank())
    rows = SHARDS[dist.get_world_size()][dist.get_rank()]
    image, text = torch.randn(2, rows, INPUTS, dtype=torch.float64, generator=draw)
    return image, text


def expected() -> Step:
    """The mean over the ranks of what every rank's chunks give with their graphs kept."""
    model, n = Towers(), dist.get_world_size()
    chunks = [x.split(CHUNK) for x in given()]
    step = graphs_kept((model.image, model.text), chunks, clip, [model.scale], list(model.parameters()))
    # of two steps that are accumulated, each with a sum over both towers' chunks on all ranks, and n divisions
    roundings = 2 * (2 * sum(1 + -(-rows // CHUNK) for rows in SHARDS[n]) + 2 * n)
    for gradient, total in zip(step.gradients, step.sums, strict=True):
        for x in (gradient, total):
            dist.all_reduce(x)
            x /= n
    sizes = [x + y.abs() for x, y in zip(step.sums, step.gradients, strict=True)]
    bounds = [2 * gamma(UNIT["float64"] * roundings) * x for x in sizes]
    return Step(step.loss, step.gradients, bounds, step.sums)


def gradients(model: nn.Module) -> list[Tensor]:
    """Of the parameters of ``Towers``, in their order; whole where a trainer keeps them in shards."""
    named: dict[str, Any] = {name.removeprefix("module."): x.grad for name, x in model.named_parameters()}
    found = [named[name] for name, _ in Towers().named_parameters()]
    return [x.full_tensor() if hasattr(x, "full_tensor") else x for x in found]


def counted(model: DistributedDataParallel) -> DistributedDataParallel:
    """DDP, whose reductions are counted in ``calls``; it has one bucket here."""

    # DDP reads a hook's annotations: they must be types, and no text
    def hook(_, bucket):  # type: ignore[no-untyped-def]
        calls.append(1)
        sent = dist.all_reduce(bucket.buffer().div_(dist.get_world_size()), async_op=True)
        return sent.get_future().then(lambda done: done.value()[0])

    model.register_comm_hook(None, hook)
    return model


def fsdp() -> nn.Module:
    model = Towers()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for tower in (model.image, model.text):
        fully_shard(tower, mesh=mesh)
    return fully_shard(model, mesh=mesh)
