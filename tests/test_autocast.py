"""Autocast: the loss takes features as a matrix product would, in autocast's dtype; all else is as without it."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from test_autograd import LOSSES, Loss, clip, features, gradients, number, sigmoid, stepped
from torch import Tensor

import contrastile
from contrastile.comm.inprocess import InProcess, InProcessGroup


def leaf(rows: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return features(rows, seed=seed, dtype=dtype).detach().requires_grad_()


def same(found: list[Tensor], expected: list[Tensor]) -> None:
    """The value bit by bit, in its dtype; gradients are the expected ones in the features' own dtype."""
    assert found[0].dtype == expected[0].dtype
    assert all(torch.equal(a, b.to(a.dtype)) for a, b in zip(found, expected, strict=True))


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
    same([value, *found], stepped(loss, *narrow, scale, "torch"))


def test_autocast_of_another_kind_of_device_says_nothing_about_these(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = [leaf(23, 0), leaf(23, 1), number(14.3, torch.float32)]
    expected = clip(*inputs, "torch")
    # torch.autocast("cuda") itself turns off where there is no GPU
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda kind: kind == "cuda")
    assert torch.equal(clip(*inputs, "torch"), expected)


@pytest.mark.usefixtures("primitives")
@pytest.mark.parametrize("loss", [clip, sigmoid])
def test_one_graph_holds_the_cast_and_no_grad_gives_the_same_value(loss: Loss) -> None:
    inputs, scale = [leaf(23, 0), leaf(23, 1)], number(14.3, torch.float32)

    def inside(*x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return loss(*x, "torch")

    torch.compiler.reset()
    around = torch.compile(lambda *x: loss(*x, "torch"), fullgraph=True, backend="aot_eager")
    within = torch.compile(inside, fullgraph=True, backend="aot_eager")
    expected = stepped(inside, *inputs, scale)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        outer = around(*inputs, scale)
    for value in (within(*inputs, scale), outer):
        same([value, *gradients(value, *inputs, scale)], expected)
    # the same compiled function, asked without autocast, casts nothing
    assert torch.equal(around(*inputs, scale), loss(*inputs, scale, "torch"))
    with torch.no_grad():
        silent = inside(*inputs, scale)
    assert torch.equal(silent, expected[0])
    assert not silent.requires_grad


@pytest.mark.parametrize("exchange", ["ring", "gather"])
@pytest.mark.parametrize("loss", [clip, sigmoid], ids=["clip", "sigmoid"])
def test_ranks_agree_on_the_dtype_that_autocast_gives_them(loss: Any, exchange: str) -> None:
    names = {clip: contrastile.clip_loss, sigmoid: contrastile.sigmoid_loss}
    dtypes = [torch.float32, torch.bfloat16]

    def program(comm: InProcess, autocast: bool) -> list[Tensor]:
        kind = dtypes[comm.rank] if autocast else torch.bfloat16
        own = [leaf(4, seed).detach().to(kind).requires_grad_() for seed in (comm.rank, comm.rank + 5)]
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            value = names[loss](*own, 20.0, group=comm, exchange=exchange)
        return [value.detach(), *gradients(value, *own)]

    found, narrow = (InProcessGroup[Any](2).run(partial(program, autocast=x)) for x in (True, False))
    for each, expected, dtype in zip(found, narrow, dtypes, strict=True):
        assert [x.dtype for x in each[1:]] == [dtype] * 2
        same(each, expected)
