"""The torch modules where ``contrastile verify`` does not take them: a teacher who is not certain, and one graph."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import contrastile
from contrastile.oracle import named

B, D, S, BETA = 11, 6, 10.0, -10.0
rng = np.random.default_rng(41)
IMAGE, TEXT = (x / np.linalg.norm(x, axis=1, keepdims=True) for x in rng.standard_normal((2, B, D)))


def leaves(*values: Any) -> list[torch.Tensor]:
    return [torch.tensor(x, dtype=torch.float64, requires_grad=True) for x in values]


MODULES = pytest.mark.parametrize("module", [contrastile.nn.ClipLoss, contrastile.nn.SigLipLoss])
ARGUMENTS = {contrastile.nn.ClipLoss: (IMAGE, TEXT, S), contrastile.nn.SigLipLoss: (IMAGE, TEXT, S, BETA)}


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
