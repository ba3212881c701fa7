# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
"""Torch tensors with a loss in one kernel, and a product with a number that rounds in the same pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from contrastile.backends.arrays import TorchArrays
from contrastile.backends.passes import ceil_div
from contrastile.backends.triton import sums
from contrastile.backends.triton.configs import INTERPRETED
from contrastile.backends.triton.launch import on_device

Array = Any

# a program sums the loss of ROWS rows TIMES times, so that one program takes the rows and columns of a small problem
ROWS, TIMES = 16 if INTERPRETED else 512, 2


class TritonArrays(TorchArrays):
    """``TorchArrays`` with fewer launches."""

    def __init__(self) -> None:
        super().__init__(torch)

    def loss(self, dtype: str, *sides: Sequence[Array]) -> Array:
        """``sum_i w_i nll_i`` over one or two sides: partial sums over a few rows, and the sum of these."""
        rows, *other_sides = [[x.contiguous() for x in side] for side in sides]
        columns: list[Any] = other_sides[0] if other_sides else [None] * len(rows)
        m, n = rows[0].shape[0], columns[0].shape[0] if other_sides else 0
        with on_device(rows[0]):
            programs, kind = max(1, ceil_div(ceil_div(m, ROWS) + ceil_div(n, ROWS), TIMES)), getattr(torch, dtype)
            partials = torch.empty(programs, dtype=kind if programs == 1 else torch.float64, device=rows[0].device)
            sums.sum_nll[(programs,)](*rows, *columns, partials, m, n, BLOCK=ROWS, TIMES=TIMES)
            return partials.view(()) if programs == 1 else partials.sum().to(kind)

    def scaled(self, x: Array, factor: Array, dtype: str, *, consume: bool) -> Array:
        """``x * factor`` rounded once, in one pass."""
        kind = getattr(torch, dtype)
        if x.dtype == kind:
            return super().scaled(x, factor, dtype, consume=consume)
        return torch.mul(x, factor, out=torch.empty(x.shape, dtype=kind, device=x.device))


ARRAYS = TritonArrays()
