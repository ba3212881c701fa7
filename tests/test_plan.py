"""What a call is asked for reaches whoever computes it, by every way into a backend, and is checked once."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from test_autograd import features, number
from torch import Tensor

import contrastile
from contrastile import plan
from contrastile.backends import choice
from contrastile.backends.contract import PRECISIONS, Options
from contrastile.backends.registry import load
from contrastile.comm.inprocess import InProcess, InProcessGroup
from contrastile.plan import DEFAULTS, Settings
from contrastile.verify.wrapped import around

ASKED: dict[str, Any] = {"tile": (7, 5), "precision": "split", "workspace": 3, "keep": 2}
Loss = Callable[..., Tensor]


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[Options]]:
    """The options that each primitive of torch's backend is given, by its name."""
    found: dict[str, list[Options]] = {}

    def call(primitive: Callable[..., Any], *given: Any) -> Any:
        found.setdefault(primitive.__name__, []).append(given[-1])
        return primitive(*given)

    watched = around(load("torch"), call, "lse", "gradients", "sigmoid")
    backend = replace(watched, precisions=frozenset(PRECISIONS), auto_precision="split")
    for module in (plan, choice):
        monkeypatch.setattr(module, "load", lambda name: backend)
    return found


def eager(loss: Loss, *leaves: Tensor, **asked: Any) -> None:
    loss(*leaves, backend="torch", **asked).backward()


def under_a_transform(loss: Loss, *leaves: Tensor, **asked: Any) -> None:
    torch.func.grad(lambda x: loss(x, *(y.detach() for y in leaves[1:]), backend="torch", **asked))(leaves[0].detach())


def compiled(loss: Loss, *leaves: Tensor, **asked: Any) -> None:
    torch.compiler.reset()
    torch.compile(lambda *x: loss(*x, backend="torch", **asked), fullgraph=True, backend="aot_eager")(
        *leaves
    ).backward()


def over_ranks(loss: Loss, *leaves: Tensor, **asked: Any) -> None:
    def program(comm: InProcess) -> None:
        own = [x.detach().requires_grad_() for x in leaves]
        loss(*own, backend="torch", group=comm, **asked).backward()

    InProcessGroup[None](2).run(program)


@pytest.mark.parametrize("call", [eager, under_a_transform, compiled, over_ranks])
@pytest.mark.parametrize("loss", [contrastile.clip_loss, contrastile.sigmoid_loss])
def test_every_option_reaches_the_backend(loss: Loss, call: Any, seen: dict[str, list[Options]]) -> None:
    call(loss, features(), features(seed=1), number(4.0), **ASKED)
    assert set(seen) == ({"sigmoid"} if loss is contrastile.sigmoid_loss else {"lse", "gradients"})
    for options in (x for each in seen.values() for x in each):
        # an operator keeps nothing: it is not asked how much
        keep = None if call in (under_a_transform, compiled) else ASKED["keep"]
        assert options == Options(**{**ASKED, "keep": keep})


@pytest.mark.parametrize("call", [eager, over_ranks])
def test_auto_is_settled_before_a_backend_is_called(call: Any, seen: dict[str, list[Options]]) -> None:
    leaves = [x.detach().float().requires_grad_() for x in (features(), features(seed=1), number(4.0))]
    for precision in ("auto", "ieee", "tf32"):
        call(contrastile.clip_loss, *leaves, precision=precision, keep=0)
    call(contrastile.clip_loss, *leaves, keep=0)
    # it says nothing to other dtypes
    call(contrastile.clip_loss, *(x.detach().half().requires_grad_() for x in leaves[:2]), leaves[2], keep=0)
    found = [x.precision for x in seen["lse"]]
    assert found[:: len(found) // 5] == ["split", "ieee", "tf32", "split", "ieee"]


def test_each_setting_has_a_default_and_is_documented_once() -> None:
    documented = re.findall(r"^    (\w+): ", inspect.getdoc(Settings) or "", re.MULTILINE)
    assert documented == list(Settings.__annotations__) == list(DEFAULTS)
