"""Log-sum-exps as pairs of float64, (m, 2): a number and what its rounding leaves; see ``contract.SideStatistics``.

Over NumPy, CuPy and torch. Those that are no pairs, (m,), pass through.
"""

from __future__ import annotations

from typing import Any

Array = Any


def head(x: Array) -> Array:
    """A log-sum-exp, (m,), without what its rounding left: see ``contract.SideStatistics``."""
    return x if x.ndim == 1 else x[:, 0]


def difference(x: Array, y: Array) -> Array:
    """``x - y`` of two log-sum-exps, (m,), to all its digits where both are pairs."""
    return x - y if x.ndim == 1 else (x - y).sum(-1)


def pair(xp: Any, x: Array, y: Array) -> Array:
    """``x + y`` as (m, 2), a number and what its rounding leaves, where no y is much larger than its x."""
    whole = x + y
    rest = y - (whole - x)
    return xp.stack((whole, xp.where(xp.isfinite(rest), rest, 0.0)), -1)


def merged_pairs(xp: Any, x: Array, y: Array) -> Array:
    """``log(exp x + exp y)`` of two log-sum-exps that are pairs: -inf where both are."""
    # -inf less -inf would be NaN
    by = (xp.where(x == y, 0.0, x - y)).sum(-1)
    high = xp.where((by >= 0)[:, None], x, y)
    return pair(xp, high[:, 0], xp.log1p(xp.exp(-abs(by))) + high[:, 1])
