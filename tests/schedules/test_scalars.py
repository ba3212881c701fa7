"""Scale and bias that lie where the host cannot read them: the ranks compare them there."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from in_process_worlds import errors

import contrastile
from contrastile import validation
from contrastile.comm.calls import Label
from contrastile.comm.communicator import MismatchError
from contrastile.comm.inprocess import InProcess, InProcessGroup
from contrastile.schedules import scalars

N, B, D = 3, 4, 5
Step = tuple[torch.Tensor, list[torch.Tensor]]


@pytest.fixture(autouse=True)
def unread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors on the host are as those on a device: nobody reads them."""
    monkeypatch.setattr(scalars, "READABLE", frozenset(["a number"]))
    monkeypatch.setattr(validation, "values_are_readable", lambda arrays, x: False)


def step(loss: str, comm: InProcess, exchange: str, scale: float, bias: float = -1.0) -> Step:
    """The loss and every gradient of one rank."""
    random = torch.Generator().manual_seed(comm.rank)
    features = [torch.randn(B, D, generator=random, dtype=torch.float64).requires_grad_() for _ in range(2)]
    numbers = [torch.tensor(x, dtype=torch.float64, requires_grad=True) for x in (scale, bias)]
    settings: Any = {"group": comm, "exchange": exchange, "backend": "torch"}
    if loss == "sup_con":
        given = [features[0], numbers[0]]
        value = contrastile.sup_con(features[0], torch.arange(B) // 2, numbers[0], **settings)
    else:
        given = [*features, *numbers[: 2 if loss == "sigmoid_loss" else 1]]
        value = getattr(contrastile, loss)(*given, **settings)
    return value.detach(), list(torch.autograd.grad(value, given))


EXCHANGES = "ring", "gather", "replicate"
LOSSES = "clip_loss", "info_nce", "nt_xent", "sup_con", "sigmoid_loss"


@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize(("loss", "number"), [*((x, "scale") for x in LOSSES), ("sigmoid_loss", "bias")])
def test_numbers_that_differ_make_everything_nan_on_every_rank(loss: str, number: str, exchange: str) -> None:
    def program(comm: InProcess) -> Step:
        by = float(comm.rank == 1)
        return step(loss, comm, exchange, 10.0 + by * (number == "scale"), -1.0 + by * (number == "bias"))

    for value, gradients in InProcessGroup[Step](N).run(program):
        assert value.isnan()
        assert all(x.isnan().all() for x in gradients)


@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("loss", LOSSES)
def test_scales_that_are_alike_change_no_bit(loss: str, exchange: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def program(comm: InProcess) -> Step:
        return step(loss, comm, exchange, 10.0 * (1 + 2.0**-23 * (comm.rank == 1)))

    compared = InProcessGroup[Step](N).run(program)
    monkeypatch.setattr(scalars, "READABLE", frozenset(["a number", "cpu"]))
    read = InProcessGroup[Step](N).run(program)
    for (a, mine), (b, theirs) in zip(compared, read, strict=True):
        assert torch.equal(a, b)
        assert all(map(torch.equal, mine, theirs))


def wrong(comm: InProcess) -> None:
    step("sigmoid_loss", comm, "ring", 10.0, -1.0 - 2 * (comm.rank == 2))


def right(comm: InProcess) -> None:
    value, _ = step("clip_loss", comm, "ring", 10.0)
    assert value.isfinite()


WORDS = (
    "MismatchError: bias must be the same on every rank, got -1.0 on ranks 0, 1, -3.0 on rank 2 in call 1 "
    "(sigmoid_loss), whose loss and gradients are NaN for that; start every rank from one bias, and average its "
    "gradient as DDP does"
)


def test_the_next_call_names_the_numbers_once_and_the_group_stays_usable() -> None:
    assert errors(N, wrong, right, right) == [["", WORDS, ""]] * N


def test_a_scale_that_is_nan_on_every_rank_is_no_mismatch() -> None:
    comm, _ = InProcessGroup[InProcess](2).run(lambda comm: comm)

    def held(*values: float) -> None:
        comm.calls.unread.append((Label(1, "forward", "clip_loss"), {"scale": lambda: np.array(values)}))
        scalars.check(comm)

    held(float("nan"), float("nan"))
    with pytest.raises(MismatchError, match=r"got nan on rank 0, 1\.0 on rank 1"):
        held(float("nan"), 1.0)


def test_the_first_replicated_calls_compare_and_then_one_of_sixteen() -> None:
    def call(comm: InProcess) -> None:
        made = comm.calls.label.serial
        step("clip_loss", comm, "replicate", 10.0 + (made >= 16) * comm.rank)

    words = errors(N, *[call] * 33)
    # calls 17 to 31 do not compare; the 32nd does, and the next one says so
    assert [bool(text) for text in words[0]] == [False] * 32 + [True]
    assert "in call 32 (clip_loss)" in words[0][-1]
    assert words[1:] == words[:1] * (N - 1)
