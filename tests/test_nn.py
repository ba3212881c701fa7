"""The torch modules: open_clip's call of the losses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import contrastile
from contrastile.comm.communicator import ExchangeError
from contrastile.oracle import named

B, D, S, BETA = 11, 6, 10.0, -10.0
rng = np.random.default_rng(41)
IMAGE, TEXT = (x / np.linalg.norm(x, axis=1, keepdims=True) for x in rng.standard_normal((2, B, D)))


def leaves(*values: Any) -> list[torch.Tensor]:
    return [torch.tensor(x, dtype=torch.float64, requires_grad=True) for x in values]


MODULES = pytest.mark.parametrize("module", [contrastile.nn.ClipLoss, contrastile.nn.SigLipLoss])
ARGUMENTS = {contrastile.nn.ClipLoss: (IMAGE, TEXT, S), contrastile.nn.SigLipLoss: (IMAGE, TEXT, S, BETA)}


@MODULES
def test_a_world_of_several_is_torch_s_default_group(module: Any) -> None:
    with pytest.raises(ExchangeError, match=r"call torch\.distributed\.init_process_group"):
        module(rank=1, world_size=4)(*leaves(IMAGE, TEXT, S, BETA))


def test_coca_has_the_loss_of_the_captions_too() -> None:
    logits, labels = torch.tensor(rng.standard_normal((B, 4, 9))), torch.tensor(rng.integers(0, 9, (B, 4)))
    image, text, scale = leaves(IMAGE, TEXT, S)
    made = contrastile.nn.CoCaLoss(2.0, 0.5)
    contrastive, caption = made(image, text, logits, labels, scale)
    assert torch.equal(contrastive, 0.5 * contrastile.nn.ClipLoss()(image, text, scale))
    assert torch.equal(caption, 2.0 * torch.nn.functional.cross_entropy(logits.mT, labels, ignore_index=0))
    named = made(image, text, logits, labels, scale, output_dict=True)
    assert named == {"contrastive_loss": contrastive, "caption_loss": caption}
    assert contrastile.nn.CoCaLoss(2.0, 0)(None, None, logits, labels, scale) == (0.0, caption)


def test_distillation_is_of_the_whole_batch_also_in_blocks() -> None:
    """Of a teacher who is not certain; over ranks it is in verify, by each exchange."""
    teacher = rng.standard_normal((2, B, 4)) / 2
    exact = named.distillation(IMAGE, TEXT, S, (teacher[0], teacher[1]), 3.0)
    for module in (contrastile.nn.DistillClipLoss(), contrastile.nn.DistillClipLoss(block=4)):
        alone = leaves(IMAGE, TEXT, S)
        distill = module(*alone, *torch.tensor(teacher), 3.0, output_dict=True)["distill_loss"]
        for here, right in zip([distill.item(), *torch.autograd.grad(distill, alone)], exact, strict=False):
            assert abs(np.asarray(here) - right).max() <= 1e-14


@pytest.mark.usefixtures("primitives")
@MODULES
def test_a_module_is_one_graph(module: Any) -> None:
    # an operator keeps nothing
    made, inputs = module(keep=0), leaves(*ARGUMENTS[module])
    compiled = torch.compile(made, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(*inputs), made(*inputs))
