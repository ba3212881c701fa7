from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from contrastile.bench import agreement, peers, plain


@pytest.mark.parametrize("name", ["numpy", "torch", "plain"])
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
def test_every_implementation_agrees(name: str, dtype: str) -> None:
    found = agreement.check(peers.named(name), dtype, "cpu", 14.3, rows=131)
    assert found.agrees or (name, dtype) == ("numpy", "bfloat16"), found


@pytest.mark.parametrize("which", range(4))
@pytest.mark.parametrize(
    "change",
    [lambda x: 2 * x, lambda x: -x, lambda x: x * float("nan"), torch.zeros_like],
    ids=["doubled", "negated", "nan", "zero"],
)
def test_a_wrong_loss_or_gradient_does_not_agree(which: int, change: Callable[[Any], Any]) -> None:
    sound = peers.plain()

    def step(given: Any) -> Any:
        def both() -> Any:
            loss, gradients = sound.step(given)()
            values = [loss, *gradients]
            values[which] = change(values[which])
            return values[0], tuple(values[1:])

        return both

    found = agreement.check(replace(sound, step=step), "float32", "cpu", 10.0, rows=67)
    assert found.ratio is not None
    assert not found.agrees


def test_a_plain_loss_that_ignores_ids_does_not_agree() -> None:
    without_ids = replace(peers.plain(), step=peers.with_autograd(lambda i, t, s, ids: plain.clip(i, t, s)))
    found = agreement.check(without_ids, "float32", "cpu", 10.0, rows=67)
    assert not found.agrees
    assert "ids" in found.reason


def test_a_refusal_is_not_an_agreement() -> None:
    found = agreement.check(peers.ours("numpy"), "bfloat16", "cpu", 10.0)
    assert found.ratio is None
    assert "takes float16, float32, float64 only" in found.reason
    assert "runs on cpu only" in agreement.check(peers.ours("numpy"), "float32", "cuda", 10.0).reason


def test_an_infinite_bound_proves_nothing() -> None:
    vague = replace(
        peers.plain(), accuracy=lambda dtype, device: replace(peers.plain().accuracy(dtype, device), unit=0.5)
    )
    found = agreement.check(vague, "float32", "cpu", 10.0, rows=67)
    assert found.ratio is None
    assert "no finite bound" in found.reason
