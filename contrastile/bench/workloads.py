"""What is measured: sizes, variants and features."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from contrastile.verify.losses.arguments import Arguments

VARIANTS = ("aligned", "ragged", "ids")

COSINE = 0.3
"""Cosine of a positive pair, about that of a trained image-text model; other pairs are orthogonal on average."""

SHARED = 0.2
"""Share of the pairs of the ``ids`` variant that share their id with another pair."""


@dataclass(frozen=True, slots=True)
class Workload:
    """One size and variant.

    Attributes:
        variant: "aligned"; "ragged", one row and three features less; or "ids", aligned with false negatives.
        batch: nominal number of pairs.
        width: nominal number of features.
    """

    variant: str
    batch: int
    width: int

    @property
    def shape(self) -> tuple[int, int]:
        """(b, d) of the features."""
        if self.variant != "ragged":
            return self.batch, self.width
        return max(1, self.batch - 1), max(1, self.width - 3)

    @property
    def flops(self) -> int:
        """``8 b^2 d``: the four products that a symmetric loss needs when it stores no logits."""
        b, d = self.shape
        return 8 * b * b * d


def features(workload: Workload, scale: float) -> Arguments:
    """The workload's arguments: unit pairs in float32, equal on every call, and for all variants of one shape."""
    b, d = workload.shape
    random = np.random.default_rng([b, d])
    image, noise = pair = tuple[Any, ...](random.standard_normal((b, d), dtype=np.float32) for _ in range(2))
    for x in pair:
        x /= np.linalg.norm(x, axis=1, keepdims=True)
    noise *= np.float32(np.sqrt(1 - COSINE**2))
    noise += np.float32(COSINE) * image
    keywords = {}
    if workload.variant == "ids":
        keywords["ids"] = ids = np.arange(b, dtype=np.int64)
        couples = random.permutation(b)[: 2 * int(b * SHARED / 2)].reshape(-1, 2)
        ids[couples[:, 1]] = ids[couples[:, 0]]
    return Arguments(pair, scale, keywords=keywords)
