"""Log-sum-exps as pairs of float64, (m, 2): a number and its rounding error; see ``contract.SideStatistics``.

Functions take NumPy, CuPy and torch arrays. ``head`` and ``difference`` also take plain log-sum-exps, (m,).
"""

from __future__ import annotations

from typing import Any

Array = Any


def head(x: Array) -> Array:
    """A log-sum-exp, (m,), without its rounding error: see ``contract.SideStatistics``."""
    return x if x.ndim == 1 else x[:, 0]


def difference(x: Array, y: Array) -> Array:
    """``x - y`` of two log-sum-exps, (m,), accurate to all digits where both are pairs."""
    return x - y if x.ndim == 1 else (x - y).sum(-1)


def pair(xp: Any, x: Array, y: Array) -> Array:
    """``x + y`` as (m, 2), a number and its rounding error; no y may be much larger than its x."""
    total = x + y
    error = y - (total - x)
    return xp.stack((total, xp.where(xp.isfinite(error), error, 0.0)), -1)


def merged_pairs(xp: Any, x: Array, y: Array) -> Array:
    """``log(exp x + exp y)`` of two log-sum-exps that are pairs: -inf where both are -inf."""
    # -inf - (-inf) would be NaN
    gap = (xp.where(x == y, 0.0, x - y)).sum(-1)
    larger = xp.where((gap >= 0)[:, None], x, y)
    return pair(xp, larger[:, 0], xp.log1p(xp.exp(-abs(gap))) + larger[:, 1])
