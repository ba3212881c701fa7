"""Host code that the three primitives share: vectors that kernels read, sizes of small kernels."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, cached_property
from typing import Any

import torch

from contrastile.backends.arrays import TorchArrays
from contrastile.backends.bars import normalised
from contrastile.backends.contract import Block, Weights
from contrastile.backends.passes import ceil_div, contiguous_pairs
from contrastile.backends.triton import precheck
from contrastile.backends.triton.configs import INTERPRETED
from contrastile.backends.triton.launch import on_device
from contrastile.backends.triton.logits import LOG2E
from contrastile.backends.triton.tiles import DROP, NO_IDS, TARGET, UNIT

# rows of a program of a small kernel, few under the interpreter, so that small problems have several programs
LINES = 4 if INTERPRETED else 8
LANES = 16 if INTERPRETED else 128
DEPTH = 4 if INTERPRETED else 32
BLOCK = 8 if INTERPRETED else 1024

_LINE = 128
"""Bytes of a GPU's cache line."""


def _with_spans(x: Any) -> Any:
    """A vector of ids or indices whose memory goes on with its ``precheck.spans``; None for None."""
    if x is None or not x.shape[0]:
        return x
    units = ceil_div(x.shape[0], UNIT.value)
    out = empty(x, x.shape[0] + 2 * units, dtype=x.dtype)
    with on_device(x):
        precheck.spans[(units,)](x, out, x.shape[0])
    return out[: x.shape[0]]


class Masks:
    """Which pairs count, in the form that the kernels take.

    Attributes:
        pairs: the vectors.
        ids: tiles.NO_IDS, DROP or TARGET.
        ids_only: whether the positives are pairs of equal ids.
        limited: whether there are limits.
        limits: of the rows and of the columns: base-2 logits, or a guide's dot products, beyond which negatives do not
            count.
    """

    def __init__(self, block: Block) -> None:
        pairs = block.pairs
        self.pairs = contiguous_pairs(pairs, torch.Tensor.contiguous)
        self.ids = {"drop": DROP, "target": TARGET, None: NO_IDS}[self.pairs.of_ids].value
        self.ids_only = self.pairs.of_ids == "target"
        bias = 0.0 if block.bias is None else block.bias
        limits = self.pairs.row_limits, self.pairs.column_limits
        is_logit = pairs.row_guide is None
        self.limits = [None if x is None else (x - bias) * LOG2E.value if is_logit else x.contiguous() for x in limits]
        self.limited = pairs.limited

    def vectors(self) -> tuple[Any, Any, Any]:
        """The exclusions, the rows' ids and the columns' ids."""
        return self.pairs.excluded, self.pairs.row_ids, self.pairs.column_ids

    @cached_property
    def spanned(self) -> Sequence[Any]:
        """Positives and ``vectors``, with spans for ``tiles.touched`` where a mask needs them."""
        vectors = self.pairs.positives, *self.vectors()
        is_masked = self.pairs.excluded is not None or self.pairs.of_ids is not None
        # rows and columns may have the same ids
        return [*map(cache(_with_spans), vectors)] if is_masked else vectors

    def flags(self) -> dict[str, Any]:
        """The compile-time arguments that choose a kernel's masks."""
        return {"EXCLUDED": self.pairs.excluded is not None, "IDS": self.ids}


def weight_vectors(weights: Weights, arrays: TorchArrays) -> list[Any]:
    """The vectors of both sides, contiguous, as ``precheck`` takes them: rows, then columns, or None without columns.

    A side has N or L, P, weights, targets, and r with L: see ``bars.normalised``.
    """
    vectors: list[Any] = []
    for side in (weights.rows, weights.columns):
        share = None
        if side is not None and side.bars is not None:
            side, share = normalised(arrays, side, "float32")
        vectors += [None] * 5 if side is None else [*side[:4], share]
    return [None if x is None else x.contiguous() for x in vectors]


def step(width: int) -> int:
    """Features that a small kernel takes in one step."""
    return min(1 << (width - 1).bit_length(), 16 if INTERPRETED else 512)


def empty(like: Any, *shape: int, dtype: Any = torch.float32) -> Any:
    """An uninitialised tensor on ``like``'s device."""
    return torch.empty(shape, dtype=dtype, device=like.device)


def empties(like: Any, dtype: Any, *lengths: int) -> Any:
    """Uninitialised vectors on ``like``'s device, at least so long: parts of one allocation, aligned to cache lines."""
    line = _LINE // dtype.itemsize
    sizes = [ceil_div(length, line) * line for length in lengths]
    return torch.empty(sum(sizes), dtype=dtype, device=like.device).split_with_sizes(sizes)
