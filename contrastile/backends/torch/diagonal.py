"""A whole softmax loss in one tile on the host, where row i's one positive is column i and all weights are equal.

What ``statistics``, ``TorchArrays.loss`` and ``gradients`` compute of it, in as few operations as it takes: at 64 pairs
each of them costs as much as its numbers. With ``S_i`` the sum of a row's negatives and ``D_i`` its positive, both as
powers of 2, the row's loss is ``log1p(S_i / D_i)``, its exponentials become probabilities by ``1 / (S_i + D_i)``, and
its positive's entry of G is ``-S_i / (S_i + D_i)``: nothing cancels where a row is certain. Columns likewise. Numbers
for which this would not be exact are left to the primitives.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from contrastile.backends.contract import Array, Options
from contrastile.backends.torch.kept import keeps
from contrastile.backends.torch.products import LOG2_E, state_of
from contrastile.backends.torch.tiles import CPU_TILE

# the least sum over a row's exponentials: a probability loses at most 2^-100 to those that are flushed to 0
_LEAST = 2.0**-26
# limits of the sum and of the positive beside it, within which their quotients are normal numbers
_MOST, _LEAST_NEGATIVES, _LEAST_POSITIVE = 2.0**60, 2.0**-60, 2.0**-120
# limits of what G is multiplied by before the products: what they flush is below the least normal number times this
_LEAST_FACTOR, _MOST_FACTOR = 2.0**-20, 2.0**60
# logits in base 2 within which no limit can be passed: there is no need to look at the sums
_SAFE = math.log2(_LEAST), math.log2(_MOST / CPU_TILE[0]) - 1


def takes(m: int, dtype: str, device: str, options: Options) -> bool:
    """See ``contract.Diagonal``: one tile, which may be kept."""
    return 0 < m <= CPU_TILE[0] and options.precision == "ieee" and keeps(m, m, dtype, device, options) > 0


def loss(
    rows: Array, columns: Array, scale: Array, weight: float, two_sided: bool
) -> tuple[Array, Sequence[Array]] | None:
    """See ``contract.Diagonal``. Its state: the sums of negatives, those of all, and the negatives' exponentials."""
    m, state = rows.shape[0], state_of(rows)
    factor = float(scale) * LOG2_E
    # BLAS skips the product when alpha is 0, and would lose a NaN in the features
    if not 2.0**-126 <= abs(factor) <= 2.0**126:
        return None
    x = rows.new_empty((m, m), dtype=state)
    torch.addmm(x, _as(state, rows), _as(state, columns).t(), beta=0, alpha=factor, out=x)
    # NaN lies within no limits
    least, most = torch.aminmax(x)
    safe = _SAFE[0] <= float(least) and float(most) <= _SAFE[1]
    named = x.exp2_().diagonal()
    positives = named.clone()
    named.fill_(0.0)
    sums = torch.stack((x.sum(1), x.sum(0))) if two_sided else x.sum(1)
    totals = sums + positives
    if not (safe or _within(sums, positives, totals)):
        return None
    value = float((sums / positives).log1p_().sum(dtype=torch.float64)) * weight
    return rows.new_full((), value, dtype=state), (sums, totals, x)


def _within(sums: torch.Tensor, positives: torch.Tensor, totals: torch.Tensor) -> bool:
    """Whether everything that is made of these has all its digits."""
    least, most = map(float, torch.aminmax(totals))
    return (
        least >= _LEAST
        and most <= _MOST
        and float(sums.amin()) >= _LEAST_NEGATIVES
        and float(positives.amin()) >= _LEAST_POSITIVE
    )


def gradients(
    rows: Array,
    columns: Array,
    scale: Array,
    weight: float,
    state: Sequence[Array],
    upstream: Array | None,
    wants: tuple[bool, bool, bool],
) -> tuple[Array | None, Array | None, Array | None] | None:
    """See ``contract.Diagonal``."""
    sums, totals, exponentials = state
    of_rows, of_columns, of_scale = wants
    number = float(scale)
    factor = number * (weight if upstream is None else float(upstream) * weight)
    if not _LEAST_FACTOR <= abs(factor) <= _MOST_FACTOR:
        return None
    shares = totals.reciprocal().mul_(factor)
    if sums.ndim == 2:
        row, column = shares.unbind()
        g = torch.add(row.unsqueeze(1), column).mul_(exponentials)
        torch.sum(shares.mul_(sums), 0, out=g.diagonal()).neg_()
    else:
        g = shares.unsqueeze(1) * exponentials
        torch.mul(shares, sums, out=g.diagonal()).neg_()
    d_rows = d_columns = d_scale = None
    if of_rows or of_scale:
        d_rows = _product(g, columns)
        if of_scale:
            d_scale = (rows * d_rows).sum(1).sum(dtype=torch.float64).div_(number).to(scale.dtype)
        d_rows = _as(rows.dtype, d_rows) if of_rows else None
    if of_columns:
        d_columns = _as(rows.dtype, _product(g.t(), rows))
    return d_rows, d_columns, d_scale


def _product(g: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
    """``g @ features`` in g's dtype: into memory that is given, or a caller's autocast would narrow the factors."""
    out = g.new_empty((g.shape[0], features.shape[1]))
    return torch.mm(g, _as(g.dtype, features), out=out)


def _as(dtype: torch.dtype, x: torch.Tensor) -> torch.Tensor:
    """X in a dtype. To ask for the one that it has costs a call of torch's."""
    return x if x.dtype is dtype else x.to(dtype)
