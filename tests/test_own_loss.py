"""The losses of docs/how-to/own-loss.md against their papers' formulas on whole matrices in float64."""

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
    """Each row's positive logit and its 2b - 2 negative logits, from the 2b x 2b logits of all views."""
    positive = x[torch.arange(2 * B), torch.arange(2 * B).roll(B)]
    others = ~(torch.eye(2 * B).bool() | torch.eye(2 * B).bool().roll(B, 0))
    return positive, x[others].view(2 * B, -1)


def cosface(x: Tensor, s: Tensor) -> Tensor:
    """Eq. 4 with m = 0.2, over rows and over columns."""
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
    """The function whose gradient Alg. 1 estimates, with tau = 1 / s, gamma = 0.9 and initial averages of 3."""
    positive, negatives = views(x)
    g = negatives.exp().mean(1)
    moving_average = (0.1 * 3.0 + 0.9 * (g[:B] + g[B:]) / 2).detach()
    return (-positive[:B] + (g[:B] + g[B:]) / (2 * moving_average)).mean() / s


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
def test_a_loss_of_the_page_equals_its_paper_s_formula(page: dict[str, Any], name: str) -> None:
    generator = torch.Generator().manual_seed(3)
    first, noise = (torch.randn(B, WIDTH, generator=generator, dtype=torch.float64) for _ in range(2))
    a, b = normalize(first, dim=1), normalize(first + 1.5 * noise, dim=1)
    s = torch.tensor(SCALE, dtype=torch.float64)
    leaves, page_leaves = ([logits.clone().requires_grad_() for logits in (a, b, s)] for _ in range(2))
    rows, columns = (leaves[0], leaves[1]) if name in PAIRS else (torch.cat(leaves[:2]),) * 2
    logits = leaves[2] * rows @ columns.T
    exact = FORMULAS[name](logits, leaves[2])
    averages: list[Any] = [torch.full((B,), 3.0, dtype=torch.float64)] if name == "sogclr" else []
    loss = page[name](*page_leaves, *averages)
    # products of WIDTH terms, sums of up to 2 B exponentials and their logarithms, at up to twice the scale
    error = UNIT * (WIDTH + 2 * B + 64) * (1 + 2 * SCALE)
    (logit_gradient,) = torch.autograd.grad(exact, logits, retain_graph=True)
    size = (logit_gradient.abs().sum() + exact.abs()).item()
    assert abs(loss - exact).item() <= 8 * error * size
    # G is a difference of terms; the terms of a row sum to at most the weight of its positive
    gradient_bound = 2 * logit_gradient.abs().sum()
    for x, y in zip(torch.autograd.grad(loss, page_leaves), torch.autograd.grad(exact, leaves), strict=True):
        assert (x - y).abs().max() <= 8 * error * (1 + SCALE) * gradient_bound


def test_composed_losses_equal_their_papers_formulas(page: dict[str, Any]) -> None:
    generator = torch.Generator().manual_seed(4)
    x, y = (normalize(torch.randn(B, 8, generator=generator, dtype=torch.float64) + 0.5, dim=1) for _ in range(2))
    cosines = (x @ x.T)[~torch.eye(B).bool()]
    expected = cosines.mean() ** 2 + (cosines.square().mean() - 1 / 8).clamp(min=0)
    # b^2 products of 8 terms, none above 1
    assert cosines.square().mean() > 1 / 8
    assert abs(page["spread_out"](x) - expected) <= UNIT * (B * B + 8) * 8
    halves = [normalize(z[:, :4], dim=1) for z in (x, y)]
    logits = [SCALE * a @ b.T for a, b in (halves, (x, y))]
    losses = [cosface(z + 0.2 * SCALE * torch.eye(B), torch.tensor(SCALE)) for z in logits]
    assert abs(page["matryoshka"](x, y, SCALE) - sum(losses) / 2) <= UNIT * (B * B + 8) * 8 * SCALE
