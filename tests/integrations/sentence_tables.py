"""Sentence encoders whose parameters are the embeddings, and a bound for the difference of two computed losses."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from contrastile.verify.arithmetic import gamma
from contrastile.verify.rounding import UNIT

ROWS, DIMENSION = 7, 8


class Table(nn.Module):
    """A module of sentence-transformers that looks up float64 embeddings of length 1.5."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        vectors = torch.randn(rows, DIMENSION, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
        self.embeddings = nn.Parameter(1.5 * nn.functional.normalize(vectors, dim=1))

    def forward(self, features: dict[str, Tensor]) -> dict[str, Tensor]:
        features["sentence_embedding"] = self.embeddings[features["input_ids"][:, 0]]
        return features

    def get_embedding_dimension(self) -> int:
        return DIMENSION


def columns(count: int, rows: int = ROWS, start: int = 0) -> list[dict[str, Tensor]]:
    """The inputs of a loss: queries, documents and hard negatives, with no sentence twice."""
    first = [start + i * rows for i in range(count)]
    return [{"input_ids": torch.arange(x, x + rows)[:, None], "attention_mask": torch.ones(rows, 1)} for x in first]


def tolerance(pairs: int, scale: float) -> float:
    """A bound for the difference of two float64 computations of a loss, and of its gradients.

    Let X be the largest possible logit. The error of a logit is at most ``gamma(4 d + 6) X``, from two lengths, a
    similarity and its factors. A sum over n columns of exponentials adds a relative error of ``gamma(n + 4)``, and a
    mean over n rows one of ``gamma(n)``. An entry of G is at most 1, so its error is at most ``gamma(4 d + 2 n + 16)
    (2 + 4 X)``. The gradient of a unit feature has n such errors times the scale. The gradient of a feature of length 1
    or more, without its part along the feature, has an error of at most 1 + sqrt(d) times that.

    Args:
        pairs: the number of columns of all directions, plus the number of rows.
        scale: the factor of a similarity, plus the hardness. Similarities are at most 1.5^2.
    """
    largest = scale * 1.5**2
    entry = gamma(UNIT["float64"] * (4 * DIMENSION + 2 * pairs + 16)) * (2 + 4 * largest)
    return float(pairs * scale * 1.5 * entry * (1 + DIMENSION**0.5))
