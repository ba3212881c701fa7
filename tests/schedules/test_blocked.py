"""The blocked schedule: its bits are those of a plain call, and its copies have no race."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from copy_races import late_copies
from in_process_worlds import with_areas

import contrastile
from contrastile import compute, evaluation
from contrastile.backends.contract import Options
from contrastile.backends.registry import load
from contrastile.problems import BUILDERS
from contrastile.schedules import local
from contrastile.schedules.problem import Blocking, Problem
from contrastile.verify.wrapped import around

TORCH, CPU = load("torch"), torch.device("cpu")
LOSSES = (contrastile.clip_loss, contrastile.nt_xent, contrastile.sigmoid_loss)


def evaluate(problem: Problem, backend: Any = TORCH) -> list[Any]:
    """The loss and its gradients."""
    wanted, work = local.Wanted.every(problem), local.Work(backend, Options())
    value, state = compute.problem_loss(problem, work, wanted)
    gradients = compute.problem_gradients(problem, state, torch.ones((), dtype=problem.scale.dtype), wanted, work)
    return [value, gradients.rows, *gradients.columns, gradients.scale, gradients.bias]


def have_same_bits(a: list[Any], b: list[Any]) -> bool:
    return all(x is y or torch.equal(x, y) for x, y in zip(a, b, strict=True))


def in_blocks(problem: Problem, block: int) -> Problem:
    return replace(problem, blocking=Blocking(block, CPU))


def test_blocks_of_rows_against_themselves_compute_each_pair_once() -> None:
    backend, areas = with_areas(TORCH)
    evaluate(in_blocks(random_problem(contrastile.nt_xent, 75), 20), backend)
    # a block of rows against itself also computes the half below its diagonal
    assert areas == [150 * 150 / 2 + (7 * 20 * 20 + 10 * 10) / 2] * 2


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_batch_of_one_block_has_the_bits_of_a_plain_call(loss: Any, dtype: torch.dtype) -> None:
    # with the backend's primitives, which compute blocks too
    problem = replace(random_problem(loss, 50, dtype), whole=None)
    assert have_same_bits(evaluate(in_blocks(problem, 100)), evaluate(problem))


def random_problem(loss: Any, b: int, dtype: torch.dtype = torch.float32, width: int = 9) -> Problem:
    """The problem that a loss makes of random features."""
    generator = torch.Generator().manual_seed(b)
    image, text = (torch.randn(b, width, generator=generator).to(dtype) for _ in range(2))
    return make_problem(loss, image, text, 0.7)


def make_problem(loss: Any, *arguments: Any) -> Problem:
    return evaluation.make(BUILDERS[loss.__name__], {}, arguments, {})[0].problem


@pytest.mark.parametrize(
    ("loss", "b", "block", "dtype"),
    [
        (contrastile.clip_loss, 41, 16, torch.float32),
        (contrastile.clip_loss, 20, 15, torch.bfloat16),
        (contrastile.nt_xent, 20, 20, torch.float32),
        (contrastile.nt_xent, 27, 15, torch.float32),
        (contrastile.nt_xent, 30, 16, torch.bfloat16),
        (contrastile.sigmoid_loss, 40, 15, torch.bfloat16),
        (contrastile.sigmoid_loss, 20, 15, torch.float32),
        (contrastile.sigmoid_loss, 20, 20, torch.float32),
    ],
)
def test_late_copies_change_no_bit_and_have_no_race(loss: Any, b: int, block: int, dtype: torch.dtype) -> None:
    problem = in_blocks(random_problem(loss, b, dtype), block)
    expected = evaluate(problem)
    with late_copies() as device:
        results = evaluate(problem)
    assert have_same_bits(results, expected)
    assert device.races == set()
    assert not device.pending


@pytest.mark.parametrize("rows", [9, 41])
def test_a_lone_block_of_rows_or_of_columns(rows: int) -> None:
    """A lone block of columns keeps its sums on the device; a lone block of rows copies no partial sum to the host."""
    case = random_problem(contrastile.clip_loss, 41)
    index = torch.arange(rows)
    problem = replace(
        in_blocks(case, 16),
        rows=case.rows[:rows],
        columns=(case.rows[: 50 - rows],),
        row_weight=case.row_weight[:rows],
        row_target=torch.where(index < 50 - rows, case.row_target[:rows], 0.0),
        positives=index,
        column_weight=None,
        column_target=None,
    )
    with late_copies() as device:
        results = evaluate(problem)
    assert have_same_bits(results, evaluate(problem))
    assert device.races == set()


def test_the_next_block_is_queued_before_a_block_is_computed() -> None:
    problem = in_blocks(random_problem(contrastile.clip_loss, 48), 16)
    with late_copies() as device:
        backend = around(TORCH, lambda lse, *arguments: device.log.append("compute") or lse(*arguments))
        compute.problem_loss(problem, local.Work(backend, Options()))
    computed = [i for i, entry in enumerate(device.log) if entry == "compute"]
    loads = [device.log[:i].count("loads 16") for i in computed]
    # the first rows with the first columns, then one block of columns ahead, with rows where the next rows begin
    assert loads == [3, 4, 6, 7, 8, 10, 11, 12, 12]


def test_torch_func_computes_in_blocks() -> None:
    image, text = torch.randn(40, 8), torch.randn(40, 8)
    gradient = torch.func.grad(lambda x: contrastile.clip_loss(x, text, 3.0, block=16))(image)
    leaf = image.clone().requires_grad_()
    contrastile.clip_loss(leaf, text, 3.0, block=16).backward()
    assert leaf.grad is not None
    assert torch.equal(gradient, leaf.grad)
