"""The integrations on several ranks, under DDP: the gradients of the one global loss, reduced once."""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.extend(str(Path(__file__).resolve().parents[2] / x) for x in (".", "integrations", "training/programs"))

import accelerate
import gather_across_devices
import lightning
import recipes
import torch
import torch.distributed as dist
import train_towers
from chunked_graphs import worst
from engines import say
from recipes import recipe
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from train_towers import CHUNK, Towers, calls, counted

from contrastile.integrations.open_clip import ChunkedModel


class Keep(torch.optim.SGD):
    """An optimiser that leaves the parameters and the gradients alone."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.0)

    def zero_grad(self, set_to_none: bool = True) -> None:
        pass


def by_lightning(pair: nn.Module, inputs: Any) -> None:
    module = recipe("Lightning")["CachedOnSeveral"](pair, CHUNK)
    module.configure_optimizers = lambda: Keep(pair.parameters())

    class Counting(lightning.Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            counted(trainer.strategy.model)

    how = {"devices": dist.get_world_size(), "strategy": "ddp", "callbacks": [Counting()]}
    recipes.by_lightning(module, inputs, **how)


def by_accelerate(pair: nn.Module, inputs: Any) -> None:
    """The same batch twice, of which accelerate accumulates the mean."""
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    prepare = accelerator.prepare

    def prepared(*given: Any) -> Any:
        model, *rest = prepare(*given)
        return counted(model), *rest

    accelerator.prepare = prepared
    recipe("accelerate")["train"](accelerator, pair, Keep(pair.parameters()), [inputs, inputs], CHUNK)


def by_open_clip(pair: nn.Module, inputs: Any) -> None:
    """ChunkedModel of DDP."""
    model = ChunkedModel(counted(DistributedDataParallel(pair)), CHUNK)
    assert model.module is pair
    train_towers.clip(*model(*inputs)).backward()


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
    rank, inputs, exact = dist.get_rank(), train_towers.given(), train_towers.expected()
    for name, train in TRAINERS.items():
        calls.clear()
        pair = Towers()
        train(pair, inputs)
        say(rank, f"{name} {len(calls)}: {worst(train_towers.gradients(pair), exact):.3g}")
    for name, ratio in gather_across_devices.trials():
        say(rank, f"{name}: {ratio:.3g}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
