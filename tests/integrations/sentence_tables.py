"""Sentence encoders whose parameters are the embeddings themselves, and how far two losses of them may be apart."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from contrastile.verify.arithmetic import gamma
from contrastile.verify.rounding import UNIT

ROWS, DIMENSION = 7, 8


class Table(nn.Module):
    """A module of sentence-transformers that looks an embedding up, of length 1.5; float64."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        drawn = torch.randn(rows, DIMENSION, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
        self.embeddings = nn.Parameter(1.5 * nn.functional.normalize(drawn, dim=1))

    def forward(self, features: dict[str, Tensor]) -> dict[str, Tensor]:
        features["sentence_embedding"] = self.embeddings[features["input_ids"][:, 0]]
        return features

    def get_embedding_dimension(self) -> int:
        return DIMENSION


def columns(many: int, rows: int = ROWS, start: int = 0) -> list[dict[str, Tensor]]:
    """Inputs of a loss: of queries, documents and hard negatives, each a sentence of its own."""
    first = [start + i * rows for i in range(many)]
    return [{"input_ids": torch.arange(x, x + rows)[:, None], "attention_mask": torch.ones(rows, 1)} for x in first]


def allowed(pairs: int, scale: float) -> float:
    """How far two computations of a loss or of its gradients may be apart, both in float64.

    With X the largest possible logit, a logit is off by at most ``gamma(4 d + 6) X`` (two lengths, a similarity, its
    factors), a sum over n columns of exponentials of it by ``gamma(n + 4)`` besides, relatively, and a mean over as
    many rows by ``gamma(n)``: every entry of G by ``gamma(4 d + 2 n + 16) (2 + 4 X)`` of its largest value, 1. A
    gradient by a unit feature is off by that for each of n columns times the scale; one by a feature of length 1 or
    more, of which the part along the feature is taken away, by at most 1 + sqrt(d) times that.

    Args:
        pairs: columns of all directions, and rows.
        scale: what multiplies a similarity, hardness added. Similarities are at most 1.5^2.
    """
    largest = scale * 1.5**2
    entry = gamma(UNIT["float64"] * (4 * DIMENSION + 2 * pairs + 16)) * (2 + 4 * largest)
    return float(pairs * scale * 1.5 * entry * (1 + DIMENSION**0.5))
