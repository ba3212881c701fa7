"""The torch operators: opcheck, compilation, and defaults of torch's that are not those of the features."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import contrastile
from contrastile import autograd, problems
from contrastile.backends.arrays import library_of
from contrastile.backends.contract import Options
from contrastile.plan import Plan

B, D = 23, 17
Loss = Callable[..., Tensor]


def features(rows: int = B, *, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    x = torch.randn(rows, D, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return torch.nn.functional.normalize(x, dim=1).to(dtype).requires_grad_()


def number(x: float, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.tensor(x, dtype=dtype, requires_grad=True)


def clip(image: Tensor, text: Tensor, scale: Tensor, backend: str) -> Tensor:
    return contrastile.clip_loss(
        image, text, scale, ids=torch.arange(len(image), device=image.device) // 2, backend=backend
    )


def info_nce(query: Tensor, key: Tensor, scale: Tensor, backend: str) -> Tensor:
    queue = key.flip(1)[:5]
    positives = torch.arange(len(query), device=query.device).flip(0)
    return contrastile.info_nce(query, key, scale, negatives=[queue, key[:3]], positives=positives, backend=backend)


def nt_xent(a: Tensor, b: Tensor, scale: Tensor, backend: str) -> Tensor:
    return contrastile.nt_xent(a, b, scale, backend=backend)


def sup_con(a: Tensor, b: Tensor, scale: Tensor, backend: str) -> Tensor:
    return contrastile.sup_con(torch.cat([a, b]), torch.arange(2 * len(a), device=a.device) % 5, scale, backend=backend)


def sigmoid(image: Tensor, text: Tensor, scale: Tensor, backend: str) -> Tensor:
    return contrastile.sigmoid_loss(image, text, scale, -3.0, backend=backend)


LOSSES = [clip, info_nce, nt_xent, sup_con, sigmoid]
BACKENDS = ["numpy", "torch"]


def gradients(loss: Tensor, *leaves: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(loss, leaves))


def stepped(loss: Loss, *given: Any) -> list[Tensor]:
    """The value, and the gradients of the towers and the scale."""
    value = loss(*given)
    return [value.detach(), *gradients(value, *given[:3])]


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # by torch 2.15 itself
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", ["clip", "info_nce", "sigmoid"])
def test_opcheck(kind: str, backend: str) -> None:
    image, text, scale = features(6), features(6, seed=1), number(4.0)
    built = {
        "clip": lambda: problems.clip(image, text, scale, ids=torch.arange(6) // 2),
        "info_nce": lambda: problems.info_nce(image, text, scale, negatives=[features(3, seed=2)]),
        "sigmoid": lambda: problems.sigmoid(image, text, scale, number(-1.0)),
    }[kind]()
    problem = built.problem
    plan = Plan(problem, backend, Options(), library_of(image))
    features_and_scale, vectors = (image, list(problem.columns), scale), list(problem.vectors)
    settings = *autograd.operators.settings_of(plan), autograd.operators.every(problem)
    arguments = *features_and_scale, problem.bias, vectors, *settings
    torch.library.opcheck(autograd.operators.loss, arguments)
    value, state = autograd.operators.loss(*arguments)
    arguments = torch.ones_like(value), state, *features_and_scale, vectors, *settings
    torch.library.opcheck(autograd.operators.gradients, tuple(detached(x) for x in arguments))


def detached(x: object) -> object:
    if isinstance(x, list):
        return [detached(each) for each in x]
    return x.detach() if isinstance(x, Tensor) else x


def test_a_scale_that_is_a_number_and_varies_compiles_without_a_graph_break() -> None:
    image, text = features(), features(seed=1)

    def loss(scale: float) -> Tensor:
        return contrastile.sigmoid_loss(image, text, scale, -1.5, backend="torch", keep=0)

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    # from the second value on, torch takes the number for a symbol
    for scale in (3.0, 4.0, 5.5, 0.1):
        assert torch.equal(compiled(scale), loss(scale))


def test_the_default_dtype_is_not_that_of_the_loss() -> None:
    leaves = features(dtype=torch.float32), features(seed=1, dtype=torch.float32), number(9.0, torch.float32)
    expected = stepped(clip, *leaves, "torch")
    torch.set_default_dtype(torch.float64)
    try:
        found = stepped(clip, *leaves, "torch")
    finally:
        torch.set_default_dtype(torch.float32)
    assert found[0].dtype == torch.float32
    assert all(map(torch.equal, found, expected))
