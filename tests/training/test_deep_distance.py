"""A deep distance in tiles has the gradients of the whole matrix (GradCache v1 Eq. 10-13) and never holds it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from chunked_graphs import graphs_kept, taken, worst
from paper_bounds import Ball, agrees, one_hot
from paper_towers import BILINEAR, LINEAR
from torch import Tensor, nn

from contrastile import training
from contrastile.oracle.papers import gradcache_distance
from contrastile.oracle.papers.gradcache import Tower

M, N, D = 7, 11, 5
DOUBLE = torch.float64
TAU = 0.5


class Bilinear(nn.Module):
    """The oracle's: tanh(F Omega G')."""

    def __init__(self, omega: Any, dropout: float = 0.0) -> None:
        super().__init__()
        self.omega = nn.Parameter(torch.tensor(omega))
        self.dropout = nn.Dropout(dropout)
        self.largest = 0

    def forward(self, f: Tensor, g: Tensor) -> Tensor:
        d = self.dropout(torch.tanh(f @ self.omega @ g.T))
        self.largest = max(self.largest, d.numel())
        return d


def arrays() -> tuple[Any, Any, Any]:
    rng = np.random.default_rng(2)
    return rng.standard_normal((M, D)), rng.standard_normal((N, D)), rng.standard_normal((D, D))


def balls(f: Any, g: Any, omega: Any) -> dict[str, Any]:
    """Every result with its rounding; log-sum-exps merged column by column, which no tiling does more often."""
    F, G, Omega, scale = Ball(f), Ball(g), Ball(omega), Ball(1.0) / TAU
    d = np.tanh(F @ Omega @ G.T)
    x = scale * d
    lse = x[:, :1]
    for j in range(1, N):
        m = np.maximum(lse.mid, x.mid[:, j : j + 1])
        lse = np.log(np.exp(lse - m) + np.exp(x[:, j : j + 1] - m)) + m
    own = one_hot(np.arange(M), N)
    loss = (lse - (x * own).sum(axis=1, keepdims=True)).sum() / M
    w = (np.exp(x - lse) - own) / M
    h = scale * w * (1.0 - d * d)
    return {
        "loss": loss,
        "omega": F.T @ h @ G,
        "anchors": h @ (G @ Omega.T),
        "targets": h.T @ (F @ Omega),
        "scale": (w * d).sum(),
    }


@pytest.mark.parametrize("tile", [2, 3, 20])
def test_loss_and_gradients_are_the_oracle_s(tile: int) -> None:
    f, g, omega = arrays()
    phi = Bilinear(omega)
    a, b = (torch.tensor(x, requires_grad=True) for x in (f, g))
    scale = torch.tensor(1 / TAU, dtype=DOUBLE, requires_grad=True)
    value = training.deep_distance(phi, tile)(a, b, scale)
    value.backward()
    if tile < N:
        assert phi.largest <= tile * tile
    ours = {"loss": value, "omega": phi.omega.grad, "anchors": a.grad, "targets": b.grad, "scale": scale.grad}
    towers = [Tower(LINEAR, np.eye(D), x, (len(x),), (0,)) for x in (f, g)]
    loss, _, _, d_omega = gradcache_distance.deep_distance_step(*towers, BILINEAR, omega, np.arange(M), TAU)
    d = gradcache_distance.distances(BILINEAR, omega, f, g, [slice(0, M)], [slice(0, N)])
    w = gradcache_distance.distance_gradient_cache(d, np.arange(M), TAU)
    whole = BILINEAR, omega, f, g, w, [slice(0, M)], [slice(0, N)]
    oracle = {
        "loss": loss,
        "omega": d_omega,
        "anchors": gradcache_distance.anchor_gradient_of_distances(*whole),
        "targets": gradcache_distance.target_gradient_of_distances(*whole),
        "scale": (w * d).sum() * TAU,
    }
    for name, ball in balls(f, g, omega).items():
        assert agrees(oracle[name], ball), name
        assert agrees(ours[name].detach().numpy(), ball), name


def test_dropout_of_a_distance_is_replayed() -> None:
    f, g, omega = (torch.tensor(x) for x in arrays())
    phi = Bilinear(omega.numpy(), dropout=0.5)
    seen: list[Tensor] = []
    phi.dropout.register_forward_hook(lambda _, __, out: seen.append(out == 0))
    loss = training.deep_distance(phi, 3)
    torch.manual_seed(0)
    value = loss(f, g, 2.0)
    torch.rand(5)  # whatever the program draws in between goes on
    drawn = torch.get_rng_state()
    value.backward()
    tiles = 3 * 4
    assert len(seen) == 2 * tiles
    assert all(torch.equal(x, y) for x, y in zip(seen[:tiles], seen[tiles:], strict=True))
    assert len({str(x) for x in seen[:tiles]}) > 4
    assert torch.equal(torch.get_rng_state(), drawn)


def test_it_is_a_loss_of_the_gradient_cache() -> None:
    """One chunk has the bits of no cache; phi's parameters learn with the encoders, and are scaled with them."""
    f, g, omega = (torch.tensor(x) for x in arrays())
    nets = [nn.Linear(D, D, dtype=DOUBLE) for _ in range(2)]
    phi = Bilinear(omega.numpy())
    loss = training.deep_distance(phi, 4)
    parameters = [*nets[0].parameters(), *nets[1].parameters(), phi.omega]
    loss(nets[0](f), nets[1](g), 3.0).backward()
    expected = taken(parameters)
    (2.0 * training.Cached(loss, nets, 50)(f, g, scale=3.0)).backward()
    assert all(torch.equal(x, 2.0 * y) for x, y in zip(taken(parameters), expected, strict=True))
    kept = graphs_kept(nets, [f.split(4), g.split(4)], loss, [lambda: 3.0], parameters)
    training.cached_step(nets, (f, g), loss, scale=3.0, chunk=4)
    found = taken(parameters)
    assert torch.equal(found[-1], kept.gradients[-1])
    assert worst(found[:-1], type(kept)(kept.loss, kept.gradients[:-1], kept.bounds[:-1])) <= 1


def test_parameters_that_are_unfrozen_or_replaced_after_the_loss_was_made_learn() -> None:
    f, g, omega = arrays()
    phi = Bilinear(omega).requires_grad_(False)
    loss = training.deep_distance(phi, 3)
    x = torch.tensor(f, requires_grad=True)
    loss(x, torch.tensor(g)).backward()
    phi.requires_grad_(True)
    loss(x, torch.tensor(g)).backward()
    (first,) = taken([phi.omega])
    phi.omega = nn.Parameter(phi.omega.detach().clone())
    loss(x, torch.tensor(g)).backward()
    assert torch.equal(taken([phi.omega])[0], first)


def test_narrow_embeddings_and_autocast() -> None:
    f, g, omega = (torch.tensor(x).float() for x in arrays())
    phi = Bilinear(omega.numpy())
    phi.omega.data = phi.omega.data.float()
    seen: list[Tensor] = []
    phi.dropout.register_forward_hook(lambda _, __, out: seen.append(out))
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


class Rows(nn.Module):
    def forward(self, f: Tensor, g: Tensor) -> Tensor:
        return f.sum(dim=1)


@pytest.mark.parametrize(
    ("call", "error", "told"),
    [
        (lambda phi, f, g: training.deep_distance(lambda a, b: a @ b.T), TypeError, "phi must be a torch.nn.Module"),
        (lambda phi, f, g: training.deep_distance(phi, 0), ValueError, "tile must be a positive integer, got 0"),
        (lambda phi, f, g: training.deep_distance(phi)(g, f), ValueError, "give each anchor its target"),
        (
            lambda phi, f, g: training.deep_distance(nn.Bilinear(D, D, 1).double())(f, g[: len(f)]),
            ValueError,
            "one similarity for",
        ),
    ],
)
def test_what_is_refused(call: Any, error: type[Exception], told: str) -> None:
    f, g, omega = arrays()
    with pytest.raises(error, match=told):
        call(Bilinear(omega), torch.tensor(f), torch.tensor(g))
