"""Two towers for trainers, and the gradients of the one global loss that their parameters must have.

The inputs and weights have few bits, so that every rank's features are exact and one process has the same ones. What
is left is the loss's own error, whose bound follows the chain rule into the parameters.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import contrastile
from contrastile import problems
from contrastile.backends import load
from contrastile.verify.arithmetic import Spread, gamma
from contrastile.verify.bounds import bounds
from contrastile.verify.rounding import UNIT
from contrastile.verify.truth import truth

SHARDS = {2: (9, 14), 3: (9, 0, 14), 4: (5, 0, 17, 1)}
BATCH, INPUTS, HIDDEN, WIDTH = 23, 5, 7, 9
SCALE, BIAS = 10.0, -2.5
rng = np.random.default_rng(23)
IMAGES, TEXTS = (rng.integers(-8, 9, (BATCH, INPUTS)) / 16 for _ in range(2))
WEIGHTS = [rng.integers(-16, 17, shape) / 32 for _ in range(2) for shape in ((HIDDEN, INPUTS), (WIDTH, HIDDEN))]


class Towers(nn.Module):
    """Features of both sides, and the scale and bias of the logits, from parameters that training changes."""

    def __init__(self) -> None:
        super().__init__()
        image, image_out, text, text_out = (nn.Linear(*x.shape[::-1], bias=False, dtype=torch.float64) for x in WEIGHTS)
        self.image = nn.Sequential(image, nn.ReLU(), image_out)
        self.text = nn.Sequential(text, nn.ReLU(), text_out)
        # FSDP2 takes no parameters without an axis
        self.logit_scale = nn.Parameter(torch.zeros(1, dtype=torch.float64))
        self.logit_bias = nn.Parameter(torch.full((1,), BIAS, dtype=torch.float64))
        with torch.no_grad():
            for layer, weight in zip((image, image_out, text, text_out), WEIGHTS, strict=True):
                layer.weight.copy_(torch.tensor(weight))

    def forward(self, images: Tensor, texts: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.image(images), self.text(texts), SCALE * self.logit_scale.exp(), 1.0 * self.logit_bias


def clip(features: tuple[Tensor, ...], **settings: Any) -> Tensor:
    image, text, scale, bias = features
    # as open_clip's own training makes it
    loss = contrastile.nn.ClipLoss(
        local_loss=True,
        gather_with_grad=True,
        cache_labels=True,
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        **settings,
    )(image, text, scale, bias)
    assert isinstance(loss, Tensor)
    return loss


def siglip(features: tuple[Tensor, ...], **settings: Any) -> Tensor:
    place = {"rank": dist.get_rank(), "world_size": dist.get_world_size()}
    loss = contrastile.nn.SigLipLoss(**place, dist_impl="gather", **settings)(*features)
    assert isinstance(loss, Tensor)
    return loss


LOSSES: dict[str, tuple[Callable[..., Tensor], Callable[..., Any], tuple[float, ...]]] = {
    "clip": (clip, problems.clip, (SCALE,)),
    "siglip": (siglip, problems.sigmoid, (SCALE, BIAS)),
}


def relu(x: Any) -> Any:
    return np.maximum(x, 0.0)


def expected(name: str, upstream: float, shards: tuple[int, ...]) -> list[tuple[Any, Any]]:
    """Each parameter's gradient of the global loss, by the oracle and the chain rule, and its bound."""
    _, build, numbers = LOSSES[name]
    hidden = [relu(x @ w.T) for x, w in zip((IMAGES, TEXTS), WEIGHTS[::2], strict=True)]
    features = [h @ w.T for h, w in zip(hidden, WEIGHTS[1::2], strict=True)]
    problem = build(*features, *numbers).problem
    exact = truth(problem, upstream)
    # the blocks of a ring and of a gather; the bound of the ring's many is the larger
    facts = load("torch").accuracy("float64", "cpu")
    ways = [Spread(shards, shards, halved=True), Spread(shards, (BATCH,))]
    limits = [bounds(problem, exact, facts, "float64", upstream, spread=way) for way in ways]
    # sums over the batch in any order, products of the chain, what the trainer adds and divides
    sums = gamma(UNIT["float64"] * (2 * BATCH + WIDTH + 2 * len(shards) + 8))
    found: list[tuple[Any, Any]] = []
    gradients = exact.outcome.rows, exact.outcome.columns[0]
    errors = [np.maximum(*pair) for pair in (tuple(x.rows for x in limits), tuple(x.columns[0] for x in limits))]
    for x, h, w2, d, e in zip((IMAGES, TEXTS), hidden, WEIGHTS[1::2], gradients, errors, strict=True):
        inner, inner_error = (d @ w2) * (h > 0), (e @ np.abs(w2)) * (h > 0)
        size = (np.abs(d) + e) @ np.abs(w2)
        found += [
            (inner.T @ x, (inner_error + sums * size).T @ np.abs(x)),
            (d.T @ h, (e + sums * np.abs(d)).T @ np.abs(h)),
        ]
    scale = exact.outcome.scale * SCALE, max(x.scale for x in limits) * SCALE + sums * abs(exact.outcome.scale * SCALE)
    bias: tuple[Any, Any] = 0.0, 0.0
    if exact.outcome.bias is not None:
        bias = exact.outcome.bias, max(x.bias for x in limits) + sums * abs(exact.outcome.bias)
    return [*found, scale, bias]


def gradients(model: nn.Module) -> list[Any]:
    """In the order of ``expected``; whole where a trainer keeps them in shards."""
    named = dict(model.named_parameters())
    order = ["image.0", "image.2", "text.0", "text.2"]
    parameters = [named[f"{prefix(named)}{name}.weight"] for name in order]
    parameters += [named[f"{prefix(named)}{name}"] for name in ("logit_scale", "logit_bias")]
    found = []
    for parameter in parameters:
        gradient: Any = parameter.grad
        found.append((gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient).numpy())
    return found


def prefix(named: dict[str, Any]) -> str:
    return "module." if any(name.startswith("module.") for name in named) else ""


def worst(got: list[Any], exact: list[tuple[Any, Any]]) -> float:
    """The largest error in bounds; an error where the bound is 0 is infinite."""
    ratios = [0.0]
    for gradient, (value, bound) in zip(got, exact, strict=True):
        error = np.abs(gradient - value)
        with np.errstate(invalid="ignore", divide="ignore"):
            ratios.append(float(np.where(error == 0, 0.0, error / bound).max()))
    return max(ratios)


def fsdp() -> nn.Module:
    model = Towers()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for tower in (model.image, model.text):
        fully_shard(tower, mesh=mesh)
    return fully_shard(model, mesh=mesh)
