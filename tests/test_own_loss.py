"""The losses of docs/how-to/own-loss.md, held to the formulas of their papers on whole matrices in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from pages import blocks, printed, read
from torch import Tensor
from torch.nn.functional import cross_entropy, normalize

PAGE = read("docs/how-to/own-loss.md")
B, WIDTH, SCALE = 13, 6, 5.5
UNIT = 2.0**-53
PAIRS = ("cosface", "smoothed")


@pytest.fixture(scope="module")
def page() -> dict[str, Any]:
    scope: dict[str, Any] = {}
    printed("\n".join(blocks(PAGE)), scope)
    return scope


def views(x: Tensor) -> tuple[Tensor, Tensor]:
    """Of the 2b x 2b logits of all views: each row's positive, and its 2b - 2 negatives."""
    positive = x[torch.arange(2 * B), torch.arange(2 * B).roll(B)]
    others = ~(torch.eye(2 * B).bool() | torch.eye(2 * B).bool().roll(B, 0))
    return positive, x[others].view(2 * B, -1)


def cosface(x: Tensor, s: Tensor) -> Tensor:
    """Eq. 4 with m = 0.2, both ways."""
    x = x - 0.2 * s * torch.eye(B, dtype=torch.float64)
    return (cross_entropy(x, torch.arange(B)) + cross_entropy(x.T, torch.arange(B))) / 2


def dcl(x: Tensor, s: Tensor) -> Tensor:
    """The positive is in no denominator."""
    positive, negatives = views(x)
    return (-positive + negatives.exp().sum(1).log()).mean()


def dclw(x: Tensor, s: Tensor) -> Tensor:
    """Weights w = 2 - exp(cosine / sigma) / mean exp(cosine / sigma), sigma = 0.5."""
    positive, negatives = views(x)
    pull = (positive / s / 0.5).detach().exp()
    return (-(2 - pull / pull.mean()) * positive + negatives.exp().sum(1).log()).mean()


def estimator(reweighted: Tensor, positive: Tensor, s: Tensor) -> Tensor:
    """``-log (e^+ / (e^+ + N g))``, g clipped at e^{-1/t}, with a prior of 0.1."""
    g = torch.maximum((reweighted - 0.1 * positive.exp()) / 0.9, torch.exp(-s))
    return -(positive.exp() / (positive.exp() + (2 * B - 2) * g)).log().mean()


def debiased(x: Tensor, s: Tensor) -> Tensor:
    """M = 1."""
    positive, negatives = views(x)
    return estimator(negatives.exp().mean(1), positive, s)


def hard(x: Tensor, s: Tensor) -> Tensor:
    """With beta = 1: the expectation under the tilted distribution, by importance sampling."""
    positive, negatives = views(x)
    importance = negatives.exp() / negatives.exp().mean(1, keepdim=True)
    return estimator((importance * negatives.exp()).mean(1), positive, s)


def sogclr(x: Tensor, s: Tensor) -> Tensor:
    """Alg. 1 with tau = 1 / s, gamma = 0.9, and averages that began at 3: what its estimator is the gradient of."""
    positive, negatives = views(x)
    g = negatives.exp().mean(1)
    moving = (0.1 * 3.0 + 0.9 * (g[:B] + g[B:]) / 2).detach()
    return (-positive[:B] + (g[:B] + g[B:]) / (2 * moving)).mean() / s


FORMULAS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "cosface": cosface,
    "smoothed": lambda x, s: cross_entropy(x, torch.arange(B), label_smoothing=0.1),
    "dcl": dcl,
    "dclw": dclw,
    "debiased": debiased,
    "hard": hard,
    "sogclr": sogclr,
}


@pytest.mark.parametrize("name", FORMULAS)
def test_a_loss_of_the_page_is_its_paper_s(page: dict[str, Any], name: str) -> None:
    draw = torch.Generator().manual_seed(3)
    first, noise = (torch.randn(B, WIDTH, generator=draw, dtype=torch.float64) for _ in range(2))
    a, b = normalize(first, dim=1), normalize(first + 1.5 * noise, dim=1)
    s = torch.tensor(SCALE, dtype=torch.float64)
    leaves, mine = ([x.clone().requires_grad_() for x in (a, b, s)] for _ in range(2))
    left, right = (leaves[0], leaves[1]) if name in PAIRS else (torch.cat(leaves[:2]),) * 2
    x = leaves[2] * left @ right.T
    exact = FORMULAS[name](x, leaves[2])
    more: list[Any] = [torch.full((B,), 3.0, dtype=torch.float64)] if name == "sogclr" else []
    found = page[name](*mine, *more)
    # products of WIDTH terms, sums of up to 2 B exponentials and their logarithms, at up to twice the scale
    error = UNIT * (WIDTH + 2 * B + 64) * (1 + 2 * SCALE)
    (slope,) = torch.autograd.grad(exact, x, retain_graph=True)
    size = (slope.abs().sum() + exact.abs()).item()
    assert abs(found - exact).item() <= 8 * error * size
    # G is a difference of terms, of which those of a row add up to no more than what its positive weighs
    terms = 2 * slope.abs().sum()
    for x, y in zip(torch.autograd.grad(found, mine), torch.autograd.grad(exact, leaves), strict=True):
        assert (x - y).abs().max() <= 8 * error * (1 + SCALE) * terms


def test_composed_losses_are_their_papers(page: dict[str, Any]) -> None:
    draw = torch.Generator().manual_seed(4)
    x, y = (normalize(torch.randn(B, 8, generator=draw, dtype=torch.float64) + 0.5, dim=1) for _ in range(2))
    cosines = (x @ x.T)[~torch.eye(B).bool()]
    exact = cosines.mean() ** 2 + (cosines.square().mean() - 1 / 8).clamp(min=0)
    # b^2 products of 8 terms, none above 1
    assert cosines.square().mean() > 1 / 8
    assert abs(page["spread_out"](x) - exact) <= UNIT * (B * B + 8) * 8
    halves = [normalize(z[:, :4], dim=1) for z in (x, y)]
    logits = [SCALE * a @ b.T for a, b in (halves, (x, y))]
    both = [cosface(z + 0.2 * SCALE * torch.eye(B), torch.tensor(SCALE)) for z in logits]
    assert abs(page["matryoshka"](x, y, SCALE) - sum(both) / 2) <= UNIT * (B * B + 8) * 8 * SCALE
