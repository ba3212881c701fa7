"""N, P and D of rows and columns, and any loss of them: ``verify.statistics`` holds them to the oracle."""

from __future__ import annotations

from typing import Any

import torch
from test_autograd import stepped
from torch import Tensor

import contrastile

M, N = 19, 27
draw = torch.Generator().manual_seed(0)
ROWS, COLUMNS = (torch.randn(n, 6, generator=draw, dtype=torch.float64) for n in (M, N))
OF_ROWS, OF_COLUMNS = (torch.randint(0, 7, (n,), generator=draw) for n in (M, N))
IDS: dict[str, Any] = {"row_ids": OF_ROWS, "column_ids": OF_COLUMNS, "ids_are": "positives"}
SCALE = torch.tensor(1.5, dtype=torch.float64)


def loss(*given: Any, **settings: Any) -> Tensor:
    """One that nobody has, masked where a row has no positive."""
    found = contrastile.statistics(*given, **IDS, **settings)
    total = sum((torch.where(p.isfinite(), 2 * n - p, 0.0) + 3 * d).mean() for n, p, d in found)
    assert isinstance(total, Tensor)
    return total


def leaves() -> list[Tensor]:
    return [x.clone().requires_grad_() for x in (ROWS, COLUMNS, SCALE)]


def test_a_compiler_and_a_transform_have_the_same_bits() -> None:
    expected = stepped(loss, *leaves())
    compiled = stepped(torch.compile(loss, backend="eager", fullgraph=True), *leaves())
    gradients, same = torch.func.grad_and_value(loss, (0, 1, 2))(ROWS, COLUMNS, SCALE)
    for found in (compiled, [same, *gradients], stepped(loss, *leaves())):
        assert all(map(torch.equal, found, expected))
