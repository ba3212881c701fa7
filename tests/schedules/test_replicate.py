"""The whole loss on every rank: gradients of features and scale as a process alone has them."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import contrastile
from contrastile.comm.inprocess import InProcess, InProcessGroup

COUNTS = 4, 0, 7


def drawn() -> list[Any]:
    """Features of all ranks and a scale."""
    draw = torch.Generator().manual_seed(0)
    image, text = (torch.randn(sum(COUNTS), 6, generator=draw) for _ in range(2))
    return [x.requires_grad_() for x in (image, text, torch.tensor(1.5))]


def test_a_rank_may_be_under_a_dispatch_mode() -> None:
    image, text, _ = (x.detach() for x in drawn())
    whole = image.clone().requires_grad_()
    contrastile.clip_loss(whole, text, 1.5).backward()

    def program(comm: InProcess) -> Tensor:
        own, other = (x.split(COUNTS)[comm.rank].clone() for x in (image, text))
        with FlopCounterMode(display=False) if comm.rank == 2 else nullcontext():
            contrastile.clip_loss(own.requires_grad_(), other, 1.5, group=comm, exchange="replicate").backward()
        return own.grad / len(COUNTS)

    torch.testing.assert_close(torch.cat(InProcessGroup[Tensor](len(COUNTS)).run(program)), whole.grad)


@pytest.mark.usefixtures("primitives")
@pytest.mark.parametrize("negatives", [[], ()])
def test_no_negatives_are_replicated_and_the_loss_can_be_divided_in_place(negatives: Any) -> None:
    def program(comm: InProcess) -> tuple[Tensor, Tensor]:
        image, text, scale = drawn()
        loss = contrastile.info_nce(image, text, scale, negatives=negatives, group=comm, exchange="replicate")
        loss /= 4
        loss.backward()
        return loss.detach(), image.grad

    image, text, scale = drawn()
    expected = contrastile.info_nce(torch.cat([image] * 2), torch.cat([text] * 2), scale)
    for value, gradient in InProcessGroup[tuple[Tensor, Tensor]](2).run(program):
        assert torch.equal(value, expected / 4)
        assert gradient.any()
