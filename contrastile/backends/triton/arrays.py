# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
"""Torch tensors with the O(b d) passes fused: they are a visible share of a whole step at small widths."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from contrastile.backends.arrays import TorchArrays
from contrastile.backends.passes import ceil_div
from contrastile.backends.triton import sums
from contrastile.backends.triton.common import LINES, step
from contrastile.backends.triton.configs import INTERPRETED
from contrastile.backends.triton.launch import on_device

Array = Any

# rows that a program takes the loss of at once, and how often: rows and columns of a small problem are one program's
ROWS, TIMES = 16 if INTERPRETED else 512, 2


def multiplied(x: Array, factor: Array, out: Array) -> None:
    """``out = x factor``, rounded once to out's dtype; both contiguous, out may be x. On the current device."""
    size = 64 if INTERPRETED else 4096
    sums.multiply[(ceil_div(x.numel(), size),)](x, factor, out, x.numel(), BLOCK=size)


class TritonArrays(TorchArrays):
    """``TorchArrays`` whose O(b d) operations read and write each element once."""

    def __init__(self) -> None:
        super().__init__(torch)

    def loss(self, dtype: str, *sides: Sequence[Array]) -> Array:
        """``sum_i w_i nll_i`` over one or two sides: sums of a few rows, and theirs."""
        row, *others = [[x.contiguous() for x in side] for side in sides]
        column: list[Any] = others[0] if others else [None] * len(row)
        m, n = row[0].shape[0], column[0].shape[0] if others else 0
        with on_device(row[0]):
            out = torch.empty((), dtype=getattr(torch, dtype), device=row[0].device)
            programs = max(1, ceil_div(ceil_div(m, ROWS) + ceil_div(n, ROWS), TIMES))
            parts = out if programs == 1 else torch.empty(programs, dtype=torch.float64, device=out.device)
            sums.sum_nll[(programs,)](*row, *column, parts, m, n, BLOCK=ROWS, TIMES=TIMES)
            if programs > 1:
                sums.add_up[(1,)](parts, out, programs, BLOCK=ROWS)
            return out

    def inner(self, a: Array, b: Array) -> Array:
        """``sum_ik a_ik b_ik``: dots of rows in float32, their sum in float64, 0-d."""
        if a.shape[0] == 0 or torch.float64 in (a.dtype, b.dtype):
            return super().inner(a, b)
        a, b = (x if x.stride(1) == 1 else x.contiguous() for x in (a, b))
        with on_device(a):
            programs = ceil_div(a.shape[0], LINES)
            out = torch.empty(programs, dtype=torch.float64, device=a.device)
            sums.row_dots[(programs,)](
                a, b, out, a.shape[0], a.stride(0), b.stride(0), depth=a.shape[1], LINES=LINES, BD=step(a.shape[1])
            )
            return out.sum()

    def scaled(self, x: Array, factor: Array, dtype: str, *, consume: bool) -> Array:
        """``x * factor`` rounded once, in one pass."""
        kind = getattr(torch, dtype)
        if x.dtype == kind:
            return x.mul_(factor) if consume else x * factor
        if x.dtype != torch.float32 or not x.is_contiguous() or x.numel() == 0:
            return super().scaled(x, factor, dtype, consume=consume)
        out = torch.empty(x.shape, dtype=kind, device=x.device)
        with on_device(x):
            multiplied(x, factor, out)
        return out


ARRAYS = TritonArrays()
