# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
"""The positives that are given by index: their logits, their sums by column, their entries of G.

A trained model's loss is the difference of a log-sum-exp and its positive's logit, and the positive's entry of G that
of a probability near 1 and a target. Tensor cores truncate as they add, so all of a tile's dots are short by a little;
a positive's dot is therefore taken by the same instructions in the same order, and what is short cancels.
"""

from __future__ import annotations

import triton
import triton.language as tl

from contrastile.backends.triton.kernel import kernel
from contrastile.backends.triton.parts import COLUMN_PARTS, PART, ROW_PARTS, SPLIT, TERMS, factor, scatter_parts
from contrastile.backends.triton.survey import load_features
from contrastile.backends.triton.tiles import FACTOR


@kernel
@triton.jit(do_not_specialize=["m", "n"])
def positive_dots(
    rows,
    columns,
    row_stride,
    column_stride,
    m,
    n,
    positives,
    excluded,
    scale,
    bias,
    row_positive,
    column_positive,
    depth,
    HOW: tl.constexpr,
    PRECISION: tl.constexpr,
    BM: tl.constexpr,
    BK: tl.constexpr,
):
    """``scale dot + bias`` of each row's positive to row_positive (m,), 0 where it has none; scale None: the dot.

    column_positive: (n,) or None; right where row i's positive is column i for every i, else ``sum_positives`` puts it
    right. Of BM x BM dots the diagonal is wanted: little work beside the tiles'.
    """
    local = tl.arange(0, BM)
    i = tl.program_id(0) * BM + local
    inside = i < m
    j = tl.load(positives + i, mask=inside, other=-1)
    named = inside & (j >= 0) & (j < n)
    if excluded is not None:
        named = named & (j != tl.load(excluded + i, mask=inside, other=-1))
    acc = tl.zeros((BM, BM), tl.float32)
    for term in tl.static_range(TERMS if HOW == SPLIT else 1):
        for k in range(0, depth, BK):
            q = load_features(rows, i, row_stride, k, named, depth, BK)
            f = load_features(columns, j, column_stride, k, named, depth, BK)
            q = factor(q, HOW, (ROW_PARTS >> (2 * term)) & 3)
            f = factor(f, HOW, (COLUMN_PARTS >> (2 * term)) & 3)
            if HOW == SPLIT:
                q, f = q.to(PART), f.to(PART)
            acc = tl.dot(q, f.T, acc, input_precision=PRECISION)
    x = tl.sum(tl.where(local[:, None] == local[None, :], acc, 0.0), 1)
    if scale is not None:
        # once rounded, as the log-sum-exp is
        wide = x.to(tl.float64) * tl.load(scale).to(tl.float64)
        if bias is not None:
            wide = wide + tl.load(bias).to(tl.float64)
        x = wide.to(tl.float32)
    x = tl.where(named, x, 0.0)
    tl.store(row_positive + i, x, mask=inside)
    if column_positive is not None:
        tl.store(column_positive + i, x, mask=inside & (i < n))


@kernel
@triton.jit(do_not_specialize=["m", "n"])
def sum_positives(
    status,
    positives,
    excluded,
    logits,
    out,
    m,
    n,
    LANES: tl.constexpr,
    OUTER: tl.constexpr,
    INNER: tl.constexpr,
):
    """``out_j = sum of logits_i over rows i whose positive is column j``, in the order of the rows.

    Returns at once where ``measure`` has done it already: where row i's positive is column i.
    """
    first = tl.program_id(0) * LANES
    j = first + tl.arange(0, LANES)
    total = tl.zeros((LANES,), tl.float32)
    stray = tl.load(status + 1) != 0
    for block in range(0, tl.where(stray, m, 0), OUTER):
        i = block + tl.arange(0, OUTER)
        named = tl.load(positives + i, mask=i < m, other=-1)
        # most blocks of rows have no positive among these columns
        if tl.max(((named >= first) & (named < first + LANES)).to(tl.int32), 0) != 0:
            for start in range(block, block + OUTER, INNER):
                k = start + tl.arange(0, INNER)
                at = tl.load(positives + k, mask=k < m, other=-1)
                if excluded is not None:
                    at = tl.where(at == tl.load(excluded + k, mask=k < m, other=-1), -1, at)
                value = tl.load(logits + k, mask=k < m, other=0.0)
                total += tl.sum(tl.where(at[:, None] == j.to(tl.int64)[None, :], value[:, None], 0.0), 0)
    tl.store(out + j, total, mask=(j < n) & stray)


@kernel
@triton.jit(do_not_specialize=["m", "n", "row0", "column0", "height", "width", "stride"])
def set_positives(
    g,
    middle,
    low,
    stride,
    plan,
    dots,
    scale,
    bias,
    positives,
    excluded,
    row_lse,
    row_weight,
    row_target,
    column_lse,
    column_weight,
    column_target,
    m,
    n,
    row0,
    column0,
    height,
    width,
    LANES: tl.constexpr,
):
    """Write FACTOR times G at the chunk's positives: ``u_i (p_ij - t_i) + v_j (p'_ij - t'_j)``, rounded once.

    g, middle, low: (height, width) with this row stride, G or its parts; dots: (m,) of the positives.
    """
    local = tl.program_id(0) * LANES + tl.arange(0, LANES)
    i = row0 + local
    inside = local < height
    j = tl.load(positives + i, mask=inside, other=-1)
    inside = inside & (j >= column0) & (j < column0 + width)
    if excluded is not None:
        inside = inside & (j != tl.load(excluded + i, mask=inside, other=-1))
    x = tl.load(dots + i, mask=inside, other=0.0).to(tl.float64) * tl.load(scale).to(tl.float64)
    # rounded as the forward rounds it: equal to L where nothing else has a probability
    if bias is not None:
        x = x + tl.load(bias).to(tl.float64)
    x = x.to(tl.float32)
    value = _excess(x, row_lse, row_weight, row_target, i, inside)
    if column_lse is not None:
        value += _excess(x, column_lse, column_weight, column_target, j, inside)
    at = local.to(tl.int64) * stride + (j - column0)
    scatter_parts(g, middle, low, at, (value * tl.load(plan + FACTOR).to(tl.float64)).to(tl.float32), inside)


@triton.jit
def _excess(x, lse, weight, target, i, inside):
    """``w (exp(x - L) - t)`` in float64, and 0 where the weight is 0."""
    log = tl.load(lse + i, mask=inside, other=0.0).to(tl.float64)
    w = tl.load(weight + i, mask=inside, other=0.0).to(tl.float64)
    t = tl.load(target + i, mask=inside, other=0.0).to(tl.float64)
    return tl.where(w != 0.0, w * (tl.exp(x.to(tl.float64) - log) - t), 0.0)
