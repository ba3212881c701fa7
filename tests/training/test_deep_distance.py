"""A deep distance in tiles (GradCache v1 Eq. 10-13): it never holds the whole matrix, and learns in a cached step."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from chunked_graphs import taken
from torch import Tensor, nn

from contrastile import training

M, N, D = 7, 11, 5


class Bilinear(nn.Module):
    """The oracle's: tanh(F Omega G')."""

    def __init__(self, omega: Any) -> None:
        super().__init__()
        self.omega = nn.Parameter(torch.tensor(omega))
        self.distances = nn.Identity()
        self.largest = 0

    def forward(self, f: Tensor, g: Tensor) -> Tensor:
        d = self.distances(torch.tanh(f @ self.omega @ g.T))
        self.largest = max(self.largest, d.numel())
        return d


@pytest.mark.parametrize("tile", [2, 3])
def test_no_more_than_a_tile_of_distances_is_computed_at_once(tile: int) -> None:
    f, g, omega = arrays()
    phi = Bilinear(omega)
    training.deep_distance(phi, tile)(torch.tensor(f, requires_grad=True), torch.tensor(g), 2.0).backward()
    assert phi.largest == tile * tile


def arrays() -> tuple[Any, Any, Any]:
    rng = np.random.default_rng(2)
    return rng.standard_normal((M, D)), rng.standard_normal((N, D)), rng.standard_normal((D, D))


def test_narrow_embeddings_and_autocast() -> None:
    f, g, omega = (torch.tensor(x).float() for x in arrays())
    phi = Bilinear(omega.numpy())
    phi.omega.data = phi.omega.data.float()
    seen: list[Tensor] = []
    phi.distances.register_forward_hook(lambda _, __, out: seen.append(out))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        value = training.deep_distance(phi, 4)(f, g, 2.0)
    assert value.dtype is torch.float32
    value.backward()
    (found,) = taken([phi.omega])
    assert found.dtype is torch.float32
    assert found.abs().max() > 0
    # the backward pass, outside of autocast, sees the distances of the forward pass
    tiles = 2 * 3
    assert all(x.dtype is torch.bfloat16 for x in seen)
    assert all(torch.equal(x, y) for x, y in zip(seen[:tiles], seen[tiles:], strict=True))
