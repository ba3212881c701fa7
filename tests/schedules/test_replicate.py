"""The whole loss on every rank: gradients of features and scale as a process alone has them, with one message."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import contrastile
from contrastile.comm.inprocess import InProcess, InProcessGroup
from contrastile.schedules.placement import REPLICATED, Shards, choose_exchange

COUNTS = 4, 0, 7
IDS = torch.tensor([0, 1, 2, 0, 4, 5, 2, 7, 8, 9, 1])
Loss = Callable[..., Any]


def drawn(frozen: bool = False) -> list[Any]:
    """Features of all ranks and a scale."""
    draw = torch.Generator().manual_seed(0)
    image, text = (torch.randn(sum(COUNTS), 6, generator=draw) for _ in range(2))
    return [image.requires_grad_(not frozen), text.requires_grad_(), torch.tensor(1.5, requires_grad=True)]


def whole(loss: Loss, frozen: bool = False, upstream: int = 1, **named: Any) -> list[Any]:
    leaves = drawn(frozen)
    value = loss(*leaves, backend="torch", **named)
    value.backward(torch.tensor(float(upstream)))
    return [value.detach(), *(x.grad for x in leaves)]


def ranks(loss: Loss, frozen: bool = False, reduction: str = "mean", **named: Any) -> list[list[Any]]:
    """Each rank's loss and gradients."""

    def program(comm: InProcess) -> list[Any]:
        def own(x: Any) -> Any:
            return x if x.ndim == 0 else x.split(COUNTS)[comm.rank]

        leaves = [own(x.detach()).clone().requires_grad_(x.requires_grad) for x in drawn(frozen)]
        settings = {"group": comm, "exchange": "replicate", "parameter_reduction": reduction, "backend": "torch"}
        before = comm.calls.messages
        value = loss(*leaves, **settings, **{name: own(x) for name, x in named.items()})
        assert comm.calls.messages == before + 1
        value.backward()
        assert comm.calls.messages == before + 1
        return [value.detach(), *(x.grad for x in leaves)]

    return InProcessGroup[list[Any]](len(COUNTS)).run(program)


def test_a_rank_may_be_under_a_dispatch_mode() -> None:
    expected = whole(contrastile.clip_loss, upstream=len(COUNTS))

    def program(comm: InProcess) -> list[Tensor]:
        def own(x: Tensor) -> Tensor:
            return (x.split(COUNTS)[comm.rank] if x.ndim else x).detach().double().clone().requires_grad_()

        image, text, scale = map(own, drawn())
        with FlopCounterMode(display=False) if comm.rank == 2 else nullcontext():
            loss = contrastile.clip_loss(image, text, scale, group=comm, exchange="replicate")
            loss.backward()
        return [loss.detach().float(), image.grad.float()]

    for rank, (value, d_image) in enumerate(InProcessGroup[list[Tensor]](len(COUNTS)).run(program)):
        torch.testing.assert_close(value, expected[0])
        torch.testing.assert_close(d_image, expected[1].split(COUNTS)[rank])


@pytest.mark.parametrize("negatives", [[], ()])
def test_no_negatives_are_replicated_and_the_loss_can_be_divided_in_place(negatives: Any) -> None:
    def program(comm: InProcess) -> tuple[Tensor, Tensor]:
        image, text, scale = drawn()
        image.requires_grad_()
        loss = contrastile.info_nce(image, text, scale, negatives=negatives, group=comm, exchange="replicate")
        loss /= 4
        loss.backward()
        return loss.detach(), image.grad

    image, text, scale = drawn()
    expected = contrastile.info_nce(torch.cat([image] * 2), torch.cat([text] * 2), scale)
    for value, gradient in InProcessGroup[tuple[Tensor, Tensor]](2).run(program):
        assert torch.equal(value, expected / 4)
        assert gradient.any()


def test_small_problems_of_gpus_are_replicated_by_auto() -> None:
    def chosen(rows: int, blocks: int = 1, itemsize: int = 2, **how: Any) -> str:
        shards = Shards((rows, rows), (((rows // blocks,) * blocks,)) * 2)
        return choose_exchange(shards, 512, itemsize, **how).exchange

    assert chosen(8192, may_replicate=True) == "replicate"
    assert chosen(8200, may_replicate=True) == chosen(64) == "gather"
    assert chosen(64, blocks=2, may_replicate=True) == "replicate"
    assert chosen(2048, itemsize=4, may_replicate=True) == "replicate"
    assert chosen(2056, itemsize=4, may_replicate=True) == "gather"
    assert REPLICATED[True] == 16384**2 * 512
