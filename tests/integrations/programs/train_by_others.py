"""The integrations on several ranks, under DDP: the gradients of the one global loss, reduced once.

The towers, their few-bit inputs and the bounds are those of ``train_towers``.
"""

# DDP reads the annotations of a communication hook: they must be types, not text
import logging
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.extend(str(Path(__file__).resolve().parents[2] / x) for x in (".", "integrations", "comm/programs"))

import accelerate
import gather_across_devices
import lightning
import torch
import torch.distributed as dist
import train_towers
from engines import say
from recipes import Batches, recipe
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from train_towers import SHARDS, Towers, expected, gradients, worst

from contrastile.integrations.open_clip import ChunkedModel

calls: list[int] = []


class Pair(Towers):
    """Towers without the bias, which a CLIP loss does not take."""

    def __init__(self) -> None:
        super().__init__()
        self.logit_bias.requires_grad_(False)

    def forward(self, images: Tensor, texts: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        return super().forward(images, texts)[:3]


def count(model: DistributedDataParallel) -> None:
    """Count the reductions of DDP, which has one bucket here."""

    def hook(_: None, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        calls.append(1)
        sent = dist.all_reduce(bucket.buffer().div_(dist.get_world_size()), async_op=True)
        return sent.get_future().then(lambda done: done.value()[0])

    model.register_comm_hook(None, hook)


class Keep(torch.optim.SGD):
    """An optimiser that leaves the parameters and the gradients alone."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.0)

    def zero_grad(self, set_to_none: bool = True) -> None:
        pass


def by_lightning(pair: nn.Module, inputs: Any) -> None:
    module = recipe("Lightning")["CachedOnSeveral"](pair, 4)
    module.configure_optimizers = lambda: Keep(pair.parameters())

    class Counting(lightning.Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            count(trainer.strategy.model)

    quiet = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=dist.get_world_size(),
        strategy="ddp",
        max_epochs=1,
        **dict.fromkeys(quiet, False),
        callbacks=[Counting()],
    )
    trainer.fit(module, Batches([inputs]))


def by_accelerate(pair: nn.Module, inputs: Any) -> None:
    """The same batch twice, of which accelerate accumulates the mean."""
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    prepare = accelerator.prepare

    def counted(*given: Any) -> Any:
        model, *rest = prepare(*given)
        count(model)
        return model, *rest

    accelerator.prepare = counted
    recipe("accelerate")["train"](accelerator, pair, Keep(pair.parameters()), [inputs, inputs], 4)


def by_open_clip(pair: nn.Module, inputs: Any) -> None:
    """ChunkedModel of DDP."""
    ddp = DistributedDataParallel(pair)
    count(ddp)
    model = ChunkedModel(ddp, 4)
    assert model.module is pair
    train_towers.clip((*model(*inputs), None)).backward()


TRAINERS: dict[str, Callable[[nn.Module, Any], None]] = {
    "lightning": by_lightning,
    "accelerate": by_accelerate,
    "open_clip": by_open_clip,
}


def main() -> None:
    # libraries warn of other versions of torch, and say how they start
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    shards = SHARDS[size]
    start = sum(shards[:rank])
    inputs = tuple(torch.tensor(x[start : start + shards[rank]]) for x in (train_towers.IMAGES, train_towers.TEXTS))
    exact = expected("clip", 1.0, shards)[:-1]
    for name, train in TRAINERS.items():
        calls.clear()
        pair = Pair()
        train(pair, inputs)
        pair.logit_bias.grad = torch.zeros_like(pair.logit_bias)
        say(rank, f"{name} {len(calls)}: {worst(gradients(pair)[:-1], exact):.3g}")
    for name, ratio in gather_across_devices.trials():
        say(rank, f"{name}: {ratio:.3g}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
