"""A whole common loss in one tile on the host, in as few operations as it takes.

At 64 pairs each operation of ``statistics``, ``gradients`` or ``sigmoid`` costs as much as its numbers. Where row i's
one positive is column i, ``S_i`` is the sum of a row's negatives and ``D_i`` its positive, both as powers of 2: the
row's loss is ``log1p(S_i / D_i)``, its exponentials become probabilities by ``1 / (S_i + D_i)``, and its positive's
entry of G is ``-S_i / (S_i + D_i)``: nothing cancels where a row is certain. Columns likewise. So it is of the lone
positives of rows against themselves, whose G + G^T has two sides that are one. Numbers for which this would not be
exact are left to the primitives.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

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


def takes(problem: Any, dtype: str, device: str, options: Options) -> bool:
    """See ``contract.Whole``: one tile, which may be kept; a row against itself alone admits nothing."""
    m, least = problem.rows.shape[0], 1 if problem.columns else 2
    return least <= m <= CPU_TILE[0] and options.precision == "ieee" and keeps(m, m, dtype, device, options) > 0


def loss(
    problem: Any, rows: Array, others: Array | None, scale: Array, bias: Array | None
) -> tuple[Array, Sequence[Array]] | None:
    """See ``contract.Whole``."""
    sigmoid, number = problem.kind == "sigmoid", float(scale)
    # BLAS skips the product when alpha is 0, and would lose a NaN in the features
    if not 2.0**-126 <= abs(number * LOG2_E) <= 2.0**126:
        return None
    state = state_of(rows)
    m, q = rows.shape[0], _as(state, rows)
    k = q if not problem.columns or others is None else _as(state, others)
    x, factor = rows.new_empty((m, m), dtype=state), number if sigmoid else number * LOG2_E
    torch.addmm(x, q, k.t(), beta=0, alpha=factor, out=x)
    if sigmoid:
        # a pair costs softplus(-z x); beyond the threshold the logarithm is below half an ulp
        x.add_(bias).diagonal().neg_()
        costs = torch.nn.functional.softplus(x, threshold=40.0 if state == torch.float64 else 20.0)
        return _value(x, costs.sum(1), problem.whole), (x,)
    # NaN lies within no limits
    least, most = torch.aminmax(x)
    safe = _SAFE[0] <= float(least) and float(most) <= _SAFE[1]
    if not problem.columns:
        return _against_themselves(problem, x, others) if safe else None
    named = x.exp2_().diagonal()
    positives = named.clone()
    named.fill_(0.0)
    sums = x.sum(1) if problem.column_weight is None else torch.stack((x.sum(1), x.sum(0)))
    totals = sums + positives
    if not (safe or _within(sums, positives, totals)):
        return None
    return _value(x, (sums / positives).log1p_(), problem.whole), (sums, totals, x)


def _value(x: torch.Tensor, each: torch.Tensor, weight: float) -> torch.Tensor:
    """The sum of losses times a weight, 0-d, in the dtype of the logits x."""
    return x.new_full((), float(each.sum(dtype=torch.float64)) * weight)


def _within(sums: torch.Tensor, positives: torch.Tensor, totals: torch.Tensor) -> bool:
    """Whether everything that is made of these has all its digits."""
    least, most = map(float, torch.aminmax(totals))
    return (
        least >= _LEAST
        and most <= _MOST
        and float(sums.amin()) >= _LEAST_NEGATIVES
        and float(positives.amin()) >= _LEAST_POSITIVE
    )


def _against_themselves(
    problem: Any, x: torch.Tensor, labels: torch.Tensor | None
) -> tuple[Array, Sequence[Array]] | None:
    """Of rows against themselves, whose positives labels name, or else an index; x are their logits in base 2.

    Left are each row's ``u / (S + D)`` and what its positives lose; the exponentials of negatives, and of positives
    that are not alone; which pairs are positive.
    """
    if labels is None:
        matched = torch.zeros_like(x).scatter_(1, problem.positives.unsqueeze(1), 1.0)
        count = logits = problem.row_target
    else:
        matched = (labels.unsqueeze(1) == labels).fill_diagonal_(False).to(x.dtype)
        count, logits = matched.sum(1), (x * matched).sum(1)
    x.exp2_().fill_diagonal_(0.0)
    among = x * matched
    positives, sums = among.sum(1), x.sub_(among).sum(1)
    shares, each = (sums + positives).reciprocal_(), (sums / positives).log1p_()
    loses, total = shares * sums, 1
    if labels is not None:
        counted, several = count.gt(0), count.gt(1)
        total = int(counted.sum())
        if total == 0:
            return None
        # of a lone positive there is no spread; a row without one has no loss
        spread = (positives.double().log2_() - logits / count).clamp_min_(0.0)
        each = torch.where(counted, each.double().addcmul_(spread, several, value=1.0 / LOG2_E), 0.0)
        loses = torch.where(several, count.reciprocal(), loses)
        shares = torch.where(counted, shares, 0.0)
        x.addcmul_(among, several.unsqueeze(1))
    return _value(x, each, problem.whole / total), (torch.stack((shares, loses)).div_(total), x, matched)


def gradients(
    problem: Any,
    rows: Array,
    others: Array | None,
    scale: Array,
    state: Sequence[Array],
    upstream: Array | None,
    wanted: Any,
) -> Sequence[Array | None] | None:
    """See ``contract.Whole``."""
    columns = rows if not problem.columns or others is None else others
    number, weight = float(scale), problem.whole if upstream is None else float(upstream) * problem.whole
    factor = number * weight
    if not _LEAST_FACTOR <= abs(factor) <= _MOST_FACTOR:
        return None
    d_bias = None
    if problem.kind == "sigmoid":
        g = torch.sigmoid(state[0])
        g.diagonal().neg_()
        if wanted.bias:
            d_bias = scale.new_full((), float(g.sum(1).sum(dtype=torch.float64)) * weight)
        g.mul_(factor)
    elif not problem.columns:
        (shares, loses), exponentials, matched = state[0] * factor, *state[1:]
        g = torch.add(shares.unsqueeze(1), shares).mul_(exponentials)
        g.addcmul_(torch.add(loses.unsqueeze(1), loses), matched, value=-1.0)
        # each pair counts twice in the rows' sums
        number *= 2.0
    else:
        sums, totals, exponentials = state
        shares = totals.reciprocal().mul_(factor)
        if sums.ndim == 2:
            row, column = shares.unbind()
            g = torch.add(row.unsqueeze(1), column).mul_(exponentials)
            torch.sum(shares.mul_(sums), 0, out=g.diagonal()).neg_()
        else:
            g = shares.unsqueeze(1) * exponentials
            torch.mul(shares, sums, out=g.diagonal()).neg_()
    d_rows = d_columns = d_scale = None
    if wanted.rows or wanted.scale:
        d_rows = _product(g, columns)
        if wanted.scale:
            d_scale = scale.new_full((), float((rows * d_rows).sum(1).sum(dtype=torch.float64)) / number)
        d_rows = _as(rows.dtype, d_rows) if wanted.rows else None
    if any(wanted.columns):
        d_columns = _as(rows.dtype, _product(g.t(), rows))
    return d_rows, d_scale, d_bias, d_columns


def _product(g: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
    """``g @ features`` in g's dtype: into memory that is given, or a caller's autocast would narrow the factors."""
    out = g.new_empty((g.shape[0], features.shape[1]))
    return torch.mm(g, _as(g.dtype, features), out=out)


def _as(dtype: torch.dtype, x: torch.Tensor) -> torch.Tensor:
    """X in a dtype. To ask for the one that it has costs a call of torch's."""
    return x if x.dtype is dtype else x.to(dtype)
