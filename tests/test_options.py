"""Options of the losses where ``contrastile verify`` has no check: successive calls, and compiled calls."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import contrastile
from contrastile.autograd.prepared import CALLS

B, WIDTH = 23, 12
generator = torch.Generator().manual_seed(0)
IMAGE, TEXT = torch.randn(2, B, WIDTH, generator=generator, dtype=torch.float64) / 2
WEIGHTS = torch.rand(B, generator=generator, dtype=torch.float64)
GUIDE = tuple(torch.randint(-1, 2, (B, 9), generator=generator).float() for _ in range(2))
SCALE = torch.tensor(2.5, dtype=torch.float64)


CHOICES: list[dict[str, Any]] = [
    *({"margin": x} for x in (0.1, 0.3)),
    {},
    *({"threshold": x} for x in (-0.2, -0.4)),
    {"threshold": -0.4, "threshold_is": "relative"},
    *({"label_smoothing": x} for x in (0.1, 0.4)),
]


# a guide whose dtype is not that of the features
GUIDES: list[dict[str, Any]] = [{"guide": GUIDE}, {"guide": GUIDE[::-1], "threshold": 1.0}]


@pytest.mark.parametrize("choices", [CHOICES, GUIDES])
@pytest.mark.parametrize("compiled", [False, True])
def test_successive_calls_have_the_bits_of_first_calls(compiled: bool, choices: list[dict[str, Any]]) -> None:
    torch.compiler.reset()
    loss: Any = contrastile.clip_loss

    def call_with(call: Any, options: dict[str, Any]) -> tuple[Tensor, list[Tensor]]:
        leaves = [x.clone().requires_grad_() for x in (IMAGE, TEXT, SCALE)]
        return call(*leaves, **options, weights=WEIGHTS), leaves

    expected_results = []
    for options in choices:
        CALLS.prepared.clear()
        value, leaves = call_with(loss, options)
        expected_results.append([value, *torch.autograd.grad(value, leaves)])
    call = torch.compile(loss, backend="eager", fullgraph=True) if compiled else loss
    pending = [call_with(call, options) for options in choices * 2]
    # all forward passes run before any backward pass: no call may use the options of the last call
    for (value, leaves), expected_tensors in zip(pending, expected_results * 2, strict=True):
        assert all(map(torch.equal, [value, *torch.autograd.grad(value, leaves)], expected_tensors))
