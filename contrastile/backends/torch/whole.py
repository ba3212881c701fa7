"""A whole common loss in one tile on the host, in as few operations as it takes.

At 64 pairs each operation of ``statistics``, ``gradients`` or ``sigmoid`` costs as much as its numbers. Where row i's
one positive is column i, ``S_i`` is the sum of a row's negatives and ``D_i`` its positive, both as powers of 2: the
row's loss is ``log1p(S_i / D_i)``, its exponentials become probabilities by ``1 / (S_i + D_i)``, and its positive's
entry of G is ``-S_i / (S_i + D_i)``: nothing cancels where a row is certain. Columns likewise. So it is of the lone
positives of rows against themselves, whose G + G^T has two sides that are one. Of a loss of the rows alone, S_i and D_i
are probabilities. Numbers for which this would not be exact are left to the primitives.
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

# limits of the sum of a row's exponentials: a probability loses at most 2^-100 to those that are flushed to 0
_LEAST, _MOST = 2.0**-26, 2.0**60
# the largest exponent in base 2: as high as a tile of them has a sum below the limit, for negatives are far below
_HIGHEST = math.log2(_MOST / CPU_TILE[0])
# the least sum of negatives, of which those flushed to 0 are little, and limits of a row's loss: quotients are normal
_LEAST_NEGATIVES, _LEAST_COST, _MOST_COST = 2.0**-100, 2.0**-116, 60.0
# limits of what G is multiplied by before the products: what they flush is below the least normal number times this
_LEAST_FACTOR, _MOST_FACTOR = 2.0**-20, 2.0**60


def takes(problem: Any, dtype: str, device: str, options: Options) -> bool:
    """See ``contract.Whole``: one tile, which may be kept; a row against itself alone admits nothing."""
    m, least = problem.rows.shape[0], 1 if problem.columns else 2
    return least <= m <= CPU_TILE[0] and options.precision == "ieee" and keeps(m, m, dtype, device, options) > 0


def loss(
    problem: Any, rows: Array, others: Array | None, scale: Array, bias: Array | None
) -> tuple[Array, Sequence[Array]] | None:
    """See ``contract.Whole``."""
    number = float(scale)
    # BLAS skips the product when alpha is 0, and would lose a NaN in the features
    if not 2.0**-126 <= abs(number * LOG2_E) <= 2.0**126 or not (bias is None or math.isfinite(bias)):
        return None
    state = state_of(rows)
    m, q = rows.shape[0], _as(state, rows)
    k = q if not problem.columns or others is None else _as(state, others)
    x, natural = rows.new_empty((m, m), dtype=state), problem.columns and problem.column_weight is None
    torch.addmm(x, q, k.t(), beta=0, alpha=number if natural else number * LOG2_E, out=x)
    if problem.kind == "sigmoid":
        # a pair costs softplus(-z x); beyond the threshold the logarithm is below half an ulp
        x.add_(bias).diagonal().neg_()
        costs = torch.nn.functional.softplus(x, threshold=40.0 if state == torch.float64 else 20.0)
        return x.new_full((), _sum(costs.sum(1)) * problem.whole), (x,)
    if natural:
        return _of_rows(x, problem.whole)
    if not problem.columns:
        return _against_themselves(problem, x, others)
    named = _below(x).exp2_().diagonal()
    positives = named.clone()
    named.fill_(0.0)
    sums = torch.stack((x.sum(1), x.sum(0)))
    totals = sums + positives
    each = (sums / positives).log1p_().view(-1).tolist()
    return (x.new_full((), float(sum(each)) * problem.whole), (sums, totals, x)) if _exact(totals, each) else None


def _of_rows(x: torch.Tensor, weight: float) -> tuple[Array, Sequence[Array]] | None:
    """Of the rows alone, by their logits x. Left are G, and the rows' sums of G times x: without weights."""
    g = torch.softmax(x, 1)
    named = g.diagonal()
    positives = named.clone()
    named.zero_()
    sums = g.sum(1)
    each = (sums / positives).log1p_().tolist()
    torch.neg(sums, out=named)
    exact = _exact(None, each)
    return (x.new_full((), float(sum(each)) * weight), (g, x.mul_(g).sum(1))) if exact else None


def _below(x: torch.Tensor) -> torch.Tensor:
    """Logits in base 2 less what the largest is too large by, which cancels in every quotient; NaN stays."""
    above = float(x.max()) - _HIGHEST
    return x.sub_(above) if above > 0.0 else x


def _exact(totals: torch.Tensor | None, each: list[float]) -> bool:
    """Whether rows' ``S + D``, None for probabilities, and their ``log1p(S / D)`` have all digits, and none is NaN."""
    least, most = (1.0, 1.0) if totals is None else map(float, torch.aminmax(totals))
    lowest = max(_LEAST_COST, _LEAST_NEGATIVES / max(least, _LEAST))
    within = least >= _LEAST and most <= _MOST and lowest <= min(each) and max(each) <= _MOST_COST
    return within and not math.isnan(sum(each))


def _sum(x: torch.Tensor) -> float:
    """The sum of a vector in float64, without another kernel."""
    return float(sum(x.tolist()))


def _against_themselves(
    problem: Any, x: torch.Tensor, labels: torch.Tensor | None
) -> tuple[Array, Sequence[Array]] | None:
    """Of rows against themselves, whose positives labels name, or else an index; x are their logits in base 2.

    Left are each row's ``u / (S + D)`` and what its positives lose; the exponentials of negatives, and of positives
    that are not alone; which pairs are positive.
    """
    # a row against itself counts for nothing
    x = _below(x.fill_diagonal_(0.0))
    if labels is None:
        matched = torch.zeros_like(x).scatter_(1, problem.positives.unsqueeze(1), 1.0)
        count = logits = problem.row_target
    else:
        matched = (labels.unsqueeze(1) == labels).fill_diagonal_(False).to(x.dtype)
        count, logits = matched.sum(1), (x * matched).sum(1)
    x.exp2_().fill_diagonal_(0.0)
    among = x * matched
    positives, sums = among.sum(1), x.sub_(among).sum(1)
    totals, each = sums + positives, (sums / positives).log1p_()
    counted, several = count.gt(0), count.gt(1)
    # labels: their counts are not targets
    total = 1 if labels is None else int(counted.sum())
    if total == 0 or not _exact(totals, each[counted].tolist()):
        return None
    shares = totals.reciprocal_()
    loses = shares * sums
    if labels is not None:
        # of a lone positive there is no spread; a row without one has no loss
        spread = (positives.double().log2_() - logits / count).clamp_min_(0.0)
        each = torch.where(counted, each.double().addcmul_(spread, several, value=1.0 / LOG2_E), 0.0)
        loses = torch.where(several, count.reciprocal(), loses)
        shares = torch.where(counted, shares, 0.0)
        x.addcmul_(among, several.unsqueeze(1))
    return x.new_full((), _sum(each) * problem.whole / total), (torch.stack((shares, loses)).div_(total), x, matched)


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
    d_bias = d_rows = d_columns = slope = None
    if problem.kind == "sigmoid":
        g = torch.sigmoid(state[0])
        g.diagonal().neg_()
        if wanted.bias:
            d_bias = scale.new_full((), _sum(g.sum(1)) * weight)
    elif not problem.columns:
        (shares, loses), exponentials, matched = state
        g = torch.add(shares.unsqueeze(1), shares).mul_(exponentials)
        g.addcmul_(torch.add(loses.unsqueeze(1), loses), matched, value=-1.0)
        # each pair counts twice in the rows' sums
        number *= 2.0
    elif problem.column_weight is None:
        g, slopes = state
        slope = _sum(slopes) * weight
    else:
        sums, totals, exponentials = state
        shares = totals.reciprocal()
        row, column = shares.unbind()
        g = torch.add(row.unsqueeze(1), column).mul_(exponentials)
        torch.sum(shares.mul_(sums), 0, out=g.diagonal()).neg_()
    spare = torch.empty_like(rows, dtype=g.dtype)
    if wanted.rows or (wanted.scale and slope is None):
        d_rows = _product(factor, g, columns, torch.empty_like(rows, dtype=g.dtype))
        if wanted.scale and slope is None:
            slope = _sum(torch.mul(rows, d_rows, out=spare).sum(1))
        d_rows = _as(rows.dtype, d_rows) if wanted.rows else None
    if any(wanted.columns):
        d_columns = _as(rows.dtype, _product(factor, g.t(), rows, spare))
    d_scale = None if slope is None or not wanted.scale else scale.new_full((), slope / number)
    return d_rows, d_scale, d_bias, d_columns


def _product(factor: float, g: torch.Tensor, features: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """``factor g @ features`` into ``out``: a caller's autocast would narrow the factors of a product without one."""
    return torch.addmm(out, g, _as(g.dtype, features), beta=0, alpha=factor, out=out)


def _as(dtype: torch.dtype, x: torch.Tensor) -> torch.Tensor:
    """X in a dtype. To ask for the one that it has costs a call of torch's."""
    return x if x.dtype is dtype else x.to(dtype)
