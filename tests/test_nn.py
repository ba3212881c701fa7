"""A torch module where ``contrastile verify`` does not take it: a teacher who is not certain."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

import contrastile
from contrastile.oracle import named

B, D, S = 11, 6, 10.0
rng = np.random.default_rng(41)
IMAGE, TEXT = (x / np.linalg.norm(x, axis=1, keepdims=True) for x in rng.standard_normal((2, B, D)))


def leaves(*values: Any) -> list[torch.Tensor]:
    return [torch.tensor(x, dtype=torch.float64, requires_grad=True) for x in values]


def test_distillation_is_of_the_whole_batch_also_in_blocks() -> None:
    """Of a teacher who is not certain; over ranks it is in verify, by each exchange."""
    teacher = rng.standard_normal((2, B, 4)) / 2
    exact = named.distillation(IMAGE, TEXT, S, (teacher[0], teacher[1]), 3.0)
    for module in (contrastile.nn.DistillClipLoss(), contrastile.nn.DistillClipLoss(block=4)):
        alone = leaves(IMAGE, TEXT, S)
        distill = module(*alone, *torch.tensor(teacher), 3.0, output_dict=True)["distill_loss"]
        for here, right in zip([distill.item(), *torch.autograd.grad(distill, alone)], exact, strict=False):
            assert abs(np.asarray(here) - right).max() <= 1e-14
