"""Features that cases are made of: unit vectors, and pairs as a model makes them."""

from __future__ import annotations

import numpy as np

from contrastile.oracle.arrays import FloatArray, float64

Draw = np.random.Generator


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
