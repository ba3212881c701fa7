# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
"""Torch tensors whose loss is one kernel, and whose products with a number are rounded in one pass."""

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

# rows that a program takes the loss of at once, and how often: rows and columns of a small problem are one program's
ROWS, TIMES = 16 if INTERPRETED else 512, 2


class TritonArrays(TorchArrays):
    """``TorchArrays`` with fewer launches."""

    def __init__(self) -> None:
        super().__init__(torch)

    def loss(self, dtype: str, *sides: Sequence[Array]) -> Array:
        """``sum_i w_i nll_i`` over one or two sides: sums of a few rows, and theirs."""
        row, *others = [[x.contiguous() for x in side] for side in sides]
        column: list[Any] = others[0] if others else [None] * len(row)
        m, n = row[0].shape[0], column[0].shape[0] if others else 0
        with on_device(row[0]):
            programs, kind = max(1, ceil_div(ceil_div(m, ROWS) + ceil_div(n, ROWS), TIMES)), getattr(torch, dtype)
            parts = torch.empty(programs, dtype=kind if programs == 1 else torch.float64, device=row[0].device)
            sums.sum_nll[(programs,)](*row, *column, parts, m, n, BLOCK=ROWS, TIMES=TIMES)
            return parts.view(()) if programs == 1 else parts.sum().to(kind)

    def scaled(self, x: Array, factor: Array, dtype: str, *, consume: bool) -> Array:
        """``x * factor`` rounded once, in one pass."""
        kind = getattr(torch, dtype)
        if x.dtype == kind:
            return super().scaled(x, factor, dtype, consume=consume)
        return torch.mul(x, factor, out=torch.empty(x.shape, dtype=kind, device=x.device))


ARRAYS = TritonArrays()
