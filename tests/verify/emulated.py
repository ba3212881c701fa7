"""A tiled float32 kernel in NumPy, behind the contract, into which one defect at a time can be planted."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from contrastile.backends.arrays import ArrayLibrary
from contrastile.backends.contract import (
    Accuracy,
    Backend,
    Block,
    Options,
    SideStatistics,
    SideWeights,
    Statistics,
    Weights,
)
from contrastile.verify.rounding import UNIT, round_to

F = np.float32
CHUNK = 16  # terms of a product summed in one go
SAFE = 30  # a shared reference this large costs nothing to underflow: exp(-2 * 30) is far above 2^-126

DEFECTS = (
    *("pad-wins-maximum", "pad-counted", "no-shift", "no-rescale", "float16-sum"),
    *("bf16-accumulator", "unnormalised", "small-filtered", "bf16-G", "bf16-sum"),
)
"""What only a kernel of this kind can get wrong: all else is a mutant of ``contrastile mutate``."""


def significand(x: np.ndarray, bits: int) -> np.ndarray:
    """x rounded to nearest with this many significant bits."""
    fraction, exponent = np.frexp(x)
    return np.ldexp(np.rint(fraction * F(2.0**bits)) * F(2.0**-bits), exponent).astype(F)


@dataclass(frozen=True)
class Kernel:
    """Tiles of 16 x 16, products in chains of 16, running maxima; ``defect`` is None or one of DEFECTS."""

    defect: str | None = None
    tf32: bool = False
    gradient: str = "float32"
    shared: bool = False
    tile: tuple[int, int] = (16, 16)

    def backend(self) -> Backend:
        return Backend(
            name="emulated",
            arrays=ArrayLibrary(np),
            dtypes=frozenset({"float16", "float32"}),
            devices=frozenset({"cpu"}),
            accuracy=lambda dtype, device: self.accuracy(),
            lse=self.lse,
            gradients=self.gradients,
            sigmoid=self.sigmoid,
            contract=2,
        )

    def accuracy(self) -> Accuracy:
        quantised = self.gradient != "float32"
        return Accuracy(
            unit=2.0**-24,
            accumulate_unit=2.0**-24,
            input_rounding=2.0**-11 if self.tf32 else 0.0,
            gradient_rounding=UNIT[self.gradient] if quantised else 0.0,
            gradient_underflow=2.0**-25 if self.gradient == "float16" else 0.0,
            shared_reference=self.shared,
            depth=lambda k: min(k, CHUNK) + -(-k // CHUNK),
            tile=lambda k: max(self.tile),
        )

    def dot(self, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        """a b^T, chunks of the inner dimension added one after the other."""
        a, b = a.astype(F), b.astype(F)
        if self.tf32:
            a, b = significand(a, 11), significand(b, 11)
        total = np.zeros((len(a), len(b)), F)
        for k in range(0, a.shape[1], CHUNK):
            total += a[:, k : k + CHUNK] @ b[:, k : k + CHUNK].T
            if self.defect == "bf16-accumulator":
                total = significand(total, 8)
        return total

    def logits(self, block: Block, rows: slice, columns: slice) -> np.ndarray:
        x = self.dot(block.rows[rows], block.columns[columns]) * F(block.scale)
        return x if block.bias is None else x + F(block.bias)

    def tiles(self, block: Block, options: Options) -> Iterator[tuple[slice, slice]]:
        tr, tc = options.tile or self.tile
        m, n = len(block.rows), len(block.columns)
        for i in range(0, m, tr):
            for j in range(0, n, tc):
                yield slice(i, min(i + tr, m)), slice(j, min(j + tc, n))

    def pairs(self, block: Block, rows: slice, columns: slice) -> tuple[np.ndarray, np.ndarray]:
        here = np.arange(columns.start, columns.stop)
        positive = np.zeros((rows.stop - rows.start, len(here)), bool)
        unseen = positive.copy()
        p = block.pairs
        if p.positives is not None:
            positive = p.positives[rows][:, None] == here
        excluded = np.zeros_like(positive)
        if p.excluded is not None:
            excluded = p.excluded[rows][:, None] == here
        if p.row_ids is not None and p.column_ids is not None:
            equal = p.row_ids[rows][:, None] == p.column_ids[columns]
            if p.match == "target":
                positive = positive | (equal & ~excluded)
            else:
                unseen = equal
        positive = positive & ~excluded
        return positive | ~(unseen | excluded), positive

    def lse(self, block: Block, columns: bool, options: Options) -> Statistics:
        sides = [Side(len(x), self) for x in (block.rows, block.columns)]
        for i, j in self.tiles(block, options):
            x = self.logits(block, i, j)
            admitted, positive = self.pairs(block, i, j)
            width = (options.tile or self.tile)[1]
            sides[0].add(i, x, admitted, positive, width - x.shape[1], block)
            sides[1].add(j, x.T, admitted.T, positive.T, 0, block)
        return Statistics(*(SideStatistics(*side.statistics()) for side in sides[: 1 + columns]))

    def gradients(
        self,
        block: Block,
        weights: Weights,
        row_sum: np.ndarray | None,
        column_sum: np.ndarray | None,
        options: Options,
    ) -> None:
        for i, j in self.tiles(block, options):
            x = self.logits(block, i, j)
            admitted, positive = self.pairs(block, i, j)
            if block.pairs.match == "drop":
                x = np.where(positive, weights.rows.positive_lse[i][:, None], x)
            G, most = self.side(x, admitted, positive, weights.rows.part(i), block), np.abs(weights.rows.weight).max()
            if weights.columns is not None:
                G = G + self.side(x.T, admitted.T, positive.T, weights.columns.part(j), block).T
                most = max(most, np.abs(weights.columns.weight).max())
            self.accumulate(block, i, j, G, most, row_sum, column_sum)

    def side(
        self,
        x: np.ndarray,
        admitted: np.ndarray,
        positive: np.ndarray,
        own: SideWeights,
        block: Block,
    ) -> np.ndarray:
        negative, positives, weight, target = (each[:, None] for each in own[:4])
        lse = np.logaddexp(negative, positives)
        if self.shared and reference(block) < SAFE:
            r = reference(block)
            p = np.exp((x - r).astype(F)) * np.exp(r - lse).astype(F)
        else:
            p = np.exp((x - lse).astype(F))
        p = np.where(admitted, p, F(0))
        if self.defect == "unnormalised":
            p = np.where(admitted, np.exp(x - x.max(axis=1, keepdims=True)), F(0)).astype(F)
        if self.defect == "small-filtered":
            p = np.where(p < F(2.0**-6), F(0), p)
        q = np.exp((x - positives).astype(F))
        certain = (q - target.astype(F)) - q * (1 / (1 + np.exp(positives - negative)))
        part = np.where(positive & admitted, certain, p).astype(F)
        return np.where(weight == 0, F(0), weight.astype(F) * part)

    def accumulate(
        self,
        block: Block,
        i: slice,
        j: slice,
        G: np.ndarray,
        largest: np.float32,
        row_sum: np.ndarray | None,
        column_sum: np.ndarray | None,
    ) -> None:
        if self.defect == "bf16-G":
            G = significand(G, 8)
        if self.gradient != "float32" and largest > 0:
            # as a share of the largest weight, so that float16 keeps what its range allows
            G = round_to(G / largest, self.gradient).astype(F) * largest
        row_sum[i] += self.dot(G, block.columns[j].T)
        column_sum[j] += self.dot(G.T, block.rows[i].T)
        if self.defect == "bf16-sum":
            row_sum[i] = significand(row_sum[i], 8)

    def sigmoid(
        self,
        block: Block,
        row_weight: np.ndarray,
        row_sum: np.ndarray | None,
        column_sum: np.ndarray | None,
        options: Options,
    ) -> tuple[np.ndarray, np.ndarray]:
        loss, total = np.zeros(len(block.rows), F), np.zeros(len(block.rows), F)
        for i, j in self.tiles(block, options):
            x = self.logits(block, i, j)
            admitted, positive = self.pairs(block, i, j)
            a = np.where(positive, -x, x)
            e = np.exp(-np.abs(a))
            loss[i] += np.where(admitted, np.maximum(a, 0) + np.log1p(e), F(0)).sum(axis=1)
            slope = np.where(a >= 0, F(1), e) / (1 + e)
            G = np.where(admitted, row_weight[i, None] * np.where(positive, F(-1), F(1)) * slope, F(0))
            total[i] += G.sum(axis=1)
            self.accumulate(block, i, j, G, np.abs(row_weight).max(), row_sum, column_sum)
        return loss, total


def reference(block: Block) -> np.float32:
    """One reference for a whole tile: the largest logit that the norms allow."""
    longest = [np.sqrt((z.astype(F) ** 2).sum(axis=1)).max(initial=0) for z in (block.rows, block.columns)]
    return F(np.abs(block.scale) * longest[0] * longest[1] * F(1 - 2.0**-12))


class Side:
    """The statistics of the rows, or of the columns."""

    def __init__(self, size: int, kernel: Kernel) -> None:
        self.negative, self.positive = Running(size, kernel), Running(size, Kernel())
        self.total = np.zeros(size, F)

    def add(
        self, own: slice, x: np.ndarray, admitted: np.ndarray, positive: np.ndarray, pad: int, block: Block
    ) -> None:
        positive = positive & admitted
        self.total[own] += np.where(positive, x, F(0)).sum(axis=1)
        self.negative.add(own, np.where(admitted & ~positive, x, F(-np.inf)), pad, block)
        self.positive.add(own, np.where(positive, x, F(-np.inf)), 0, block)

    def statistics(self) -> list[np.ndarray]:
        return [self.negative.lse(), self.positive.lse(), self.total.astype(np.float64)]


class Running:
    """A running (maximum, sum) pair for each row, or column."""

    def __init__(self, size: int, kernel: Kernel) -> None:
        self.kernel = kernel
        self.top, self.sum = np.full(size, -np.inf, F), np.zeros(size, F)

    def add(self, own: slice, x: np.ndarray, pad: int, block: Block) -> None:
        defect = self.kernel.defect
        if defect == "pad-counted" and pad > 0:
            x = np.concatenate([x, np.zeros((len(x), pad), F)], axis=1)
        top = x.max(axis=1)
        if defect == "pad-wins-maximum" and pad > 0:
            top = np.maximum(top, F(0))
        old = self.top[own]
        new = np.maximum(old, top)
        if defect == "no-shift":
            new = np.zeros_like(new)
        if self.kernel.shared and reference(block) < SAFE:
            new = np.full_like(new, reference(block))
        # only a finite maximum may be subtracted
        shift = np.where(np.isfinite(new), new, F(0))
        keep = np.where(np.isneginf(old), F(0), np.exp(old - shift))
        if defect in ("no-rescale", "no-shift"):
            keep = np.ones_like(keep)
        self.sum[own] = self.sum[own] * keep + np.exp(x - shift[:, None]).sum(axis=1)
        if defect == "float16-sum":
            self.sum[own] = significand(self.sum[own], 11)
        self.top[own] = new

    def lse(self) -> np.ndarray:
        top = self.top.astype(np.float64)
        return np.where(np.isneginf(top), top, top + np.log(self.sum))
