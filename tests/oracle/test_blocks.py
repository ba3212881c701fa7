"""Several column blocks under one LSE against the same columns in one matrix, and GTE's four against loops."""

from __future__ import annotations

from functools import reduce
from itertools import pairwise

import numpy as np
import torch
from balls import Ball, agrees, general, lse
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle_problems import RAGGED, Problem, on_grid, problems

from contrastile.oracle.general import merge
from contrastile.oracle.pairs import Pairs
from contrastile.oracle.papers.blocks import Block, gradients_over_blocks, loss_over_blocks, lse_over_blocks


def cut(p: Problem, places: list[int], both_ways: bool, queue: bool = False) -> list[Block]:
    """The problem's columns in pieces, empty ones too; the last is a queue where asked."""
    edges = [0, *sorted(min(c, len(p.k)) for c in places), len(p.k)]
    pieces = [slice(a, b) for a, b in pairwise(edges)]
    return [
        Block(
            p.q,
            p.k[c],
            p.scale,
            p.bias,
            p.A[:, c],
            p.y[:, c],
            v=p.v[c] if both_ways else None,
            y_c=p.y_c[:, c] if both_ways else None,
            columns_need_gradient=not (queue and c is pieces[-1]),
        )
        for c in pieces
    ]


@settings(max_examples=60)
@given(p=problems(), places=st.lists(st.integers(0, 8), max_size=3), both_ways=st.booleans())
def test_columns_in_pieces_are_the_columns(p: Problem, places: list[int], both_ways: bool) -> None:
    p = p if both_ways else p.moved(v=np.zeros(len(p.k)))
    blocks, ball = cut(p, places, both_ways), general(p)
    assert agrees(merge(*lse_over_blocks(blocks)), ball.row_lse)
    assert agrees(loss_over_blocks(blocks, p.u), ball.loss)
    found = gradients_over_blocks(blocks, p.u)
    # adding the blocks' parts costs one rounding a block, of partial sums that the ball's magnitudes cover
    assert agrees(sum(f.d_rows for f in found), ball.d_rows)
    assert agrees(np.concatenate([f.d_columns for f in found]), ball.d_columns)
    assert agrees(sum(f.d_scale for f in found), ball.d_scale)
    assert agrees(sum(f.d_bias for f in found), ball.d_bias)


def test_a_queue_gets_no_gradient_and_changes_no_other() -> None:
    plain = gradients_over_blocks(cut(RAGGED, [6], False), RAGGED.u)
    queued = gradients_over_blocks(cut(RAGGED, [6], False, queue=True), RAGGED.u)
    assert queued[1].d_columns is None
    np.testing.assert_array_equal(queued[0].d_columns, plain[0].d_columns)
    for ours, theirs in zip(queued, plain, strict=True):
        np.testing.assert_array_equal(ours.d_rows, theirs.d_rows)


def test_four_blocks_with_rows_of_their_own_share_one_lse() -> None:
    """GTE: pair i's query and document each against all documents and all queries, themselves left out."""
    rng, m, s = np.random.default_rng(2), 5, 3.0
    Q, D = on_grid(rng.standard_normal((m, 3))), on_grid(rng.standard_normal((m, 3)))
    u, i = np.full(m, 1 / m), np.arange(m)
    pairs = [Pairs(i), *[Pairs(excluded=i)] * 3]
    of = [
        Problem(q, k, s, pairs=each, u=u, v=np.zeros(m))
        for (q, k), each in zip(((Q, D), (Q, Q), (D, Q), (D, D)), pairs, strict=True)
    ]
    blocks = [Block(p.q, p.k, s, 0.0, p.A, p.y) for p in of]

    def by_loops(Q: torch.Tensor, D: torch.Tensor) -> torch.Tensor:
        total = torch.zeros((), dtype=torch.float64)
        for i in range(m):
            terms = [s * Q[i] @ D[j] for j in range(m)]
            for row, columns in ((Q[i], Q), (D[i], Q), (D[i], D)):
                terms += [s * row @ columns[j] for j in range(m) if j != i]
            total = total + (torch.stack(terms).logsumexp(0) - s * Q[i] @ D[i]) / m
        return total

    L = reduce(np.logaddexp, [lse(s * (Ball(p.q) @ p.k.T), p.A) for p in of])
    balls = [general(p, row_lse=L) for p in of]
    leaves = [torch.tensor(x, requires_grad=True) for x in (Q, D)]
    expected = by_loops(*leaves)
    # only the first block has positives
    assert agrees(loss_over_blocks(blocks, u), balls[0].loss)
    assert agrees(expected.item(), balls[0].loss)
    found = gradients_over_blocks(blocks, u)
    dQ, ball = (x[0].d_rows + x[1].d_rows + x[1].d_columns + x[2].d_columns for x in (found, balls))
    assert agrees(dQ, ball)
    assert agrees(torch.autograd.grad(expected, leaves)[0].numpy(), ball)
