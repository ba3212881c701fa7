"""Autocast: the loss takes features as a matrix product would, in autocast's dtype; all else is as without it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_autograd import LOSSES, Loss, clip, features, gradients, number, sigmoid
from torch import Tensor

import contrastile
from contrastile.comm.inprocess import InProcess, InProcessGroup

Step = tuple[Tensor, list[Tensor]]


def leaf(rows: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return features(rows, seed=seed, dtype=dtype).detach().requires_grad_()


def step(loss: Loss, inputs: list[Tensor], scale: Tensor) -> Step:
    """The value, and the gradients of the inputs and the scale."""
    value = loss(*inputs, scale, "torch")
    return value, gradients(value, *inputs, scale)


def same(found: Step, expected: Step) -> None:
    """Value and scale's gradient bit by bit; features' gradients are the expected ones in the features' own dtype."""
    assert torch.equal(found[0], expected[0])
    for a, b in zip(found[1], expected[1], strict=True):
        assert torch.equal(a, b.to(a.dtype))


@pytest.mark.parametrize("loss", LOSSES)
def test_dtypes_that_differ_meet_in_autocast_s(loss: Loss) -> None:
    image, text, scale = leaf(23, 0), leaf(23, 1, torch.bfloat16), number(50.0, torch.float32)
    if loss.__name__ != "sup_con":  # which is given one matrix, joined by the test
        with pytest.raises(TypeError, match="must have the same dtype, got float32 and bfloat16"):
            loss(image, text, scale, "torch")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        value = loss(image, text, scale, "torch")
    narrow = [x.detach().bfloat16().requires_grad_() for x in (image, text)]
    found = gradients(value, image, text, scale)
    assert [x.dtype for x in found] == [torch.float32, torch.bfloat16, torch.float32]
    same((value, found), step(loss, narrow, scale))


def plain(loss: Loss, *inputs: Tensor) -> Tensor:
    with torch.autocast("cpu", enabled=False):
        return loss(*inputs, "torch")


def test_autocast_of_another_kind_of_device_says_nothing_about_these(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = [leaf(23, 0), leaf(23, 1), number(14.3, torch.float32)]
    expected = clip(*inputs, "torch")
    # torch.autocast("cuda") itself turns off where there is no GPU
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda kind: kind == "cuda")
    assert torch.equal(clip(*inputs, "torch"), expected)


@pytest.mark.parametrize("loss", [clip, sigmoid])
def test_one_graph_holds_the_cast_and_no_grad_gives_the_same_value(loss: Loss) -> None:
    inputs, scale = [leaf(23, 0), leaf(23, 1)], number(14.3, torch.float32)

    def inside(*x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return loss(*x, "torch")

    torch.compiler.reset()
    around = torch.compile(lambda *x: loss(*x, "torch"), fullgraph=True, backend="aot_eager")
    within = torch.compile(inside, fullgraph=True, backend="aot_eager")
    expected = inside(*inputs, scale)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        outer = around(*inputs, scale)
    values = [within(*inputs, scale), outer]
    for value in values:
        same((value, gradients(value, *inputs, scale)), (expected, gradients(inside(*inputs, scale), *inputs, scale)))
    # the same compiled function, asked without autocast, casts nothing
    assert torch.equal(around(*inputs, scale), plain(loss, *inputs, scale))
    with torch.no_grad():
        silent = inside(*inputs, scale)
    assert torch.equal(silent, expected)
    assert not silent.requires_grad


@pytest.mark.parametrize("exchange", ["ring", "gather"])
@pytest.mark.parametrize("loss", [clip, sigmoid], ids=["clip", "sigmoid"])
def test_ranks_agree_on_the_dtype_that_autocast_gives_them(loss: Any, exchange: str) -> None:
    names = {clip: contrastile.clip_loss, sigmoid: contrastile.sigmoid_loss}
    dtypes = [torch.float32, torch.bfloat16]

    def program(comm: InProcess) -> tuple[Tensor, Tensor]:
        own = [leaf(4, seed, dtypes[comm.rank]) for seed in (comm.rank, comm.rank + 5)]
        with torch.autocast("cpu", dtype=torch.bfloat16):
            value = names[loss](*own, 20.0, group=comm, exchange=exchange)
        return value.detach(), gradients(value, own[0])[0]

    def narrow(comm: InProcess) -> tuple[Tensor, Tensor]:
        own = [leaf(4, seed).detach().bfloat16().requires_grad_() for seed in (comm.rank, comm.rank + 5)]
        value = names[loss](*own, 20.0, group=comm, exchange=exchange)
        return value.detach(), gradients(value, own[0])[0]

    for rank, (found, expected) in enumerate(
        zip(InProcessGroup[Any](2).run(program), InProcessGroup[Any](2).run(narrow), strict=True)
    ):
        assert torch.equal(found[0], expected[0])
        assert found[1].dtype == dtypes[rank]
        assert torch.equal(found[1], expected[1].to(dtypes[rank]))
