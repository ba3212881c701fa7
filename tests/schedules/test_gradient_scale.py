"""The scale of the gradient: what a trainer makes of the ranks' gradients is the gradient of the one global loss.

Two linear towers, written out: features X W, parameter gradient X^T dF. A trainer takes the mean over the ranks (DDP)
or the sum. Shards are uneven and one rank holds nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import contrastile
from contrastile import problems
from contrastile.comm.inprocess import InProcess, InProcessGroup
from contrastile.verify.arithmetic import Spread, gamma
from contrastile.verify.bounds import ORACLE, bounds
from contrastile.verify.rounding import UNIT
from contrastile.verify.truth import truth

B, INPUTS, D, SCALE, BIAS = 23, 6, 9, 12.5, -2.5
SHARDS = {1: [23], 2: [20, 3], 3: [9, 0, 14], 4: [1, 12, 7, 3], 8: [3, 0, 5, 1, 2, 6, 0, 6]}
rng = np.random.default_rng(17)
# few bits: the features are exact, however many rows they are computed for at a time
X_IMAGE, X_TEXT = rng.integers(-16, 17, (2, B, INPUTS)) / 16
W_IMAGE, W_TEXT = rng.integers(-64, 65, (2, INPUTS, D)) / 128

LOSSES = {
    "clip": (contrastile.clip_loss, problems.clip, (SCALE,)),
    "sigmoid": (contrastile.sigmoid_loss, problems.sigmoid, (SCALE, BIAS)),
}


@dataclass(frozen=True)
class Trained:
    """Parameter gradients: of both towers, scale and bias."""

    image: Any
    text: Any
    numbers: list[Any]


def whole(name: str, upstream: float) -> tuple[Trained, Trained]:
    """Gradients of the global loss by the oracle, and how far the ranks' may be off."""
    _, build, numbers = LOSSES[name]
    problem = build(X_IMAGE @ W_IMAGE, X_TEXT @ W_TEXT, *numbers).problem
    exact = truth(problem, upstream)
    # any world's sums: one row and one column at a time
    spread = Spread((1,) * B, (1,) * B, halved=True)
    allowed = bounds(problem, exact, ORACLE, "float64", upstream, spread=spread)
    # the parameter gradient is a sum over B samples, taken in any order
    sums = gamma(UNIT["float64"] * (2 * B + len(SHARDS[8])))
    pairs = (X_IMAGE, exact.outcome.rows, allowed.rows), (X_TEXT, exact.outcome.columns[0], allowed.columns[0])
    found = [x.T @ gradient for x, gradient, _ in pairs]
    slack = [np.abs(x).T @ (limit + sums * (np.abs(gradient) + limit)) for x, gradient, limit in pairs]
    outcomes = [[x.scale] + ([] if x.bias is None else [x.bias]) for x in (exact.outcome, allowed)]
    return Trained(*found, outcomes[0]), Trained(*slack, outcomes[1])


def trained(name: str, n: int, exchange: str, reduction: str, backend: str) -> list[Trained]:
    """Each rank's own parameter gradients."""
    loss, _, numbers = LOSSES[name]
    sizes = SHARDS[n]
    ends = np.cumsum(sizes)

    def program(comm: InProcess) -> Trained:
        here = slice(ends[comm.rank] - sizes[comm.rank], ends[comm.rank])
        image, text = X_IMAGE[here], X_TEXT[here]
        both = contrastile.value_and_grad(
            loss, backend=backend, group=comm, exchange=exchange, parameter_reduction=reduction
        )
        _, (d_image, d_text, *d_numbers) = both(image @ W_IMAGE, text @ W_TEXT, *numbers)
        return Trained(image.T @ d_image, text.T @ d_text, d_numbers)

    return InProcessGroup[Trained](n).run(program)


def reduced(parts: list[Trained], reduction: str) -> Trained:
    """What the trainer makes of them."""
    over = len(parts) if reduction == "mean" else 1

    def join(xs: list[Any]) -> Any:
        return np.sum(xs, axis=0) / over

    columns = zip(*(part.numbers for part in parts), strict=True)
    return Trained(
        join([part.image for part in parts]), join([part.text for part in parts]), [join(list(x)) for x in columns]
    )


def within(got: Trained, exact: Trained, slack: Trained) -> None:
    pairs = [(got.image, exact.image, slack.image), (got.text, exact.text, slack.text)]
    pairs += list(zip(got.numbers, exact.numbers, slack.numbers, strict=True))
    for a, b, limit in pairs:
        assert np.all(np.abs(a - b) <= limit)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("exchange", ["ring", "gather"])
@pytest.mark.parametrize("n", list(SHARDS))
@pytest.mark.parametrize("name", list(LOSSES))
def test_the_reduced_gradient_is_that_of_the_global_loss(name: str, n: int, exchange: str, reduction: str) -> None:
    parts = trained(name, n, exchange, reduction, "numpy")
    within(reduced(parts, reduction), *whole(name, 1.0))


@pytest.mark.parametrize("n", [3, 8])
@pytest.mark.parametrize("name", list(LOSSES))
def test_taking_the_other_reduction_is_far_outside(name: str, n: int) -> None:
    parts = trained(name, n, "ring", "mean", "numpy")
    exact, slack = whole(name, 1.0)
    with pytest.raises(AssertionError):
        within(reduced(parts, "sum"), exact, slack)
    # and what a package gets that forgets the factor n, 1 / n of the encoders' gradients
    forgotten = reduced(parts, "mean")
    with pytest.raises(AssertionError):
        within(Trained(forgotten.image / n, forgotten.text / n, forgotten.numbers), exact, slack)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("name", list(LOSSES))
def test_a_loss_scaled_up_by_autograd_scales_everything(name: str, reduction: str) -> None:
    import torch

    loss, _, numbers = LOSSES[name]
    sizes = SHARDS[4]
    ends = np.cumsum(sizes)
    factor = 2.0**10

    def program(comm: InProcess) -> Trained:
        here = slice(ends[comm.rank] - sizes[comm.rank], ends[comm.rank])
        towers = [torch.tensor(w, requires_grad=True) for w in (W_IMAGE, W_TEXT)]
        leaves = [torch.tensor(x, dtype=torch.float64, requires_grad=True) for x in numbers]
        features = [torch.tensor(x[here]) @ w for x, w in zip((X_IMAGE, X_TEXT), towers, strict=True)]
        # what a GradScaler does
        (factor * loss(*features, *leaves, group=comm, parameter_reduction=reduction)).backward()
        return Trained(*(x.grad.numpy() for x in towers), [x.grad.numpy() for x in leaves])

    got = reduced(InProcessGroup[Trained](4).run(program), reduction)
    within(got, *whole(name, factor))
