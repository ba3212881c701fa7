"""open_clip's own training loop with a chunked model and the losses of this package."""

from __future__ import annotations

import argparse
from typing import Any

import pytest
import torch
from chunked_graphs import taken
from recipes import recipe
from torch import Tensor, nn
from torchvision_stand_in import open_clip

import contrastile

pytestmark = pytest.mark.slow
B, DOUBLE = 13, torch.float64


def model(**settings: Any) -> Any:
    """A CLIP of open_clip, tiny, with dropout of patches."""
    library, _ = open_clip()
    vision = library.CLIPVisionCfg(layers=1, width=16, head_width=8, patch_size=4, image_size=8, patch_dropout=0.5)
    text = library.CLIPTextCfg(context_length=6, vocab_size=20, width=16, heads=2, layers=1)
    torch.manual_seed(0)
    return library.CLIP(8, vision, text, output_dict=True, **settings).double()


def batch(rows: int = B) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(1)
    images = torch.randn(rows, 3, 8, 8, dtype=DOUBLE, generator=draw)
    return images, torch.randint(1, 20, (rows, 6), generator=draw)


def epoch(model: nn.Module, loss: Any, *batches: tuple[Tensor, Tensor]) -> list[Tensor]:
    """The gradients of the last step of ``train_one_epoch``, whose optimiser leaves the parameters alone."""
    _, train = open_clip()

    class Loader(list[tuple[Tensor, Tensor]]):
        num_batches, num_samples = len(batches), sum(len(x) for x, _ in batches)

    class Data:
        dataloader = Loader(batches)

        def set_epoch(self, epoch: int) -> None:
            pass

    args = argparse.Namespace(
        device="cpu",
        precision="fp32",
        accum_freq=1,
        batch_size=B,
        world_size=1,
        rank=0,
        distill=False,
        skip_scheduler=True,
        horovod=False,
        grad_clip_norm=None,
        wandb=False,
        log_every_n_steps=1,
        log_local=False,
    )
    torch.manual_seed(2)
    optimiser = torch.optim.SGD(model.parameters(), lr=0.0)
    train.train_one_epoch(model, {"train": Data()}, loss, 0, optimiser, None, None, None, args)
    return taken(list(model.parameters()))


@pytest.mark.parametrize("bias", [False, True])
def test_one_chunk_has_the_bits_of_the_model_itself(bias: bool) -> None:
    settings = {"init_logit_bias": -3.0} if bias else {}
    loss = contrastile.nn.SigLipLoss() if bias else contrastile.nn.ClipLoss()
    # of 256 pairs
    expected, found = (
        epoch(model(**settings), loss, batch()),
        epoch(recipe("open_clip")["chunked"](model(**settings)), loss, batch()),
    )
    assert all(x.abs().max() > 0 for x in expected)
    assert all(torch.equal(x, y) for x, y in zip(expected, found, strict=True))
