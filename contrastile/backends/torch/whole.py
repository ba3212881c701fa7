"""A whole common loss in one tile on the host, in as few operations as possible.

At 64 pairs the call of each operation costs as much as its arithmetic. Where row i's one positive is column i, ``S_i``
is the sum of a row's negatives and ``D_i`` its positive, both as powers of 2. The row's loss is ``log1p(S_i / D_i)``,
its exponentials times ``1 / (S_i + D_i)`` are probabilities, and its positive's entry of G is ``-S_i / (S_i + D_i)``:
nothing cancels where a row is certain. Columns are likewise, and so are rows against themselves with single positives,
where G + G^T has one side. In a loss of the rows alone, S_i and D_i are probabilities. Where this would not be exact,
the functions return None, and the schedule uses the primitives.
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

# limits of a row's sum of exponentials: then exponentials flushed to 0 cost a probability at most 2^-100
_LEAST, _MOST = 2.0**-26, 2.0**60
# the largest exponent in base 2: high, because negatives are far below, but a row of such terms stays below _MOST
_HIGHEST = math.log2(_MOST / CPU_TILE[0])
# the least sum of negatives, much larger than flushed terms, and limits of a row's loss that keep quotients normal
_LEAST_NEGATIVES, _LEAST_COST, _MOST_COST = 2.0**-100, 2.0**-116, 60.0
# limits of the factor of G before the products: flushed entries are below the least normal number times this
_LEAST_FACTOR, _MOST_FACTOR = 2.0**-20, 2.0**60


def takes(problem: Any, dtype: str, device: str, options: Options) -> bool:
    """See ``contract.Whole``: losses of one tile that may be kept; a single row against itself admits no pair."""
    m, smallest = problem.rows.shape[0], 1 if problem.columns else 2
    return smallest <= m <= CPU_TILE[0] and options.precision == "ieee" and keeps(m, m, dtype, device, options) > 0


def loss(
    problem: Any, rows: Array, others: Array | None, scale: Array, bias: Array | None
) -> tuple[Array, Sequence[Array]] | None:
    """See ``contract.Whole``."""
    scale_value = float(scale)
    # BLAS skips the product when alpha is 0, and would lose a NaN in the features
    if not 2.0**-126 <= abs(scale_value * LOG2_E) <= 2.0**126 or not (bias is None or math.isfinite(bias)):
        return None
    state = state_of(rows)
    m, q = rows.shape[0], _cast(state, rows)
    k = q if not problem.columns or others is None else _cast(state, others)
    x, is_rows_only = rows.new_empty((m, m), dtype=state), problem.columns and problem.column_weight is None
    torch.addmm(x, q, k.t(), beta=0, alpha=scale_value if is_rows_only else scale_value * LOG2_E, out=x)
    if problem.kind == "sigmoid":
        # the loss of a pair is softplus(-z x); beyond the threshold the logarithm is below half an ulp
        x.add_(bias).diagonal().neg_()
        costs = torch.nn.functional.softplus(x, threshold=40.0 if state == torch.float64 else 20.0)
        return x.new_full((), _sum(costs.sum(1)) * problem.whole), (x,)
    if is_rows_only:
        return _rows_loss(x, problem.whole)
    if not problem.columns:
        return _self_loss(problem, x, others)
    diagonal = _lowered(x).exp2_().diagonal()
    positives = diagonal.clone()
    diagonal.fill_(0.0)
    sums = torch.stack((x.sum(1), x.sum(0)))
    totals = sums + positives
    losses = (sums / positives).log1p_().view(-1).tolist()
    return (x.new_full((), float(sum(losses)) * problem.whole), (sums, totals, x)) if _exact(totals, losses) else None


def _rows_loss(x: torch.Tensor, weight: float) -> tuple[Array, Sequence[Array]] | None:
    """The loss of the rows alone, from their logits x. The state is G and the rows' sums of G x, without weights."""
    g = torch.softmax(x, 1)
    diagonal = g.diagonal()
    positives = diagonal.clone()
    diagonal.zero_()
    sums = g.sum(1)
    losses = (sums / positives).log1p_().tolist()
    torch.neg(sums, out=diagonal)
    is_exact = _exact(None, losses)
    return (x.new_full((), float(sum(losses)) * weight), (g, x.mul_(g).sum(1))) if is_exact else None


def _lowered(x: torch.Tensor) -> torch.Tensor:
    """Subtract from logits in base 2 the excess of the largest: it cancels in every quotient. NaN stays NaN."""
    excess = float(x.max()) - _HIGHEST
    return x.sub_(excess) if excess > 0.0 else x


def _exact(totals: torch.Tensor | None, losses: list[float]) -> bool:
    """Whether the rows' ``S + D``, None for probabilities, and ``log1p(S / D)`` are accurate, and none is NaN."""
    smallest, largest = (1.0, 1.0) if totals is None else map(float, torch.aminmax(totals))
    least_loss = max(_LEAST_COST, _LEAST_NEGATIVES / max(smallest, _LEAST))
    is_within = smallest >= _LEAST and largest <= _MOST and least_loss <= min(losses) and max(losses) <= _MOST_COST
    return is_within and not math.isnan(sum(losses))


def _sum(x: torch.Tensor) -> float:
    """The sum of a vector in float64, without another kernel."""
    return float(sum(x.tolist()))


def _self_loss(problem: Any, x: torch.Tensor, labels: torch.Tensor | None) -> tuple[Array, Sequence[Array]] | None:
    """The loss of rows against themselves, whose positives labels name, or else an index; x: logits in base 2.

    The state is each row's ``u / (S + D)`` and the number that G of its positives subtracts; the exponentials of
    negatives, and of positives that are not single; and which pairs are positive.
    """
    # a row against itself does not count
    x = _lowered(x.fill_diagonal_(0.0))
    if labels is None:
        matched = torch.zeros_like(x).scatter_(1, problem.positives.unsqueeze(1), 1.0)
        counts = positive_logits = problem.row_target
    else:
        matched = (labels.unsqueeze(1) == labels).fill_diagonal_(False).to(x.dtype)
        counts, positive_logits = matched.sum(1), (x * matched).sum(1)
    x.exp2_().fill_diagonal_(0.0)
    positive_exponentials = x * matched
    positives, sums = positive_exponentials.sum(1), x.sub_(positive_exponentials).sum(1)
    totals, losses = sums + positives, (sums / positives).log1p_()
    has_positive, has_several = counts.gt(0), counts.gt(1)
    # with labels, the loss is a mean over rows with positives
    total = 1 if labels is None else int(has_positive.sum())
    if total == 0 or not _exact(totals, losses[has_positive].tolist()):
        return None
    shares = totals.reciprocal_()
    lost = shares * sums
    if labels is not None:
        # a single positive has no spread; a row without a positive has no loss
        spread = (positives.double().log2_() - positive_logits / counts).clamp_min_(0.0)
        losses = torch.where(has_positive, losses.double().addcmul_(spread, has_several, value=1.0 / LOG2_E), 0.0)
        lost = torch.where(has_several, counts.reciprocal(), lost)
        shares = torch.where(has_positive, shares, 0.0)
        x.addcmul_(positive_exponentials, has_several.unsqueeze(1))
    return x.new_full((), _sum(losses) * problem.whole / total), (torch.stack((shares, lost)).div_(total), x, matched)


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
    scale_value, weight = float(scale), problem.whole if upstream is None else float(upstream) * problem.whole
    factor = scale_value * weight
    if not _LEAST_FACTOR <= abs(factor) <= _MOST_FACTOR:
        return None
    d_bias = d_rows = d_columns = scale_slope = None
    if problem.kind == "sigmoid":
        g = torch.sigmoid(state[0])
        g.diagonal().neg_()
        if wanted.bias:
            d_bias = scale.new_full((), _sum(g.sum(1)) * weight)
    elif not problem.columns:
        (shares, lost), exponentials, matched = state
        g = torch.add(shares.unsqueeze(1), shares).mul_(exponentials)
        g.addcmul_(torch.add(lost.unsqueeze(1), lost), matched, value=-1.0)
        # each pair counts twice in the rows' sums
        scale_value *= 2.0
    elif problem.column_weight is None:
        g, row_slopes = state
        scale_slope = _sum(row_slopes) * weight
    else:
        sums, totals, exponentials = state
        shares = totals.reciprocal()
        row, column = shares.unbind()
        g = torch.add(row.unsqueeze(1), column).mul_(exponentials)
        torch.sum(shares.mul_(sums), 0, out=g.diagonal()).neg_()
    spare = torch.empty_like(rows, dtype=g.dtype)
    if wanted.rows or (wanted.scale and scale_slope is None):
        d_rows = _multiply(factor, g, columns, torch.empty_like(rows, dtype=g.dtype))
        if wanted.scale and scale_slope is None:
            scale_slope = _sum(torch.mul(rows, d_rows, out=spare).sum(1))
        d_rows = _cast(rows.dtype, d_rows) if wanted.rows else None
    if any(wanted.columns):
        d_columns = _cast(rows.dtype, _multiply(factor, g.t(), rows, spare))
    d_scale = None if scale_slope is None or not wanted.scale else scale.new_full((), scale_slope / scale_value)
    return d_rows, d_scale, d_bias, d_columns


def _multiply(factor: float, g: torch.Tensor, features: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """``factor g @ features`` into ``out``: without ``out``, a caller's autocast would narrow the product's factors."""
    return torch.addmm(out, g, _cast(g.dtype, features), beta=0, alpha=factor, out=out)


def _cast(dtype: torch.dtype, x: torch.Tensor) -> torch.Tensor:
    """X in a dtype: faster than ``x.to`` where x has that dtype."""
    return x if x.dtype is dtype else x.to(dtype)
