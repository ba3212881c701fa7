"""Towers, their inputs, and the three ways to call the gradient cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from contrastile import training

B, D = 17, 6
DOUBLE = torch.float64


def rows(*shape: int, seed: int = 0, dtype: torch.dtype = DOUBLE) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def tower(width: int, seed: int, dtype: torch.dtype = DOUBLE) -> nn.Sequential:
    torch.manual_seed(seed)
    layers = nn.Linear(width, 9), nn.Tanh(), nn.Dropout(0.5), nn.Linear(9, D)
    return nn.Sequential(*layers).to(dtype)


def log_scale() -> nn.Parameter:
    return nn.Parameter(torch.tensor(0.7, dtype=DOUBLE))


def setting(lengths: Sequence[int], dtype: torch.dtype = DOUBLE) -> tuple[list[nn.Module], list[Tensor]]:
    return (
        [tower(4 + i, i, dtype) for i in range(len(lengths))],
        [rows(n, 4 + i, seed=i, dtype=dtype) for i, n in enumerate(lengths)],
    )


def every_parameter(*modules: nn.Module) -> list[Tensor]:
    return [p for module in dict.fromkeys(modules) for p in module.parameters()]


def skins() -> dict[str, Callable[..., Tensor]]:
    def wrapped(encode: Any, inputs: Any, loss: Any, *, scale: Any, chunk: Any) -> Tensor:
        value = training.Cached(loss, encode, chunk)(*inputs, scale=scale)
        value.backward()
        return value.detach()

    def by_hand(encode: Any, inputs: Any, loss: Any, *, scale: Any, chunk: Any) -> Tensor:
        found, replay = training.embed(encode, inputs, chunk)
        value = loss(*(found if isinstance(found, tuple) else (found,)), scale())
        value.backward()
        replay()
        return value.detach()

    return {"cached_step": training.cached_step, "Cached": wrapped, "embed": by_hand}
