# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
"""Positives that an index names: their logits, each column's statistics of these logits, and their entries of G.

Tensor cores truncate as they add, so all dots of a tile are slightly too small. A positive's dot uses the same
instructions, so that this error cancels in differences of logits where features share a direction.
"""

from __future__ import annotations

import triton
import triton.language as tl

from contrastile.backends.triton.kernel import kernel
from contrastile.backends.triton.logits import bias_of
from contrastile.backends.triton.parts import COLUMN_PARTS, PART, ROW_PARTS, SPLIT, TERMS, factor, scatter_parts
from contrastile.backends.triton.precheck import load_features
from contrastile.backends.triton.tiles import GRADIENT_SCALE


@kernel
@triton.jit(do_not_specialize=["m", "n"])
def positive_dots(
    rows, columns, row_stride, column_stride, m, n, positives, excluded, scale, bias, logits, sums, depth,
    HOW: tl.constexpr, PRECISION: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Write ``scale dot + bias`` of each row's positive to logits and sums (m,), float64; -inf and 0 if it has none.

    Only the diagonal of BM x BM dots is used, which is little work beside that of the tiles.
    """
    local = tl.arange(0, BM)
    i = tl.program_id(0) * BM + local
    inside = i < m
    j = tl.load(positives + i, mask=inside, other=-1)
    has_positive = inside & (j >= 0) & (j < n)
    if excluded is not None:
        has_positive = has_positive & (j != tl.load(excluded + i, mask=inside, other=-1))
    acc = tl.zeros((BM, BM), tl.float32)
    for term in tl.static_range(TERMS if HOW == SPLIT else 1):
        for k in range(0, depth, BK):
            q = load_features(rows, i, row_stride, k, has_positive, depth, BK)
            f = load_features(columns, j, column_stride, k, has_positive, depth, BK)
            q = factor(q, HOW, (ROW_PARTS >> (2 * term)) & 3)
            f = factor(f, HOW, (COLUMN_PARTS >> (2 * term)) & 3)
            if HOW == SPLIT:
                q, f = q.to(PART), f.to(PART)
            acc = tl.dot(q, f.T, acc, input_precision=PRECISION)
    dot = tl.sum(tl.where(local[:, None] == local[None, :], acc, 0.0), 1).to(tl.float64)
    x = dot * tl.load(scale).to(tl.float64) + bias_of(bias)
    tl.store(logits + i, tl.where(has_positive, x, float("-inf")), mask=inside)
    tl.store(sums + i, tl.where(has_positive, x, 0.0), mask=inside)


@kernel
@triton.jit(do_not_specialize=["m", "n"])
def sum_positives(
    diagonals, positives, excluded, row_logits, logs, sums, m, n,
    LANES: tl.constexpr, OUTER: tl.constexpr, INNER: tl.constexpr,
):  # fmt: skip
    """Write log-sum-exp and sum of row_logits_i over rows i whose positive is column j to logs and sums (n,), float64.

    Rows are added in their order. Only rows that ``diagonals`` allows are read: as many as columns, if all positives
    lie on one diagonal.
    """
    first_column = tl.program_id(0).to(tl.int64) * LANES
    j = first_column + tl.arange(0, LANES)
    start = tl.minimum(tl.maximum(first_column - tl.load(diagonals + 1), 0), m)
    stop = tl.minimum(tl.maximum(first_column + LANES - tl.load(diagonals), 0), m)
    total, count = tl.zeros((LANES,), tl.float64), tl.zeros((LANES,), tl.int32)
    maximum = tl.full((LANES,), float("-inf"), tl.float64)
    for block in range(start, stop, OUTER):
        if _names_any(positives, block, stop, first_column, LANES, OUTER):
            for row in range(block, tl.minimum(block + OUTER, stop), INNER):
                is_positive, logits = _rows_naming(positives, excluded, row_logits, row, stop, j, INNER)
                total += tl.sum(tl.where(is_positive, logits[:, None], 0.0), 0)
                count += tl.sum(is_positive.to(tl.int32), 0)
                maximum = tl.maximum(maximum, tl.max(tl.where(is_positive, logits[:, None], float("-inf")), 0))
    log = tl.where(count == 0, float("-inf"), total)
    if tl.max(count, 0) > 1:
        shift = tl.where(tl.abs(maximum) < float("inf"), maximum, 0.0)
        exponential_sum = tl.zeros((LANES,), tl.float64)
        for block in range(start, stop, OUTER):
            if _names_any(positives, block, stop, first_column, LANES, OUTER):
                for row in range(block, tl.minimum(block + OUTER, stop), INNER):
                    is_positive, logits = _rows_naming(positives, excluded, row_logits, row, stop, j, INNER)
                    exponential_sum += tl.sum(tl.where(is_positive, tl.exp(logits[:, None] - shift[None, :]), 0.0), 0)
        # the log-sum-exp of one logit is that logit, to the last bit
        log = tl.where(count > 1, shift + tl.log(exponential_sum), log)
    tl.store(logs + j, log, mask=j < n)
    tl.store(sums + j, total, mask=j < n)


@triton.jit
def _names_any(positives, start, stop, first_column, LANES: tl.constexpr, OUTER: tl.constexpr):
    """Whether any of OUTER rows from ``start`` names one of LANES columns from ``first_column``; mostly none does."""
    i = start + tl.arange(0, OUTER)
    named = tl.load(positives + i, mask=i < stop, other=-1)
    return tl.max(((named >= first_column) & (named < first_column + LANES)).to(tl.int32), 0) != 0


@triton.jit
def _rows_naming(positives, excluded, row_logits, start, stop, j, INNER: tl.constexpr):
    """Whether each of INNER rows from ``start`` names each of the columns j, (INNER, columns); and the rows' logits."""
    i = start + tl.arange(0, INNER)
    named = tl.load(positives + i, mask=i < stop, other=-1)
    if excluded is not None:
        named = tl.where(named == tl.load(excluded + i, mask=i < stop, other=-1), -1, named)
    is_positive = (named[:, None] == j[None, :]) & (named >= 0)[:, None]
    return is_positive, tl.load(row_logits + i, mask=i < stop, other=0.0)


@kernel
@triton.jit(do_not_specialize=["row0", "column0", "height", "width", "stride"])
def set_positives(
    g, middle, low, stride, plan, values, positives, excluded, row0, column0, height, width, LANES: tl.constexpr
):  # fmt: skip
    """Overwrite G at the chunk's positives with GRADIENT_SCALE times ``values`` (m,), rounded once.

    g, middle, low: G or its parts, (height, width) with row stride ``stride``.
    """
    local = tl.program_id(0) * LANES + tl.arange(0, LANES)
    i = row0 + local
    inside = local < height
    j = tl.load(positives + i, mask=inside, other=-1)
    inside = inside & (j >= column0) & (j < column0 + width)
    if excluded is not None:
        inside = inside & (j != tl.load(excluded + i, mask=inside, other=-1))
    value = tl.load(values + i, mask=inside, other=0.0) * tl.load(plan + GRADIENT_SCALE).to(tl.float64)
    offsets = local.to(tl.int64) * stride + (j - column0)
    scatter_parts((g, middle, low), offsets, value.to(tl.float32), inside)
