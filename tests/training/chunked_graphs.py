"""The same step with the graphs of all chunks kept, and how far its parameters' gradients may be from cached ones.

Where features have the same bits, so have the loss, its gradients by the features, and what each chunk sends to a
parameter. What differs is the order in which J such contributions g_j are added: each sum is within
gamma(J) sum_j |g_j| of the exact one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from contrastile.verify.arithmetic import gamma


@dataclass(frozen=True)
class Step:
    """A loss, the gradients of parameters, and their bounds."""

    loss: Tensor
    gradients: list[Tensor]
    bounds: list[Tensor]


def graphs_kept(
    encoders: Sequence[Callable[..., Tensor]],
    chunks: Sequence[Sequence[Any]],
    loss: Callable[..., Tensor],
    numbers: Sequence[Callable[[], Any]],
    parameters: Sequence[Tensor],
) -> Step:
    """Forward of every chunk with its graph, one loss, one backward."""
    torch.manual_seed(0)
    parts = [[encode(chunk) for chunk in each] for encode, each in zip(encoders, chunks, strict=True)]
    joined = [torch.cat(part) for part in parts]
    value = loss(*joined, *(number() for number in numbers))
    learnt = [(part, x) for part, x in zip(parts, joined, strict=True) if x.requires_grad]
    features = torch.autograd.grad(value, [x for _, x in learnt], retain_graph=True)
    sums = [torch.zeros_like(p) for p in parameters]
    units = 0
    for (part, _), whole in zip(learnt, features, strict=True):
        for x, gradient in zip(part, whole.split([len(x) for x in part]), strict=True):
            units += 1
            if not x.requires_grad:
                continue
            sent = torch.autograd.grad(x, parameters, gradient, retain_graph=True, allow_unused=True)
            for total, each in zip(sums, sent, strict=True):
                if each is not None:
                    total += each.abs()
    found = torch.autograd.grad(value, parameters, allow_unused=True)
    gradients = [torch.zeros_like(p) if x is None else x for x, p in zip(found, parameters, strict=True)]
    bounds = [2 * gamma(units * torch.finfo(x.dtype).eps / 2) * x for x in sums]
    return Step(value.detach(), gradients, bounds)


def taken(parameters: Sequence[Tensor]) -> list[Tensor]:
    """The gradients, which are cleared."""
    found = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
    for p in parameters:
        p.grad = None
    return found


def worst(found: Sequence[Tensor], expected: Step) -> float:
    """The largest error in bounds; infinite where the bound is 0."""
    ratios = [0.0]
    for x, y, bound in zip(found, expected.gradients, expected.bounds, strict=True):
        error = (x - y).abs()
        ratios.append(float(torch.where(error == 0, 0.0, error / bound).max()))
    return max(ratios)
