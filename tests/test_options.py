"""Options of the losses where ``contrastile verify`` does not look: calls one after another, compilers, keys."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import contrastile
from contrastile import compute, problems
from contrastile.backends.contract import Options, UnsupportedProblemError
from contrastile.backends.registry import load
from contrastile.oracle import named

B, N, WIDTH = 23, 31, 12
# two float64 computations of logits below 10: products, sums of up to B + N exponentials, and their differences
ERROR = 2.0**-53 * 16 * (WIDTH + B + N + 64)
draw = torch.Generator().manual_seed(0)
IMAGE, TEXT, KEYS = (torch.randn(n, WIDTH, generator=draw, dtype=torch.float64) / 2 for n in (B, B, N))
LABELS, OF_KEYS = (torch.randint(0, 9, (n,), generator=draw) for n in (B, N))
WEIGHTS = torch.rand(B, generator=draw, dtype=torch.float64)
SCALE = torch.tensor(2.5, dtype=torch.float64)


def leaves(*given: Tensor) -> list[Tensor]:
    return [x.clone().requires_grad_() for x in given]


def check(loss: Tensor, given: list[Tensor], exact: named.LossAndGradients) -> None:
    gradients = torch.autograd.grad(loss, given)
    expected = exact.loss, exact.d_rows, exact.d_columns, exact.d_scale
    for x, y in zip((loss.detach(), *gradients), expected, strict=True):
        np.testing.assert_allclose(x.numpy(), y, rtol=0, atol=ERROR * (1 + np.abs(y).max()))


CHOICES: list[tuple[dict[str, Any], named.Options]] = [
    ({"margin": 0.1}, named.Options(margin=0.1)),
    ({"margin": 0.3}, named.Options(margin=0.3)),
    ({}, named.Options()),
    ({"threshold": -0.2}, named.Options(threshold=-0.2)),
    ({"threshold": -0.4}, named.Options(threshold=-0.4)),
    ({"threshold": -0.4, "threshold_is": "relative"}, named.Options(threshold=-0.4, relative=True)),
    ({"label_smoothing": 0.1}, named.Options(smoothing=0.1)),
    ({"label_smoothing": 0.4}, named.Options(smoothing=0.4)),
]


@pytest.mark.parametrize("compiled", [False, True])
def test_calls_one_after_another_have_their_own_numbers(compiled: bool) -> None:
    call: Any = (
        torch.compile(contrastile.clip_loss, backend="eager", fullgraph=True) if compiled else contrastile.clip_loss
    )
    pending = []
    for keywords, options in CHOICES * 2:
        given = leaves(IMAGE, TEXT, SCALE)
        pending.append((call(*given, **keywords, weights=WEIGHTS), given, options))
    # every backward pass after all forward passes: none may have the numbers of the last
    for loss, given, options in pending:
        check(loss, given, named.clip(IMAGE.numpy(), TEXT.numpy(), 2.5, weights=WEIGHTS.numpy(), options=options))


def test_value_and_grad_of_sup_con_with_keys_has_the_gradients_of_its_own_arguments() -> None:
    how = {"keys": KEYS, "key_labels": OF_KEYS, "weights": WEIGHTS}
    value, gradients = contrastile.value_and_grad(contrastile.sup_con)(IMAGE, LABELS, SCALE, **how)
    assert torch.equal(value, contrastile.sup_con(IMAGE, LABELS, SCALE, **how))
    assert [x.shape for x in gradients] == [IMAGE.shape, ()]


def test_modules_show_their_options() -> None:
    made = contrastile.nn.ClipLoss(ids_are="positives", label_smoothing=0.2)
    assert repr(made) == "ClipLoss(backend='auto', tile=None, ids_are='positives', label_smoothing=0.2)"


def test_a_backend_that_knows_no_limits_is_given_none() -> None:
    problem = problems.clip(IMAGE, TEXT, 2.0, threshold=0.1).problem
    with pytest.raises(UnsupportedProblemError, match="limits and thresholds must be None"):
        compute.problem_loss(problem, replace(load("torch"), limits=False), Options())
