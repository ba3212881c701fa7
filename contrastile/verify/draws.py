"""What cases are made of: unit vectors, pairs as a model makes them, real embeddings, and ids."""

from __future__ import annotations

from functools import cache

import numpy as np

from contrastile.data.wordnet import load_wordnet_pairs
from contrastile.oracle.arrays import FloatArray, IntArray, float64

Draw = np.random.Generator

FAR: IntArray = np.array(
    [-1, 2**32 - 1, 0, 2**32, -(2**32), -5, 2**32 - 5, 2**53, 2**53 + 1, 2**62, -(2**62), -100, 2**63 - 1, -(2**63)]
)
"""Ids beyond 32 bits or below 0, some alike in their low 32 bits or as a float64; none may mean that there is no id."""

wordnet_pairs = cache(load_wordnet_pairs)
"""The shipped embeddings, read once."""


def unit(x: FloatArray) -> FloatArray:
    return float64(x / np.linalg.norm(x, axis=1, keepdims=True))


def pairs(draw: Draw, b: int, d: int, least: float = 1.0, most: float = 1.0) -> tuple[FloatArray, FloatArray]:
    """Unit pairs like a model's: a column is one part noise and ``least`` to ``most`` parts its row."""
    rows = unit(draw.standard_normal((b, d)))
    return rows, unit(np.linspace(least, most, b)[:, None] * rows + unit(draw.standard_normal((b, d))))


def certain_pairs(draw: Draw, b: int, d: int) -> tuple[FloatArray, FloatArray]:
    """Unit pairs of a trained model: each column is far closer to its row than to any other."""
    rows = unit(draw.standard_normal((b, d)))
    return rows, unit(rows + draw.standard_normal((b, d)) / (2 * np.sqrt(d)))
