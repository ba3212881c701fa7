"""A step that keeps the graphs of all chunks. Its numbers are integers, so that sums in any order are exact."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn


def towers(rows: int, dim: int, device: str = "cpu") -> tuple[list[nn.Module], list[Tensor]]:
    """Two towers with weights -1, 0 and 1 and a dropout of 0.5, and inputs on the host.

    With 8 outputs and 1,001 rows the gradients stay below 2^53.
    """
    nets, inputs = list[nn.Module](), list[Tensor]()
    torch.manual_seed(0)
    for i in range(2):
        net = nn.Sequential(nn.Linear(4 + i, 9), nn.ReLU(), nn.Dropout(0.5), nn.Linear(9, dim)).double()
        for parameter in net.parameters():
            parameter.data = torch.randint(-1, 2, parameter.shape, dtype=parameter.dtype)
        nets.append(net.to(device))
        inputs.append(torch.randint(-1, 2, (rows, 4 + i), dtype=torch.float64))
    return nets, inputs


def product(a: Tensor, b: Tensor, scale: Any) -> Tensor:
    """A loss that depends on every pair of samples."""
    return scale * (a @ b.T).square().sum()


def graphs_kept(
    encoders: Sequence[Callable[..., Tensor]], chunks: Sequence[Sequence[Any]], scale: Any, parameters: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    """The loss and its gradients, from one backward pass through the graphs of all chunks."""
    torch.manual_seed(0)
    features = [torch.cat([encode(chunk) for chunk in parts]) for encode, parts in zip(encoders, chunks, strict=True)]
    value = product(*features, scale)
    return value.detach(), *torch.autograd.grad(value, parameters)
