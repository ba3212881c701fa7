"""Blocks and problems for the tests of the torch backend, and how far off it is on them, in bounds."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import contrastile.backends.torch
from contrastile.backends.contract import Block, Options, Pairs, SideWeights, Weights
from contrastile.backends.torch import backend, products
from contrastile.schedules.problem import Problem
from contrastile.verify.bounds import bounds
from contrastile.verify.comparison import Worst, compare
from contrastile.verify.execution import outcome
from contrastile.verify.truth import Truth, truth

RAGGED = Options(tile=(7, 13))


def worst(problem: Problem, exact: Truth, dtype: str, options: Options = Options(), facts_of: str = "cpu") -> Worst:  # noqa: B008
    facts = backend.accuracy(dtype, facts_of)
    bound = bounds(problem, exact, facts, dtype, options=options)
    return compare(outcome(problem, backend, dtype, options=options), exact.outcome, bound)


def block_of(seed: int, m: int, n: int, d: int, scale: float = 10.0, **pairs: Any) -> Block:
    generator = torch.Generator().manual_seed(seed)
    rows, columns = (torch.nn.functional.normalize(torch.randn(k, d, generator=generator), dim=1) for k in (m, n))
    return Block(rows, columns, torch.tensor(scale), None, Pairs(**pairs))


def symmetric(block: Block, seed: int = 0) -> tuple[Problem, Truth]:
    """A signed symmetric problem over the block's features, in NumPy, and its truth."""
    generator = np.random.default_rng(seed)
    m, n = len(block.rows), len(block.columns)
    positives = generator.integers(0, n, m)
    shared_by = np.bincount(positives, minlength=n)
    problem = Problem(
        rows=block.rows.double().numpy(),
        columns=(block.columns.double().numpy(),),
        scale=block.scale.double().numpy(),
        row_weight=generator.standard_normal(m).astype(np.float32).astype(np.float64),
        row_target=np.ones(m),
        column_weight=generator.standard_normal(n).astype(np.float32).astype(np.float64),
        column_target=np.where(shared_by > 0, 1 / np.maximum(shared_by, 1), 0.0).astype(np.float32).astype(np.float64),
        positives=positives,
    )
    return problem, truth(problem)


def statistics_and_gradients(block: Block, options: Options = RAGGED) -> list[torch.Tensor]:
    (m, d), n = block.rows.shape, len(block.columns)
    found = backend.lse(block, True, options)
    assert found.columns is not None
    vectors = [*found.rows, *found.columns]
    half = block.rows.new_full if block.rows.dtype == torch.float64 else block.rows.float().new_full
    each = (found.rows, m, 0.5), (found.columns, n, 0.25)
    sides = [SideWeights(*side[:2], half((k,), weight), half((k,), 1.0)) for side, k, weight in each]
    row, column = (half((size, d), 0.0) for size in (m, n))
    backend.gradients(block, Weights(*sides), row, column, options)
    return [*vectors, row, column]


def pretend_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take the path of a device: nothing is read on the host, and 16-bit products have a float32 result."""
    plain_mm = torch.mm

    def mm(a: torch.Tensor, b: torch.Tensor, out_dtype: Any = None, **how: Any) -> torch.Tensor:
        if out_dtype is None:
            return plain_mm(a, b, **how)
        assert a.dtype == b.dtype in (torch.float16, torch.bfloat16)
        return plain_mm(a.to(out_dtype), b.to(out_dtype), **how)

    monkeypatch.setattr(products, "on_host", lambda _: False)
    for module in (products, contrastile.backends.torch):
        monkeypatch.setattr(module, "has_mixed_product", lambda: True)
    monkeypatch.setattr(torch, "mm", mm)
