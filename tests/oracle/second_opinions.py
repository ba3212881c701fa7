"""The same losses written again, pair by pair, with nothing in common with the oracle but the definition.

Loops over the definition, in mpmath at 50 digits: (loss, d_rows, d_columns, d_scale, d_bias).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import mpmath
import numpy as np

if TYPE_CHECKING:
    from oracle_problems import Problem

    from contrastile.oracle.pairs import Pairs

DIGITS = 50


def pair_kind(pairs: Pairs, i: int, j: int) -> tuple[bool, bool]:
    """(positive, admitted) for one pair, by the words of the definition."""
    same_id = pairs.row_ids is not None and pairs.row_ids[i] == pairs.column_ids[j]
    if pairs.excluded is not None and pairs.excluded[i] == j:
        return False, False
    if pairs.match == "target":
        return bool(same_id), True
    if pairs.positives is not None and pairs.positives[i] == j:
        return True, True
    return False, not same_id


def scale_of(p: Problem, i: int) -> Any:
    return p.scale[i] if np.ndim(p.scale) else p.scale


def written_out(p: Problem, number: Any, exp: Any, log: Any, b: float | None = None) -> tuple[Any, ...]:
    """The general loss, or the sigmoid loss where b is given, entry by entry in any arithmetic."""
    m, n, d = *p.x.shape, p.q.shape[1]
    q, k = ([[number(float(t)) for t in row] for row in rows] for rows in (p.q, p.k))
    dots = [[sum((q[i][c] * k[j][c] for c in range(d)), number(0)) for j in range(n)] for i in range(m)]
    x = [[number(float(scale_of(p, i))) * t + number(p.bias) for t in dots[i]] for i in range(m)]
    kinds = [[pair_kind(p.pairs, i, j) for j in range(n)] for i in range(m)]
    G = [[number(0)] * n for _ in range(m)]
    total = number(0)
    if b is None:
        lines = [(number(float(p.u[i])), [(i, j) for j in range(n)]) for i in range(m)]
        lines += [(number(float(p.v[j])), [(i, j) for i in range(m)]) for j in range(n)]
        for w, cells in lines:
            if w == 0:
                continue
            Z = sum((exp(x[i][j]) for i, j in cells if kinds[i][j][1]), number(0))
            targets = [(i, j) for i, j in cells if kinds[i][j][0]]
            total += w * log(Z) - w * sum((x[i][j] for i, j in targets), number(0)) / max(len(targets), 1)
            for i, j in cells:
                positive, admitted = kinds[i][j]
                G[i][j] += w * (exp(x[i][j]) / Z if admitted else 0)
                G[i][j] -= w / len(targets) if positive else 0
    else:
        for i in range(m):
            for j in range(n):
                positive, admitted = kinds[i][j]
                z = 1 if positive else -1
                if admitted:
                    total += log(1 + exp(-z * x[i][j])) / b
                    G[i][j] = -z / (1 + exp(z * x[i][j])) / b
    s = [number(float(scale_of(p, i))) for i in range(m)]
    d_rows = [[s[i] * sum((G[i][j] * k[j][c] for j in range(n)), number(0)) for c in range(d)] for i in range(m)]
    d_columns = [[sum((s[i] * G[i][j] * q[i][c] for i in range(m)), number(0)) for c in range(d)] for j in range(n)]
    d_scale = [sum((G[i][j] * dots[i][j] for j in range(n)), number(0)) for i in range(m)]
    d_bias = sum((g for row in G for g in row), number(0))
    return total, d_rows, d_columns, d_scale if np.ndim(p.scale) else sum(d_scale, number(0)), d_bias


def as_arrays(p: Problem, found: tuple[Any, ...]) -> list[Any]:
    """The five results in float64 and in their shapes, empty ones too."""
    shapes = [(), p.q.shape, p.k.shape, np.shape(p.scale), ()]
    return [
        np.array(mpmath.matrix(t).tolist() if isinstance(t, mpmath.matrix) else t, dtype=np.float64).reshape(shape)
        for t, shape in zip(found, shapes, strict=True)
    ]


def in_mpmath(p: Problem, b: float | None = None) -> list[Any]:
    with mpmath.workdps(DIGITS):
        return as_arrays(p, written_out(p, mpmath.mpf, mpmath.exp, mpmath.log, b))
