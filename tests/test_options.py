"""Options of the losses where ``contrastile verify`` does not look: calls one after another, compilers, keys."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import contrastile
from contrastile.autograd.prepared import CALLS

B, WIDTH = 23, 12
draw = torch.Generator().manual_seed(0)
IMAGE, TEXT = torch.randn(2, B, WIDTH, generator=draw, dtype=torch.float64) / 2
WEIGHTS = torch.rand(B, generator=draw, dtype=torch.float64)
GUIDE = tuple(torch.randint(-1, 2, (B, 9), generator=draw).float() for _ in range(2))
SCALE = torch.tensor(2.5, dtype=torch.float64)


CHOICES: list[dict[str, Any]] = [
    *({"margin": x} for x in (0.1, 0.3)),
    {},
    *({"threshold": x} for x in (-0.2, -0.4)),
    {"threshold": -0.4, "threshold_is": "relative"},
    *({"label_smoothing": x} for x in (0.1, 0.4)),
]


# of another dtype than the features
GUIDES: list[dict[str, Any]] = [{"guide": GUIDE}, {"guide": GUIDE[::-1], "threshold": 1.0}]


@pytest.mark.parametrize("choices", [CHOICES, GUIDES])
@pytest.mark.parametrize("compiled", [False, True])
def test_calls_one_after_another_have_the_bits_of_a_first_call(compiled: bool, choices: list[dict[str, Any]]) -> None:
    torch.compiler.reset()
    loss: Any = contrastile.clip_loss

    def made(call: Any, options: dict[str, Any]) -> tuple[Tensor, list[Tensor]]:
        given = [x.clone().requires_grad_() for x in (IMAGE, TEXT, SCALE)]
        return call(*given, **options, weights=WEIGHTS), given

    expected = []
    for options in choices:
        CALLS.prepared.clear()
        value, given = made(loss, options)
        expected.append([value, *torch.autograd.grad(value, given)])
    call = torch.compile(loss, backend="eager", fullgraph=True) if compiled else loss
    pending = [made(call, options) for options in choices * 2]
    # every backward pass after all forward passes: none may have the numbers of the last
    for (value, given), right in zip(pending, expected * 2, strict=True):
        assert all(map(torch.equal, [value, *torch.autograd.grad(value, given)], right))
