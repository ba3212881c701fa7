# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
"""The second products of the backward: ``out += G K`` and ``out += G^T Q``, accumulated in float32.

On a GPU cuBLAS multiplies float16 and bfloat16, also parts of float32, because it is the fastest for a plain product.
The kernel here computes all others: the product of the first of three parts, whose sum must be as exact as in float32;
float32, which cuBLAS rounds to tf32 if a global switch says so; and all products on the CPU.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl

from contrastile.backends.triton.configs import INTERPRETED, Config
from contrastile.backends.triton.kernel import kernel
from contrastile.backends.triton.launch import descriptor, grid
from contrastile.backends.triton.parts import PRODUCTS, add
from contrastile.backends.triton.tiles import place


@kernel
@triton.jit(do_not_specialize=["m", "n", "terms", "out_stride"])
def add_product(
    g, features, out, out_stride, m, n, terms, TRANSPOSED: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr, GROUP: tl.constexpr, PRECISION: tl.constexpr, FRESH: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """``out (m, n) += G F``, or ``= G F`` if FRESH, with F (terms, n), G (m, terms) or its transpose (terms, m).

    EXACT: ``parts.add`` adds each step's products to the sum of the steps before.
    """
    row_tiles, column_tiles = tl.cdiv(m, BM), tl.cdiv(n, BN)
    for tile in tl.range(tl.program_id(0), row_tiles * column_tiles, tl.num_programs(0)):
        r, c = place(tile, row_tiles, column_tiles, GROUP)
        acc = tl.zeros((BM, BN), tl.float32)
        for k in range(0, terms, BK):
            left = g.load([k, r * BM]).T if TRANSPOSED else g.load([r * BM, k])
            right = features.load([k, c * BN])
            if EXACT:
                acc = add(acc, tl.dot(left, right, input_precision=PRECISION))
            else:
                acc = tl.dot(left, right, acc, input_precision=PRECISION)
        i, j = r * BM + tl.arange(0, BM), c * BN + tl.arange(0, BN)
        pointers = out + i.to(tl.int64)[:, None] * out_stride + j[None, :]
        inside = (i < m)[:, None] & (j < n)[None, :]
        if not FRESH:
            acc += tl.load(pointers, mask=inside, other=0.0)
        tl.store(pointers, acc, mask=inside)


@cache
def _has_out_dtype() -> bool:
    """Whether torch.addmm takes an out_dtype (torch 2.8 on)."""
    return any("dtype" in name for name in torch.ops.aten.addmm.overloads())


def accumulate(
    out: Any, g: list[Any], features: list[Any], config: Config, *, transposed: bool = False, fresh: bool = False
) -> None:
    """``out += G F``, or ``G^T F`` with ``transposed``; out is float32.

    Args:
        out: (m, d) float32, unit stride along d.
        g: (m, r), or (r, m) with ``transposed``, or its parts; rows 16-byte aligned.
        features: (r, d), or as many parts; rows 16-byte aligned.
        config: tile of the kernel, where it is used.
        transposed: whether g enters transposed.
        fresh: whether out is overwritten, whatever it holds.
    """
    for index, (g_part, feature_part) in enumerate(PRODUCTS[len(g)]):
        # the product of the first of three parts is all but 2^-8 of the whole
        exact = len(g) == 3 and g_part == feature_part == 0
        _accumulate(out, g[g_part], features[feature_part], config, transposed, fresh and index == 0, exact)


def _accumulate(out: Any, g: Any, features: Any, config: Config, transposed: bool, fresh: bool, exact: bool) -> None:
    if not INTERPRETED and g.dtype != torch.float32 and not exact and _has_out_dtype():
        matrix = g.T if transposed else g
        torch.addmm(out, matrix, features, out_dtype=torch.float32, beta=0 if fresh else 1, out=out)
        return
    m, n, terms = out.shape[0], out.shape[1], features.shape[0]
    bm, bn, bk = config.bm, config.bn, config.bk
    factors = descriptor(g, (bk, bm) if transposed else (bm, bk)), descriptor(features, (bk, bn))
    flags = {"TRANSPOSED": transposed, "FRESH": fresh, "EXACT": exact}
    add_product[grid(m, n, config, out)](*factors, out, out.stride(0), m, n, terms, **flags, **config.named)
