"""The options of a call reach the backend, whichever way the call takes."""

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

OPTIONS: dict[str, Any] = {"tile": (7, 5), "precision": "split", "workspace": 3, "keep": 2}
Loss = Callable[..., Tensor]


@pytest.fixture
def received_options(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[Options]]:
    """The options that each primitive of the torch backend receives, by the primitive's name."""
    options: dict[str, list[Options]] = {}

    def call(primitive: Callable[..., Any], *arguments: Any) -> Any:
        options.setdefault(primitive.__name__, []).append(arguments[-1])
        return primitive(*arguments)

    recording_backend = around(load("torch"), call, "lse", "gradients", "sigmoid")
    backend = replace(recording_backend, precisions=frozenset(PRECISIONS), auto_precision="split")
    for module in (plan, choice):
        monkeypatch.setattr(module, "load", lambda name: backend)
    return options


def eager(loss: Loss, *leaves: Tensor, **options: Any) -> None:
    loss(*leaves, backend="torch", **options).backward()


def under_a_transform(loss: Loss, *leaves: Tensor, **options: Any) -> None:
    x, *others = (leaf.detach() for leaf in leaves)
    torch.func.grad(lambda x: loss(x, *others, backend="torch", **options))(x)


def compiled(loss: Loss, *leaves: Tensor, **options: Any) -> None:
    torch.compiler.reset()
    torch.compile(lambda *x: loss(*x, backend="torch", **options), fullgraph=True, backend="aot_eager")(
        *leaves
    ).backward()


def over_ranks(loss: Loss, *leaves: Tensor, **options: Any) -> None:
    def program(comm: InProcess) -> None:
        own_leaves = [x.detach().requires_grad_() for x in leaves]
        loss(*own_leaves, backend="torch", group=comm, **options).backward()

    InProcessGroup[None](2).run(program)


@pytest.mark.parametrize("call", [eager, under_a_transform, compiled, over_ranks])
@pytest.mark.parametrize("loss", [contrastile.clip_loss, contrastile.sigmoid_loss])
def test_every_option_reaches_the_backend(loss: Loss, call: Any, received_options: dict[str, list[Options]]) -> None:
    call(loss, features(), features(seed=1), number(4.0), **OPTIONS)
    assert set(received_options) == ({"sigmoid"} if loss is contrastile.sigmoid_loss else {"lse", "gradients"})
    for options in (x for calls in received_options.values() for x in calls):
        # an operator keeps no exponentials, so it passes no limit for them
        keep = None if call in (under_a_transform, compiled) else OPTIONS["keep"]
        assert options == Options(**{**OPTIONS, "keep": keep})


@pytest.mark.parametrize("call", [eager, over_ranks])
def test_a_backend_never_receives_the_precision_auto(call: Any, received_options: dict[str, list[Options]]) -> None:
    leaves = [x.detach().float().requires_grad_() for x in (features(), features(seed=1), number(4.0))]
    for precision in ("auto", "ieee", "tf32"):
        call(contrastile.clip_loss, *leaves, precision=precision, keep=0)
    call(contrastile.clip_loss, *leaves, keep=0)
    # the backend's automatic precision is for float32 alone
    call(contrastile.clip_loss, *(x.detach().half().requires_grad_() for x in leaves[:2]), leaves[2], keep=0)
    precisions = [x.precision for x in received_options["lse"]]
    assert precisions[:: len(precisions) // 5] == ["split", "ieee", "tf32", "split", "ieee"]


def test_each_setting_has_a_default_and_is_documented_once() -> None:
    documented = re.findall(r"^    (\w+): ", inspect.getdoc(Settings) or "", re.MULTILINE)
    assert documented == list(Settings.__annotations__) == list(DEFAULTS)
