"""Rows against themselves: each pair once, within the bounds, at half of the operations."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from contrastile.backends.arrays import library_of
from contrastile.backends.contract import Block, Options, Statistics, Weights
from contrastile.backends.registry import load
from contrastile.evaluation import make
from contrastile.problems import BUILDERS
from contrastile.schedules import schedule, triangle
from contrastile.schedules.local import Wanted
from contrastile.schedules.problem import Problem
from contrastile.verify import cases
from contrastile.verify.trial import Subject

TORCH = load("torch")


def test_halves_begin_where_tiles_do() -> None:
    rows, columns = next(triangle.places(slice(0, 10_000), 4096))
    assert (rows.stop, columns) == (5120, slice(5120, 10_000))
    assert all(rows.start % triangle.ALIGNED == 0 for rows, _ in triangle.places(slice(0, 10_000), 300))


def stated(loss: str, n: int, width: int = 8) -> Problem:
    """A problem of the front door's, of n rows."""
    random = torch.Generator().manual_seed(n)
    features = torch.randn(n, width, generator=random)
    second = torch.randint(0, n // 3, (n,), generator=random) if loss == "sup_con" else None
    given = (features, second) if second is not None else (features[: n // 2], features[n // 2 :])
    return make(BUILDERS[loss], {}, (*given, torch.tensor(0.7)), {})[0].problem


@pytest.mark.parametrize("loss", ["nt_xent", "sup_con"])
@pytest.mark.parametrize("n", [512, 500])
def test_half_of_the_logits_are_computed(loss: str, n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it says of FLOPs: n^2 / 2 logits and n / 2 more for each row of a block on the diagonal, in either pass."""
    monkeypatch.setattr(triangle, "CPU_ROWS", most := 64)
    areas: dict[str, int] = {"lse": 0, "gradients": 0, "products": 0}

    def lse(block: Block, columns: bool, options: Options) -> Statistics:
        areas["lse"] += block.rows.shape[0] * block.columns.shape[0]
        return TORCH.lse(block, columns, options)

    def gradients(block: Block, weights: Weights, rows: Any, columns: Any, options: Options) -> None:
        area = block.rows.shape[0] * block.columns.shape[0]
        areas["gradients"] += area
        areas["products"] += area * ((rows is not None) + (columns is not None))
        TORCH.gradients(block, weights, rows, columns, options)

    backend, problem = replace(TORCH, lse=lse, gradients=gradients), stated(loss, n)
    _, state = schedule.loss(problem, backend, Options())
    schedule.gradients(problem, state, torch.ones(()), Wanted(True, ()), backend, Options())
    assert areas["lse"] == areas["gradients"] <= n * n / 2 + most * n / 2
    assert areas["products"] == n * n


@pytest.mark.parametrize("name", ["self-excluded", "views", "certain-views"])
def test_the_logit_of_a_pair_is_one_number_on_both_sides(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triangle, "CPU_ROWS", 9)
    case, seen = cases.build(name, "float32"), 0

    def gradients(block: Block, weights: Weights, *rest: Any) -> None:
        nonlocal seen
        for i, j in enumerate(block.pairs.positives.tolist()):
            if 0 <= j < block.columns.shape[0]:
                assert weights.columns is not None
                assert weights.rows.positive_lse[i] == weights.columns.positive_lse[j]
                seen += 1
        TORCH.gradients(block, weights, *rest)

    Subject("torch", TORCH, "float32").run(replace(case.problem, columns=()), replace(TORCH, gradients=gradients))
    # either way round within a block on the diagonal
    assert seen >= len(case.problem.rows) // 2


def test_what_asks_for_nothing_computes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triangle, "CPU_ROWS", 9)
    problem = stated("nt_xent", 40)
    _, state = schedule.loss(problem, TORCH, Options())
    whole = schedule.gradients(problem, state, torch.ones(()), Wanted(True, ()), TORCH, Options())
    for rows, scale in ((True, False), (False, True), (False, False)):
        found = schedule.gradients(problem, state, torch.ones(()), Wanted(rows, (), scale), TORCH, Options())
        assert (found.rows is not None, found.scale is not None) == (rows, scale)
        assert found.rows is None or torch.equal(found.rows, whole.rows)
        assert found.scale is None or torch.equal(found.scale, whole.scale)


def test_wide_rows_are_cut_smaller_on_a_gpu() -> None:
    class OnGpu:
        def device(self, x: Any) -> str:
            return "cuda"

        def dtype(self, x: Any) -> str:
            return "bfloat16"

    def narrow(width: int, dtype: str, options: Options) -> bool:
        return width <= 128 and dtype == "bfloat16"

    def most(width: int, tile: tuple[int, int] | None = None, rows: int = 0, asked: Any = None) -> int:
        problem = replace(stated("nt_xent", 8), rows=torch.empty(rows, width, device="meta"))
        backend: Any = SimpleNamespace(arrays=OnGpu(), rows_alone=asked)
        return triangle.whole_up_to(problem, backend, Options(tile=tile))

    assert [most(d) ** 2 * d for d in (32, 128, 512)] == [triangle.WORK] * 3
    assert most(0) > most(1 << 30) == triangle.ALIGNED
    assert most(512, (300, 200)) == 200
    # where rows alone take less time, nothing is halved, unless a tile was asked for
    assert most(128, rows=1 << 20) < 1 << 20 == most(128, rows=1 << 20, asked=narrow)
    assert most(129, rows=1 << 20, asked=narrow) == most(129, rows=1 << 20)
    assert most(128, (64, 64), rows=1 << 20, asked=narrow) == 64


def test_a_gpu_computes_few_blocks() -> None:
    for n in (1000, 8192, 8200, 20001, 65000, 65536, 1 << 20):
        rows = torch.empty(n, 512, device="meta")
        problem = Problem(rows, (), rows, rows, rows)
        backend: Any = SimpleNamespace(arrays=library_of(rows), rows_alone=None)
        most = triangle.whole_up_to(problem, backend, Options())
        blocks = list(triangle.places(slice(0, n), most))
        assert len(blocks) == (1 if n <= 8192 else 3 if n < 65536 else 7)
        assert n <= 8192 or max(rows.stop - rows.start for rows, columns in blocks if rows == columns) <= n / 2 + 128
